"""A session: made on first use, kept alive by heartbeats, ended by `close()` or when its last client is gone.

The heartbeat holds only the session's core, never the `Session` object: dropping every client stops the heartbeats.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tinkex._version import PROTOCOL_VERSION
from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import read_value
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.send import send
from tinkex.client._runtime.link import ServiceLink, link_for
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.run_log import RunLog
from tinkex.client._runtime.telemetry import Telemetry
from tinkex.client.future import APIFuture, finished
from tinkex.errors import APIError, ClosedError, NotFoundError, TinkexError, ValidationError
from tinkex.settings import Config
from tinkex.types import CreateSessionResponse, SessionHeartbeatRequest
from tinkex.wire import endpoints, requests
from tinkex.wire.dialect import Dialect

T = TypeVar("T")
log = logging.getLogger("tinkex.session")
HEARTBEAT_S = 10.0
HEARTBEAT_TIMEOUT_S = 10.0
WARN_AFTER_S = 120.0
FINISH = ("success", "errored", "interrupted")
FINISH_S = 10.0
"""How long the goodbye may take: a service that does not respond must not hold up the end of a program."""
FLUSH_S = 5.0
"""How much of that is for what was logged last."""


class _Core:
    """The part of a session that background work may reference without keeping the session alive."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pid = os.getpid()
        self.session_id: str | None = None
        self.state = "session not opened yet"
        self.creating: asyncio.Task[Any] | None = None
        self.heartbeat: asyncio.Task[Any] | None = None
        self.telemetry: Telemetry | None = None
        self.is_closed = False
        self.run_logs: list[RunLog] = []
        """What its training clients log; sent before the goodbye."""

    def stop(self) -> None:
        """Loop thread: end all background work of this session."""
        self.is_closed = True
        if self.heartbeat is not None:
            self.heartbeat.cancel()
        if self.telemetry is not None:
            self.telemetry.stop()


