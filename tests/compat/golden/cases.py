"""All golden cases. `CASES[name]` is a Case; `cases_for("0.4.1")` are those a release can play."""

from __future__ import annotations

from . import cases_low_level, cases_rest, cases_sampling, cases_service, cases_training
from .case import ALL as CASES
from .case import Case, run_case

__all__ = ["CASES", "Case", "cases_for", "run_case"]

MODULES = (cases_service, cases_training, cases_sampling, cases_rest, cases_low_level)


def cases_for(version: str) -> list[Case]:
    return [case for case in CASES.values() if version in case.versions]
