"""The gates of the limiter: who is admitted, and who is next."""

from __future__ import annotations

import asyncio

from tinkex.client._calls.limits import Gate
from tinkex.clock import REAL


def test_a_gate_with_no_places_still_admits_one_at_a_time() -> None:
    async def main() -> tuple[int, bool, int]:
        gate = Gate(REAL, 0)
        await asyncio.wait_for(gate.acquire(), 1)
        second = asyncio.ensure_future(gate.acquire())
        await asyncio.sleep(0)
        held, is_in = gate.admitted, second.done()
        gate.release()
        await asyncio.wait_for(second, 1)
        return held, is_in, gate.admitted

    assert asyncio.run(main()) == (1, False, 1)


def test_small_ones_go_on_when_the_large_one_before_them_is_cancelled() -> None:
    async def main() -> None:
        gate = Gate(REAL, 10, limit_bytes=100)
        await gate.acquire(50)
        large = asyncio.ensure_future(gate.acquire(80))
        small = asyncio.ensure_future(gate.acquire(10))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait_for(small, 1)
        assert (gate.admitted, gate.admitted_bytes) == (2, 60)

    asyncio.run(main())
