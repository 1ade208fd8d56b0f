"""The pool's book-keeping, with connections that answer when the test says so: nobody is forgotten, nobody jumps in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tinkex.client._http import pool
from tinkex.client._http.dial import Origin
from tinkex.client._http.exchange import ConnectionLost, Exchange, HTTPRequest
from tinkex.client._http.pool import ConnectionPool

REQUEST = HTTPRequest("GET", "https", "service.example", "/", {}, b"")


class Line:
    """A connection; `answer` ends the exchange that began first."""

    settled = None

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self.in_use = 0
        self.is_closed = False
        self.was_used = False
        self.last_activity = self.idle_since = 0.0
        self.open: list[Exchange] = []

    def start(self, request: HTTPRequest, exchange: Exchange) -> None:
        self.open.append(exchange)

    def abandon(self, exchange: Exchange) -> None:
        if exchange in self.open:
            self.open.remove(exchange)
            if self.capacity == 1:
                self.close()

    def unsent_bytes(self, exchange: Exchange) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def answer(self) -> None:
        exchange = self.open.pop(0)
        exchange.begin(200, {}, lambda: None)
        exchange.end()

    def break_off(self) -> None:
        self.close()
        for exchange in self.open:
            exchange.end(ConnectionLost("broken"))
        self.open.clear()


class Network:
    """What `dial` finds."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self.lines: list[Line] = []
        self.dialled = 0
        self.is_reachable = asyncio.Event()
        self.is_reachable.set()
        self.problem: OSError | None = None

    async def dial(self, origin: Origin, context: object) -> Line:
        self.dialled += 1
        await self.is_reachable.wait()
        if self.problem is not None:
            raise self.problem
        self.lines.append(Line(self.capacity))
        return self.lines[-1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario with a pool of `limit` connections over a network of lines with `capacity` places."""

    def go(
        scenario: Callable[[ConnectionPool, Network], Coroutine[Any, Any, None]], limit: int, capacity: int = 1
    ) -> None:
        async def main() -> None:
            network = Network(capacity)
            monkeypatch.setattr(pool, "dial", network.dial)
            await scenario(ConnectionPool(Origin("https", "service.example", 443), limit, None), network)

        asyncio.run(main())

    return go


def ask(pool: ConnectionPool) -> asyncio.Task[Exchange]:
    return asyncio.ensure_future(pool.exchange(REQUEST, 60.0))


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_connection_is_opened_and_waited_for_where_it_may_carry_them_all(run: Callable[..., None]) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        network.is_reachable.clear()
        asked = [ask(pool) for _ in range(50)]
        await settle()
        assert network.dialled == 1
        network.is_reachable.set()
        await settle()
        assert [len(line.open) for line in network.lines] == [50]
        for _ in asked:
            network.lines[0].answer()
        await asyncio.gather(*asked)

    run(scenario, limit=10, capacity=100)


def test_a_full_connection_is_joined_by_another(run: Callable[..., None]) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        asked = [ask(pool) for _ in range(10)]
        await settle()
        # Four places each; the last two wait for one of the two connections that are allowed.
        assert [len(line.open) for line in network.lines] == [4, 4]
        while any(line.open for line in network.lines):
            for line in network.lines:
                if line.open:
                    line.answer()
            await settle()
        assert all(task.done() for task in asked)
        assert network.dialled == 2

    run(scenario, limit=2, capacity=4)


def test_connections_that_carry_one_exchange_each_are_opened_side_by_side_once_that_is_known(
    run: Callable[..., None],
) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        asked = [ask(pool) for _ in range(6)]
        await settle()
        assert [len(line.open) for line in network.lines] == [1, 1, 1, 1]
        for _ in range(2):
            for line in network.lines:
                if line.open:
                    line.answer()
            await settle()
        assert all(task.done() for task in asked)
        assert network.dialled == 4

    run(scenario, limit=4)


def test_those_who_waited_for_a_connection_that_cannot_be_opened_hear_so_together(run: Callable[..., None]) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        network.is_reachable.clear()
        network.problem = ConnectionRefusedError("nobody there")
        asked = [ask(pool) for _ in range(50)]
        await settle()
        network.is_reachable.set()
        await settle()
        assert network.dialled == 1
        assert all(isinstance(task.exception(), ConnectionRefusedError) for task in asked)

    run(scenario, limit=10, capacity=100)


def test_who_opens_a_connection_and_gives_up_leaves_the_opening_to_the_next(run: Callable[..., None]) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        network.is_reachable.clear()
        first, second = ask(pool), ask(pool)
        await settle()
        first.cancel()
        await settle()
        network.is_reachable.set()
        await settle()
        network.lines[0].answer()
        assert (await second).status == 200

    run(scenario, limit=10, capacity=100)


def test_a_place_meant_for_somebody_who_gave_up_in_the_same_moment_goes_to_the_next(run: Callable[..., None]) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        first, second, third = ask(pool), ask(pool), ask(pool)
        await settle()
        network.lines[0].break_off()  # wakes the second, who shall open a new connection ...
        second.cancel()  # ... and is gone before it can
        await settle()
        assert len(network.lines) == 2
        network.lines[1].answer()
        assert (await third).status == 200
        assert isinstance(first.exception(), ConnectionLost)

    run(scenario, limit=1)


def test_a_connection_handed_to_somebody_who_gave_up_in_the_same_moment_goes_to_the_next(
    run: Callable[..., None],
) -> None:
    async def scenario(pool: ConnectionPool, network: Network) -> None:
        first, second, third = ask(pool), ask(pool), ask(pool)
        await settle()
        network.lines[0].answer()
        second.cancel()
        await settle()
        network.lines[0].answer()
        assert [(await task).status for task in (first, third)] == [200, 200]
        assert network.dialled == 1

    run(scenario, limit=1)


@pytest.mark.timing
def test_an_upload_that_ends_late_leaves_the_answer_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        network = Network()
        monkeypatch.setattr(pool, "dial", network.dial)
        connections = ConnectionPool(Origin("http", "service.example", 80), 1, None)
        unsent = 100
        monkeypatch.setattr(Line, "unsent_bytes", lambda *_: unsent)
        asked = asyncio.ensure_future(connections.exchange(REQUEST, 0.4))
        await asyncio.sleep(0.2)
        unsent = 50
        await asyncio.sleep(0.5)
        unsent = 0  # at 0.7 s: just before the second look
        await asyncio.sleep(0.3)
        network.lines[0].answer()
        assert (await asked).status == 200

    asyncio.run(main())
