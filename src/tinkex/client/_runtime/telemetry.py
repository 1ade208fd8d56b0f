"""Telemetry: reports failures to the service, per session. Best effort: own pool, bounded queue, one try, never
waited for.

Events carry ids and error texts, never headers, bodies or keys. TINKER_TELEMETRY=0 turns it off.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import platform
import traceback
import uuid
from collections import deque
from typing import Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.client._calls.send import send
from tinkex.client._runtime.link import ServiceLink
from tinkex.errors import APIError, APIStatusError, RequestErrorCategory, RequestFailedError, ValidationError
from tinkex.redact import redact
from tinkex.types import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetryEvent,
    UnhandledExceptionEvent,
)
from tinkex.wire import endpoints, requests
from tinkex.wire.dialect import Dialect

QUEUE = 1000
BATCH = 100
FLUSH_S = 10.0
TIMEOUT_S = 5.0
GOODBYE_S = 1.0
_process = str(uuid.uuid4())


class Telemetry:
    """One stream of events to the service. Loop thread."""

    def __init__(self, link: ServiceLink, session_id: str) -> None:
        self._link = link
        self._session_id = session_id
        self._events: deque[TelemetryEvent] = deque(maxlen=QUEUE)
        self._index = 0
        self._started = link.clock.now()
        self._wake = asyncio.Event()
        self._add(SessionStartEvent, "SESSION_START", "INFO")
        self._worker = link.loop.spawn(self._work())
        link.loop.at_exit(id(self), self.finish)

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Send the failure of an operation at once, without making the caller wait."""
        secret = (self._link.config.api_key, self._link.auth.header)
        if _is_users_fault(error):
            message = redact(str(error), secret)
            data = {"operation": operation, "error_type": type(error).__name__, "message": message}
            self._add(GenericEvent, "GENERIC_EVENT", "WARNING", event_name="user_error", event_data=data)
        else:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            self._add(
                UnhandledExceptionEvent,
                "UNHANDLED_EXCEPTION",
                "ERROR",
                error_type=type(error).__name__,
                error_message=redact(str(error), secret),
                traceback=redact("".join(lines)[-8000:], secret),
            )
        self._wake.set()

    async def finish(self) -> None:
        """Say goodbye once; a telemetry service that is down costs a second at most."""
        seconds = self._link.clock.now() - self._started
        self._add(SessionEndEvent, "SESSION_END", "INFO", duration=str(dt.timedelta(seconds=seconds)))
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._flush()
        except TimeoutError:
            pass
        self.stop()

    def stop(self) -> None:
        self._link.loop.at_exit(id(self), None)
        self._worker.cancel()

    def _add(self, kind: Any, event: str, severity: str, **fields: Any) -> None:
        now = dt.datetime.fromtimestamp(self._link.clock.wall(), dt.UTC)
        record: TelemetryEvent = kind(
            event=event,
            event_id=str(uuid.uuid4()),
            event_session_index=self._index,
            severity=severity,
            timestamp=now,
            **fields,
        )
        self._events.append(record)
        self._index += 1

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._events:
            dialect = self._link.dialect or Dialect.PROTO
            batch = [self._events.popleft() for _ in range(min(len(self._events), BATCH))]
            body = requests.telemetry(
                batch, platform.system(), PROTOCOL_VERSION, self._session_id, _process, dialect=dialect
            )
            try:
                await send(self._link, endpoints.TELEMETRY, body, timeout_s=TIMEOUT_S)
            except APIError:
                return  # dropped: telemetry that is down must never cost more than this


def _is_users_fault(error: BaseException) -> bool:
    if isinstance(error, RequestFailedError):
        return error.category is RequestErrorCategory.User
    if isinstance(error, APIStatusError):
        return 400 <= error.status_code < 500 and not error.retryable
    return isinstance(error, ValidationError)
