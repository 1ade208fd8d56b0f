"""Decides which node gets a run, which draws a sample, and which runs a node gives up. Pure: values in, a choice out.

Whoever places a run or a sample calls these functions: `Homes` (for the store's claim), `Peers`, `ClusterMember` and
`benchmarks/cluster_simulation.py`. What they know of a node is its row: `runs` is exact, everything else is as old as
the last renewal of its lease. `tinkex cluster move` without a node takes the one with the fewest runs (`ClusterStore`).
`docs/decisions/placement.md` has the figures behind the constants.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tinkex.store.cluster.cluster_store import NodeRecord

LATE = 1 / 3
"""A node with less of its lease left than this part of the longest has missed two renewals: it may be gone."""
TRAINS_NOW = 2
"""How much more a run counts that has work now, or has just come, than one that is idle."""
FULLEST = 1.25
"""A node with more than so many times the mean of queued sequences is passed over for a sample."""
QUEUED_ROWS = 64
"""Queued sequences up to which a node is never passed over: an engine draws so many at the same time (`--max-rows`)."""
UNEVEN = 1.25
"""A node with more runs than so many times the mean gives some up."""
UNEVEN_RUNS = 4
"""And at least so many more than the mean: among a few runs one more is no reason to move."""
MOVED_AT_ONCE = 4
"""Runs that a node gives up in one look, every five seconds: each writes a snapshot, and its client waits meanwhile."""

STATES = ("busy", "idle", "starting", "draining", "gone")


def node_for_run(nodes: Sequence[NodeRecord], model: str, own: str = "") -> NodeRecord | None:
    """Return the node for a run without a home, or None if no node may have it.

    The one that has the least to do (`_weight`). Of equals the newest release, because an upgrade drains the others;
    then `own`, which saves a hop.
    """
    fit = [node for node in nodes if node.trains and not node.is_draining and node.serves(model)]
    newest = max((_release(node) for node in fit), default=())
    return min(
        _dependable(fit),
        key=lambda node: (_weight(node), _release(node) != newest, node.id != own, node.id),
        default=None,
    )


def node_for_sample(
    nodes: Sequence[NodeRecord], key: str, model: str, sent: Mapping[str, int] = {}, without: Collection[str] = ()
) -> NodeRecord | None:
    """Return the node that draws a sample: the same one for the same key, unless it has too much to do.

    Rendezvous hashing: when a node comes or goes, only its own keys change their node. With bounded load: a node with
    more than its part of what is queued leaves a key to the next in that key's own order. `sent` are the sequences that
    went to each node since the rows were read. Nodes that train draw only where no node does nothing else.
    """
    named = [node for node in nodes if node.url not in without and node.serves(model)]
    fit = _dependable([node for node in named if not node.is_draining] or named)
    fit = [node for node in fit if not node.trains] or fit
    queued = {node.id: node.facts.samples + sent.get(node.id, 0) for node in fit}
    bound = max(FULLEST * sum(queued.values()) / max(len(fit), 1), QUEUED_ROWS)
    roomy = [node for node in fit if queued[node.id] <= bound]
    return max(roomy, key=lambda node: _rank(key, node.id), default=None)


def runs_to_give_up(own: str, nodes: Sequence[NodeRecord], waiting: Mapping[str, int]) -> list[str]:
    """Return the runs that a node lets go of, because others have far fewer; the next request about one claims it anew.

    `waiting` has the runs that are at home on the node, with the operations of each that are not finished. Idle ones
    go first: nobody waits while they move.
    """
    fit = _dependable([node for node in nodes if node.trains and not node.is_draining and node.facts.is_ready])
    mine = next((node for node in fit if node.id == own), None)
    if mine is None or len(fit) < 2:
        return []
    like = [node for node in fit if set(mine.models) <= set(node.models)]
    mean = sum(node.runs for node in like) / len(like)
    others = [_weight(node) for node in like if node is not mine]
    if not others or len(waiting) <= max(mean * UNEVEN, mean + UNEVEN_RUNS):
        return []
    # A claim goes by weight, not by the number of runs: more than these would come back with their next request.
    count = min(math.floor(len(waiting) - mean), _weight(mine) - min(others) - 1, MOVED_AT_ONCE)
    return sorted(waiting, key=lambda run_id: (waiting[run_id], run_id))[: max(count, 0)]


def engines_text(nodes: Sequence[NodeRecord]) -> str:
    """Say what the engines of these nodes do: "3 engines busy, 1 starting"."""
    counts = Counter(map(state_of, nodes))
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    if not parts:
        return "no engine"
    number, _, state = parts[0].partition(" ")
    return ", ".join([f"{number} engine{'' if number == '1' else 's'} {state}", *parts[1:]])


def state_of(node: NodeRecord) -> str:
    if node.left_s <= 0:
        return "gone"
    if node.is_draining:
        return "draining"
    if not node.facts.is_ready:
        return "starting"
    return "busy" if node.facts.operations or node.facts.samples else "idle"


def _weight(node: NodeRecord) -> int:
    """Return what a node has to do: one for each run, and two more for each that trains now.

    Runs that came after the last renewal count as training. Not less, because busy runs alone ignore idle ones that may
    wake up; runs alone send a whole burst to a node that has just come back; queued work alone does so until that node
    renews its lease.
    """
    return node.runs + TRAINS_NOW * (node.facts.busy + max(node.runs - node.facts.runs, 0))


def _dependable(nodes: list[NodeRecord]) -> list[NodeRecord]:
    """Leave out nodes whose engine is not ready, or that renew late, as long as there are others."""
    ready = [node for node in nodes if node.facts.is_ready] or nodes
    longest = max((node.left_s for node in ready), default=0.0)
    return [node for node in ready if node.left_s >= longest * LATE]


def _release(node: NodeRecord) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", node.version)))


def _rank(key: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{node_id} {key}".encode("utf-8", "replace"), digest_size=8).digest()
