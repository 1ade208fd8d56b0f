"""A `tinkex serve` in a process of its own that is started again when it ends. Used by `--engines` and by Ray actors.

The child's settings, secrets included, are in a file that only its owner may read. Its stdin is its lifeline: when this
process ends, even by kill -9, the pipe closes and the child stops in order, so that its runs go on elsewhere at once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tinkex.clock import REAL
from tinkex.engine.host import STEADY_AFTER_S, describe_exit, restart_delay_s
from tinkex.settings import ServeConfig, private_environment, write_private_file

logger = logging.getLogger("tinkex.launch")

STOP_S = 20.0
"""How long a child may take to stop beyond the time that it gives its running work (`drain_s`)."""
KILLED_S = 10.0
LAST_LINES = 20
"""Lines of its log that are kept for the message about its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a child is doing now."""

    name: str
    url: str = ""
    pid: int = 0
    is_ready: bool = False
    needs_key: bool = False
    """Whether its clients need a key."""
    starts: int = 0
    failure: str = ""
    """Why the last child ended, in its own words if it said so; "" if none has."""


class KeptServer:
    """Runs one `tinkex serve`, and starts it again when it ends.

    `configure` returns the settings of each start; `variables` are added to the child's environment.

    A first child that cannot start is reported in `has_given_up` unless `is_patient`; what has worked once is started
    again for ever, after a delay that grows to 30 s.
    """

    def __init__(
        self,
        name: str,
        configure: Callable[[], ServeConfig],
        variables: Mapping[str, str] | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        self.name = name
        self.on_change: Callable[[], None] = lambda: None
        """Called from a thread of this object when the child is ready, has ended, or will not be started again."""
        self.has_given_up = False
        self.url = ""
        self._configure, self._variables = configure, dict(variables or {})
        self._is_patient = is_patient
        self._process: subprocess.Popen[str] | None = None
        self._is_ready, self._was_ready, self._needs_key = False, False, False
        self._starts = 0
        self._failure = ""
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._drain_s = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"tinkex {name}", daemon=True)

    @property
    def state(self) -> ServerState:
        process = self._process
        return ServerState(
            name=self.name,
            url=self.url,
            pid=0 if process is None else process.pid,
            is_ready=self._is_ready,
            needs_key=self._needs_key,
            starts=self._starts,
            failure=self._failure,
        )

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """Have the child finish what it is doing and end. No other one is started."""
        with self._starting:  # not between the look at this flag and the start of a child
            self._stopping.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        """Wait until the child has ended; kill it if it takes too long."""
        if not self._thread.is_alive():
            return
        self._thread.join(self._drain_s + STOP_S)
        if self._thread.is_alive():
            self.kill()
            self._thread.join(KILLED_S)

    def kill(self) -> None:
        with self._starting:
            self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            logger.warning("%s does not end; killing it", self.name)
            _kill_group(self._process)

    def _keep(self) -> None:
        deaths = 0
        while not self._stopping.is_set():
            began = REAL.now()
            try:
                self._failure = self._run()
            except Exception as error:  # an edge: no memory, no disk for the file, no port. It may pass
                self._failure = f"could not be started: {str(error).rstrip('.') or type(error).__name__}"
            self._is_ready = False
            if self._stopping.is_set():
                break
            if not self._was_ready and not self._is_patient:
                self.has_given_up = True
                break
            deaths = 0 if REAL.now() - began >= STEADY_AFTER_S else deaths
            delay_s = restart_delay_s(deaths)
            deaths += 1
            logger.error("%s %s; starting it again in %.1f s", self.name, self._failure, delay_s)
            self.on_change()
            self._stopping.wait(delay_s)
        self.on_change()

    def _run(self) -> str:
        """Run one child to its end. Return how it ended, as the end of a sentence."""
        config = self._configure()
        self._drain_s = config.drain_s
        folder = Path(tempfile.mkdtemp(prefix="tinkex-"))
        try:
            file = folder / "tinkex.toml"
            write_private_file(file, config)
            with self._starting:
                if self._stopping.is_set():
                    return "was not started"
                process = self._process = self._popen(folder, private_environment(file) | self._variables)
                self._starts += 1
            logs = threading.Thread(target=self._forward_logs, args=(process,), daemon=True)
            logs.start()
            try:
                self._wait(process, config.node_url)
            finally:
                _kill_group(process)  # what it has started and left behind, and itself if it wrote what nobody reads
            logs.join(1.0)  # what it had written is there; a process that left its group may hold the pipe open
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            code = process.returncode
            said = self._last_lines[-1] if self._last_lines and code > 0 else ""
            reason = said.removeprefix("tinkex: ") if said.startswith("tinkex: ") else ""
            return f"{describe_exit(code)}{': ' if reason else ''}{reason.rstrip('.')}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, process: subprocess.Popen[str], node_url: str | None) -> None:
        assert process.stdout is not None
        if line := process.stdout.readline():
            ready = json.loads(line)
            # Of a node the address in the database: what it prints is --public-url, which is the same for all.
            self.url, self._needs_key = node_url or str(ready["url"]), bool(ready["needs_key"])
            self._is_ready = self._was_ready = True
            self.on_change()
        process.wait()

    def _popen(self, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tinkex", "-o", "json", "serve", "--private", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            # Ctrl-C in a terminal reaches all of its processes; this one is stopped by its owner only.
            start_new_session=True,
        )

    def _forward_logs(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if text := line.rstrip():
                self._last_lines.append(text)
                with suppress(OSError, ValueError):  # a full disk: the child must not wait for a pipe that nobody reads
                    print(f"{self.name}: {text}", file=sys.stderr, flush=True)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a child and what it has started in its group. The engine has a group of its own, and a lifeline."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILLED_S)
