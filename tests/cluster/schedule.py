"""From a seed to the schedule of a cluster: which programs run, how many servers, what breaks and when. Pure.

As with one server, time is counted in training requests that have passed: the same moment on a fast and a slow machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.cluster.kinds import (
    AMOUNTS,
    BY_NAME,
    DIRECTED,
    KINDS,
    LONG_AWAY,
    LONG_AWAY_S,
    ONE_DIRECTED_IN,
    ONE_LONG_IN,
    Role,
)
from tests.faults.program import BRIEF, LONG, steps_of
from tests.faults.schedule import NETWORK_KINDS, NetworkFault

NAMES = ("alice", "bob", "carol", "dave")
BRIEF_PROGRAMS = tuple(range(BRIEF, BRIEF + 6))
LONG_PROGRAMS = tuple(range(LONG, LONG + 4))
ONE_LONG_PROGRAM_IN = 4
"""In one schedule of so many each tenant trains for 40 steps; in the others all tenants together do."""


@dataclass(frozen=True, kw_only=True)
class ClusterFault:
    """What happens when the `at`-th training request has passed, after `delay_s`."""

    kind: str
    at: int
    delay_s: float
    seconds: float
    server: int = 0
    """Which front or node, by its number."""
    amount: float = 0.0
    """See `kinds.AMOUNTS`."""

    def __str__(self) -> str:
        where = "" if BY_NAME[self.kind].role == "all" else f" {self.server + 1}"
        amount = f", {self.amount:+.1f} s" if self.amount else ""
        when = f"training request {self.at} + {self.delay_s * 1000:.0f} ms"
        return f"{when}: {self.kind}{where} ({self.seconds:.1f} s{amount})"


@dataclass(frozen=True, kw_only=True)
class ClusterSchedule:
    seed: int
    programs: dict[str, int]
    fronts: int
    nodes: int
    snapshot_every_s: float
    faults: tuple[ClusterFault, ...]
    network: tuple[NetworkFault, ...]
    """Between the clients and the fronts."""

    def __str__(self) -> str:
        tenants = ", ".join(f"{name} runs program {number}" for name, number in self.programs.items())
        servers = f"{self.fronts} fronts, {self.nodes} nodes, snapshots every {self.snapshot_every_s:g} s"
        rows = [f"  {fault}" for fault in (*self.faults, *self.network)]
        return "\n".join([f"seed {self.seed}: {servers}; {tenants}", *rows])


def kinds_of(schedule: object) -> set[str]:
    assert isinstance(schedule, ClusterSchedule)
    return {fault.kind for fault in schedule.faults}


def schedule_of(seed: int, *, is_long: bool = False) -> ClusterSchedule:
    """Return the schedule of a seed. `is_long`: each tenant trains for 40 steps, whatever the seed is."""
    dice = random.Random(f"cluster {seed}")
    fronts, nodes = 2, dice.choice((2, 2, 3))
    programs = LONG_PROGRAMS if is_long or seed % ONE_LONG_PROGRAM_IN == 0 else BRIEF_PROGRAMS
    # Training requests that pass in an undisturbed schedule, about.
    requests = len(NAMES) * steps_of(programs[0]) * 2
    schedule = ClusterSchedule(
        seed=seed,
        programs=dict(zip(NAMES, dice.sample(programs, len(NAMES)), strict=True)),
        fronts=fronts,
        nodes=nodes,
        snapshot_every_s=dice.choice((0.0, 0.1, 10.0)),
        faults=_faults(dice, seed, requests, {"front": fronts, "node": nodes, "all": 1}),
        network=_network(dice, requests),
    )
    if seed % ONE_DIRECTED_IN != ONE_DIRECTED_IN // 2:
        return schedule
    kind = list(DIRECTED)[seed // ONE_DIRECTED_IN % len(DIRECTED)]
    fault = ClusterFault(
        kind=kind,
        at=dice.randrange(requests // 5, requests // 2),
        delay_s=0.0,
        seconds=0.0,
        server=dice.randrange(nodes),
    )
    return replace(schedule, snapshot_every_s=DIRECTED[kind], faults=(fault,), network=())


def _faults(dice: random.Random, seed: int, requests: int, servers: dict[Role, int]) -> tuple[ClusterFault, ...]:
    if seed % ONE_LONG_IN == ONE_LONG_IN - 1:
        at = dice.randrange(8, requests // 3)
        return (ClusterFault(kind=LONG_AWAY, at=at, delay_s=0.0, seconds=LONG_AWAY_S),)
    faults = []
    for at in sorted(dice.sample(range(6, int(requests * 0.85)), dice.choice((1, 2, 2, 3)))):
        kind = dice.choices(KINDS, [kind.weight for kind in KINDS])[0]
        faults.append(
            ClusterFault(
                kind=kind.name,
                at=at,
                delay_s=dice.random() * 0.05,
                seconds=dice.choice(kind.seconds),
                server=dice.randrange(servers[kind.role]),
                amount=dice.choice(AMOUNTS.get(kind.name, (0.0,))),
            )
        )
    return tuple(faults)


def _network(dice: random.Random, requests: int) -> tuple[NetworkFault, ...]:
    ordinals = sorted(dice.sample(range(2, requests * 2), dice.randrange(0, 6)))
    return tuple(
        NetworkFault(kind=dice.choice(NETWORK_KINDS), at=at, seconds=dice.choice((0.02, 0.1, 0.4)), share=dice.random())
        for at in ordinals
    )
