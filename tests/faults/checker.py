"""From a history, and what the same programs did undisturbed, to violations. Pure: knows no process and no clock.

It does not know how many servers there were: a cluster has to keep the same promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.history import Call, FinalRun, History, Value

STALL_CPU_S = 0.05
"""No callback may compute longer on an event loop. This time is that of the loop's thread alone, so the bound is that
of the service, however busy the machine is."""
STALL_WALL_S = 1.0
"""No callback may hold an event loop longer by the clock: it would wait for a disk, a lock or another thread. Several
schedules on two cores delay each other by some 0.3 s, so this bound is wide; and wider still on a machine that others
use: 1.3 s of nothing but waiting for a core were seen with 16 processes per core."""
USUAL_LOAD = 4.0
"""Processes per core up to which the bound holds as it is."""
FREEZES = (
    "stop server", "freeze node", "freeze machine", "pause node", "freeze node, then lose its heir",
    "freeze idle node, then lose its heir",
)  # fmt: skip
"""Faults that stop the process whose loop is watched."""
Promise = Literal[
    "answered", "succeeded", "exact results", "once and in order", "exact weights", "readable", "isolated",
    "nothing left", "no stall", "no crash", "goes on",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Violation:
    promise: Promise
    sentence: str

    def __str__(self) -> str:
        return f"[{self.promise}] {self.sentence}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a program gives when nothing is broken."""

    values: dict[str, Value]
    """"index what" → the recorded value of that call."""
    losses: list[Value]
    """Of the optimizer steps, in order."""
    checkpoints: dict[str, str]
    """Name → digest of its tensors."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Tenant → what its program should have given."""

    by_tenant: Mapping[str, Expected] = field(default_factory=dict)


def expected_of(history: History, tenant: str) -> Expected:
    """Read an undisturbed history as the expectation for the others."""
    final = next(final for final in history.finals if final.tenant == tenant)
    return Expected(
        values={_key(call): call.value for call in history.calls if call.tenant == tenant},
        losses=[step[1] for step in final.steps],
        checkpoints=dict(final.checkpoints),
    )


def check(history: History, expectation: Expectation) -> list[Violation]:
    """Return every broken promise."""
    violations = [*_answers(history), *_isolation(history), *_stalls(history), *_rest(history)]
    for tenant, expected in expectation.by_tenant.items():
        violations += _results(history, tenant, expected)
        final = next((final for final in history.finals if final.tenant == tenant), None)
        if final is None:
            violations.append(_violation("readable", f"The service says nothing about {tenant}'s run in the end."))
        else:
            violations += [*_order(final, expected), *_checkpoints(history, final, expected), *_failures(final)]
    return violations


def _violation(promise: Promise, sentence: str) -> Violation:
    return Violation(promise=promise, sentence=sentence)


def _key(call: Call) -> str:
    return f"{call.index} {call.what}"


def _answers(history: History) -> Iterator[Violation]:
    for call in history.calls:
        if not call.is_answered:
            yield _violation("answered", f"{call.tenant}'s {_key(call)} was never answered: {call.error}")


def _results(history: History, tenant: str, expected: Expected) -> Iterator[Violation]:
    """Every call of the program has succeeded once, with the same bits as in the undisturbed run."""
    calls = [call for call in history.calls if call.tenant == tenant]
    done = {_key(call): call for call in calls if call.is_answered and call.error is None}
    for key, count in Counter(_key(call) for call in calls if call.error is None).items():
        if count > 1:
            yield _violation("once and in order", f"{tenant}'s {key} succeeded {count} times.")
    for key, value in expected.values.items():
        if key in done:
            if done[key].value != value:
                yield _violation("exact results", f"{tenant}'s {key} gave {done[key].value}, undisturbed {value}.")
            continue
        error = next((call.error for call in reversed(calls) if _key(call) == key), "it was never called")
        if not any(_key(call) == key and not call.is_answered for call in calls):
            yield _violation("succeeded", f"{tenant}'s {key} did not succeed: {error}")


