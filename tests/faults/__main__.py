"""`python -m tests.faults --seed 17` runs one schedule and prints its timeline; `--seeds 100 --first 0` runs many.

`--without NAME` takes a protection away first; with `--seed`, one schedule shows what then goes wrong, else schedules
run until one does. `--without all` does so for every protection of tests/faults/broken.py.
"""

from __future__ import annotations

import argparse
import sys

from tests.faults import broken
from tests.faults.harness import Bench
from tests.faults.range_run import MOST_SEEDS, prove, run_range, tell
from tests.faults.schedule import Schedule, schedule_of
from tests.faults.warm import Warmth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone and print its timeline")
    parser.add_argument("--seeds", type=int, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--jobs", type=int, default=4, help="how many at a time; a schedule waits more than it computes"
    )
    parser.add_argument("--without", choices=["all", *broken.names()], help="take this protection away")
    parser.add_argument("--servers", type=int, default=1, help="with --seed: so many on one store, once they can")
    parser.add_argument("--log", action="store_true", help="print the server's log too")
    parser.add_argument("--show", action="store_true", help="print the schedule and run nothing")
    args = parser.parse_args()
    if args.seed is None and args.without is not None:
        names = broken.names() if args.without == "all" else [args.without]
        return prove(names, args.first, args.jobs, args.seeds or MOST_SEEDS)
    if args.seed is None:
        return run_range(range(args.first, args.first + (args.seeds or 20)), args.jobs)
    schedule = schedule_of(args.seed, args.servers)
    print(schedule)
    if args.show:
        return 0
    return _run_one(schedule, args.without or "", args.log)


def _run_one(schedule: Schedule, without: str, has_log: bool) -> int:
    with Warmth() as warmth:
        bench = Bench(warmth.address)
        try:
            outcome = bench.run(schedule, bench.expectations(), without)
        finally:
            bench.close()
    return tell(outcome, has_log=has_log)


if __name__ == "__main__":
    sys.exit(main())
