"""Every protection that the harness can take away is still there to be taken away."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from tests.faults.broken import PROTECTIONS, misfit_reason, take_away


def test_eight_protections_can_be_taken_away() -> None:
    assert len(PROTECTIONS) >= 8
    assert all(protection.promises for protection in PROTECTIONS.values())


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_patch_finds_what_it_replaces(side: str) -> None:
    """In a process of its own: what is taken away stays away. A renamed function would make the proof empty."""
    process = multiprocessing.get_context("spawn").Process(target=_take_all, args=(side,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_patch_with_a_parameter_too_few_is_noticed() -> None:
    """Before: `submit` got a parameter, its patch raised TypeError, and that counted as a noticed loss."""

    def submit(link: Any, number: int, size_hint: int = 0, datums: int | None = None) -> None: ...
    def short(link: Any, number: int, size_hint: int = 0) -> None: ...
    def fitting(link: Any, number: int, *rest: Any, **options: Any) -> None: ...

    assert "too many positional arguments" in (misfit_reason(submit, short) or "")
    assert misfit_reason(submit, fitting) is None
    assert misfit_reason(submit, submit) is None
    assert misfit_reason(fitting, submit) is None


def _take_all(side: str) -> None:
    for name in PROTECTIONS:
        take_away(name, "server" if side == "server" else "client")