class Session:
    """Shared by the clients of one `ServiceClient`. Opened by the first operation that needs its `id()`."""

    def __init__(
        self,
        config: Config,
        *,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        attach_to: str | None = None,
    ) -> None:
        self.config = config
        self._user_metadata = dict(user_metadata) if user_metadata is not None else None
        self.project_id = project_id or config.project_id
        self._display_name = display_name
        self.model_seqs = itertools.count()
        self.sampling_seqs = itertools.count()
        self._core = self._new_core(attach_to)

    def _new_core(self, attach_to: str | None = None) -> _Core:
        """`attach_to`: a session that another process opened (an unpickled client); it is kept alive, not created."""
        core = _Core(self.config)
        core.session_id = attach_to
        # No strong reference from the finalizer to self, and none at interpreter exit: the loop ends by itself there.
        weakref.finalize(self, _let_go, core).atexit = False
        return core

    def link(self) -> ServiceLink:
        """Return the shared link of this process; after a fork, a new one and with it a new session."""
        if self._core.pid != os.getpid():
            self._core = self._new_core()
        if self._core.is_closed:
            raise ClosedError("This session was closed. Make a new ServiceClient to go on.")
        return link_for(self.config)

    @property
    def session_id(self) -> str | None:
        """The id, if the session has been opened."""
        return self._core.session_id

    def state(self) -> str:
        return self._core.state

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Send the failure of an operation to the service's telemetry. Loop thread."""
        if self._core.telemetry is not None and not isinstance(error, ClosedError):
            self._core.telemetry.report_failure(operation, error)

    def operation(self, kind: str) -> Operation:
        return Operation(kind, self.link().clock.now(), session=self)

    def run(self, kind: str, work: Callable[[Operation], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Start an operation of this session. Returns at once, from any thread."""
        operation = self.operation(kind)
        return self.link().run(operation, lambda: work(operation))

    async def id(self) -> str:
        """Open the session if needed and return its id; one request however many ask. Loop thread."""
        core = self._core
        if core.heartbeat is None:
            if core.creating is None or core.creating.done():
                core.creating = self.link().loop.spawn(self._create(core))
            error = await asyncio.shield(core.creating)
            if error is not None:
                raise error
        assert core.session_id is not None
        return core.session_id

    async def _create(self, core: _Core) -> TinkexError | None:
        try:
            link = self.link()
            dialect = await ready(link)
            if core.session_id is not None:
                self._opened(core, link, core.session_id)
                return None
            body = requests.create_session(
                self.config.tags,
                self._user_metadata,
                PROTOCOL_VERSION,
                self.project_id,
                self._display_name,
                dialect=dialect,
            )
            response = await call(link, endpoints.CREATE_SESSION, body, operation=self.operation("create_session"))
            created = await read_value(CreateSessionResponse, response.content)
        except TinkexError as error:  # ClosedError among them
            core.state = f"session not opened: {error}"
            return error
        for level, message in ((20, created.info_message), (30, created.warning_message), (40, created.error_message)):
            if message:
                log.log(level, "%s", message)
        self._opened(core, link, created.session_id)
        return None

    def _opened(self, core: _Core, link: ServiceLink, session_id: str) -> None:
        core.session_id = session_id
        core.state = "session alive"
        core.heartbeat = link.loop.spawn(_beat(core, link))
        if self.config.telemetry and not core.is_closed:
            core.telemetry = Telemetry(link, session_id)

    def run_log(self, model_id: str) -> RunLog:
        """Return what a client of this session logs for its run."""
        run_log = RunLog(model_id, self.config.metrics_dir)
        self._core.run_logs.append(run_log)
        return run_log

    def close(self, status: str = "success", detail: str | None = None) -> APIFuture[None]:
        """Tell the service that the session is over, and stop all background work. Closing twice is harmless."""
        if status not in FINISH:
            raise ValidationError(f"close(status={status!r}): use one of {', '.join(FINISH)}.")
        core = self._core
        if core.is_closed or core.pid != os.getpid():
            return finished(None)
        link = self.link()
        operation = self.operation("close")
        core.is_closed = True
        return link.run(operation, lambda: _finish(core, link, operation, status, detail), FINISH_S)


async def _finish(core: _Core, link: ServiceLink, operation: Operation, status: str, detail: str | None) -> None:
    try:
        for run_log in core.run_logs:
            run_log.flush()  # all of them send at once
        await asyncio.gather(*(run_log.finish_async(FLUSH_S) for run_log in core.run_logs))
        if core.session_id is not None:
            path = endpoints.FINISH_SESSION.url(session_id=core.session_id)
            body = requests.finish_session(status, detail)
            try:
                await call(link, endpoints.FINISH_SESSION, body, operation=operation, path=path, max_attempts=3)
            except NotFoundError:
                pass  # services from before 0.28 have no such call
            except APIError as error:
                if not error.retryable:
                    raise
                # Nothing is lost, and a program whose work is done must not fail at its end.
                log.warning("Session %s ends by itself later: the service was not told. %s", core.session_id, error)
        if core.telemetry is not None:
            await core.telemetry.finish()
    finally:
        core.state = "session closed"
        core.stop()


async def _beat(core: _Core, link: ServiceLink) -> None:
    """Send a heartbeat every 10 s on its own pool, never retried: the next one is the retry."""
    clock = link.clock
    last_ok = clock.now()
    has_warned = False
    assert core.session_id is not None
    body = requests.request(SessionHeartbeatRequest(session_id=core.session_id), link.dialect or Dialect.PROTO)
    while not core.is_closed:
        await clock.sleep(HEARTBEAT_S)
        reason = ""
        try:
            response = await send(link, endpoints.SESSION_HEARTBEAT, body, timeout_s=HEARTBEAT_TIMEOUT_S)
            if response.status == 410:
                if core.is_closed:  # while this heartbeat was under way
                    return
                core.state = "session ended by the service"
                log.warning("The service ended session %s. Make a new ServiceClient to go on.", core.session_id)
                return
            if response.status >= 400:
                reason = f"HTTP {response.status}"
        except APIError as error:
            reason = str(error)
        silent_s = clock.now() - last_ok
        if not reason:
            last_ok, has_warned = clock.now(), False
            core.state = "session alive"
        else:
            core.state = f"no heartbeat answered for {silent_s:.0f} s ({reason})"
            if silent_s >= WARN_AFTER_S and not has_warned:
                has_warned = True
                log.warning("Session %s: %s.", core.session_id, core.state)


def _let_go(core: _Core) -> None:
    """Stop a session whose last client is gone. Never waits: garbage collection may call it, on any thread."""
    if core.creating is None:  # never used: nothing runs, and there may be no link to ask
        core.is_closed = True
    elif core.pid == os.getpid() and not core.is_closed:
        link_for(core.config).loop.post(core.stop)
