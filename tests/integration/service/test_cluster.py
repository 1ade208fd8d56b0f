"""Several real servers on one PostgreSQL: each run is at home on one of them, and a client cannot tell which."""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import tinkex
from tests.integration.service.cluster import LEASE_S, STEP, Cluster, Node, losses
from tests.integration.service.live import CACHE, LiveServer
from tests.integration.service.raw import Raw, batch
from tests.unit.store.postgres import PostgresServer

STEPS = 40
HEAVY = 19
"""The step whose pass takes so long that a home can be stopped in the middle of it."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def cluster(postgres: PostgresServer, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(postgres, tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def two(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, for tests that do not hurt them."""
    cluster = Cluster(postgres, tmp_path_factory.mktemp("two"))
    cluster.node()
    cluster.node()
    cluster.wait()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def single_losses(live: LiveServer) -> list[float]:
    return losses([Raw(live)])


def test_requests_of_one_run_to_two_nodes_in_turn_give_the_losses_of_one_server(
    two: Cluster, single_losses: list[float]
) -> None:
    """Without homes each node trained without the other's steps, in silence."""
    clients = [Raw(server) for server in two.servers]
    assert losses(clients) == single_losses
    assert losses(clients[::-1]) == single_losses
    turns = losses([clients[0], clients[0], clients[1]])
    assert turns == single_losses


