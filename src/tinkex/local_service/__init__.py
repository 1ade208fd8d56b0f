"""`tinkex.local()`: a client of the service on this machine, which is started if none runs.

shared     the service that all programs of a user share on a data folder
ephemeral  a private, temporary one, which ends with the program
start      what a start of either shows
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tinkex import settings
from tinkex.client.future import APIFuture, follow_up, reject, resolve
from tinkex.client.service import ServiceClient
from tinkex.errors import ConfigError, MissingExtra, TinkexError
from tinkex.local_service.ephemeral import PrivateServer
from tinkex.local_service.shared import SharedServer

OWN = ("host", "port", "public_url", "api_keys", "keys_file", "base_models")
"""Settings that are never read from the environment or the file: there they describe a service for others."""
OF_THE_HOME = ("data_dir", "database_url", "database_url_file")
"""Settings that are read there for the home alone."""
NEEDS = ("torch", "transformers", "sqlalchemy", "starlette", "uvicorn")


def local(
    base_model: str | Sequence[str] = "smollm2-135m",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    ephemeral: bool = False,
    **config: Any,
) -> LocalServiceClient:
    """Return a client of the service on this machine, ready to use. Needs the extra `local`.

    All programs of a user share one service and one data folder, that of `tinkex serve` (docs/serving.md). This joins
    the service that runs there, or starts it as a process of its own. It ends some seconds after its last user; a
    client leaves it with `close()`, or with its process. Runs and checkpoints are there the next time.

    `data_dir` names another folder, with a service of its own. `ephemeral=True` starts a private, temporary service,
    which ends with this client; its data is deleted then. `config`: settings of a service that is started, such as
    device="cpu", threads=4 (docs/settings.md).

    >>> with tinkex.local("tinkex/tiny") as service:
    ...     training = service.create_lora_training_client("tinkex/tiny", rank=8)
    """
    needs_local("tinkex.local()")
    names = (base_model,) if isinstance(base_model, str) else tuple(base_model)
    if not ephemeral:
        return LocalServiceClient(SharedServer(shared_config(names, data_dir, **config), tuple(config)))
    if data_dir is not None:
        raise ConfigError("A service with ephemeral=True keeps nothing, so it has no data_dir. Leave one of them out.")
    folder = Path(tempfile.mkdtemp(prefix="tinkex-local-"))
    try:
        server = PrivateServer(_private_config(names, folder, config), folder)
        server.start()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LocalServiceClient(server)


def needs_local(what: str) -> None:
    """Raise `MissingExtra` if the packages of the extra `local` are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDS):
        raise MissingExtra(what, "local")


class LocalServer(Protocol):
    """The server behind a client: shared with other programs, or private."""

    @property
    def url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def models(self) -> tuple[str, ...]: ...

    @property
    def is_running(self) -> bool: ...

    def request_stop(self) -> None:
        """Give the server up, without waiting: garbage collection may call this anywhere."""

    def stop(self) -> None:
        """Give the server up; a private one has ended then."""


class LocalServiceClient(ServiceClient):
    """A `ServiceClient` of a service on this machine. Closing it leaves the service, and stops a private one."""

    def __init__(self, server: LocalServer) -> None:
        # No proxy, whatever the settings say: a proxy cannot reach a port of this machine.
        super().__init__(
            config=settings.resolve(base_url=server.url, api_key=server.api_key, proxy="", telemetry=False)
        )
        self._server = server
        # All clients of this server hold the session: it is given up with the last of them. At exit there is nothing
        # to do, because pipe or lock go with the process.
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
        """End the session, then leave the service; a private one stops. The future is done when both have happened."""
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
        return f"<tinkex.local {', '.join(self._server.models)} at {self.base_url} ({state})>"


def shared_config(
    names: tuple[str, ...], data_dir: str | os.PathLike[str] | None = None, **arguments: Any
) -> settings.ServeConfig:
    """Return the settings of a service on the home, or on the folder that the caller names."""
    if data_dir is None:
        return _config(names, arguments, {}, inherits=OF_THE_HOME)
    return _config(names, arguments, {"data_dir": Path(data_dir).expanduser().absolute()})


def _private_config(names: tuple[str, ...], folder: Path, arguments: dict[str, Any]) -> settings.ServeConfig:
    # Queued work is deleted with the folder, so there is nothing to drain.
    drain_s = arguments.get("drain_s", 0.0)
    key = f"{settings.KEY_PREFIX}{secrets.token_urlsafe(32)}"
    return _config(names, arguments, {"data_dir": folder / "data", "api_keys": (key,), "drain_s": drain_s})


def _config(
    names: tuple[str, ...], arguments: dict[str, Any], own: dict[str, Any], inherits: Sequence[str] = ()
) -> settings.ServeConfig:
    """Return a server's settings: the arguments, then environment and file, except for those it has of its own."""
    if rejected := sorted(set(arguments) & {*OWN, *OF_THE_HOME}):
        raise ConfigError(f"tinkex.local() chooses {', '.join(rejected)} itself. To choose them, run `tinkex serve`.")
    resolved = settings.resolve_serve(**arguments)
    left_out = {*OWN, *OF_THE_HOME} - set(inherits)
    inherited = {row.name: getattr(resolved, row.name) for row in settings.SERVE if row.name not in left_out}
    return settings.ServeConfig(**{**inherited, "base_models": names, "port": 0, **own})
