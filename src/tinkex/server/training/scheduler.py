"""Chooses the tenant and the operation that go to the engine next. Pure: values in, a decision out.

Fair between tenants by work, not by calls: the tenant that was charged the least goes first, and of its runs the one
that has waited longest. A tenant that comes back starts level with the least charged of those that wait, so a quiet
hour is no credit to spend all at once. `docs/decisions/fairness.md` draws this beside the engine's own fairness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tinkex.server.training.run_queue import PendingOperation

_BACKWARD_COST = 3
"""Times the cost of a forward pass: the backward pass that follows takes about twice as long."""


def cost_of(kind: str, tokens: int, targets: int = 0) -> int:
    """Return what an operation costs its tenant: its tokens, weighted by the work that one token takes.

    A pass with several targets per position costs its targets: each has to be computed, returned and stored.
    """
    cost = max(tokens, targets)
    return cost * _BACKWARD_COST if kind == "forward_backward" else cost


@dataclass(slots=True)
class Shares:
    """What each waiting tenant was charged so far."""

    charged: dict[str, float] = field(default_factory=dict)

    def pick(self, waiting: Iterable[str]) -> str:
        tenants = set(waiting)
        floor = min((self.charged[tenant] for tenant in tenants if tenant in self.charged), default=0.0)
        # Tenants that wait for nothing are forgotten: they start level with the others when they come back.
        self.charged = {tenant: self.charged.get(tenant, floor) for tenant in tenants}
        return min(tenants, key=lambda tenant: (self.charged[tenant], tenant))

    def charge(self, tenant: str, cost: float) -> None:
        self.charged[tenant] = self.charged.get(tenant, 0.0) + max(cost, 1.0)


def choose(ready: Iterable[PendingOperation], shares: Shares) -> PendingOperation | None:
    """Return the operation to start next, of those that could run now; None if there is none."""
    by_tenant: dict[str, list[PendingOperation]] = {}
    for pending in ready:
        by_tenant.setdefault(pending.row.tenant, []).append(pending)
    if not by_tenant:
        return None
    return min(by_tenant[shares.pick(by_tenant)], key=lambda pending: (pending.arrived, pending.row.run_id))
