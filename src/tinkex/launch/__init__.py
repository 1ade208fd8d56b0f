"""Starts servers of a cluster as child processes and keeps them running: several on this machine, or one per Ray actor.

Each child is an ordinary `tinkex serve`. What this room knows of a cluster is which settings make a node or a front.

Others import:
    engines        `serve_engines`: `tinkex serve --engines N`
    ray_cluster    `scale` and `stop`: `tinkex cluster up` and `tinkex cluster down`
    emptying       `wait_until_empty`: waits for a node that drains
"""
