"""Every step of `official_flow.py` with every official client and ours, on the tiny model and on SmolLM2.

    make conformance

Prints a line per client and model, writes the table that README.md shows (benchmarks/results/conformance.md), and exits
0 only if every step passed everywhere.
"""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.client_cost import commit
from tests.compat.conformance.environments import RELEASES, bare_environ, python_of
from tests.integration.service.live import LiveServer

FLOW = Path(__file__).parent / "official_flow.py"
MODELS = ("tinkex/tiny", "HuggingFaceTB/SmolLM2-135M-Instruct")
OURS = "tinkex"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "conformance.md"
STEPS = 21


class Outcome(NamedTuple):
    passed: int
    failed: int
    output: str

    @property
    def is_whole(self) -> bool:
        return self.failed == 0 and self.passed == STEPS


def drive(client: str, url: str, model: str, *, seconds: float = 1200) -> Outcome:
    """One client through all steps."""
    python = Path(sys.executable) if client == OURS else python_of(client)
    extra = {"TINKER_MODULE": "tinkex"} if client == OURS else {}
    words = [str(python), str(FLOW), url, model]
    done = subprocess.run(words, capture_output=True, text=True, env=bare_environ(**extra), timeout=seconds)
    found = re.search(r"(\d+) passed, (\d+) failed", done.stdout)
    passed, failed = (int(found[1]), int(found[2])) if found else (0, STEPS)
    return Outcome(passed, failed, done.stdout + done.stderr)


def page(found: dict[tuple[str, str], Outcome]) -> str:
    """The results as a table."""
    rows = ["| client | " + " | ".join(f"`{model}`" for model in MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    for client in (*RELEASES, OURS):
        name = "`tinkex` (ours)" if client == OURS else f"`tinker` {client}"
        rows.append(f"| {name} | " + " | ".join(f"{found[client, model].passed} of {STEPS}" for model in MODELS) + " |")
    about = (
        "# What works with what\n\nEvery step of the conformance flow (create, train, sample, save, load, resume, "
        "list, delete), by\nevery official client and ours, against `tinkex serve`. Written by "
        f"`make conformance` on {dt.date.today().isoformat()}, commit {commit()}.\n"
    )
    return about + "\n" + "\n".join(rows) + "\n"


def main() -> int:
    found: dict[tuple[str, str], Outcome] = {}
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder) / "data", models=MODELS) as server:
        for model in MODELS:
            for client in (*RELEASES, OURS):
                outcome = found[client, model] = drive(client, server.url, model)
                print(f"{client:8} {model:40} {outcome.passed} of {STEPS}", flush=True)
                if not outcome.is_whole:
                    print(outcome.output[-3000:], flush=True)
    RESULTS.write_text(page(found), encoding="utf-8")
    return 0 if all(outcome.is_whole for outcome in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
