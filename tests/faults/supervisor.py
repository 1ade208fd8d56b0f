"""Starts a server and breaks what it stands on: its processes, its disk, its database, its clock.

One server per object; a cluster is several of them on one database. Every wait has a deadline, and `close` leaves
nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tests.faults import warm
from tests.faults.databases import AnyDatabase
from tests.faults.history import Recorder, Stall
from tests.faults.hooks import OFFSET
from tests.faults.schedule import HeavyFault
from tests.faults.tenant import MODEL

CACHE = Path(__file__).parents[2] / ".cache"
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 15.0
STARTING_S = 1.0
"""In its first moments a process has no handlers yet, and SIGTERM ends it like any other. Nothing was accepted."""
DISK_BYTES = 1 << 30
"""Of a tmpfs, which takes memory for what is in it only. The service pauses below 200 MB."""


class Process(Protocol):
    pid: int

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after so long."""


class ColdServer:
    """`python -m tinkex serve`, as users start it."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinkex", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Disk:
    """A folder that can be full: a tmpfs of its own where this process may mount one, else a plain folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self.can_fill = _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder))

    def fill(self, left_kb: float) -> bool:
        """Leave so many KB. False if this disk cannot be filled."""
        if not self.can_fill:
            return False
        used = shutil.disk_usage(self.folder).used
        return _mount("-o", f"remount,size={used + int(left_kb) * 1024}", str(self.folder))

    def free(self) -> None:
        if self.can_fill:
            _mount("-o", f"remount,size={DISK_BYTES}", str(self.folder))

    def close(self) -> None:
        if self.can_fill:
            subprocess.run(["umount", "-l", str(self.folder)], check=False, capture_output=True, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


class Supervisor:
    """One server, the same port and folder on every start."""

    def __init__(
        self,
        folder: Path,
        database: AnyDatabase,
        disk: Disk,
        recorder: Recorder,
        *,
        flags: list[str],
        warmth: str | None,
        without: str = "",
        name: str = "server",
        has_engine: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is what the server has beside the address of its database, or instead of it."""
        self._database, self._disk, self._recorder, self._warmth, self.name = database, disk, recorder, warmth, name
        self._without = without
        self._environment = {"TINKEX_DATABASE_URL": database.url, **(environment or {})}
        self._log, self._clock, self._stalls = (folder / f"{name}.{kind}" for kind in ("log", "clock", "stalls"))
        self._clock.write_bytes(OFFSET.pack(0.0))
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = ["serve", *(("--base-model", MODEL, "--threads", "1") if has_engine else ())]
        self._words += ["--port", str(self.port), "--drain-s", "3"]
        self._words += ["--data-dir", str(disk.folder), "--cache-dir", str(CACHE), *flags]
        self._process: Process | None = None
        self._started_at = 0.0

    # ── Life

    def start(self) -> None:
        self._started_at = time.monotonic()
        if self._warmth is None:
            self._process = ColdServer(self._words, self._log, self._environment)
        else:
            request = warm.Start(
                words=self._words,
                log=str(self._log),
                clock=str(self._clock),
                stalls=str(self._stalls),
                without=self._without,
                environment=self._environment,
            )
            self._process = warm.start(self._warmth, request)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_WITHIN_S
        while not self._is_ready():
            assert self._process is not None
            code = self._process.wait(0.02)
            if code is not None or time.monotonic() > end:
                raise AssertionError(f"the {self.name} is not ready (exit code {code}):\n{self.log()[-2000:]}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def check_alive(self) -> None:
        """Record the end of a server that nothing here has ended, and start another."""
        assert self._process is not None
        code = self._process.wait(0.001)
        if code is not None:
            sentence = f"The {self.name} ended by itself with exit code {code}. Its log ends: {self.log()[-800:]}"
            self._recorder.add(self._recorder.history.crashes, sentence)
            self.start()

    def stop(self) -> None:
        """End it with SIGTERM and record what does not end, or ends badly."""
        assert self._process is not None
        pid = self._process.pid
        is_starting = time.monotonic() - self._started_at < STARTING_S
        groups = self._groups()
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has ended by itself, with the code below
        code = self._process.wait(STOP_WITHIN_S)
        if code != 0 and not (is_starting and code == -signal.SIGTERM):
            state = f"still runs {STOP_WITHIN_S:.0f} s after SIGTERM" if code is None else f"ended with {code}"
            sentence = f"The {self.name} {state}. Its log ends: {self.log()[-800:]}"
            self._recorder.add(self._recorder.history.left_over, sentence)
        if not _are_gone(groups, 2.0):
            self._recorder.add(self._recorder.history.left_over, f"A child of the {self.name} outlived it.")
            _kill_groups(groups)
        self.kill_all()

    def kill_all(self) -> None:
        """End whatever is left of it."""
        if self._process is not None:
            _kill_groups(self._groups())
            self._process.wait(10)
            self._process = None

    def stalls(self) -> list[Stall]:
        if not self._stalls.exists():
            return []
        rows = [json.loads(line) for line in self._stalls.read_text().splitlines() if line.endswith("}")]
        return [
            Stall(
                loop=self.name,
                began_s=row["began"] - self._recorder.began,
                seconds=row["seconds"],
                cpu_s=row["cpu_s"],
                what=row["what"],
            )
            for row in rows
        ]

    # ── Faults

    def commit(self, fault: HeavyFault) -> str:
        """Do it, undo it after its time, and return a note for the record. The server runs again afterwards."""
        self.check_alive()
        match fault.kind:
            case "kill server" | "kill both":
                return self._kill(fault)
            case "kill engine":
                return self.signal_engine(signal.SIGKILL)
            case "restart server":
                self.stop()
                self.start()
            case "stop server":
                assert self._process is not None
                return self._pause(self._process.pid, fault.seconds)
            case "stop engine":
                pid = self.engine_pid()
                return "no engine at that moment" if pid is None else self._pause(pid, fault.seconds)
            case "fill disk":
                return self._fill_disk(fault)
            case "lock database":
                self._database.lock(fault.seconds)
            case "slow database":
                self._database.slow(fault.seconds)
            case "lose database":
                self._database.lose(fault.seconds)
            case "stop database":
                self._database.stop(fault.seconds)
            case "restart database":
                self._database.restart(fault.seconds)
            case "jump clock":
                self._clock_offset(fault.amount)
            case "expire sessions":
                # Forward, until the upkeep has seen it, and back.
                self._clock_offset(fault.amount)
                _pause(max(fault.seconds, 0.8))
                self._clock_offset(0.0)
        return ""

    def _kill(self, fault: HeavyFault) -> str:
        assert self._process is not None
        groups = self._groups()
        note = self.signal_engine(signal.SIGKILL) if fault.kind == "kill both" else ""
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.wait(10) is not None
        if not _are_gone(groups, 5.0):
            sentence = f"The engine outlived its {self.name}, which was killed."
            self._recorder.add(self._recorder.history.left_over, sentence)
            _kill_groups(groups)
        _pause(fault.seconds)
        self.start()
        return note

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def set_flags(self, *flags: str) -> None:
        """Add flags that are known only when the port is: before the first start."""
        self._words += flags

    def signal_engine(self, number: signal.Signals) -> str:
        pid = self.engine_pid()
        if pid is None:
            return "no engine at that moment"
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return "the engine was gone already"
        return ""

    def engine_pid(self) -> int | None:
        """The server's only child."""
        assert self._process is not None
        pid = self._process.pid
        try:
            pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(pids[0]) if pids else None

    def _groups(self) -> list[int]:
        """The server's process group and that of its engine, which has one of its own."""
        assert self._process is not None
        return [pid for pid in (self._process.pid, self.engine_pid()) if pid is not None]

    def pause(self, seconds: float, *, with_engine: bool) -> str:
        """Stop the server's process for a while; with its engine, as where a whole machine is stopped."""
        engine = self.engine_pid() if with_engine else None
        if engine is None:
            return self._pause(self.pid(), seconds)
        try:
            os.kill(engine, signal.SIGSTOP)
            note = self._pause(self.pid(), seconds)
            os.kill(engine, signal.SIGCONT)
        except ProcessLookupError:
            return "the engine was gone already"
        return note

    def skew_clock(self, seconds: float) -> None:
        self._clock_offset(seconds)

    def _pause(self, pid: int, seconds: float) -> str:
        try:
            os.kill(pid, signal.SIGSTOP)
            _pause(seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return "the process was gone already"
        return ""

    def _fill_disk(self, fault: HeavyFault) -> str:
        if not self._disk.fill(fault.amount):
            return "not done: mounting a small disk needs root"
        try:
            _pause(fault.seconds)
        finally:
            self._disk.free()
        return ""

    def _clock_offset(self, seconds: float) -> None:
        # In place: the server has mapped this very file.
        with self._clock.open("r+b") as file:
            file.write(OFFSET.pack(seconds))

    def heal(self) -> None:
        """Undo whatever a failed fault may have left behind."""
        self._disk.free()
        if self._process is not None:
            for pid in (self._process.pid, self.engine_pid()):
                if pid is not None:
                    try:
                        os.kill(pid, signal.SIGCONT)
                    except ProcessLookupError:
                        pass


def _mount(*words: str) -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    return subprocess.run(["mount", *words], check=False, capture_output=True, timeout=10).returncode == 0


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _kill_groups(groups: list[int]) -> None:
    for group in groups:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                pass


def _are_gone(groups: list[int], seconds: float) -> bool:
    """Whether every process of the groups has ended, or does so within a while."""
    end = time.monotonic() + seconds
    while any(members_of_group(group) for group in groups):
        if time.monotonic() > end:
            return False
        _pause(0.01)
    return True


def members_of_group(group: int) -> list[int]:
    """Return the processes of a group that run. One that has ended and waits for its parent does not count."""
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # pid (name) state parent group …; the name may hold spaces and brackets.
                state, _, found = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            if int(found) == group and state != "Z":
                members.append(int(folder.name))
    return members


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
