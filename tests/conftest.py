"""Settings for every test: no package index, threads that wait without using a core, and Ctrl-C as in a terminal."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.prepare import WHEELS

# Tests install nothing from outside: pip, also that of child processes, sees only what `make prepare` downloaded.
os.environ["PIP_NO_INDEX"] = "1"
os.environ["PIP_FIND_LINKS"] = str(WHEELS)

# No test touches the runs of the user: the home, where tinkex.local() starts a service, is a folder of this process.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tinkex-tests-")
os.environ.pop("TINKEX_DATA_DIR", None)
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)
# Runs of tests leave their metrics nowhere but here.
os.environ["TINKEX_METRICS_DIR"] = tempfile.mkdtemp(prefix="tinkex-test-metrics-")

# Two processes on two cores stand still together otherwise. OpenMP reads it when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what it runs in the background with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Restore the umask: a server that a test runs in this process makes it private, and PostgreSQL runs as nobody."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
