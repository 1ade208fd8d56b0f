"""The service that all programs of a user share on a data folder: joins the one that runs, or starts one.

It is a process of its own session, so that no Ctrl-C and no crash of its starter reaches it, and it ends by itself some
seconds after its last user has left. A program first makes itself a user and then reads `service.json`; a service that
ends first removes the file and then looks for users once more. So a program that still found it keeps it alive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinkex import settings
from tinkex._version import __version__
from tinkex.client.diagnose import fetch_json
from tinkex.clock import REAL
from tinkex.errors import ConfigError, TinkexError
from tinkex.home.lock import FileLock, Locked, holder_pid
from tinkex.home.owner_key import read_key
from tinkex.home.running import LOG_FILE, RunningService, running_service
from tinkex.home.users import UserLock, user_pids
from tinkex.local_service.start import LOOK_S, StartLines, reason_in, tail
from tinkex.settings import ServeConfig
from tinkex.wire.endpoints import GET_SERVER_CAPABILITIES

LINGER_S = 20.0
"""How long a service stays after its last user has left: a program that is run again finds its model loaded."""
SETTINGS_FILE, START_LOCK = "service.toml", "start.lock"


class SharedServer:
    """One use of the service on a data folder: from the constructor, which waits until it is ready, to `stop()`."""

    def __init__(self, config: ServeConfig, given: Collection[str] = (), *, who: str = "tinkex.local") -> None:
        """`given`: the settings that the caller chose; the service must have them. `who` begins lines on stderr."""
        self._folder = config.data_dir
        self._lock = _become_user(self._folder)
        try:
            self._service = join_or_start(config, LINGER_S, who=who)
            _check_same(self._service, config, given)
            self.api_key = read_key(self._folder) or settings.KEYLESS
            offer(settings.client_arguments(self._folder, self._service), config.base_models)
        except BaseException:
            self._lock.release()
            raise
        self.models = config.base_models

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def pid(self) -> int:
        return self._service.pid

    @property
    def is_running(self) -> bool:
        return holder_pid(self._folder) == self._service.pid

    def request_stop(self) -> None:
        """Leave the service: it ends when it has no other users. Garbage collection may call this anywhere."""
        self._lock.release()

    def stop(self) -> None:
        self._lock.release()


def join_or_start(config: ServeConfig, linger_s: float, *, who: str) -> RunningService:
    """Return the service on the folder that `config` names, ready to use; start it if none runs.

    `linger_s`: how long after its last user a service that is started here ends; 0: it stays until it is stopped.
    """
    folder = config.data_dir
    lines = StartLines(who, "", folder / LOG_FILE)
    while True:
        if (service := running_service(folder)) is not None:
            return service
        if (pid := holder_pid(folder)) is None:  # else it starts or ends just now: wait, and look again
            with suppress(Locked), FileLock(folder, START_LOCK):
                started = _start(config, linger_s, who)
                if started is not None:
                    return started
        if pid is not None:
            lines.what = f"waiting until the service (pid {pid}) is ready or gone; `tinkex stop` ends one that hangs"
        else:
            lines.what = "waiting for another program that starts the service"
        lines.show()
        REAL.pause(LOOK_S)


def _become_user(folder: Path) -> UserLock:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return UserLock(folder)
    except OSError as error:
        raise TinkexError(f"{folder} cannot be used for a service's data: {error.strerror}.") from None


def _start(config: ServeConfig, linger_s: float, who: str) -> RunningService | None:
    """Start a server process and wait until it is ready. None: another one was faster. Holds the start lock."""
    folder = config.data_dir
    if holder_pid(folder) is not None or running_service(folder) is not None:
        return None
    log = folder / LOG_FILE
    with suppress(FileNotFoundError):
        os.replace(log, log.with_suffix(".log.1"))  # it may say why the last one ended
    settings.write_private_file(folder / SETTINGS_FILE, config)
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "-o", "json", "serve", "--detached", str(linger_s)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=settings.private_environment(folder / SETTINGS_FILE),
            start_new_session=True,
        )
    # It may outlive this program, or end before it: somebody has to read its exit code.
    threading.Thread(target=process.wait, name="tinkex-local", daemon=True).start()
    lines = StartLines(who, f"starting {', '.join(config.base_models)}", log)
    try:
        while process.poll() is None:
            service = running_service(folder)
            if service is not None:
                return service
            lines.show()
            REAL.pause(LOOK_S)
    except BaseException:
        if set(user_pids(folder)) <= {os.getpid()}:
            process.terminate()  # nobody else waits for it
        raise
    if holder_pid(folder) is not None:
        return None
    raise ConfigError(f"The service did not start: {reason_in(tail(log))} Its log: {log}")


def _check_same(service: RunningService, config: ServeConfig, given: Collection[str]) -> None:
    """Raise if the service is of another version, or has other settings than the caller chose."""
    where = f"The service on {config.data_dir} (pid {service.pid})"
    instead = "Stop it with `tinkex stop` (runs and checkpoints stay), or pass ephemeral=True for a private service."
    if service.version != __version__:
        raise ConfigError(f"{where} is tinkex {service.version}, and this program has {__version__}. {instead}")
    wanted: Mapping[str, Any] = settings.shown_settings(config)
    different = [name for name in given if name in wanted and service.settings.get(name) != wanted[name]]
    if different:
        has = ", ".join(f"{name}={service.settings.get(name)!r}" for name in different)
        asked = ", ".join(f"{name}={wanted[name]!r}" for name in different)
        raise ConfigError(f"{where} runs with {has}, not with {asked}. {instead}")


def offer(arguments: Mapping[str, Any], models: Collection[str]) -> None:
    """Make sure that a service offers these base models. The one place where a program asks it for another.

    `arguments`: the settings that lead to it (`settings.client_arguments`).
    """
    config = settings.resolve(**arguments, telemetry=False)
    offered = [str(entry["model_name"]) for entry in fetch_json(config, GET_SERVER_CAPABILITIES)["supported_models"]]
    if missing := [name for name in models if name not in offered]:
        raise ConfigError(
            f"The service at {config.base_url} offers {', '.join(offered)}, and not {', '.join(missing)}. Stop it with "
            f"`tinkex stop`, and start it with all of them: tinkex serve {' '.join([*offered, *missing])}. In Python, "
            "tinkex.local(..., ephemeral=True) starts a private service beside it."
        )
