"""The kinds of faults of a cluster. Pure. To add a kind, add a row here and a function to `strikes.STRIKES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["front", "node", "all"]
LEASE_S = 3.0
"""Of the nodes in a schedule. A fifth of the default, so that a schedule takes a fifth of the time."""
MARGIN_S = 15.0
"""How much longer than a lease a tenant may wait after a fault."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    role: Role
    seconds: tuple[float, ...]
    """How long it lasts: one of these."""
    counts_from: Literal["begin", "end"]
    """From when the time to go on counts. The end: where nothing can go on before, or nothing else takes over."""
    weight: int = 2
    """How often the dice choose it; 0: only in the schedules of `DIRECTED`."""


def _leases(*counts: float) -> tuple[float, ...]:
    return tuple(count * LEASE_S for count in counts)


KINDS: tuple[Kind, ...] = (
    # Processes. What was killed starts again after the seconds.
    Kind(name="kill front", role="front", seconds=(0.1, 2.0), counts_from="begin"),
    Kind(name="restart front", role="front", seconds=(0.0,), counts_from="begin", weight=1),
    Kind(name="kill node", role="node", seconds=(0.1, *_leases(0.5, 2)), counts_from="begin", weight=5),
    Kind(name="kill engine", role="node", seconds=(0.0,), counts_from="begin"),
    Kind(name="restart node", role="node", seconds=(0.0,), counts_from="begin"),
    # An owner that does not know that it was given up.
    Kind(name="freeze node", role="node", seconds=_leases(1.3, 2), counts_from="begin", weight=5),
    Kind(name="freeze machine", role="node", seconds=_leases(1.3, 2), counts_from="begin"),
    Kind(
        name="freeze node, then lose its heir",
        role="node",
        seconds=_leases(1.5, 2),
        counts_from="end",  # of the second one
        weight=4,
    ),
    Kind(name="pause node", role="node", seconds=_leases(0.2, 0.7), counts_from="end"),
    # The network. Cut: connections are reset, and new ones too. Silence: nothing arrives, until it does.
    Kind(name="cut from database", role="node", seconds=_leases(1.3, 2), counts_from="begin", weight=4),
    Kind(name="silence from database", role="node", seconds=_leases(1.3, 3), counts_from="begin", weight=4),
    Kind(name="blink of database", role="node", seconds=_leases(0.1, 0.5), counts_from="end"),
    Kind(name="cut between nodes", role="node", seconds=_leases(0.3, 1.5), counts_from="end"),
    Kind(name="silence between nodes", role="node", seconds=_leases(0.3, 1.5), counts_from="end"),
    Kind(name="isolate node", role="node", seconds=_leases(1.5, 2.5), counts_from="begin", weight=3),
    Kind(name="front cut from database", role="front", seconds=_leases(0.5, 1.5), counts_from="end", weight=1),
    # What all share.
    Kind(name="restart database", role="all", seconds=(0.3, *_leases(0.5, 1.3)), counts_from="end"),
    Kind(name="lose database", role="all", seconds=(0.3, *_leases(0.5, 1.3)), counts_from="end"),
    Kind(name="stop database", role="all", seconds=_leases(0.3, 1.3), counts_from="end"),
    Kind(name="bucket away", role="all", seconds=(1.0, 4.0), counts_from="end"),
    Kind(name="bucket silent", role="all", seconds=(1.0, 4.0), counts_from="end", weight=1),
    # The time of day of one machine. Less than the 30 s for which a signed hop holds.
    Kind(name="skew clock", role="node", seconds=(0.0,), counts_from="begin"),
    # A former home, as bad as it can be. They wait for what has to be so, and last as long as that takes.
    Kind(
        name="silence with work in hand, then lose its heir", role="node", seconds=(0.0,), counts_from="end", weight=0
    ),
    Kind(name="freeze idle node, then lose its heir", role="node", seconds=(0.0,), counts_from="end", weight=0),
)
BY_NAME = {kind.name: kind for kind in KINDS}
LONG_AWAY = "bucket away"
LONG_AWAY_S = 60.0
ONE_LONG_IN = 25
"""In one schedule of so many, the bucket is away for a whole minute, and nothing else happens."""
DIRECTED = {"silence with work in hand, then lose its heir": 0.0, "freeze idle node, then lose its heir": 10.0}
"""Kinds that show one protection each (`tests.faults.broken`), and after how many seconds of work a run is snapshotted.

At once: an old snapshot is written late, and the commands are deleted that a replay would need. Never: the write of a
snapshot would tell the node that its idle run was elsewhere."""
ONE_DIRECTED_IN = 10
"""In one schedule of so many one of these happens and nothing else, in turn."""
AMOUNTS: dict[str, tuple[float, ...]] = {
    "skew clock": (-10.0, 10.0),
    # How long the node is awake before its heir is lost: before and after it knows that it was given up.
    "freeze node, then lose its heir": (0.1, LEASE_S / 2),
}
"""Seconds that are something else than how long it lasts."""