def test_a_server_that_is_alone_loads_nothing_of_the_cluster(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE_AND_TELL, str(tmp_path / "data"), str(CACHE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tinkex.server.main"]


SERVE_AND_TELL = """
import os, signal, sys
from tinkex.server.main import serve
from tinkex.settings import ServeConfig

def on_ready(needs_key, address):
    ours = [name for name in sys.modules if name.startswith("tinkex")]
    loaded = [name for name in ours if "cluster" in name or ".tls" in name or name == "tinkex.server.main"]
    print(*loaded, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

config = ServeConfig(data_dir=sys.argv[1], cache_dir=sys.argv[2], port=0, base_models=("tinkex/tiny",))
sys.exit(serve(config, on_ready=on_ready))
"""


def test_a_client_is_told_to_wait_while_a_dead_home_still_counts(cluster: Cluster) -> None:
    """And the operation that it had accepted runs at the new home, without anybody who asks for it."""
    near, home = two_nodes(cluster, 0)
    run = Raw(near).run()
    assert cluster.home_of(run.id) is home
    first = run.client.post("forward_backward", run.named(forward_backward_input=batch())).json["request_id"]
    assert run.client.poll(first).status == 200
    home.kill()
    step = run.named(adam_params=STEP)
    rejected = run.client.post("optim_step", step)
    assert (rejected.status, rejected.headers["retry-after"]) == (503, "1"), rejected.content
    assert "Another one takes over within seconds" in rejected.text and rejected.json["category"] == "server"
    with psycopg.connect(cluster.url) as connection:  # accepted by the home just before it died
        connection.execute(
            "UPDATE operations SET state = 'queued', finished_at = NULL, result_type = NULL WHERE request_id = %s",
            (first,),
        )
        connection.execute("DELETE FROM payloads WHERE request_id = %s AND part = 'result'", (first,))
    pending = run.client.post("retrieve_future", {"request_id": first})
    assert (pending.status, pending.json["type"], pending.json["queue_state"]) == (408, "try_again", "paused_capacity")
    assert "1 engine idle" in pending.json["queue_state_reason"]
    state = "SELECT state FROM operations WHERE request_id = %s"
    until(lambda: cluster.rows(state, first) == [("done",)], LEASE_S + 10)
    assert cluster.home_of(run.id) is near
    submitted = run.client.post("optim_step", step)
    assert run.client.poll(submitted.json["request_id"]).json["metrics"].get("no_gradient:max", 0.0) == 0.0


def test_a_node_that_is_stopped_leaves_its_runs_to_the_others_at_once(cluster: Cluster) -> None:
    near, home = two_nodes(cluster, 0)
    run = Raw(near).run()
    assert cluster.home_of(run.id) is home
    run.done("forward_backward", forward_backward_input=batch())
    home.stop()
    assert run.client.post("optim_step", run.named(adam_params=STEP)).status in (200, 503)
    assert run.done("forward", forward_input=batch())["metrics"]["loss:sum"] > 0
    assert cluster.home_of(run.id) is near
    assert [server for (server,) in cluster.rows("SELECT url FROM nodes")] == [near.url]


def test_a_node_that_drains_gives_up_a_run_that_was_handed_to_it_and_nobody_asked_for(
    two: Cluster, tmp_path: Path
) -> None:
    """Before: it looked at runs only that a request had brought to it, and `tinkex cluster drain` never ended."""
    client = Raw(two.servers[0])
    run = client.run()
    before = run.done("forward", forward_input=batch())["metrics"]["loss:sum"]
    home = two.home_of(run.id)
    other = next(node for node in two.servers if node is not home)

    def tell(*words: str) -> None:
        command = [sys.executable, "-m", "tinkex", "cluster", *words, "--database-url", two.url]
        done = subprocess.run([*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    tell("move", run.id, other.url, "--wait-s", "40")
    assert two.home_of(run.id) is other
    tell("drain", other.url, "--wait-s", "40")
    tell("drain", other.url, "--undo")
    assert run.done("forward", forward_input=batch())["metrics"]["loss:sum"] == before


@pytest.mark.full
def test_a_run_moves_in_the_middle_of_its_steps_and_keeps_its_bits(
    cluster: Cluster, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """To the other node, and back, while the client has steps under way."""
    near, home = two_nodes(cluster, 0)
    moved: list[tuple[int, str, str]] = []
    moves: list[threading.Thread] = []

    def move(run_id: str, *node: str) -> None:
        words = [sys.executable, "-m", "tinkex", "cluster", "move", run_id, *node, "--database-url", cluster.url]
        done = subprocess.run([*words, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=120)
        moved.append((done.returncode, done.stdout + done.stderr, cluster.home_of(run_id).url))

    def disturb(step: int, run_id: str) -> None:
        if step in (5, 25):
            assert cluster.home_of(run_id) is (home if step == 5 else near)
            moves.append(threading.Thread(target=move, args=(run_id, *((home.url,) if step == 25 else ()))))
            moves[-1].start()
        if step in (14, 34):
            moves[-1].join()

    found = train(near.url, disturb)
    assert [(code, url) for code, _, url in moved] == [(0, near.url), (0, home.url)], moved
    assert f"is at home at {near.url} now." in moved[0][1]
    assert found == undisturbed, cluster.logs()
    assert all("was handed over to node" in server.log() for server in cluster.servers)


# ── The death and the freezing of a home


def batch_of(step: int) -> list[tinkex.Datum]:
    dice = random.Random(step)
    rows = [[dice.randrange(5, 250) for _ in range(dice.randrange(6, 24))] for _ in range(3)]
    if step == HEAVY:
        rows = [[dice.randrange(5, 250) for _ in range(200)] for _ in range(100)]
    return [
        tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(url: str, disturb: Callable[[int, str], None]) -> dict[str, bytes]:
    """Forty steps with one client, disturbed while they are under way; the final adapter and optimizer."""
    with tinkex.ServiceClient(base_url=url, api_key="tml-test") as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=11)
        pending: list[tinkex.APIFuture[Any]] = []
        for step in range(STEPS):
            pending.append(training.forward_backward(batch_of(step), "cross_entropy"))
            pending.append(training.optim_step(tinkex.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)))
            disturb(step, training.model_id)
            if step % 3 == 2:
                for future in pending:
                    future.result(timeout=120)
                pending.clear()
        for future in pending:
            future.result(timeout=120)
        path = training.save_state("final").result(timeout=120).path
    run, checkpoint = path.removeprefix("tinker://").split("/", 1)
    with urllib.request.urlopen(f"{url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive") as response:
        content = response.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {file.name.rpartition("/")[2]: archive.extractfile(file) for file in archive if file.isfile()}
        return {name: file.read() for name, file in files.items() if file and name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def undisturbed(live: LiveServer) -> dict[str, bytes]:
    found = train(live.url, lambda step, run_id: None)
    assert found.keys() >= {"adapter_model.safetensors", "optimizer.safetensors"}
    return found


def counted(server: Node, name: str) -> float:
    """The sum of a counter over its labels."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        rows = page.read().decode().splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(f"{name}_total"))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def two_nodes(cluster: Cluster, seed: int) -> tuple[Node, Node]:
    """The node that clients talk to, and the one where their next run will be at home."""
    # Every second pair has snapshots all the time, so that both ways of rebuilding a run are tried.
    flags = ("--snapshot-every-s", "0") if seed % 2 else ()
    near, home = cluster.node(*flags), cluster.node(*flags)
    cluster.wait()
    assert cluster.home_of(Raw(near).run().id) is near  # among equals the node that was asked
    return near, home


def check_kill(cluster: Cluster, seed: int, expected: dict[str, bytes]) -> None:
    """kill -9 of the home in the middle of the steps: the client finishes through the other node."""
    dice = random.Random(seed)
    near, home = two_nodes(cluster, seed)
    at, strikes = dice.randrange(3, STEPS - 3), []

    def disturb(step: int, run_id: str) -> None:
        if step == at:
            assert cluster.home_of(run_id) is home
            strikes.append(threading.Timer(dice.random() * 0.05, home.kill))
            strikes[0].start()

    found = train(near.url, disturb)
    strikes[0].join()
    assert found == expected, f"seed {seed}\n{cluster.logs()}"
    assert counted(near, "tinkex_home_claims") >= 1


def sample_of(sampler: str, number: int) -> dict[str, object]:
    return {
        "sampling_session_id": sampler,
        "seq_id": number + 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10 + number, 20, 30]}]},
        "sampling_params": {"max_tokens": 2, "temperature": 0.0},
        "num_samples": 1,
    }


def check_freeze(cluster: Cluster, seed: int, expected: dict[str, bytes]) -> None:
    """The home is stopped in the middle of a pass, past its lease, and goes on when another node has its run."""
    near, home = two_nodes(cluster, seed)
    assert home.process is not None
    process, wakes = home.process, []

    def disturb(step: int, run_id: str) -> None:
        if step == HEAVY:
            assert cluster.home_of(run_id) is home
            query = "SELECT seq_id FROM operations WHERE run_id = %s AND state = 'done' AND kind = 'optim_step'"
            until(lambda: len(cluster.rows(query, run_id)) == HEAVY)  # all before it are done: it is in the engine
            time.sleep(0.03)
            process.send_signal(signal.SIGSTOP)
            wakes.append(threading.Timer(2 * LEASE_S, process.send_signal, [signal.SIGCONT]))
            wakes[0].start()

    found = train(near.url, disturb)
    wakes[0].join()
    until(lambda: counted(home, "tinkex_home_fences") >= 1)
    assert found == expected, f"seed {seed}\n{cluster.logs()}"
    until(lambda: "was given up" in home.log())
    # The node that was given up is of use again, at once: its samples have its new name.
    sampler, poller = Raw(home), Raw(near)
    weights = sampler.sampler()
    for number in range(6):  # each is drawn where its prompt hashes to
        request_id = sampler.post("asample", sample_of(weights, number)).json["request_id"]
        assert poller.poll(request_id).status == 200
    assert losses([Raw(home), Raw(near)]) == losses([Raw(near)])


@pytest.mark.parametrize("seed", range(1))
def test_a_run_whose_home_was_killed_ends_with_the_same_bits_through_the_other_node(
    seed: int, cluster: Cluster, undisturbed: dict[str, bytes]
) -> None:
    check_kill(cluster, seed, undisturbed)


@pytest.mark.parametrize("seed", range(1))
def test_what_a_frozen_home_still_does_is_refused(seed: int, cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    check_freeze(cluster, seed, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 20))
def test_twenty_runs_whose_home_was_killed_end_with_the_same_bits(
    seed: int, cluster: Cluster, undisturbed: dict[str, bytes]
) -> None:
    check_kill(cluster, seed, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 20))
def test_twenty_frozen_homes_are_refused(seed: int, cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    check_freeze(cluster, seed, undisturbed)
