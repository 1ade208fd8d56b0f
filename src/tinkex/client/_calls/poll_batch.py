"""One long poll for all samples of a sampler, where the service offers it (`retrieve_futures`).

It only says *which* samples are ready; each result is then fetched by its own, immediate poll. Whatever goes wrong here
is mended by falling back to single polls: a batch that fails must not fail the samples in it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from tinkex.client._calls.attempts import Attempts
from tinkex.client._calls.retry import QUICK_S, Poll, poll_delay
from tinkex.client._calls.send import send
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIError, TinkexError
from tinkex.types import FuturesRetrieveResponse
from tinkex.wire import endpoints, json_codec, requests

POLL_TIMEOUT_S = 60.0
FAULTS_ALLOWED = 3
REMEMBERED = 4096
"""How many fetched ids are repeated to the service, which may forget them then."""


class BatchAttempts(Attempts):
    """A few attempts, whatever the error: the samples can always be polled for one by one."""

    def delay_after(self, error: APIError, attempt: int) -> float:
        if attempt >= FAULTS_ALLOWED:
            raise error
        return poll_delay(Poll.FAULT, attempt - 1, rng=random.random)


class PollBatch:
    """The samples of one sampler that wait until they can be fetched. Loop thread."""

    def __init__(self, link: ServiceLink, sampling_session_id: str) -> None:
        self._link = link
        self._sampling_session_id = sampling_session_id
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._early: set[str] = set()
        self._fetched: deque[str] = deque(maxlen=REMEMBERED)
        self._cursor = 0
        self._worker: asyncio.Task[None] | None = None

    async def wait_until_ready(self, request_id: str) -> None:
        """Return when the sample can be fetched, or when it is better to poll for it alone."""
        if request_id in self._early:
            self._early.discard(request_id)
            return
        waiter = self._waiters[request_id] = asyncio.get_running_loop().create_future()
        if self._worker is None or self._worker.done():
            self._worker = self._link.loop.spawn(self._work())
        try:
            await waiter
        finally:
            self._waiters.pop(request_id, None)

    async def _work(self) -> None:
        quick = 0
        clock = self._link.clock
        attempts = BatchAttempts(
            self._link, Operation("retrieve_futures", clock.now()), endpoints.RETRIEVE_FUTURES.name
        )
        while self._waiters:
            try:
                response = await attempts.run(self._ask)
            except TinkexError:
                self._release_all()
                return
            self._cursor = response.cursor
            for completion in response.completions:
                self._fetched.append(completion.request_id)
                waiter = self._waiters.get(completion.request_id)
                if waiter is None:
                    self._early.add(completion.request_id)  # finished before its submission was answered
                elif not waiter.done():
                    waiter.set_result(None)
            is_quick = not response.completions and clock.now() - self._asked_at < QUICK_S
            quick = quick + 1 if is_quick else 0
            await clock.sleep(poll_delay(Poll.PENDING, quick - 1) if quick else 0)

    async def _ask(self, attempt: int) -> FuturesRetrieveResponse:
        self._asked_at = self._link.clock.now()
        fetched = [self._fetched.popleft() for _ in range(len(self._fetched))]
        body = requests.retrieve_futures(self._sampling_session_id, self._cursor, fetched)
        try:
            response = await send(
                self._link, endpoints.RETRIEVE_FUTURES, body, attempt=attempt, timeout_s=POLL_TIMEOUT_S, raises=True
            )
            return json_codec.read_content(FuturesRetrieveResponse, response.content)
        except APIError:
            self._fetched.extend(fetched)
            raise

    def _release_all(self) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