def _order(final: FinalRun, expected: Expected) -> Iterator[Violation]:
    """The journal has every optimizer step once, in order, with the loss of the undisturbed run."""
    numbers = [step[0] for step in final.steps]
    if numbers != sorted(set(numbers)):
        yield _violation("once and in order", f"The steps of {final.tenant}'s run have the numbers {numbers}.")
    losses = [step[1] for step in final.steps]
    if len(losses) != len(expected.losses):
        yield _violation(
            "once and in order",
            f"{final.tenant}'s run has {len(losses)} steps in the journal, undisturbed {len(expected.losses)}.",
        )
    elif losses != expected.losses:
        first = next(
            index for index, pair in enumerate(zip(losses, expected.losses, strict=True)) if pair[0] != pair[1]
        )
        yield _violation(
            "once and in order",
            f"The losses of {final.tenant}'s run differ from the undisturbed ones from step {first}.",
        )


def _checkpoints(history: History, final: FinalRun, expected: Expected) -> Iterator[Violation]:
    for name in dict.fromkeys(history.saved.get(final.tenant, [])):
        digest, wanted = final.checkpoints.get(name), expected.checkpoints.get(name)
        if digest is None or name not in final.listed:
            yield _violation("readable", f"{final.tenant}'s checkpoint {name} was acknowledged and is gone.")
        elif ":" in digest:
            yield _violation("readable", f"{final.tenant}'s checkpoint {name} cannot be read: {digest}")
        elif digest != wanted:
            yield _violation("exact weights", f"{final.tenant}'s checkpoint {name} has other bits than undisturbed.")
    unknown = sorted(set(final.listed) - set(expected.checkpoints))
    if unknown:
        yield _violation("once and in order", f"{final.tenant} has checkpoints that no call saved: {unknown}.")


def _failures(final: FinalRun) -> Iterator[Violation]:
    """Operations may fail because a tenant asked for another's weights, or a save or load because the disk was full."""
    for failure in final.failed_operations:
        is_refusal = failure.startswith("load_weights") and "is not known" in failure
        is_full_disk = failure.startswith(("save_weights", "load_weights")) and "disk" in failure
        if not is_refusal and not is_full_disk:
            yield _violation("succeeded", f"{final.tenant}'s run has a failed operation: {failure}")


def _isolation(history: History) -> Iterator[Violation]:
    for intrusion in history.intrusions:
        if intrusion.was_given:
            yield _violation(
                "isolated",
                f"{intrusion.tenant} reached {intrusion.owner}'s data with {intrusion.what}: {intrusion.outcome}",
            )
    for leak in history.leaks:
        yield _violation("isolated", leak)


def _stalls(history: History) -> Iterator[Violation]:
    frozen = [(fault.began_s, fault.ended_s) for fault in history.faults if fault.what in FREEZES]
    most_s = STALL_WALL_S * max(history.load_per_core / USUAL_LOAD, 1.0)
    for stall in history.stalls:
        end_s = stall.began_s + stall.seconds
        is_excused = any(began_s <= end_s and stall.began_s <= ended_s for began_s, ended_s in frozen)
        if stall.cpu_s > STALL_CPU_S or (stall.seconds > most_s and not is_excused):
            yield _violation(
                "no stall",
                f"A callback held the loop of {stall.loop} for {stall.seconds:.2f} s ({stall.cpu_s:.3f} s of its own "
                f"CPU time) at {stall.began_s:.2f} s: {stall.what}",
            )


def _rest(history: History) -> Iterator[Violation]:
    for resumption in history.resumptions:
        if resumption.seconds > resumption.most_s:
            yield _violation(
                "goes on",
                f"After {resumption.what} a tenant waited for {resumption.seconds:.1f} s; "
                f"{resumption.most_s:.1f} s are allowed.",
            )
    for sentence in history.left_over:
        yield _violation("nothing left", sentence)
    for sentence in history.crashes:
        yield _violation("no crash", sentence)
