"""The private, temporary service of `tinkex.local(ephemeral=True)`: a server process that ends with its program.

A pipe connects the two: the server stops when its stdin closes, which happens however this process ends. So nothing is
left running after an exception, a killed notebook or `kill -9`, and nothing has to be done at exit.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from tinkex import settings
from tinkex.errors import ConfigError
from tinkex.local_service.start import StartLines, reason_in, tail

log = logging.getLogger("tinkex.local")

STOP_S = 10.0
"""How long after `drain_s` a server that was asked to stop may run before it is killed."""


class PrivateServer:
    """Starts the server process, waits for it and stops it. Only the process that started it may stop it.

    `folder` is temporary and private: settings, log and data. At the end this process removes it or, if this process
    has ended, the server does.
    """

    def __init__(self, config: settings.ServeConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self._log = folder / "serve.log"
        self._owner = os.getpid()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._is_stopping = False
        self._ready_line = ""
        self._last_lines = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return str(json.loads(self._ready_line)["url"])

    @property
    def api_key(self) -> str:
        return self.config.api_keys[0]

    @property
    def models(self) -> tuple[str, ...]:
        return self.config.base_models

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def start(self) -> None:
        """Return when the server accepts requests. A failed start raises with the last lines of the server's log."""
        file = self.folder / "tinkex.toml"
        settings.write_private_file(file, self.config)
        with self._log.open("w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinkex", "-o", "json", "serve", "--private", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                encoding="utf-8",
                env=settings.private_environment(file),
                # Ctrl-C in a terminal reaches all of its processes; this one is stopped by its owner only.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        arguments = (self._process, self._process.stdout)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="tinkex-local", daemon=True)
        self._thread.start()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask the server to stop, and wait until it has ended."""
        if os.getpid() != self._owner or self._process is None:
            return
        self.request_stop()
        if not self._ended.wait(self.config.drain_s + STOP_S):
            self._process.kill()
            self._ended.wait()

    def request_stop(self) -> None:
        """Ask the server to stop, without waiting: garbage collection may call this anywhere."""
        if os.getpid() != self._owner or self._process is None:
            return
        self._is_stopping = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it has ended already
        # A process that was forked from this one holds the pipe open too, so SIGTERM is sent as well.
        self._process.terminate()

    def _watch(self, process: subprocess.Popen[str], stdout: IO[str]) -> None:
        """Wait for the line that says the server is ready, then for its end. Runs on its own thread."""
        self._ready_line = stdout.readline()
        self._ready.set()
        stdout.read()
        code = process.wait()
        self._last_lines = tail(self._log)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ended.set()
        if not self._is_stopping and self._ready_line:
            log.error("The private server ended unexpectedly (exit code %s). Its log: %s", code, self._last_lines)

    def _wait(self) -> None:
        lines = StartLines("tinkex.local", f"starting {', '.join(self.config.base_models)}", self._log)
        while not self._ready.wait(0.1):
            lines.show()
        if not self._ready_line:
            self._ended.wait()
            raise ConfigError(f"The private server did not start: {reason_in(self._last_lines)}")
