"""Sends what a program logs for its run, numbers and samples, to the service: in the background, in batches.

Nothing here makes the program wait or fail. All of it is in `metrics.jsonl` as well. Of what the service does not take
in time, the oldest is given up; a line in the log says so.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tinkex.client._calls.attempts import call
from tinkex.client._calls.handshake import ready
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.metrics_file import MetricsFile
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import APIError, TinkexError, ValidationError
from tinkex.types.coerce import describe
from tinkex.wire import endpoints
from tinkex.wire.body import JSON, Body

log = logging.getLogger("tinkex.metrics")
PAUSE_S = 1.0
"""Between two requests: what is logged meanwhile goes together."""
MAX_BATCH = 500
MAX_BATCH_BYTES = 1 << 20
MAX_WAITING_BYTES = 16 << 20
"""Of what the service has not taken yet."""
MAX_TEXT = 100_000
"""Characters of a prompt or a text; the rest is cut."""
MAX_NAME, MAX_METRICS = 200, 500
FLUSH_S = 10.0
"""How long the end of a session, or of a progress, waits for the last batches."""
EXIT_S = 2.0
"""How long the end of a program that closes nothing waits."""
Kind = Literal["metrics", "sample"]

_logs: weakref.WeakSet[RunLog] = weakref.WeakSet()


class _Record(NamedTuple):
    kind: Kind
    row: Mapping[str, Any]
    size: int


class _Batch(NamedTuple):
    """One request. Every attempt at it has the same key, also those after a pause of minutes."""

    records: list[_Record]
    key: str


class RunLog:
    """What is logged for one run. From any thread."""

    def __init__(self, model_id: str, metrics_dir: str) -> None:
        self.model_id = model_id
        self.file = MetricsFile(metrics_dir, model_id)
        self._lock = threading.Lock()
        self._waiting: deque[_Record] = deque()
        self._waiting_bytes = 0
        self._batch: _Batch | None = None
        self._link: ServiceLink | None = None
        self._sending: APIFuture[None] | None = None
        self._is_hurried = False
        self._hurry: asyncio.Event | None = None
        self._is_kept_here = False
        """The service takes none, or no more."""
        self._has_warned = False

    # -- from the program ---------------------------------------------------------------------------------------------

    def add(self, link: ServiceLink, kind: Kind, row: Mapping[str, Any]) -> None:
        """Write a row to the file, and send it soon."""
        self.file.write({"kind": kind, **row})
        record = _Record(kind, row, len(json.dumps(row, default=str)) + 1)
        with self._lock:
            if self._is_kept_here:
                return
            self._link = link
            self._waiting.append(record)
            self._waiting_bytes += record.size
            self._drop_oldest()
            self._start(link)
        _logs.add(self)

    def _start(self, link: ServiceLink) -> None:
        """Begin to send, if nothing does. Call it with the lock."""
        if self._sending is None:
            operation = Operation("log_metrics", link.clock.now())
            self._sending = link.run(operation, lambda: self._send_all(link, operation))

    def flush(self) -> APIFuture[None] | None:
        """Send what waits without a pause. Returns the future of that; None if nothing waits."""
        with self._lock:
            if self._link is not None and (self._batch or self._waiting) and not self._is_kept_here:
                self._start(self._link)  # what an outage left behind
            if self._sending is not None and self._link is not None:
                self._is_hurried = True
                self._link.loop.post(self._wake)
            return self._sending

    def finish(self, seconds: float = FLUSH_S) -> None:
        """Wait until all is sent, or so long. The file has everything in any case."""
        sending = self.flush()
        if sending is not None:
            try:
                sending.result(seconds)
            except (TimeoutError, TinkexError):
                self._warn("are not stored on the service yet; %s has them", self.file.path)

    async def finish_async(self, seconds: float = FLUSH_S) -> None:
        sending = self.flush()
        if sending is not None:
            try:
                await sending.result_async(seconds)
            except (TimeoutError, TinkexError):
                self._warn("are not stored on the service yet; %s has them", self.file.path)

    # -- on the loop --------------------------------------------------------------------------------------------------

    async def _send_all(self, link: ServiceLink, operation: Operation) -> None:
        try:
            await ready(link)
            if not link.extensions.get("run_records"):
                self._keep_here(link)
                return
            self._hurry = asyncio.Event()
            if self._is_hurried:
                self._hurry.set()
            while (batch := self._next(link)) is not None:
                await self._send(link, operation, batch)
                try:
                    async with asyncio.timeout(PAUSE_S):
                        await self._hurry.wait()
                except TimeoutError:
                    pass
        except APIError as error:  # for minutes: the next entry tries again
            self._warn("are not stored on the service for now: %s", error)
            self._end()
        except BaseException:
            self._end()
            raise

    async def _send(self, link: ServiceLink, operation: Operation, batch: _Batch) -> None:
        """Send a batch. One that the service rejects is given up; raises an APIError if it cannot be reached."""
        path = endpoints.LOG_METRICS.url(run_id=self.model_id)
        fields = {
            name: [record.row for record in batch.records if record.kind == kind]
            for name, kind in (("entries", "metrics"), ("samples", "sample"))
        }
        body = Body(json.dumps(fields, default=str).encode(), JSON)
        headers = {"x-idempotency-key": batch.key}
        try:
            await call(link, endpoints.LOG_METRICS, body, operation=operation, path=path, headers=headers)
        except APIError as error:
            if error.retryable:
                raise
            self._warn("were rejected by the service: %s", error)
        self._batch = None
        operation.waiting_since = link.clock.now()  # it may go on for hours: no line says that it waits

    def _next(self, link: ServiceLink) -> _Batch | None:
        """Return what to send next. With None, sending has ended: the next entry begins it again."""
        with self._lock:
            if self._batch is None and self._waiting:
                records, size = list[_Record](), 0
                while self._waiting and len(records) < MAX_BATCH and size < MAX_BATCH_BYTES:
                    record = self._waiting.popleft()
                    self._waiting_bytes -= record.size
                    size += record.size
                    records.append(record)
                self._batch = _Batch(records, link.idempotency_key())
            if self._batch is None:
                self._sending, self._is_hurried = None, False
            return self._batch

    def _end(self) -> None:
        with self._lock:
            self._sending, self._is_hurried = None, False

    def _wake(self) -> None:
        if self._hurry is not None:
            self._hurry.set()

    def _keep_here(self, link: ServiceLink) -> None:
        with self._lock:
            self._is_kept_here, self._sending = True, None
            self._waiting.clear()
            self._waiting_bytes = 0
        log.warning(
            "The service at %s keeps no metrics of your own (`tinkex serve` does): they are in %s.",
            link.config.base_url,
            self.file.path or "this program only",
        )

    def _drop_oldest(self) -> None:
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= self._waiting.popleft().size
            self._warn("are given up: the service does not take them; %s has them", self.file.path)

    def _warn(self, text: str, *values: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"Metrics or samples of {self.model_id} {text}", *values)


@atexit.register
def _flush_at_exit() -> None:
    """Give what was logged last a moment, in a program that closes nothing. Registered after the loop, so it is before.

    All logs together: `flush` has each of them send at once.
    """
    for sending in [run_log.flush() for run_log in list(_logs)]:
        if sending is not None:
            try:
                sending.result(EXIT_S)
            except (TimeoutError, TinkexError):
                return  # `metrics.jsonl` has it


# -- what a program may log --------------------------------------------------------------------------------------------


def metrics_row(metrics: Mapping[str, Any], step: int | None, seq_id: int | None, at: float) -> dict[str, Any]:
    """Return the row of an entry. Raises ValidationError."""
    if not isinstance(metrics, Mapping) or not metrics:
        raise ValidationError(f"log_metrics takes numbers by name, such as {{'reward': 0.4}}, got {describe(metrics)}.")
    if len(metrics) > MAX_METRICS:
        raise ValidationError(f"log_metrics got {len(metrics)} metrics; one entry has at most {MAX_METRICS}.")
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ValidationError(f"A metric's name is a text of 1 to {MAX_NAME} characters, got {describe(name)}.")
        numbers[_clean(name)] = _finite(_number(value, name))
    return {"step": _step(step), "seq_id": seq_id, "time": at, "metrics": numbers}


def sample_row(
    prompt: str, text: str, reward: float | None, step: int | None, metadata: Mapping[str, Any], at: float
) -> dict[str, Any]:
    """Return the row of a sample. Long texts are cut. Raises ValidationError."""
    for name, value in (("prompt", prompt), ("text", text)):
        if not isinstance(value, str):
            raise ValidationError(f"The {name} of a sample is a text, got {describe(value)}. Decode tokens first.")
    written = _clean(json.dumps(dict(metadata), ensure_ascii=False, default=str))
    if len(written) > MAX_TEXT:
        raise ValidationError(f"The metadata of a sample have {len(written):,} characters; {MAX_TEXT:,} are allowed.")
    row = {"step": _step(step), "time": at, "prompt": _cut(prompt), "text": _cut(text)}
    reward = None if reward is None else _finite(_number(reward, "reward"))
    return {**row, "reward": reward, "metadata": json.loads(written, parse_constant=lambda _: None)}


def _number(value: Any, name: str) -> float:
    try:
        return float(value)  # also a tensor or an array with one number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValidationError(f"The metric {name!r} is not a number: {describe(value)}.") from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _step(step: int | None) -> int | None:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31):
        raise ValidationError(f"step is {step!r}; it must be a whole number from 0 up, or None.")
    return step


def _cut(text: str) -> str:
    return _clean(text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…")


def _clean(text: str) -> str:
    """Replace half surrogate pairs, which a decoder may leave behind and UTF-8 cannot say."""
    return text.encode("utf-8", "replace").decode()
