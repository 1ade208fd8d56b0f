"""What each kind of fault does to a cluster. To add a kind, add a row to `kinds.KINDS` and a function here."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence

from tests.cluster import heirs
from tests.cluster.kinds import KINDS
from tests.cluster.links import Link, Mode
from tests.cluster.schedule import ClusterFault
from tests.cluster.servers import Cluster
from tests.faults.schedule import HeavyFault, HeavyKind
from tests.faults.supervisor import Supervisor

Strike = Callable[[Cluster, ClusterFault], str | None]


def strike(cluster: Cluster, fault: ClusterFault) -> str:
    """Break something, undo it after its time, and return a note for the record."""
    for supervisor in cluster.supervisors:
        supervisor.check_alive()
    return STRIKES[fault.kind](cluster, fault) or ""


def _heavy(kind: HeavyKind) -> Callable[[Supervisor, ClusterFault], str]:
    """Return what breaks one server as in the schedules of a single one."""
    return lambda supervisor, fault: supervisor.commit(
        HeavyFault(kind=kind, at=fault.at, delay_s=0.0, seconds=fault.seconds)
    )


def _on_front(act: Callable[[Supervisor, ClusterFault], str]) -> Strike:
    return lambda cluster, fault: act(cluster.fronts[fault.server].supervisor, fault)


def _on_node(act: Callable[[Supervisor, ClusterFault], str]) -> Strike:
    return lambda cluster, fault: act(cluster.nodes[fault.server].supervisor, fault)


def _on_links(mode: Mode, links_of: Callable[[Cluster, ClusterFault], Sequence[Link | None]]) -> Strike:
    def act(cluster: Cluster, fault: ClusterFault) -> str:
        with cluster.broken(mode, *links_of(cluster, fault)):
            threading.Event().wait(fault.seconds)
        return ""

    return act


def _database(cluster: Cluster, fault: ClusterFault) -> tuple[Link]:
    return (cluster.nodes[fault.server].database,)


def _door(cluster: Cluster, fault: ClusterFault) -> tuple[Link | None]:
    return (cluster.nodes[fault.server].door,)


STRIKES: dict[str, Strike] = {
    "kill front": _on_front(_heavy("kill server")),
    "restart front": _on_front(_heavy("restart server")),
    "kill node": _on_node(_heavy("kill server")),
    "kill engine": _on_node(lambda supervisor, _: supervisor.signal_engine(signal.SIGKILL)),
    "restart node": _on_node(_heavy("restart server")),
    "freeze node": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=False)),
    "freeze machine": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=True)),
    "freeze node, then lose its heir": heirs.freeze,
    "silence with work in hand, then lose its heir": heirs.silence_with_work,
    "freeze idle node, then lose its heir": heirs.freeze_idle,
    "pause node": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=False)),
    "cut from database": _on_links("cut", _database),
    "silence from database": _on_links("silent", _database),
    "blink of database": _on_links("cut", _database),
    "cut between nodes": _on_links("cut", _door),
    "silence between nodes": _on_links("silent", _door),
    "isolate node": _on_links("silent", lambda cluster, fault: (*_database(cluster, fault), *_door(cluster, fault))),
    "front cut from database": _on_links("cut", lambda cluster, fault: (cluster.fronts[fault.server].database,)),
    "restart database": lambda cluster, fault: cluster.schema.restart(fault.seconds),
    "lose database": lambda cluster, fault: cluster.schema.lose(fault.seconds),
    "stop database": lambda cluster, fault: cluster.schema.stop(fault.seconds),
    "bucket away": _on_links("cut", lambda cluster, fault: (cluster.bucket_link,)),
    "bucket silent": _on_links("silent", lambda cluster, fault: (cluster.bucket_link,)),
    "skew clock": _on_node(lambda supervisor, fault: supervisor.skew_clock(fault.amount) or ""),
}
assert set(STRIKES) == {kind.name for kind in KINDS}
