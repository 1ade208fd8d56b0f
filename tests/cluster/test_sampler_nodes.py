"""A node that only samples, beside one that trains: runs are at home on the one, samples are drawn on the other."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.cluster import Cluster, Node
from tests.unit.store.postgres import PostgresServer

pytestmark = pytest.mark.full
KEY = "tml-alice-0123456789abcdef"
PROMPT = tinkex.ModelInput.from_ints([10, 20, 30])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path)
    cluster.node("--api-key", KEY)
    cluster.node("--api-key", KEY, "--samples-only")
    cluster.front("--api-key", KEY)
    cluster.wait()
    yield cluster
    cluster.stop()
    postgres.stop()


def test_samples_are_drawn_where_nothing_is_trained_and_by_the_trainer_when_that_is_gone(cluster: Cluster) -> None:
    training_node, sampling_node, front = cluster.servers
    with tinkex.ServiceClient(base_url=front.url, api_key=KEY) as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=3)
        assert cluster.home_of(training.model_id) is training_node
        data = tinkex.Datum(tinkex.ModelInput.from_ints([10, 20, 30]), {"target_tokens": [20, 30, 40]})
        training.forward_backward([data], "cross_entropy").result(60)
        training.optim_step(tinkex.AdamParams(learning_rate=0.05)).result(60)
        sampler = training.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=6, temperature=0.0)
        before = sampler.sample(PROMPT, 2, params).result(60)
        assert drawn_by(sampling_node) == 1 and drawn_by(training_node) == 0
        sampling_node.stop()
        after = sampler.sample(PROMPT, 2, params).result(60)
    assert drawn_by(training_node) == 1
    assert [list(row.tokens) for row in after.sequences] == [list(row.tokens) for row in before.sequences]


def drawn_by(server: Node) -> int:
    """How many samples a server has drawn."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=30) as response:
        found = re.findall(
            r'^tinkex_samples_total\{[^}]*outcome="done".*\} (\S+)$', response.read().decode(), re.MULTILINE
        )
    return int(sum(map(float, found)))
