"""Adapters and the engine's memory, with a real engine: what does not fit leaves and comes back, bit for bit."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, Run, batch, datum, tensor, text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")

Start = Callable[..., LiveServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[LiveServer] = []

    def start(*flags: str) -> LiveServer:
        servers.append(LiveServer(tmp_path / f"data{len(servers)}", *flags))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_idle_models_of_another_tenant_do_not_make_training_fail(start: Start) -> None:
    """With 1.8 GB for the engine and 38 idle models of Bob, all of Alice's passes failed with "Out of memory"."""
    server = start("--api-key", ALICE, "--api-key", BOB, "--adapter-memory-mb", "1000000")
    alice, bob = Raw(server, ALICE), Raw(server, BOB)
    hers = alice.run(rank=256)
    train_once(hers)
    limit_memory(server, 200 << 20)  # some nine adapters of 21 MB
    session = bob.session()
    for number, rank in enumerate([512] * 12 + [64] * 8 + [8] * 10):  # the small ones fill what the large ones leave
        fields = {"base_model": "tinkex/tiny", "lora_config": {"rank": rank}}
        created = bob.post("create_model", {"session_id": session, "model_seq_id": number, **fields})
        bob.poll(created.json["request_id"])
    for _ in range(2):
        train_once(hers)
    assert "out of memory" in server.log()


def train_once(run: Run) -> None:
    tokens = [number % 250 for number in range(500)]
    long = datum(text(tokens), target_tokens=tensor(tokens), weights=None)
    run.done("forward_backward", forward_backward_input=batch([long] * 4))
    run.done("optim_step", adam_params={"learning_rate": 1e-3})


def limit_memory(server: LiveServer, more: int) -> None:
    """Let the engine's process grow by so many bytes and no further."""
    pid = server.engine_pid()
    assert pid is not None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def test_runs_that_take_turns_in_memory_end_as_if_they_had_all_of_it(start: Start, live: LiveServer) -> None:
    """Room for two adapters and six runs: nothing fails, and the weights are the same to the bit."""
    narrow = start("--adapter-memory-mb", "6")
    assert train_in_turns(narrow) == train_in_turns(live)
    assert gauge(narrow) <= 6_000_000 < gauge(live)


def gauge(server: LiveServer) -> float:
    page = Raw(server, "tml-test").get("/metrics").content.decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith("tinkex_adapter_bytes "))


def train_in_turns(server: LiveServer) -> list[str]:
    """Train six runs, half of them with two calls in flight, and return the hashes of their weights."""
    client = Raw(server, "tml-test")
    session = client.session()
    runs = [client.run(session, number, rank=60 + number) for number in range(6)]
    for turn in range(3):
        pending = [submit(run, turn) for run in runs[:3]]
        for run in runs[3:]:
            for request_id in submit(run, turn):
                assert "error" not in client.poll(request_id).json
        for request_id in (request_id for ids in pending for request_id in ids):
            assert "error" not in client.poll(request_id).json
    for run in runs:
        run.saved("save_weights", "end")
    files = [next(server.data_dir.glob(f"checkpoints/{run.id}/weights/*/adapter_model.safetensors")) for run in runs]
    return [sha256(file.read_bytes()).hexdigest() for file in files]


def submit(run: Run, turn: int) -> list[str]:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("forward_backward", {"forward_backward_input": batch()}),
        ("optim_step", {"adam_params": {"learning_rate": 1e-3 * (turn + 1)}}),
    ]
    return [str(run.client.post(call, run.named(**fields)).json["request_id"]) for call, fields in calls]
