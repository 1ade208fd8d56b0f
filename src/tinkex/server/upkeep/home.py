"""The data folder as other programs of its user see it: they find the service there, and the key of its owner.

A service that `tinkex.local()` started ends when it is unused: no process holds a lock in `users/`, and no client that
only knows the address has sent a request (their heartbeats come every 10 s).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinkex._version import __version__
from tinkex.clock import REAL, Clock
from tinkex.home.owner_key import read_key, write_key
from tinkex.home.running import LOG_FILE, RunningService, remove_service, write_service
from tinkex.home.users import user_pids
from tinkex.server.http.access import LOCAL_TENANT, tenant_of
from tinkex.settings import ServeConfig, shown_settings
from tinkex.store.access import hash_key, new_key
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

LOOK_S = 0.5
"""How often it looks for users. A look costs a system call or two for each."""


class SharedHome:
    """For the one service that holds the folder's lock, from its start to its end."""

    def __init__(self, config: ServeConfig, url: str, clock: Clock, detached_s: float | None = None) -> None:
        """`detached_s`: it runs in the background and ends so many seconds after its last user left; 0: it stays."""
        self._config, self._url, self._clock = config, url, clock
        self._is_detached, self._unused_s = detached_s is not None, detached_s or 0.0
        remove_service(config.data_dir)  # of a service that was killed: from here on the lock would confirm it
        self.key = read_key(config.data_dir) or self._make_key()
        self._service: RunningService | None = None

    @property
    def ends_unused(self) -> bool:
        return self._unused_s > 0

    @property
    def is_private(self) -> bool:
        """Whether only the owner may use it: somebody else of this machine must not find an open port by chance."""
        return self.ends_unused

    def announce(self, *, needs_key: bool) -> None:
        """Let other programs find the service: it is ready."""
        config = self._config
        self._service = RunningService(
            url=self._url,
            pid=os.getpid(),
            version=__version__,
            models=config.base_models,
            started_at=self._clock.wall(),
            needs_key=needs_key or self.is_private,
            ends_unused=self.ends_unused,
            log=str(config.data_dir / LOG_FILE) if self._is_detached else None,
            settings=shown_settings(config),
        )
        self._write()

    def retract(self) -> None:
        """Let no other program find the service: it is about to stop."""
        if self._service is not None:
            remove_service(self._config.data_dir)

    async def until_unused(self, last_request_at: Callable[[], float]) -> None:
        """Return when nothing has used the service for some seconds. New users do not find it any more then."""
        folder, used_at = self._config.data_dir, self._clock.now()
        while True:
            await self._clock.sleep(min(LOOK_S, self._unused_s / 4))
            if self._service is None or user_pids(folder):  # it is still starting
                used_at = self._clock.now()
            elif self._clock.now() - max(used_at, last_request_at()) >= self._unused_s:
                # A program first takes its lock and then reads the file: whoever still found it is seen here.
                self.retract()
                if not user_pids(folder):
                    logger.info("nothing has used this service for %.0f s: it ends", self._unused_s)
                    return
                self._write()
                used_at = self._clock.now()

    def adopt_runs(self, store: Store) -> None:
        """Give the owner what `tinkex.local(data_dir=...)` of older releases made, which had a tenant of its own."""
        if moved := store.move_tenant(tenant_of(hash_key(self.key)), LOCAL_TENANT):
            logger.info("%d runs of an older release belong to the owner of this folder now", moved)

    def _write(self) -> None:
        assert self._service is not None
        try:
            write_service(self._config.data_dir, self._service)
        except OSError as error:  # a full disk: clients with the address can still delete checkpoints
            logger.warning("other programs cannot find this service by itself: %s", error)

    def _make_key(self) -> str:
        key = new_key()
        try:
            write_key(self._config.data_dir, key)
        except OSError as error:
            logger.warning("no key for the owner of this folder could be stored: %s", error)
        return key


@contextmanager
def home_of(config: ServeConfig, sock: socket.socket, detached_s: float | None) -> Iterator[SharedHome | None]:
    """Yield what lets other programs of this user find the service. One of several servers is not found that way."""
    if config.is_clustered:
        yield None
        return
    host, port = sock.getsockname()[:2]
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    home = SharedHome(config, f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}", REAL, detached_s)
    try:
        yield home
    finally:
        home.retract()
