"""tinker-cookbook trains through a front over slow links, a partition and a clock that is wrong; the losses are those
of one server.

The links add 50 ms in each direction, themselves: `tc netem` is not in every kernel.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.buckets import Buckets
from tests.cluster.kinds import LEASE_S
from tests.cluster.schedule import ClusterSchedule
from tests.cluster.servers import Cluster
from tests.compat.as_tinker import cookbook_imports
from tests.compat.cookbook import environment
from tests.compat.cookbook.environment import CLIENTS, Run
from tests.faults.databases import BreakablePostgres
from tests.faults.history import Recorder
from tests.faults.warm import Warmth
from tests.integration.service.conftest import live as live
from tests.integration.service.live import LiveServer

TINY = "tinkex/tiny"
DELAY_S = 0.05
SKEW_S = 10.0
ARGUMENTS = ("--learning-rate", "0.01", "--max-length", "256")
CALM = ClusterSchedule(seed=0, programs={}, fronts=1, nodes=2, snapshot_every_s=0.1, faults=(), network=())
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def slow() -> Iterator[Cluster]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinkex-cookbook-")))
        postgres = BreakablePostgres()
        stack.callback(postgres.stop)
        buckets, warmth = stack.enter_context(Buckets()), stack.enter_context(Warmth())
        cluster = Cluster(CALM, folder, postgres, buckets.port, Recorder(), warmth.address, "", stack, delay_s=DELAY_S)
        cluster.wait()
        yield cluster


def losses(run: Run) -> dict[str, list[float]]:
    assert run.code == 0, run.output[-5000:]
    found = {name: run.series(name) for name in ("train_mean_nll", "test/nll")}
    assert len(found["train_mean_nll"]) == 5
    return found


@pytest.mark.parametrize("client", CLIENTS)
def test_a_cookbook_run_through_slow_links_a_partition_and_a_wrong_clock_ends_with_the_losses_of_one_server(
    client: str, slow: Cluster, live: LiveServer, tmp_path: Path
) -> None:
    python = cookbook_imports.python_of(environment.PLACE)
    for name in ("one", "cluster"):
        (tmp_path / name).mkdir()
    expected = losses(environment.run(python, client, "supervised.py", live.url, TINY, tmp_path / "one", *ARGUMENTS))
    door = slow.links.add(slow.fronts[0].supervisor.port)
    slow.nodes[0].supervisor.skew_clock(SKEW_S)
    is_over, struck = threading.Event(), list[str]()
    breaker = threading.Thread(target=_partition, args=(slow, is_over, struck))
    breaker.start()
    try:
        run = environment.run(python, client, "supervised.py", door.url, TINY, tmp_path / "cluster", *ARGUMENTS)
    finally:
        is_over.set()
        breaker.join(60)
        slow.heal()
    found = losses(run)
    assert found["train_mean_nll"] == expected["train_mean_nll"]
    # Scored by a sampler: its rounding depends on which prompts it meets at the same moment.
    assert found["test/nll"] == pytest.approx(expected["test/nll"], rel=1e-5)
    assert struck, "the run ended before the partition"


def _partition(cluster: Cluster, is_over: threading.Event, struck: list[str]) -> None:
    """Isolate the home of the newest run in the middle of its steps: from the database and from the others."""
    newest = "SELECT id FROM runs ORDER BY created_at DESC LIMIT 1"
    steps = f"SELECT count(*) FROM operations WHERE kind = 'optim_step' AND state = 'done' AND run_id = ({newest})"
    home = f"SELECT n.url FROM homes h JOIN nodes n ON n.id = h.node WHERE h.run_id = ({newest})"
    before = cluster.rows("SELECT count(*) FROM runs")
    while not is_over.wait(0.05):
        if cluster.rows("SELECT count(*) FROM runs") != before and cluster.rows(steps)[0][0] >= 2:
            [(url,)] = cluster.rows(home)
            node = next(node for node in cluster.nodes if node.door is not None and node.door.url == url)
            with cluster.broken("silent", node.database, node.door):
                struck.append(url)
                is_over.wait(2.5 * LEASE_S)
            return
