"""A real `tinkex serve` in a process of its own, with a real engine: started, stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

CACHE = Path(__file__).parents[3] / ".cache"
"""The models' cache of this checkout, so that they are made or fetched once."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class LiveServer:
    """The same port and data folder on every start. `source` is the `src` of another checkout, to compare with."""

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        models: tuple[str, ...] = ("tinkex/tiny",),
        source: Path | None = None,
        max_files: int | None = None,
    ) -> None:
        """`max_files` is how many files the server may have open."""
        self._environment = None if source is None else {**os.environ, "PYTHONPATH": str(source)}
        self.data_dir, self.port, self.cache = data_dir, free_port(), CACHE
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = data_dir.parent / f"{data_dir.name}.log"
        self._words = [sys.executable, "-m", "tinkex", "serve", "--port", str(self.port), "--data-dir", str(data_dir)]
        self._words += ["--drain-s", "5"]
        self._words += [
            "--cache-dir",
            str(CACHE),
            *[word for name in models for word in ("--base-model", name)],
            *flags,
        ]
        if max_files is not None:
            self._words = ["sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh", *self._words]
        self.process: subprocess.Popen[bytes] | None = None
        self.tls: ssl.SSLContext | None = None

    def start(self, *, wait_s: float = 120.0) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
        if wait_s:
            self.wait_until_ready(wait_s)

    def wait_until_ready(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not self.is_ready():
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"not ready after {seconds} s:\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2, context=self.tls) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def engine_pid(self) -> int | None:
        """The server's only child (Linux tells)."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            pids = [int(pid) for pid in children.read_text().split()]
        except (OSError, ValueError):
            return None
        return pids[0] if pids else None

    def kill_engine(self) -> None:
        if (pid := self.engine_pid()) is not None:
            _kill(pid)

    def kill(self) -> None:
        """kill -9 of the server alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
                raise AssertionError(f"the server did not stop in {seconds} s:\n{self.log()[-3000:]}") from None
        return self.process.returncode

    def __enter__(self) -> LiveServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
