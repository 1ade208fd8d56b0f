"""`log_to=`: the numbers that a tracker has stored are those of the progress. With the real packages, offline."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest

import tinkex
from tests import tools
from tests.unit.watch.conftest import train
from tinkex.testing import ScriptedService
from tinkex.watch.trackers import TrackerName


@pytest.mark.full
@pytest.mark.parametrize("tracker", get_args(TrackerName))
def test_a_tracker_has_stored_the_numbers_of_the_progress(
    scripted: ScriptedService, tmp_path: Path, tracker: str
) -> None:
    words = [
        str(tools.make("trackers")),
        "-m",
        "tests.unit.watch.tracker_program",
        tracker,
        scripted.url,
        str(tmp_path),
    ]
    ran = subprocess.run(words, cwd=tools.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    [line] = [line for line in ran.stdout.splitlines() if line.startswith("{")]  # trackers print lines of their own
    told = json.loads(line)
    of_service = "step_max" if tracker == "tensorboard" else "step:max"  # tensorboardX replaces colons
    assert {"loss", "tokens", "learning_rate", "reward/mean", "kl", of_service} <= told["read"].keys()
    for name, points in told["logged"].items():
        steps, values = zip(*points, strict=True)
        read_steps, read_values = zip(*sorted(map(tuple, told["read"][name])), strict=True)
        assert read_steps == steps, name
        assert read_values == pytest.approx(values, rel=1e-6), name  # TensorBoard has single precision


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in (
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("tensorboard", "tensorboardX"),
        ("mlflow", "mlflow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(tinkex.MissingExtra, match=rf"tinkex\[{name}\]"):
            tinkex.progress(training, 1, log_to=name)  # type: ignore[arg-type]
    with pytest.raises(tinkex.ValidationError, match="'tensorbord'"):
        tinkex.progress(training, 1, log_to=["tensorbord"])  # type: ignore[list-item]


def test_a_tracker_that_fails_is_left_out_and_the_training_goes_on(
    training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(folder)

        def add_scalar(self, *values: Any) -> None:
            calls.append(values)
            raise OSError("the disk is full")

        def close(self) -> None:
            raise AssertionError("it was left out before")

    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    progress = tinkex.progress(training, 3, file=io.StringIO(), log_to="tensorboard")
    with caplog.at_level(logging.ERROR, "tinkex.progress"), progress:
        for _ in progress:
            train(training)
    assert progress.stopped_by == "steps" and len(progress.history) == 3
    assert len(calls) == 2
    assert [record.getMessage() for record in caplog.records] == ["tensorboard failed; nothing more is sent to it"]
