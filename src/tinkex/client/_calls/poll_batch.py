"""One long poll for all samples of a sampler, where the service offers it (`retrieve_futures`).

It only says *which* samples are ready; each answer is then fetched by its own, immediate poll. Whatever goes wrong here
is mended by falling back to single polls: a batch that fails must not fail the samples in it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from tinkex.client._calls.call import error_of, send
from tinkex.client._calls.retry import QUICK_S, Poll, poll_delay
from tinkex.client._runtime.link import Connection
from tinkex.errors import APIError, TinkexError
from tinkex.types import FuturesRetrieveResponse
from tinkex.wire import endpoints, json_codec, requests

POLL_TIMEOUT_S = 60.0
FAULTS_ALLOWED = 3
REMEMBERED = 4096
"""How many fetched ids are repeated to the service, which may forget them then."""


class Batch:
    """The samples of one sampler that wait for their turn to be fetched. Loop thread."""

    def __init__(self, connection: Connection, sampling_session_id: str) -> None:
        self._connection = connection
        self._sampling_session_id = sampling_session_id
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._early: set[str] = set()
        self._fetched: deque[str] = deque(maxlen=REMEMBERED)
        self._cursor = 0
        self._worker: asyncio.Task[None] | None = None

    async def ready(self, request_id: str) -> None:
        """Return when the sample can be fetched, or when it is better to poll for it alone."""
        if request_id in self._early:
            self._early.discard(request_id)
            return
        waiter = self._waiters[request_id] = asyncio.get_running_loop().create_future()
        if self._worker is None or self._worker.done():
            self._worker = self._connection.loop.spawn(self._work())
        try:
            await waiter
        finally:
            self._waiters.pop(request_id, None)

    async def _work(self) -> None:
        faults = quick = 0
        clock = self._connection.clock
        while self._waiters:
            started = clock.now()
            try:
                found = await self._ask()
                faults = 0
            except TinkexError:
                faults += 1
                if faults >= FAULTS_ALLOWED:
                    self._release_all()
                    return
                await clock.sleep(poll_delay(Poll.FAULT, faults - 1, rng=random.random))
                continue
            self._cursor = found.cursor
            for completion in found.completions:
                self._fetched.append(completion.request_id)
                waiter = self._waiters.get(completion.request_id)
                if waiter is None:
                    self._early.add(completion.request_id)  # finished before its submission was answered
                elif not waiter.done():
                    waiter.set_result(None)
            is_quick = not found.completions and clock.now() - started < QUICK_S
            quick = quick + 1 if is_quick else 0
            await clock.sleep(poll_delay(Poll.PENDING, quick - 1) if quick else 0)

    async def _ask(self) -> FuturesRetrieveResponse:
        fetched = [self._fetched.popleft() for _ in range(len(self._fetched))]
        body = requests.retrieve_futures(self._sampling_session_id, self._cursor, fetched)
        try:
            answer = await send(self._connection, endpoints.RETRIEVE_FUTURES, body, timeout_s=POLL_TIMEOUT_S)
            if answer.status >= 400:
                raise error_of(self._connection, answer, endpoints.RETRIEVE_FUTURES)
            return json_codec.read_content(FuturesRetrieveResponse, answer.content)
        except APIError:
            self._fetched.extend(fetched)
            raise

    def _release_all(self) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
