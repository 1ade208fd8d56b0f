"""Training operations: from an accepted request to a stored result.

    intake ─► run_queue ─► worker ─► operation_runner ─► engine ─► store ─► waiters
              (scheduler chooses)    (residency: the adapter is in the engine)

Others import:
    intake            Intake: accepts operations into the journal
    worker            Worker: runs them; what is queued, paused or active
    waiters           Waiters, OperationResult: long polls and results
    run_queue         RunQueue, PendingOperation: one run's operations
    checks            check_data, check_text, count_targets: what a request may contain
    pass_notes        pass_options: what the journal notes about a pass for those who look at it
    steps             steps_of, settled, picked: a journal as optimizer steps
"""
