"""Around a real service with a real engine, on the tiny model."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tests.unit.watch.conftest import MODEL, PRICES


@pytest.mark.slow
def test_a_real_run_is_shown_as_the_service_reports_it(tmp_path: Path) -> None:
    draws = random.Random(3)
    rows = [[draws.randrange(1, 100) for _ in range(9)] for _ in range(4)]
    data = [
        tinkex.Datum(tinkex.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:], "weights": [0.0] + [1.0] * 7})
        for row in rows
    ]
    file = io.StringIO()
    with LiveServer(tmp_path / "data") as server, tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(MODEL, rank=8)
        with tinkex.progress(training, 12, prices=PRICES, budget=0.35, file=file) as progress:
            for step in progress:
                training.forward_backward(data, "cross_entropy")
                stepped = training.optim_step(tinkex.AdamParams(learning_rate=2e-2))
                if step == 3:
                    sampler = training.save_weights_and_get_sampling_client()
                    prompt = tinkex.ModelInput.from_ints(rows[0])
                    seen = sampler.stream(prompt, tinkex.SamplingParams(max_tokens=5, stop=[]))
                    sampled = sum(len(chunk.tokens) for chunk in seen)
            del stepped
        told = service.create_rest_client().get_run_steps(training.model_id).result().steps

    # 32 tokens at 1,000 a million each step; nine prompt tokens and those sampled, once.
    extra = 9 * 100e-6 + sampled * 10_000e-6
    assert progress.stopped_by == "budget"
    assert progress.cost == pytest.approx(0.032 * progress.step + extra)
    assert progress.cost is not None and progress.cost <= 0.35
    assert progress.tokens == 32 * progress.step + 9 + sampled
    assert [record.loss for record in progress.history] == pytest.approx([step.loss for step in told])
    assert [record.learning_rate for record in progress.history] == [2e-2] * progress.step
    first, last = progress.history[0].loss, progress.history[-1].loss
    assert first is not None and last is not None
    assert last < 0.8 * first
    assert f"of 12 steps, stopped by the budget of $0.35 · loss per token {first:.2f} → " in file.getvalue()
    assert "loss" in progress.curve()
