"""What pages and plots show of runs: the numbers and samples that a user's program logged, and some steps of long runs.

Nothing of a run's training depends on it.

Others import:
    logged_store   LoggedStore, NewRows, delete_logged
    long_runs      LongRunStore, PickedStep
"""
