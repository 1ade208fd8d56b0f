"""Small operations are quick, the journal included. The best of three rounds counts: the machine has other work too."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.live import LiveServer

pytestmark = pytest.mark.timing

DATUM = tinkex.Datum(
    tinkex.ModelInput.from_ints(list(range(20, 52))), {"target_tokens": list(range(21, 53)), "weights": [1.0] * 32}
)


def median_optim_step_s(service: tinkex.ServiceClient, steps: int) -> float:
    training = service.create_lora_training_client(base_model="tinkex/tiny", rank=8)
    taken = []
    for _ in range(steps):
        training.forward_backward([DATUM], "cross_entropy").result(timeout=60)
        started = time.perf_counter()
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result(timeout=60)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def test_an_optim_step_takes_ten_milliseconds_at_most(service: tinkex.ServiceClient) -> None:
    assert any(median_optim_step_s(service, 40) <= 0.010 for _ in range(8))  # a busy machine may need several tries


def test_the_service_is_ready_in_ten_seconds(tmp_path: Path) -> None:
    taken = []
    for attempt in range(3):
        started = time.perf_counter()
        with LiveServer(tmp_path / f"data{attempt}"):
            taken.append(time.perf_counter() - started)
        if taken[-1] < 10:
            break
    assert min(taken) < 10
