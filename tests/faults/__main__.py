"""`python -m tests.faults --seed 17` runs one schedule and prints its timeline; `--seeds 100 --first 0` runs many."""

from __future__ import annotations

import argparse
import sys

from tests.faults.harness import Bench
from tests.faults.range_run import run_range
from tests.faults.schedule import schedule_of
from tests.faults.warm import Warmth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone and print its timeline")
    parser.add_argument("--seeds", type=int, default=20, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--log", action="store_true", help="print the server's log too")
    parser.add_argument("--show", action="store_true", help="print the schedule and run nothing")
    args = parser.parse_args()
    if args.seed is None:
        return run_range(range(args.first, args.first + args.seeds), args.jobs)
    schedule = schedule_of(args.seed)
    print(schedule)
    if args.show:
        return 0
    with Warmth() as warmth:
        bench = Bench(warmth.address)
        try:
            outcome = bench.run(schedule, bench.expectations())
        finally:
            bench.close()
    print(outcome.timeline)
    if args.log:
        print(outcome.log)
    print(outcome.report())
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
