"""A sampling session on the service: its id, the numbers of its samples, and the poll its samples share."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import deque

from tinkex.client._calls.attempts import Attempts, call
from tinkex.client._calls.decode import read_value
from tinkex.client._calls.retry import QUICK_S, fault_delay, pending_delay
from tinkex.client._calls.send import send
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIError, NotFoundError, TinkexError
from tinkex.types import FuturesRetrieveResponse, JoinSamplingSessionRequest, JoinSamplingSessionResponse
from tinkex.wire import endpoints, requests
from tinkex.wire.dialect import Dialect

SEQ_BLOCK = 1_000_000_000
"""Copies of a sampler in other processes number their samples in blocks of this size, one block per copy."""
POLL_TIMEOUT_S = 60.0
FAULTS_ALLOWED = 3
REMEMBERED = 4096
"""How many fetched ids are repeated to the service, which may forget them then."""


class SamplingSession:
    """Numbers the samples of one sampling client, also after a fork and in unpickled copies."""

    def __init__(self, sampling_session_id: str, is_copy: bool) -> None:
        self.sampling_session_id = sampling_session_id
        self._pid = os.getpid()
        self._seq_ids = itertools.count()
        self._needs_block = is_copy
        self._joining: asyncio.Lock | None = None
        self._batch: tuple[ServiceLink, PollBatch] | None = None

    def next_seq_id(self) -> int | None:
        """Return the number of a sample, or None where a block of numbers must be had first (`join`). Any thread."""
        if self._pid != os.getpid():  # forked: the parent goes on with its own numbers
            self._joining = None
            self._needs_block = True
            self._pid = os.getpid()
        return None if self._needs_block else next(self._seq_ids)

    async def join(self, link: ServiceLink, operation: Operation) -> int:
        """Return a number from this copy's own block, which one sample asks for while the others wait for it."""
        if self._joining is None:
            self._joining = asyncio.Lock()
        async with self._joining:
            if self._needs_block:
                self._seq_ids = itertools.count(await self._block(link, operation) * SEQ_BLOCK)
                self._needs_block = False
        return next(self._seq_ids)

    async def _block(self, link: ServiceLink, operation: Operation) -> int:
        if link.server.sample_join_sampling_session:
            try:
                request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
                body = requests.request(request, Dialect.PROTO)
                response = await call(link, endpoints.JOIN_SAMPLING_SESSION, body, operation=operation)
                return (await read_value(JoinSamplingSessionResponse, response.content)).client_counter
            except NotFoundError:
                pass
        # Drawn where it cannot be asked for. Wide enough that siblings do not meet, and all numbers fit 64 bits.
        return random.SystemRandom().randrange(1 << 20, 1 << 33)

    def batch(self, link: ServiceLink) -> PollBatch:
        """Return the poll that all samples of this session share. Loop thread."""
        if self._batch is None or self._batch[0] is not link:
            self._batch = (link, PollBatch(link, self.sampling_session_id))
        return self._batch[1]


class BatchAttempts(Attempts):
    """A few attempts, whatever the error: the samples can always be polled for one by one."""

    def delay_after(self, error: APIError, attempt: int) -> float:
        if attempt >= FAULTS_ALLOWED:
            raise error
        return fault_delay(attempt - 1)


class PollBatch:
    """One long poll for all samples of a sampler, where the service offers it (`retrieve_futures`). Loop thread.

    It only says *which* samples are ready; each result is then fetched by its own, immediate poll. Whatever goes wrong
    here is mended by falling back to single polls: a batch that fails must not fail the samples in it.
    """

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
                for pending in self._waiters.values():
                    if not pending.done():
                        pending.set_result(None)
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
            await clock.sleep(pending_delay(quick))

    async def _ask(self, attempt: int) -> FuturesRetrieveResponse:
        self._asked_at = self._link.clock.now()
        fetched = [self._fetched.popleft() for _ in range(len(self._fetched))]
        body = requests.retrieve_futures(self._sampling_session_id, self._cursor, fetched)
        try:
            response = await send(
                self._link, endpoints.RETRIEVE_FUTURES, body, attempt=attempt, timeout_s=POLL_TIMEOUT_S, raises=True
            )
            return await read_value(FuturesRetrieveResponse, response.content)
        except APIError:
            self._fetched.extend(fetched)
            raise
