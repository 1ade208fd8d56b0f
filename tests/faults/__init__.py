"""Breaks a real service on purpose, by seed, and checks that nothing was lost, doubled, mixed up or left behind.

    schedule     a seed → the tenants' programs and the faults, and when each happens; pure and printable
    program      what one tenant does: a list of steps
    tenant       runs a program with the real client and records every call
    proxy        HTTP on 127.0.0.1 between client and server: delays, drops, cuts, resets, repeats
    supervisor   starts servers; kills, stops, restarts them; breaks their disk, database and clock
    databases    SQLite and PostgreSQL, and how each becomes locked, slow or gone
    warm         a process that has torch loaded already and forks servers: 0.3 s for a start instead of 5
    hooks        what a forked server has that a plain one has not: a clock that can jump, a watch on its loop
    history      the record of calls, results, faults and the final state
    broken       what may be taken away from server, engine or client, to see that the checker notices
    checker      a history, and that of an undisturbed run → violations; pure
    harness      one schedule from start to verdict
    range_run    many schedules, several at a time

`python -m tests.faults --seed 17` runs one and prints its timeline.
"""
