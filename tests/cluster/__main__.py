"""`python -m tests.cluster --seed 17` runs one schedule and prints its timeline; `--seeds 200 --jobs 3` runs many.

`--without NAME` takes a protection away first, as `python -m tests.faults` does: see tests/faults/broken.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from tests.cluster.buckets import Buckets
from tests.cluster.harness import ClusterBench
from tests.cluster.schedule import ClusterSchedule, kinds_of, schedule_of
from tests.faults import broken
from tests.faults.range_run import MOST_SEEDS, Rig, prove, run_range, tell
from tests.faults.warm import Warmth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone and print its timeline")
    parser.add_argument("--seeds", type=int, default=20, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument(
        "--long", action="store_true", help="40 steps by each tenant in all of them, not in every fourth"
    )
    parser.add_argument("--without", choices=["all", *broken.names_for_cluster()], help="take this protection away")
    parser.add_argument("--log", action="store_true", help="print the servers' logs too")
    parser.add_argument("--show", action="store_true", help="print the schedule and run nothing")
    args = parser.parse_args()
    scheduled = partial(schedule_of, is_long=args.long)
    if args.show:
        for seed in [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds):
            print(scheduled(seed))
        return 0
    program = f"{ClusterBench.program} --long" if args.long else ClusterBench.program
    with Buckets() as buckets:
        make = partial(ClusterBench, buckets_port=buckets.port, program=program)
        if args.seed is not None:
            return _run_one(scheduled(args.seed), args.without or "", args.log, make)
        rig = Rig(make, scheduled, kinds_of, is_cluster=True, program=program)
        if args.without is not None:
            names = broken.names_for_cluster() if args.without == "all" else [args.without]
            return prove(names, args.first, args.jobs, min(args.seeds, MOST_SEEDS), rig)
        return run_range(range(args.first, args.first + args.seeds), args.jobs, rig)


def _run_one(schedule: ClusterSchedule, without: str, has_log: bool, make: Callable[[str], ClusterBench]) -> int:
    print(schedule)
    with Warmth() as warmth:
        bench = make(warmth.address)
        try:
            numbers = sorted(schedule.programs.values())
            outcome = bench.run(schedule, bench.expectations(numbers), without)
        finally:
            bench.close()
    return tell(outcome, has_log=has_log)


if __name__ == "__main__":
    sys.exit(main())
