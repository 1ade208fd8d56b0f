"""Anything of a cluster is killed, stopped, cut off or partitioned, and every promise is kept. `make test-cluster`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("TINKEX_CLUSTER_SEEDS", "20"))
SECONDS_EACH = 60
"""Far more than a schedule takes. In one of 25 the bucket is away for a minute."""
pytestmark = pytest.mark.full


def run(*words: str, seconds: float) -> str:
    command = [sys.executable, "-m", "tests.cluster", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"Run `{' '.join(command[1:])}` again:\n{done.stdout[-9000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_a_cluster_of_which_anything_is_killed_keeps_every_promise() -> None:
    """Four tenants of 40 steps each, with snapshots, commands of 5 MB and checkpoints, in disjoint data folders."""
    output = run("--seeds", str(SEEDS), "--jobs", "2", seconds=300 + SEEDS * SECONDS_EACH)
    print(output[-4000:])
    assert f"{SEEDS} schedules from seed 0, 0 with violations" in output


@pytest.mark.parametrize("name", ["journal-first", "fence", "renewal"])
def test_without_its_protection_the_same_checker_finds_a_violation(name: str) -> None:
    output = run("--without", name, "--seeds", "100", "--jobs", "2", seconds=3600)
    print(output[-2000:])
    assert "1 of 1 noticed" in output
