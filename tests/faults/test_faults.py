"""A real service is broken in seeded ways, and keeps what it promises. `make faults SEEDS=1000` runs many more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_service_that_is_broken_keeps_every_promise() -> None:
    """Eight schedules: killed and stopped processes, lost and repeated requests, a full disk, a locked database."""
    command = [sys.executable, "-m", "tests.faults", "--seeds", "8", "--first", "100", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"Run `{' '.join(command[1:])}` again:\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "8 schedules from seed 100, 0 with violations" in done.stdout
