"""The rows that several servers on one PostgreSQL share: which of them live, and which one works on each run.

Others import:
    cluster_store    ClusterStore: the store of a node, with its lease, the homes of runs, and one janitor
"""
