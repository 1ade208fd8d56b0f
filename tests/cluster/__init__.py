"""Several servers on one PostgreSQL and one bucket, broken in seeded ways: the cluster suite, `make test-cluster`.

The tenants, their programs, the history and the checker are those of `tests/faults`; this is what a cluster has more.

    links        TCP between two servers that can be cut or made silent
    schedule     a seed → programs, fronts, nodes and faults; pure and printable
    kinds        the kinds of faults: how likely, how long, from when the time to go on counts; a table to add rows to
    servers      the cluster of one schedule: fronts, nodes, links, a bucket
    strikes      what each kind of fault does to it; `heirs`: those in which runs come back to a node that was given up
    buckets      a bucket server in a process of its own, which several schedules share
    harness      one schedule from start to verdict
    resumption   from a history: how long each fault kept a tenant waiting; pure

`python -m tests.cluster --seed 17` runs one schedule and prints its timeline; `--seeds 200 --jobs 3` runs many.
"""
