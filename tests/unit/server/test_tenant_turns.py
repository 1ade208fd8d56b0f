"""Turns of tenants: one at a time, in the order of arrival within a tenant, tenants one after the other."""

from __future__ import annotations

import asyncio

from tinkex.server.limits.tenant_turns import TenantTurns


async def hold(turns: TenantTurns, tenant: str, order: list[str], is_held: list[bool]) -> None:
    async with turns.of(tenant):
        assert not is_held
        is_held.append(True)
        await asyncio.sleep(0)
        is_held.clear()
        order.append(tenant)


def test_a_tenant_with_many_does_not_delay_one_with_few() -> None:
    """Before: whoever came first was first; 200 polls of one tenant made a stream of another wait for two seconds."""

    async def run() -> list[str]:
        turns, order, is_held = TenantTurns(), list[str](), list[bool]()
        await asyncio.gather(*(hold(turns, tenant, order, is_held) for tenant in ["a"] * 20 + ["b", "b", "c"]))
        async with turns.of("a"):  # it is free again
            pass
        return order

    order = asyncio.run(run())
    assert order[:7] == ["a", "a", "b", "c", "a", "b", "a"] and len(order) == 23


def test_who_is_cancelled_gives_the_turn_on_wherever_it_is() -> None:
    async def run() -> None:
        turns, order, is_held = TenantTurns(), list[str](), list[bool]()
        for delay in range(6):
            tasks = [asyncio.create_task(hold(turns, name, order, is_held)) for name in ("a", "b", "c")]
            for _ in range(delay):
                await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            is_held.clear()
            async with asyncio.timeout(1), turns.of("d"):
                pass

    asyncio.run(run())
