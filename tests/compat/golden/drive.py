"""Runs inside an environment that has an official release: plays every case and every answer, writes the data files.

From the root of the repository: python -m tests.compat.golden.drive surface|requests|answers OUTPUT.json [NAME PART]
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from typing import Any

from .answers import run_variant, variants_for
from .cases import cases_for, run_case
from .server import GoldenServer
from .surface import surface_of


def main(what: str, output: str, only: str = "") -> None:
    logging.disable(logging.CRITICAL)
    T = importlib.import_module("tinker")
    if what == "surface":
        text = json.dumps(surface_of(T), indent=1, ensure_ascii=False)
    else:
        with GoldenServer() as server:
            recorded = record_requests(T, server, only) if what == "requests" else record_answers(T, server, only)
        text = pretty({"version": T.__version__, what: recorded})
    with open(output, "w") as file:
        file.write(text + "\n")


def record_requests(T: Any, server: GoldenServer, only: str) -> dict[str, Any]:
    chosen = [case for case in cases_for(T.__version__) if only in case.name]
    return {case.name: run_case(case, T, server) for case in chosen}


def record_answers(T: Any, server: GoldenServer, only: str) -> dict[str, Any]:
    chosen = [variant for variant in variants_for(T.__version__) if only in variant.name]
    return {variant.name: run_variant(variant, T, server, T.__version__) for variant in chosen}


def pretty(value: Any, indent: str = "") -> str:
    """JSON that fits a reviewer's screen: whatever fits on one line stays on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= 140 or not isinstance(value, (dict, list)) or not value:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if all(isinstance(item, (int, float)) for item in value):
        return flat
    return "[\n" + ",\n".join(inner + pretty(item, inner) for item in value) + f"\n{indent}]"


if __name__ == "__main__":
    main(*sys.argv[1:])
