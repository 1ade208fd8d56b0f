"""Many schedules in one go: one that ends its process, or does not end, costs its own result and no other."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults import range_run
from tests.faults.harness import Outcome
from tests.faults.history import History
from tests.faults.range_run import Rig, SeedResult, run_range

ENDS_ITS_PROCESS, DOES_NOT_END = 1, 3


class Scripted:
    """In the place of a bench, in a lane's process."""

    def __init__(self, warmth: str) -> None: ...

    def close(self) -> None: ...

    def expectations(self, wanted: object) -> dict[int, Any]:
        return {}

    def run(self, schedule: Any, expected: object, without: str) -> Outcome:
        if schedule.seed == ENDS_ITS_PROCESS:
            os._exit(3)
        if schedule.seed == DOES_NOT_END:
            threading.Event().wait()
        return Outcome(schedule=schedule, history=History(), violations=[], seconds=1.0, timeline="", log="")


def schedule_of(seed: int) -> Any:
    return SimpleNamespace(seed=seed, programs={})


class NoWarmth:
    address = ""

    def __enter__(self) -> NoWarmth:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_schedule_that_takes_its_process_with_it_is_one_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: the first such schedule ended the run of all 200, and the results of an hour were gone."""
    monkeypatch.setattr(range_run, "Warmth", NoWarmth)
    monkeypatch.setattr(range_run, "MOST_S", 3.0)
    monkeypatch.setattr(range_run, "PROGRESS_EVERY", 2)
    assert run_range(range(6), 2, Rig(cast(Any, Scripted), schedule_of, program="tests.cluster")) == 1
    output = capsys.readouterr().out
    assert "seed 1: the schedule ended the process that ran it" in output
    assert "seed 3: the schedule did not end within 3 s" in output
    assert "6 schedules from seed 0, 2 with violations [1, 3]" in output
    assert "4 of 6 schedules, " in output and "to see seed 3 again: python -m tests.cluster --seed 3" in output


def test_how_far_a_long_run_is_can_be_read() -> None:
    results = [cast(SeedResult, SimpleNamespace(promises=["no crash"] if number == 4 else [])) for number in range(20)]
    line = range_run._progress(200, results, 300.0)
    assert line == "20 of 200 schedules, 1 with violations; 300 s, about 2700 s left"
