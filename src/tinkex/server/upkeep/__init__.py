"""What keeps a service tidy: its files, its models, and the thread that all database calls run on.

Others import:
    database_thread.Db    run a call of the store on its own thread
    catalog.Catalog       the base models that are offered
    base_models           BaseModels: which of them are in the engine
    machine               how much memory there is
    blob_calls            folders and large payloads of the store, in the data folder or in a bucket
    checksums             whether the files of a checkpoint are what was written
    adapter_files         a PEFT adapter that a client uploads
    watchdog.Watchdog     measures how long the event loop is blocked, and by what
    sparse_log            log lines that any connection can cause, at most one in 10 seconds
    permissions           who may read what the service stores
    readiness.Readiness   why the service cannot work now
    home.SharedHome       what other programs of the same user find in the data folder
    janitor.Janitor       deletes what expired, and watches the disk
"""
