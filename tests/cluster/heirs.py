"""Faults in which a node is given up, another one takes its runs, and dies: the runs come back to the first one.

That is what fence and conditional renewal are for. What a node still has of a run must not count when it comes back:
not as a late write (the fence), nor as what the node believes to have (the renewal).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from tests.cluster.kinds import LEASE_S
from tests.cluster.schedule import ClusterFault
from tests.cluster.servers import Cluster, Server

WITHIN_S = 30.0
"""How long a fault waits for what has to be so before it goes on."""
QUIET_S = 4.0
"""After so long without a training request, clients have sent all that they send before they wait for results."""
_LIVES = "nodes.until > extract(epoch from clock_timestamp())"
_HOME = "homes JOIN nodes ON nodes.id = homes.node"


def freeze(cluster: Cluster, fault: ClusterFault) -> str:
    """Freeze a node, wake it, and kill the others: the runs come back to it, which has an old state of them."""
    cluster.nodes[fault.server].supervisor.pause(fault.seconds, with_engine=False)
    threading.Event().wait(fault.amount)
    _kill_heirs(cluster, fault)
    _start_heirs_again(cluster, fault)
    return ""


def silence_with_work(cluster: Cluster, fault: ClusterFault) -> str:
    """Keep what a node writes at the end of an operation on its way to the database until its heir has gone on far
    beyond, and has died. What arrives then is a result that is known, and a snapshot that is old."""
    node = cluster.nodes[fault.server]
    node.supervisor.signal_engine(signal.SIGSTOP)
    try:
        if not _wait_until(lambda: bool(_unfinished(cluster, node))):
            return "it had no work"
        threading.Event().wait(0.3)  # from the journal to the engine
        node.database.set("silent")
        at_work = _unfinished(cluster, node)
    finally:
        node.supervisor.signal_engine(signal.SIGCONT)
    has_gone_on = _wait_until(lambda: any(_snapshot(cluster, run) > seq + 1 for run, seq in at_work.items()))
    _kill_heirs(cluster, fault)
    node.database.set("open")
    _start_heirs_again(cluster, fault)
    return "" if has_gone_on else "its heir did not go on"


def freeze_idle(cluster: Cluster, fault: ClusterFault) -> str:
    """Freeze a node while its runs have nothing to do. Their clients then send to its heir, which finishes nothing and
    dies. The node has the runs again, and no write of its own has told it that they were elsewhere."""
    node, clients = cluster.nodes[fault.server], cluster.clients
    assert node.door is not None and clients is not None
    clients.partition(True)
    _wait_until(lambda: not cluster.rows("SELECT 1 FROM operations WHERE state = 'queued' LIMIT 1"))
    runs = _runs(cluster, node)
    os.kill(node.supervisor.pid(), signal.SIGSTOP)
    node.door.set("cut")  # or it finds requests when it wakes, and asks the database where each run is
    for heir in _heirs(cluster, fault):
        heir.supervisor.signal_engine(signal.SIGSTOP)
    clients.partition(False)
    is_there = _wait_until(lambda: _have_work_elsewhere(cluster, node, runs))
    _wait_until_quiet(cluster)
    os.kill(node.supervisor.pid(), signal.SIGCONT)
    _wait_until(lambda: _lives(cluster, node))
    _kill_heirs(cluster, fault)
    node.door.set("open")
    _start_heirs_again(cluster, fault)
    return "" if is_there else "no run of it went elsewhere"


def _heirs(cluster: Cluster, fault: ClusterFault) -> list[Server]:
    return [node for number, node in enumerate(cluster.nodes) if number != fault.server]


def _kill_heirs(cluster: Cluster, fault: ClusterFault) -> None:
    for heir in _heirs(cluster, fault):
        heir.supervisor.kill_all()


def _start_heirs_again(cluster: Cluster, fault: ClusterFault) -> None:
    """When their leases are over: a new process would be a node without runs, and get them."""
    threading.Event().wait(2 * LEASE_S)
    for heir in _heirs(cluster, fault):
        heir.supervisor.start()


# ── What the database says


def _lives(cluster: Cluster, node: Server) -> bool:
    assert node.door is not None
    return bool(cluster.rows(f"SELECT 1 FROM nodes WHERE url = %s AND {_LIVES}", node.door.url))


def _runs(cluster: Cluster, node: Server) -> set[str]:
    """Return the runs that are at home on a node."""
    assert node.door is not None
    return {run for (run,) in cluster.rows(f"SELECT run_id FROM {_HOME} WHERE url = %s", node.door.url)}


def _unfinished(cluster: Cluster, node: Server) -> dict[str, int]:
    """Return the runs at home on a node that have work, and the number of the first operation of each."""
    query = "SELECT run_id, min(seq_id) FROM operations WHERE state = 'queued' GROUP BY run_id"
    here = _runs(cluster, node)
    return {run: seq for run, seq in cluster.rows(query) if run in here}


def _snapshot(cluster: Cluster, run: str) -> int:
    """Return the number of the operation after which a run's last snapshot was made."""
    return max((seq for (seq,) in cluster.rows("SELECT snapshot_seq FROM runs WHERE id = %s", run)), default=-1)


def _have_work_elsewhere(cluster: Cluster, node: Server, runs: set[str]) -> bool:
    """Whether one of these runs is at home on another node by now, and has work there."""
    assert node.door is not None
    query = f"SELECT DISTINCT run_id FROM operations JOIN ({_HOME}) USING (run_id) WHERE state = 'queued' AND url <> %s"
    return any(run in runs for (run,) in cluster.rows(query, node.door.url))


def _wait_until(is_so: Callable[[], bool]) -> bool:
    give_up_s = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > give_up_s:
            return False
        threading.Event().wait(0.05)
    return True


def _wait_until_quiet(cluster: Cluster) -> None:
    """Wait until clients send no more training requests: all of them wait for results."""
    assert cluster.clients is not None
    seen, since_s = cluster.clients.training_requests, time.monotonic()
    give_up_s = since_s + WITHIN_S
    while time.monotonic() < min(since_s + QUIET_S, give_up_s):
        threading.Event().wait(0.05)
        if cluster.clients.training_requests != seen:
            seen, since_s = cluster.clients.training_requests, time.monotonic()
