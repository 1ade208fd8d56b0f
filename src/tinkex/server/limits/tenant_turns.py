"""One at a time, and tenants in turn: what holds the loop or the store briefly, and many may want at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """`async with turns.of(tenant):` holds the turn. Whoever waits gets it in the order of arrival of its own tenant;
    tenants take turns, however many of one wait."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant; the one whose turn is next first."""

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, tenant: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given the turn, and then cancelled
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():  # else it was cancelled while it waited
                turn.set_result(None)
                return
        self._is_taken = False
