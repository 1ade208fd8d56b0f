"""Several servers on one PostgreSQL: each run is at home on one of them, and the others hand its requests on.

A server is a node with `--node-url`, a front with `--no-engine`. Without either nothing of this package is loaded.

Others import:
    member    ClusterMember: what a server does besides its own work because it is one of several
"""
