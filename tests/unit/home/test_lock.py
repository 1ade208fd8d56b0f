"""One server per data folder, with a lock of the operating system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.home.lock import FileLock

HOLD = """
import sys
from pathlib import Path
from tinkex.home.lock import FileLock
with FileLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_server_is_rejected_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"pid {first.pid}\b.*--data-dir"):
            FileLock(tmp_path).acquire()
        first.kill()


def test_the_lock_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        first.wait()
    with FileLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    with FileLock(tmp_path), pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        FileLock(tmp_path).acquire()
    with FileLock(tmp_path):
        pass


def test_a_failed_lock_attempt_keeps_the_holders_pid(tmp_path: Path) -> None:
    with FileLock(tmp_path):
        with pytest.raises(ConfigError):
            FileLock(tmp_path).acquire()
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path)
    lock.acquire()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    ) as child:
        lock.release()
        with FileLock(tmp_path):
            assert child.poll() is None
        child.kill()


def test_the_data_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    with FileLock(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o077 == 0
