"""From a seed to a schedule: which programs run, on what database, what breaks and when. Pure and printable.

Time is counted in requests, not in seconds: "when the 23rd training request arrives" is the same moment on a fast and
on a slow machine. What the operating system decides (which byte was written when the kill came) stays open.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from tests.faults.program import PROGRAMS

Database = Literal["sqlite", "postgresql"]
NetworkKind = Literal[
    "delay request", "delay response", "drop before", "drop after", "cut request", "cut response", "reset",
    "repeat at once", "repeat later", "bad gateway",
]  # fmt: skip
HeavyKind = Literal[
    "kill server", "kill engine", "kill both", "restart server", "stop server", "stop engine", "fill disk",
    "lock database", "slow database", "lose database", "jump clock", "expire sessions", "partition",
    "stop database", "restart database",
]  # fmt: skip
NETWORK_KINDS: tuple[NetworkKind, ...] = (
    "delay request", "delay response", "drop before", "drop after", "cut request", "cut response", "reset",
    "repeat at once", "repeat later", "bad gateway",
)  # fmt: skip
HEAVY_KINDS: tuple[HeavyKind, ...] = (
    "kill server", "kill engine", "kill both", "restart server", "stop server", "stop engine", "fill disk",
    "lock database", "slow database", "lose database", "jump clock", "expire sessions", "partition",
)  # fmt: skip
DATABASE_KINDS: tuple[HeavyKind, ...] = ("lose database", "stop database", "restart database")
"""What the die calls "lose database" is one of these."""
NAMES = ("alice", "bob", "carol")
MOST_ENGINE_DEATHS = 2
"""A third death under the same operation fails it, and rightly so."""
ONE_COLD_IN = 40
"""One schedule in so many starts its servers as users do, with all the imports: five seconds each."""


@dataclass(frozen=True, kw_only=True)
class NetworkFault:
    """What the proxy does to the `at`-th request that passes it."""

    kind: NetworkKind
    at: int
    seconds: float = 0.0
    share: float = 0.5
    """How much of the bytes goes through before a cut."""

    def __str__(self) -> str:
        return f"request {self.at}: {self.kind} ({self.seconds:.2f} s, {self.share:.0%})"


@dataclass(frozen=True, kw_only=True)
class HeavyFault:
    """What the supervisor does when the `at`-th training request has passed the proxy, after `delay_s`."""

    kind: HeavyKind
    at: int
    delay_s: float
    seconds: float
    server: int = 0
    """Which server of the cluster; a schedule with one server has 0 only."""
    amount: float = 0.0
    """Seconds that the clock jumps; KB that the disk has left."""

    def __str__(self) -> str:
        amount = f", {self.amount:+.0f}" if self.amount else ""
        where = f" of server {self.server + 1}" if self.server else ""
        when = f"training request {self.at} + {self.delay_s * 1000:.0f} ms"
        return f"{when}: {self.kind}{where} ({self.seconds:.2f} s{amount})"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    database: Database
    programs: dict[str, int]
    """Tenant → the number of its program."""
    snapshot_every_s: float
    is_cold: bool
    network: tuple[NetworkFault, ...]
    heavy: tuple[HeavyFault, ...]
    servers: int = 1

    def __str__(self) -> str:
        tenants = ", ".join(f"{name} runs program {number}" for name, number in self.programs.items())
        start = ", cold starts" if self.is_cold else ""
        head = f"seed {self.seed}: {self.database}, snapshots every {self.snapshot_every_s:g} s{start}; {tenants}"
        return "\n".join([head, *(f"  {fault}" for fault in (*self.heavy, *self.network))])


def undisturbed(programs: dict[str, int]) -> Schedule:
    """Return a schedule without faults, for comparison."""
    return Schedule(
        seed=-1, database="sqlite", programs=programs, snapshot_every_s=10.0, is_cold=False, network=(), heavy=()
    )


def schedule_of(seed: int, servers: int = 1) -> Schedule:
    """Return the schedule of a seed. With several servers on one store, each heavy fault strikes one of them."""
    schedule = _of_one_server(seed)
    if servers == 1:
        return schedule
    dice = random.Random(f"servers {seed}")
    heavy = tuple(replace(fault, server=dice.randrange(servers)) for fault in schedule.heavy)
    return replace(schedule, servers=servers, heavy=heavy)


def _of_one_server(seed: int) -> Schedule:
    dice = random.Random(f"schedule {seed}")
    names = NAMES[: dice.choice((2, 2, 3))]
    is_cold = dice.randrange(ONE_COLD_IN) == 0
    database: Database = "postgresql" if dice.random() < 0.3 else "sqlite"
    requests = 20 * len(names)
    return Schedule(
        seed=seed,
        database=database,
        programs=dict(zip(names, dice.sample(range(PROGRAMS), len(names)), strict=True)),
        snapshot_every_s=dice.choice((0.0, 0.02, 10.0)),
        is_cold=is_cold,
        network=_network(dice, requests * 4),
        heavy=_heavy(dice, requests, is_cold),
    )


def _network(dice: random.Random, requests: int) -> tuple[NetworkFault, ...]:
    ordinals = sorted(dice.sample(range(2, requests), dice.randrange(3, 10)))
    return tuple(
        NetworkFault(kind=dice.choice(NETWORK_KINDS), at=at, seconds=dice.choice((0.02, 0.1, 0.4)), share=dice.random())
        for at in ordinals
    )


def _heavy(dice: random.Random, requests: int, is_cold: bool) -> tuple[HeavyFault, ...]:
    count = 1 if is_cold else dice.choice((1, 2, 2, 3))
    faults: list[HeavyFault] = []
    engine_deaths = 0
    for at in sorted(dice.sample(range(1, requests), count)):
        # A cold server has no clock that can jump.
        kind = dice.choice(
            [kind for kind in HEAVY_KINDS if not (is_cold and kind in ("jump clock", "expire sessions"))]
        )
        if kind in ("kill engine", "kill both"):
            engine_deaths += 1
            if engine_deaths > MOST_ENGINE_DEATHS:
                kind = "stop engine"
        fault = _fault(dice, kind, at)
        if kind == "lose database":
            # A die of its own: seeds that are written down somewhere keep their other faults.
            fault = replace(fault, kind=random.Random(f"how the database goes {fault}").choice(DATABASE_KINDS))
        faults.append(fault)
    return tuple(faults)


def _fault(dice: random.Random, kind: HeavyKind, at: int) -> HeavyFault:
    amount = 0.0
    if kind == "jump clock":
        amount = dice.choice((-7200.0, -30.0, 30.0, 7200.0))
    if kind == "expire sessions":
        amount = 4000.0
    if kind == "fill disk":
        amount = dice.choice((0.0, 16.0, 200.0))
    return HeavyFault(
        kind=kind, at=at, delay_s=dice.random() * 0.05, seconds=dice.choice((0.1, 0.3, 0.8)), amount=amount
    )
