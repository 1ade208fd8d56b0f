"""`tinkex.local()`: a private server process and a client of it, as one object.

The two are held together by a pipe: the server stops when its stdin closes, however this process ends. So nothing is
left running after an exception, a killed notebook or `kill -9`, and nothing has to be remembered at exit.
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
"""Never taken from the environment or the file: those are about a service that others use."""
NEEDS = ("torch", "transformers", "sqlalchemy", "starlette", "uvicorn")
KEY_FILE = "private.key"
QUIET_S = 1.0
"""A start that takes longer says what it is doing."""
LINE_S = 5.0
STOP_S = 10.0
"""Beyond `drain_s`: how long a server that was asked to stop may take before it is ended."""
TAIL = 12


def local(
    base_model: str | Sequence[str] = "smollm2-135m",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    **config: Any,
) -> LocalServiceClient:
    """A service of this program's own, and a client of it that is ready to use. Needs the extra `local`.

    The server is a process of its own on a free port of this machine, behind a random key. It ends with `close()`, with
    the last client that was made from it, or with this process. What it keeps goes too, unless `data_dir` names a
    folder: then runs and checkpoints are there the next time, and the key is kept beside them in `private.key`.
    `config`: settings of a service, such as device="cpu", threads=4 (docs/settings.md).

    >>> with tinkex.local("tinkex/tiny") as service:
    ...     training = service.create_lora_training_client("tinkex/tiny", rank=8)
    """
    needs_local("tinkex.local()")
    folder = Path(tempfile.mkdtemp(prefix="tinkex-local-"))
    try:
        names = (base_model,) if isinstance(base_model, str) else tuple(base_model)
        server = PrivateServer(_settle(names, folder, data_dir, config), folder)
        server.start()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LocalServiceClient(server)


def needs_local(what: str) -> None:
    """Say which extra is missing before anything is started."""
    if any(importlib.util.find_spec(name) is None for name in NEEDS):
        raise MissingExtra(what, "local")


class LocalServiceClient(ServiceClient):
    """A `ServiceClient` with a private server behind it. Closing it stops the server."""

    def __init__(self, server: PrivateServer) -> None:
        # No proxy, whatever the settings say: none could reach a port of this machine.
        super().__init__(
            config=settings.resolve(base_url=server.url, api_key=server.config.api_keys[0], proxy="", telemetry=False)
        )
        self._server = server
        # The session is what all clients of this server hold: with the last of them the server goes. At exit there is
        # nothing to do, the pipe closes by itself.
        weakref.finalize(self._session, server.let_go).atexit = False

    @property
    def base_url(self) -> str:
        """The private server's address, for other programs: with `api_key`, any Tinker or OpenAI client can use it."""
        return self._session.config.base_url

    @property
    def api_key(self) -> str:
        return self._session.config.api_key

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.pid

    def close(self, status: str = "success", detail: str | None = None) -> APIFuture[None]:
        """End the session, then the server. The future is done when both are."""
        goodbye = super().close(status, detail)
        both: APIFuture[None] = follow_up(goodbye)

        def finish() -> None:
            problem = goodbye.exception()
            was_there = self._server.is_running
            self._server.stop()
            if problem is None or not was_there:  # a server that is gone needs no goodbye
                resolve(both, None)
            else:
                reject(both, problem)

        threading.Thread(target=finish, name="tinkex-local-close").start()
        return both

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, problem, trace)
        except TinkexError:
            if self._server.is_running:
                raise
        finally:
            self._server.stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, problem, trace)
        except TinkexError:
            if self._server.is_running:
                raise
        finally:
            await self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self._server.is_running else "stopped"
        return f"<tinkex.local {', '.join(self._server.config.base_models)} at {self.base_url} ({state})>"


