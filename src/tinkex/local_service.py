"""`tinkex.local()`: starts a private server process and returns a client of it.

A pipe connects the two: the server stops when its stdin closes, which happens however this process ends. So nothing is
left running after an exception, a killed notebook or `kill -9`, and nothing has to be done at exit.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tinkex import settings
from tinkex.client.future import APIFuture, follow_up, reject, resolve
from tinkex.client.service import ServiceClient
from tinkex.clock import REAL
from tinkex.errors import ConfigError, MissingExtra, TinkexError

log = logging.getLogger("tinkex.local")

OWN = ("host", "port", "public_url", "data_dir", "database_url", "api_keys", "keys_file", "base_models")
"""Settings that are never read from the environment or the file: there they describe a service for others."""
NEEDS = ("torch", "transformers", "sqlalchemy", "starlette", "uvicorn")
KEY_FILE = "private.key"
QUIET_S = 1.0
"""A start that takes longer prints what it is doing."""
LINE_S = 5.0
STOP_S = 10.0
"""How long after `drain_s` a server that was asked to stop may run before it is killed."""
TAIL = 12


def local(
    base_model: str | Sequence[str] = "smollm2-135m",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    **config: Any,
) -> LocalServiceClient:
    """Start a private service and return a client of it, ready to use. Needs the extra `local`.

    The server is a separate process on a free port of this machine, protected by a random key. It stops with `close()`,
    with the last client that was created from it, or with this process. Its data is deleted then, unless `data_dir`
    names a folder: then runs and checkpoints are there the next time, and the key is in `private.key` beside them.
    `config`: settings of a service, such as device="cpu", threads=4 (docs/settings.md).

    >>> with tinkex.local("tinkex/tiny") as service:
    ...     training = service.create_lora_training_client("tinkex/tiny", rank=8)
    """
    needs_local("tinkex.local()")
    folder = Path(tempfile.mkdtemp(prefix="tinkex-local-"))
    try:
        names = (base_model,) if isinstance(base_model, str) else tuple(base_model)
        server = PrivateServer(_resolve(names, folder, data_dir, config), folder)
        server.start()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LocalServiceClient(server)


def needs_local(what: str) -> None:
    """Raise `MissingExtra` if the packages of the extra `local` are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDS):
        raise MissingExtra(what, "local")


class LocalServiceClient(ServiceClient):
    """A `ServiceClient` with a private server behind it. Closing it stops the server."""

    def __init__(self, server: PrivateServer) -> None:
        # No proxy, whatever the settings say: a proxy cannot reach a port of this machine.
        super().__init__(
            config=settings.resolve(base_url=server.url, api_key=server.config.api_keys[0], proxy="", telemetry=False)
        )
        self._server = server
        # All clients of this server hold the session: the server stops with the last of them. At exit there is nothing
        # to do, because the pipe closes by itself.
        weakref.finalize(self._session, server.request_stop).atexit = False

    @property
    def base_url(self) -> str:
        """The server's address, for other programs: with `api_key`, any Tinker or OpenAI client can use it."""
        return self._session.config.base_url

    @property
    def api_key(self) -> str:
        return self._session.config.api_key

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self._server.pid

    def close(self, status: str = "success", detail: str | None = None) -> APIFuture[None]:
        """End the session, then stop the server. The future is done when both have ended."""
        goodbye = super().close(status, detail)
        both: APIFuture[None] = follow_up(goodbye)

        def finish() -> None:
            error = goodbye.exception()
            was_running = self._server.is_running
            self._server.stop()
            if error is None or not was_running:  # a session cannot be ended on a server that has stopped
                resolve(both, None)
            else:
                reject(both, error)

        threading.Thread(target=finish, name="tinkex-local-close").start()
        return both

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        except TinkexError:
            if self._server.is_running:
                raise
        finally:
            self._server.stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except TinkexError:
            if self._server.is_running:
                raise
        finally:
            await self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self._server.is_running else "stopped"
        return f"<tinkex.local {', '.join(self._server.config.base_models)} at {self.base_url} ({state})>"


class PrivateServer:
    """Starts the server process, waits for it and stops it. Only the process that started it may stop it.

    `folder` is temporary and private: settings, log and, without `data_dir`, data. At the end this process removes it
    or, if this process has ended, the server does.
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
        self._last_lines = self._tail()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ended.set()
        if not self._is_stopping and self._ready_line:
            log.error("The private server ended unexpectedly (exit code %s). Its log: %s", code, self._last_lines)

    def _wait(self) -> None:
        began, printed_at, printed = REAL.now(), -LINE_S, ""
        while not self._ready.wait(0.1):
            waited_s = REAL.now() - began
            if waited_s > QUIET_S and waited_s - printed_at >= LINE_S:
                # The message of a log line, without time, level and logger.
                line = re.sub(r"^[\d-]+ [\d:,]+ \w+ [\w.]+: ", "", self._tail().rpartition("\n")[2])
                what = f": {line}" if line and line != printed else ""
                names = ", ".join(self.config.base_models)
                print(f"tinkex.local: starting {names} ({waited_s:.0f} s){what}", file=sys.stderr)
                printed_at, printed = waited_s, line
        if not self._ready_line:
            self._ended.wait()
            # The sentence that the command ends with, without the log before it.
            reason = self._last_lines.rpartition("\ntinkex: ")[2].removeprefix("tinkex: ")
            raise ConfigError(f"The private server did not start: {reason or 'it wrote no reason'}")

    def _tail(self) -> str:
        """Return the last lines of the server's log."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-TAIL:])


def _resolve(
    base_models: tuple[str, ...], folder: Path, data_dir: str | os.PathLike[str] | None, arguments: dict[str, Any]
) -> settings.ServeConfig:
    """Return the server's settings: the arguments, then environment and file, except for the settings in `OWN`."""
    if rejected := sorted(set(arguments) & set(OWN)):
        raise ConfigError(f"tinkex.local() chooses {', '.join(rejected)} itself. To choose them, run `tinkex serve`.")
    resolved = settings.resolve_serve(**arguments)
    inherited = {row.name: getattr(resolved, row.name) for row in settings.SERVE if row.name not in OWN}
    own: dict[str, Any] = {"base_models": base_models, "port": 0}
    if data_dir is None:
        # Queued work is deleted with the folder, so there is nothing to drain.
        own |= {"data_dir": folder / "data", "api_keys": (_new_key(),), "drain_s": arguments.get("drain_s", 0.0)}
    else:
        permanent = Path(data_dir).expanduser().absolute()
        own |= {"data_dir": permanent, "api_keys": (_stored_key(permanent),)}
    return settings.ServeConfig(**{**inherited, **own})


def _new_key() -> str:
    return f"{settings.KEY_PREFIX}{secrets.token_urlsafe(32)}"


def _stored_key(folder: Path) -> str:
    """Return the key of a data folder, created on first use. The folder's runs belong to this key."""
    file = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(_new_key() + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise TinkexError(f"{folder} cannot be used for a service's data: {error.strerror}.") from None
    return file.read_text(encoding="utf-8").strip()
