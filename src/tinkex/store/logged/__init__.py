"""What a user's program logs for its runs: numbers and samples. Nothing of a run depends on it.

Others import:
    logged_store   LoggedStore, NewRows, delete_logged
"""