class PrivateServer:
    """The process: started, waited for, stopped. Only the process that started it may stop it.

    `folder` is temporary and nobody else's: settings, log and, unless they are kept elsewhere, data. It is removed in
    the end, by this process or, if that is gone, by the server.
    """

    def __init__(self, config: settings.ServeConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self._log = folder / "serve.log"
        self._owner = os.getpid()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._is_stopping = False
        self._answer = ""
        self._said = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return str(json.loads(self._answer)["url"])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def start(self) -> None:
        """Return when the server takes requests. A failed start raises with what the server said last."""
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
                # Ctrl-C in a terminal reaches all of its processes; what becomes of this one is for its owner to say.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        watched = (self._process, self._process.stdout)
        self._thread = threading.Thread(target=self._watch, args=watched, name="tinkex-local", daemon=True)
        self._thread.start()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask the server to stop, and wait until it has."""
        if os.getpid() != self._owner or self._process is None:
            return
        self.let_go()
        if not self._ended.wait(self.config.drain_s + STOP_S):
            self._process.kill()
            self._ended.wait()

    def let_go(self) -> None:
        """Ask the server to stop. Never waits: it may run anywhere, during garbage collection."""
        if os.getpid() != self._owner or self._process is None:
            return
        self._is_stopping = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it has ended already
        # A process that was forked from this one holds the pipe open as well, so the word is given too.
        self._process.terminate()

    def _watch(self, process: subprocess.Popen[str], stdout: IO[str]) -> None:
        """Own thread: waits for the answer, then for the end."""
        self._answer = stdout.readline()
        self._ready.set()
        stdout.read()
        code = process.wait()
        self._said = self._tail()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ended.set()
        if not self._is_stopping and self._answer:
            log.error("The private server ended by itself (exit code %s). It said last: %s", code, self._said)

    def _wait(self) -> None:
        began, said_at, said = REAL.now(), -LINE_S, ""
        while not self._ready.wait(0.1):
            waited_s = REAL.now() - began
            if waited_s > QUIET_S and waited_s - said_at >= LINE_S:
                # The message without the time and the name that a log line begins with.
                line = re.sub(r"^[\d-]+ [\d:,]+ \w+ [\w.]+: ", "", self._tail().rpartition("\n")[2])
                what = f": {line}" if line and line != said else ""
                names = ", ".join(self.config.base_models)
                print(f"tinkex.local: starting {names} ({waited_s:.0f} s){what}", file=sys.stderr)
                said_at, said = waited_s, line
        if not self._answer:
            self._ended.wait()
            # The sentence that the command ends with, without the log before it.
            reason = self._said.rpartition("\ntinkex: ")[2].removeprefix("tinkex: ")
            raise ConfigError(f"The private server did not start. It said: {reason or 'nothing'}")

    def _tail(self) -> str:
        """The last lines that the server wrote."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-TAIL:])


def _settle(
    base_models: tuple[str, ...], folder: Path, data_dir: str | os.PathLike[str] | None, given: dict[str, Any]
) -> settings.ServeConfig:
    """The server's settings: what was passed, then environment and file as far as they are about computing."""
    if taken := sorted(set(given) & set(OWN)):
        raise ConfigError(f"tinkex.local() chooses {', '.join(taken)} itself. To choose them, run `tinkex serve`.")
    usual = settings.resolve_serve(**given)
    inherited = {row.name: getattr(usual, row.name) for row in settings.SERVE if row.name not in OWN}
    own: dict[str, Any] = {"base_models": base_models, "port": 0}
    if data_dir is None:
        # What is queued dies with the folder, so nothing is waited for.
        own |= {"data_dir": folder / "data", "api_keys": (_new_key(),), "drain_s": given.get("drain_s", 0.0)}
    else:
        kept = Path(data_dir).expanduser().absolute()
        own |= {"data_dir": kept, "api_keys": (_kept_key(kept),)}
    return settings.ServeConfig(**{**inherited, **own})


def _new_key() -> str:
    return f"{settings.KEY_PREFIX}{secrets.token_urlsafe(32)}"


def _kept_key(folder: Path) -> str:
    """The key of a folder: what was made under it belongs to it, so it must be the same the next time."""
    file = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(_new_key() + "\n")
    except FileExistsError:
        pass
    except OSError as problem:
        raise TinkexError(f"{folder} cannot be used for a service's data: {problem.strerror}.") from None
    return file.read_text(encoding="utf-8").strip()
