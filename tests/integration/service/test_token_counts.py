"""The same run has the same number of tokens wherever the service or the client shows one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import tinkex
from tests.integration.service.live import LiveServer
from tests.integration.service.test_numbers import RATE, data, new_run

STEPS = 3


def read(live: LiveServer, path: str) -> bytes:
    with urllib.request.urlopen(f"{live.url}/{path}", timeout=20) as response:
        return bytes(response.read())


def trained_tokens(live: LiveServer) -> float:
    """What /metrics counts, over all models and kinds of operations."""
    families = text_string_to_metric_families(read(live, "metrics").decode())
    return sum(row.value for family in families for row in family.samples if row.name == "tinkex_trained_tokens_total")


@contextmanager
def stopped_engine(live: LiveServer) -> Iterator[None]:
    """Hold the engine still, so that all operations of a loop are in the queue at once."""
    pid = live.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def queued(live: LiveServer, run_id: str, operations: int) -> list[dict[str, Any]]:
    """What the console's queue page shows of a run, as soon as all its operations have arrived."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        rows = [row for row in json.loads(read(live, "api/v1/service_state"))["queue"] if row["run_id"] == run_id]
        if len(rows) == operations:
            return rows
        time.sleep(0.02)
    raise AssertionError(f"{len(rows)} of {operations} operations are in the queue")


def watched(live: LiveServer, run_id: str) -> list[dict[str, Any]]:
    """What `tinkex run watch` prints of a run that is idle."""
    command = [sys.executable, "-m", "tinkex", "run", "watch", run_id, "--until-idle", "--idle-for", "0"]
    environment = {**os.environ, "TINKER_BASE_URL": live.url, "TINKER_API_KEY": "tml-test"}
    done = subprocess.run(
        [*command, "--output", "json"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_page_terminal_metrics_queue_and_sdk_count_the_same_tokens(
    live: LiveServer, service: tinkex.ServiceClient
) -> None:
    training = new_run(service, seed=1)
    batches = [data(seed) for seed in range(STEPS)]
    held_out = data(99, rows=1)
    true_tokens = [sum(len(datum.model_input.to_ints()) for datum in [*batch, *held_out]) for batch in batches]
    counted_before = trained_tokens(live)
    with tinkex.progress(training, STEPS, file=io.StringIO()) as progress:
        with stopped_engine(live):
            futures: list[Any] = []
            for batch in batches:
                futures.append(training.forward_backward(batch, "cross_entropy"))
                futures.append(training.forward(held_out, "cross_entropy"))
                futures.append(training.optim_step(RATE))
            in_queue = queued(live, training.model_id, len(futures))
        for future in futures:
            future.result(timeout=60)
    in_console = json.loads(read(live, f"api/v1/training_runs/{training.model_id}/steps"))["steps"]
    on_terminal = watched(live, training.model_id)
    assert {
        "tinkex.progress": progress.tokens,
        "console": sum(step["tokens"] for step in in_console),
        "run watch": sum(step["tokens"] for step in on_terminal),
        "queue page": sum(row["tokens"] for row in in_queue),
        "/metrics": trained_tokens(live) - counted_before,
    } == dict.fromkeys(("tinkex.progress", "console", "run watch", "queue page", "/metrics"), sum(true_tokens))
    by_step = [[step["tokens"] for step in steps] for steps in (in_console, on_terminal)]
    assert [true_tokens, *by_step] == [[record.tokens for record in progress.history]] * 3
