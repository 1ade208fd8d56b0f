"""Who is next. Pure: values in, a decision out; the worker acts on it.

Fair between tenants by work done, not by calls: the tenant that was served the fewest tokens goes first, and among its
runs the one that has waited longest. A tenant that comes (back) starts level with the least served of those that are
waiting, so that a quiet hour is no credit to spend all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_BACKWARD_COST = 3
"""A backward pass takes about twice the time of its forward pass, which it follows."""


def cost_of(kind: str, tokens: int) -> int:
    """Return what an operation costs its tenant: its tokens, weighted by the work that one token takes."""
    return tokens * _BACKWARD_COST if kind == "forward_backward" else tokens


class Ready(NamedTuple):
    """An operation that could run now."""

    run_id: str
    tenant: str
    since: float


@dataclass(slots=True)
class Shares:
    """Tokens served per tenant, as far as they matter for what is next."""

    served: dict[str, float] = field(default_factory=dict)

    def pick(self, waiting: Iterable[str]) -> str:
        """The tenant whose turn it is, of those that wait."""
        tenants = set(waiting)
        known = [self.served[tenant] for tenant in tenants if tenant in self.served]
        floor = min(known, default=0.0)
        for tenant in tenants:
            self.served.setdefault(tenant, floor)
        # Whoever waits for nothing is forgotten: it will start level with the others when it comes back.
        self.served = {tenant: self.served[tenant] for tenant in tenants}
        return min(tenants, key=lambda tenant: (self.served[tenant], tenant))

    def charge(self, tenant: str, tokens: float) -> None:
        self.served[tenant] = self.served.get(tenant, 0.0) + max(tokens, 1.0)


def choose(ready: Iterable[Ready], shares: Shares) -> Ready | None:
    """The operation to start next, or None if there is none."""
    by_tenant: dict[str, list[Ready]] = {}
    for entry in ready:
        by_tenant.setdefault(entry.tenant, []).append(entry)
    if not by_tenant:
        return None
    return min(by_tenant[shares.pick(by_tenant)], key=lambda entry: (entry.since, entry.run_id))


def describe_queue(ahead: int, missing: int | None, engine_reason: str, paused: str) -> tuple[str, str]:
    """`queue_state` and its reason, for somebody whose poll is not answered yet."""
    if paused:
        return "paused_capacity", paused
    if engine_reason:
        return "paused_capacity", engine_reason
    if missing is not None:
        return "active", f"waits for operation {missing} of this run, which has not arrived"
    if ahead:
        return "active", f"{ahead} operation{'s' if ahead > 1 else ''} of this run before it"
    return "active", "running or next in line"
