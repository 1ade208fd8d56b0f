"""A sampling session on the service: its id, the numbers of its samples, and the poll its samples share."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading

from tinkex.client._calls.call import call
from tinkex.client._calls.poll_batch import PollBatch
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import NotFoundError
from tinkex.types import JoinSamplingSessionRequest, JoinSamplingSessionResponse
from tinkex.wire import endpoints, json_codec, requests
from tinkex.wire.dialect import Dialect

SEQ_BLOCK = 1_000_000_000
"""Copies of a sampler in other processes number their samples in blocks of this size, one block per copy."""


class SamplingSession:
    """Numbers the samples of one sampling client, also after a fork and in unpickled copies."""

    def __init__(self, sampling_session_id: str, is_copy: bool) -> None:
        self.sampling_session_id = sampling_session_id
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._seq_ids = itertools.count()
        self._needs_block = is_copy
        self._joining: asyncio.Lock | None = None
        self._batch: tuple[ServiceLink, PollBatch] | None = None

    def next_seq_id(self) -> int | None:
        """Return the number of a sample, or None where a block of numbers must be had first (`join`). Any thread."""
        if self._pid != os.getpid():  # forked: the parent goes on with its own numbers
            self._lock = threading.Lock()
            self._pid = os.getpid()
            self._joining = None
            self._needs_block = True
        with self._lock:
            return None if self._needs_block else next(self._seq_ids)

    async def join(self, link: ServiceLink, operation: Operation) -> int:
        """Return a number from this copy's own block, which one sample asks for while the others wait for it."""
        if self._joining is None:
            self._joining = asyncio.Lock()
        async with self._joining:
            if self._needs_block:
                self._seq_ids = itertools.count(await self._block(link, operation) * SEQ_BLOCK)
                self._needs_block = False
        with self._lock:
            return next(self._seq_ids)

    async def _block(self, link: ServiceLink, operation: Operation) -> int:
        if link.server.sample_join_sampling_session:
            try:
                request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
                body = requests.request(request, Dialect.PROTO)
                response = await call(link, endpoints.JOIN_SAMPLING_SESSION, body, operation=operation)
                return json_codec.read_content(JoinSamplingSessionResponse, response.content).client_counter
            except NotFoundError:
                pass
        # Drawn where it cannot be asked for. Wide enough that siblings do not meet, and all numbers fit 64 bits.
        return random.SystemRandom().randrange(1 << 20, 1 << 33)

    def batch(self, link: ServiceLink) -> PollBatch:
        """Return the poll that all samples of this session share. Loop thread."""
        if self._batch is None or self._batch[0] is not link:
            self._batch = (link, PollBatch(link, self.sampling_session_id))
        return self._batch[1]
