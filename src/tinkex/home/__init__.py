"""What programs of one user find in a data folder (the home): its lock, its service, the users of that, a key.

Files only; it opens no connection and starts no process.

    lock       `FileLock`: one service per folder; `is_locked`: whether one has it now
    running    `service.json`: where the service of the folder listens, while one does
    users      one locked file for each program that uses the service
    owner_key  `private.key`: the key that makes a program the owner of the folder
"""
