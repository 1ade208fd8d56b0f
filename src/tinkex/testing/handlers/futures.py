"""The results of accepted operations, and the polls that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import orjson

from tinkex.testing.http.messages import Response
from tinkex.testing.script import Expire, FailFuture, Pending, Twist, Work

PROTOBUF = "application/x-protobuf"


class Result:
    """What an operation found; its bytes are made when first asked for."""

    def __init__(self, as_json: Callable[[], Any], as_protobuf: Callable[[], bytes] | None = None) -> None:
        self._as_json = as_json
        self._as_protobuf = as_protobuf
        self._made: dict[bool, Response] = {}

    def response(self, wants_protobuf: bool) -> Response:
        in_protobuf = wants_protobuf and self._as_protobuf is not None
        if in_protobuf not in self._made:
            self._made[in_protobuf] = self._make(in_protobuf)
        return self._made[in_protobuf]

    def _make(self, in_protobuf: bool) -> Response:
        if in_protobuf and self._as_protobuf is not None:
            return Response(200, self._as_protobuf(), PROTOBUF)
        return Response(200, orjson.dumps(self._as_json()))


class Future:
    """One accepted operation."""

    __slots__ = (
        "_waiters",
        "failure",
        "id",
        "is_done",
        "is_expired",
        "on_done",
        "op",
        "queue",
        "result",
        "was_fetched",
        "work_s",
    )

    def __init__(self, op: str, twists: Sequence[Twist], work_s: float) -> None:
        self.id = f"{op}-{uuid4().hex}"
        self.op = op
        self.queue: list[Pending] = []
        self.failure: FailFuture | None = None
        self.result: Result | None = None
        self.work_s = work_s
        self.is_done = False
        self.is_expired = False
        self.was_fetched = False
        self.on_done: Callable[[Future], None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        for twist in twists:
            self.twist(twist)

    def twist(self, twist: Twist) -> None:
        """Change what becomes of it."""
        match twist:
            case Pending():
                self.queue += [twist] * twist.times
            case Work():
                self.work_s = twist.seconds
            case Expire():
                self.is_expired = True
            case FailFuture():
                self.failure = twist

    def finish(self, result: Result | None) -> None:
        """Done, well or (without a result) badly: whoever polls now gets the response."""
        if self.is_done:  # cancelled while it worked
            return
        self.result = result
        self.is_done = True
        if self.on_done is not None:
            self.on_done(self)
        for waiter in self._waiters:
            _wake(waiter)
        self._waiters.clear()

    def fail(self, message: str, category: str) -> None:
        self.failure = FailFuture(message, category)
        self.finish(None)

    @property
    def is_lost(self) -> bool:
        """Its client was told that there will be no result: asking again is new work."""
        return self.was_fetched and (self.is_expired or self.failure is not None)

    def poll(self, wants_protobuf: bool, hold_s: float, metadata_over: int | None) -> Response | Awaitable[Response]:
        """The response to `retrieve_future`: at once when there is one, else held for a while.

        `metadata_over`: results of more bytes are announced first, not sent; None sends every result.
        """
        if self.is_expired:
            self.was_fetched = True
            return json_response(410, {"detail": "the result is gone", "code": "expired", "category": "server"})
        if self.queue:
            return _queued(self.queue.pop(0))
        if self.is_done:
            return self._answer(wants_protobuf, metadata_over)
        return self._held(wants_protobuf, hold_s, metadata_over)

    async def wait(self, hold_s: float) -> None:
        """Until it is done, at most so long."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(hold_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def _held(self, wants_protobuf: bool, hold_s: float, metadata_over: int | None) -> Response:
        await self.wait(hold_s)
        return self._answer(wants_protobuf, metadata_over) if self.is_done else _queued(Pending())

    def _answer(self, wants_protobuf: bool, metadata_over: int | None) -> Response:
        if self.failure is not None or self.result is None:
            self.was_fetched = True
            failure = self.failure or FailFuture()
            return json_response(200, {"error": failure.message, "category": failure.category})
        response = self.result.response(wants_protobuf)
        if metadata_over is not None and len(response.body) > metadata_over:
            return json_response(200, {"status": "complete_metadata", "response_payload_size": len(response.body)})
        self.was_fetched = True
        return response


def json_response(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(value), headers=headers)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _queued(state: Pending) -> Response:
    body: dict[str, Any] = {"queue_state": state.queue_state}
    if state.reason is not None:
        body["queue_state_reason"] = state.reason
    return json_response(200, {"type": "try_again", **body}) if state.try_again else json_response(408, body)
