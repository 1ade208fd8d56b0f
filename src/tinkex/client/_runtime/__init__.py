"""What every client runs on: the loop thread, the link to a service, operations, sessions, queues.

    fork               per-process state: threads, fork and exit in one place; ProcessRegistry
    loop               LoopThread, Mailbox: one event loop in one daemon thread; in_thread: a function beside it
    operation          Operation: the state of one call in flight
    auth               Auth: the API key or its short-lived token
    tracing            OpenTelemetry spans
    link               ServiceLink: what all clients of one service share; runs their operations
    pump               Pump: one operation that brings many values
    session            Session: opened on first use, kept alive by heartbeats
    telemetry          Telemetry: failures reported to the service
    operation_queue    OperationQueue: the order of a training client's operations
    base_client        BaseClient: what all clients share
    account_client     AccountClient: what the two REST clients share

Private to tinkex.client.
"""
