"""Everything that must survive a restart: rows in SQLite or PostgreSQL, and large payloads in files beside them.

The store knows no HTTP and reads no tensor: commands and results are bytes to it.

Others import:
    store.Store        the store itself; every method is one transaction
    records            the rows as frozen dataclasses
    errors             DiskFull, Duplicate, HomeLost, LeaseLost, Unavailable
    disk               files that reach the disk, and what a full disk says
    access             new API keys and their hashes
    lease.Lease        one server per database
    backup.back_up     a copy of all data while the service runs
"""
