"""What every client object runs on: the loop thread, sessions, operations, their order and their records."""
