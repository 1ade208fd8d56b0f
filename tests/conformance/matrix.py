"""Every step of `official_flow.py` with every official client and ours, on the tiny model and on SmolLM2.

    make conformance

Prints a line per client and model and exits 0 only if every step passed everywhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.conformance.environments import RELEASES, bare_environ, python_of
from tests.service.live import LiveServer

FLOW = Path(__file__).parent / "official_flow.py"
MODELS = ("tinkex/tiny", "HuggingFaceTB/SmolLM2-135M-Instruct")
OURS = "tinkex"
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


def main() -> int:
    is_whole = True
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder) / "data", models=MODELS) as server:
        for model in MODELS:
            for client in (*RELEASES, OURS):
                found = drive(client, server.url, model)
                is_whole &= found.is_whole
                print(f"{client:8} {model:40} {found.passed} of {STEPS}", flush=True)
                if not found.is_whole:
                    print(found.output[-3000:], flush=True)
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
