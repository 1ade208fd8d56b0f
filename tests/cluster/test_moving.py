"""Runs leave a node that has far more than others: a node that comes is of use at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service.cluster import STEP, Cluster
from tests.integration.service.raw import Raw, batch, datum, text
from tests.integration.service.test_cluster import until
from tests.unit.store.postgres import PostgresServer

pytestmark = pytest.mark.full
RUNS = 14


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path)
    yield cluster
    cluster.stop()
    postgres.stop()


def test_a_node_that_comes_gets_some_of_the_runs_and_they_go_on_to_the_bit(cluster: Cluster) -> None:
    first = cluster.node()
    cluster.wait()
    runs = [Raw(first).run(rank=2) for _ in range(RUNS)]

    def losses(step: int) -> list[float]:
        data = batch([datum(text([10 + step, 20, 30]))])
        found = [run.done("forward_backward", forward_backward_input=data)["metrics"]["loss:sum"] for run in runs]
        for run in runs:
            run.done("optim_step", adam_params=STEP)
        return found

    before = [losses(step) for step in range(2)]
    second = cluster.node()
    cluster.wait()
    homes = "SELECT count(*) FROM homes h JOIN nodes n ON n.id = h.node WHERE n.url = %s"
    until(lambda: cluster.rows(homes, first.url)[0][0] < RUNS, 30)
    after = [losses(step) for step in range(2, 4)]
    assert all(len(set(row)) == 1 for row in (*before, *after)), "equal runs have equal losses wherever they are"
    spread = Counter(cluster.home_of(run.id).url for run in runs)
    assert spread.keys() == {first.url, second.url} and min(spread.values()) >= 2
    assert "which has more runs than others" in first.log()
