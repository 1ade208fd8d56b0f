"""What keeps a service tidy: its files, its models, and the thread that all database calls run on.

Others import:
    database_thread.Db    run a call of the store on its own thread
    catalog.Catalog       the base models that are served
    folders               checkpoint folders inside the data folder
    adapter_files         a PEFT adapter that a client uploads
    watchdog.Watchdog     measures how long the event loop is blocked, and by what
    janitor.Janitor       deletes what expired, and watches the disk
"""
