"""Every kind of broken promise is found in a history that was broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from tests.faults.checker import Expectation, check, expected_of
from tests.faults.history import Call, FaultRecord, FinalRun, History, Intrusion, Resumption, Stall


def good() -> History:
    calls = [
        Call(tenant="alice", index=number, what=what, began_s=number, ended_s=number + 0.5, value=value)
        for number, (what, value) in enumerate(
            {"forward_backward 0": 1.5, "optim_step 0": None, "save s": None}.items()
        )
    ]
    final = FinalRun(tenant="alice", steps=[[2, "0x1p+1"], [4, "0x1p+0"]], checkpoints={"s": "abc"}, listed=["s"])
    return History(calls=calls, finals=[final], saved={"alice": ["s"]})


BREAKS: dict[str, tuple[str, Callable[[History], object]]] = {
    "a future without an outcome": (
        "answered",
        lambda history: history.calls.append(replace(history.calls[0], ended_s=None, error="no outcome")),
    ),
    "a call that failed": (
        "succeeded",
        lambda history: history.calls.__setitem__(1, replace(history.calls[1], error="APIError: no")),
    ),
    "a call that was never made": ("succeeded", lambda history: history.calls.pop(1)),
    "another loss": ("exact results", lambda history: history.calls.__setitem__(0, replace(history.calls[0], value=2))),
    "a call that succeeded twice": ("once and in order", lambda history: history.calls.append(history.calls[1])),
    "a step that ran twice": ("once and in order", lambda history: history.finals[0].steps.append([4, "0x1p+0"])),
    "a step that is missing": ("once and in order", lambda history: history.finals[0].steps.pop()),
    "steps in another order": ("once and in order", lambda history: history.finals[0].steps.reverse()),
    "a checkpoint that nobody saved": ("once and in order", lambda history: history.finals[0].listed.append("x")),
    "another weight": ("exact weights", lambda history: history.finals[0].checkpoints.update(s="abd")),
    "a checkpoint that is gone": ("readable", lambda history: history.finals[0].checkpoints.clear()),
    "a checkpoint that is not listed": ("readable", lambda history: history.finals[0].listed.clear()),
    "a checkpoint that cannot be read": (
        "readable",
        lambda history: history.finals[0].checkpoints.update(s="NotFoundError: gone"),
    ),
    "a run that is unknown": ("readable", lambda history: history.finals.clear()),
    "a failed operation": (
        "succeeded",
        lambda history: history.finals[0].failed_operations.append("optim_step: memory"),
    ),
    "data of another tenant": (
        "isolated",
        lambda history: history.intrusions.append(
            Intrusion(tenant="bob", owner="alice", what="GET run", was_given=True, outcome="200")
        ),
    ),
    "an id of another tenant in a response": ("isolated", lambda history: history.leaks.append("bob saw alice's id")),
    "a blocked loop": (
        "no stall",
        lambda history: history.stalls.append(Stall(loop="server", began_s=1.0, seconds=1.1, cpu_s=0.0, what="sleep")),
    ),
    "a loop that computes": (
        "no stall",
        lambda history: history.stalls.append(Stall(loop="server", began_s=1.0, seconds=0.1, cpu_s=0.09, what="sum")),
    ),
    "a process that is left": ("nothing left", lambda history: history.left_over.append("process 7 is left")),
    "a tenant that waits too long": (
        "goes on",
        lambda history: history.resumptions.append(Resumption(what="kill node", seconds=18.1, most_s=18.0)),
    ),
    "a crash": ("no crash", lambda history: history.crashes.append("the server ended")),
}


def promises(history: History) -> set[str]:
    return {
        violation.promise
        for violation in check(history, Expectation(by_tenant={"alice": expected_of(good(), "alice")}))
    }


def test_an_undisturbed_history_breaks_no_promise() -> None:
    assert promises(good()) == set()


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_is_found(name: str) -> None:
    promise, break_it = BREAKS[name]
    history = deepcopy(good())
    break_it(history)
    assert promise in promises(history)


def test_a_stall_while_the_server_was_stopped_is_excused() -> None:
    history = good()
    history.stalls.append(Stall(loop="server", began_s=1.0, seconds=1.5, cpu_s=0.01, what="stopped"))
    history.faults.append(FaultRecord(what="stop server", began_s=1.2, ended_s=2.0))
    assert promises(history) == set()


def test_a_loop_may_wait_longer_for_a_core_where_many_processes_do() -> None:
    history = good()
    history.stalls.append(Stall(loop="server", began_s=1.0, seconds=1.3, cpu_s=0.01, what="waited for a core"))
    assert promises(history) == {"no stall"}
    history.load_per_core = 16.0
    assert promises(history) == set()


def test_a_stall_in_which_the_machine_ran_other_processes_is_excused() -> None:
    history = good()
    history.stalls.append(Stall(loop="server", began_s=1.0, seconds=0.4, cpu_s=0.01, what="waited for a core"))
    assert promises(history) == set()
