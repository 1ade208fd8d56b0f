"""A machine is lost with its data folder; another server goes on with database and bucket alone, to the bit."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.service.cluster import Cluster, Node
from tests.integration.service.live import LiveServer
from tests.unit.store.bucket_server import BucketServer
from tests.unit.store.postgres import PostgresServer
from tinkex.client.download import download_checkpoint

STEPS = 8
AWAY_S = 60.0
STRIKE_AT = 5
"""After the snapshot that follows a load, and after a command that is too large for a row."""


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[BucketServer]:
    server = BucketServer()
    yield server
    server.stop()


def batch(step: int) -> list[tinkex.Datum]:
    """Some steps are larger than a row of the database."""
    dice = random.Random(step)
    rows = [[dice.randrange(5, 250) for _ in range(60)] for _ in range(120 if step % 2 else 3)]
    return [
        tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(server: LiveServer, folder: Path, strike: Callable[[], None] | None = None) -> dict[str, bytes]:
    """Return the files of the last checkpoint, downloaded, and a sample of it. `strike` is called twice on the way."""
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=11)
        pending: list[tinkex.APIFuture[Any]] = []
        for step in range(STEPS):
            pending.append(training.forward_backward(batch(step), "cross_entropy"))
            pending.append(training.optim_step(tinkex.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)))
            if step == 3:
                path = training.save_state("middle").result(timeout=120).path
                training.load_state_with_optimizer(path).result(timeout=120)
            if step == STRIKE_AT and strike is not None:
                pending.pop().result(timeout=120)
                strike()
        for future in pending:
            future.result(timeout=120)
        path = training.save_state("final").result(timeout=120).path
        unnamed = training.save_weights_and_get_sampling_client()
        if strike is not None:
            strike()
        files = download_checkpoint(client.create_rest_client(), path, folder).result(timeout=120)
        params = tinkex.SamplingParams(max_tokens=8, temperature=0.7, seed=4)
        sampling = unnamed.sample(tinkex.ModelInput.from_ints([5, 6, 7]), num_samples=1, sampling_params=params)
        tokens = str(sampling.result(timeout=120).sequences[0].tokens).encode()
    return {**{file.name: file.read_bytes() for file in files if file.suffix == ".safetensors"}, "sample": tokens}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same run, undisturbed and without a bucket."""
    folder = tmp_path_factory.mktemp("calm")
    with LiveServer(folder / "data") as server:
        return train(server, folder / "expected")


@pytest.mark.slow
def test_a_run_and_a_checkpoint_survive_the_loss_of_their_machine(
    expected: dict[str, bytes], bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket_server.environ.items():
        monkeypatch.setenv(name, value)
    url = bucket_server.new_url()
    database = f"sqlite:///{tmp_path / 'tinkex.db'}"
    with LiveServer(tmp_path / "data", "--blobs", url, "--database-url", database) as server:

        def lose_the_machine() -> None:
            """kill -9, and nothing of its disk is left."""
            server.kill()
            shutil.rmtree(server.data_dir)
            server.start()

        assert train(server, tmp_path / "downloaded", lose_the_machine) == expected
        log = server.log()
    keys = bucket_server.keys(bucket_server.bucket(url))
    for root in ("checkpoints/", "journal/snapshots/", "journal/"):
        assert any(key.startswith(root) for key in keys), f"nothing of {root} was in the bucket"
    assert "rebuilt" in log and "journal/snapshots/" in log.partition("rebuilt")[2], "the loss was real"
    assert bucket_server.access["secret_access_key"] not in log


@pytest.mark.full
def test_a_run_goes_on_at_another_node_that_has_only_database_and_bucket(
    expected: dict[str, bytes], bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket_server.environ.items():
        monkeypatch.setenv(name, value)
    postgres, url = PostgresServer(), bucket_server.new_url()
    cluster = Cluster(postgres, tmp_path)
    lost: list[Node] = []

    def lose_the_home() -> None:
        """kill -9, and nothing of its disk is left."""
        [(run_id,)] = cluster.rows("SELECT run_id FROM homes")
        lost.append(home := cluster.home_of(run_id))
        home.kill()
        shutil.rmtree(home.data_dir)
        home.start()

    try:
        nodes = cluster.node("--blobs", url), cluster.node("--blobs", url)
        front = cluster.front()
        cluster.wait()
        assert train(front, tmp_path / "downloaded", lose_the_home) == expected, cluster.logs()
    finally:
        cluster.stop()
        postgres.stop()
    assert nodes[0].data_dir != nodes[1].data_dir and len(lost) == 2


@pytest.mark.full
def test_a_bucket_that_is_away_for_a_minute_only_delays(
    expected: dict[str, bytes], bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket_server.environ.items():
        monkeypatch.setenv(name, value)
    back: list[threading.Timer] = []

    def go_away() -> None:
        if not back:  # the second time it is needed at once
            bucket_server.stop()
            back.append(threading.Timer(AWAY_S, bucket_server.start))
            back[0].start()

    with LiveServer(tmp_path / "data", "--blobs", bucket_server.new_url()) as server:
        assert train(server, tmp_path / "downloaded", go_away) == expected
        log = server.log()
    back[0].join()
    assert "does not respond; cannot write journal/" in log, "a large call came meanwhile, and came again"
