"""Counts what tenants use and rejects what exceeds a limit that can be set. Fixed bounds are beside what they bound.

A tenant over its own limit is rejected. When the service as a whole is full, only tenants with more than an even share
are: a tenant that uses little is let in, until the sum is twice the limit. Then nobody is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tinkex.clock import Clock
from tinkex.server.http.errors import RequestRejected
from tinkex.settings import LIMITS, ServeConfig

BURST_S = 5.0
"""A tenant may spend the requests of this many seconds at once: a loop submits its batch, then waits."""
DECOMPRESSED_BURST_S = 16.0
"""The same of decompressed bytes: two of the largest passes come one after the other, then nothing for a while."""
POLLS_PER_REQUEST = 10
"""Polls and heartbeats have a rate of their own, so many times that of other requests: a result takes several."""
POLL_DELAY_S = 1.0
"""How much later a poll beyond that rate is served."""
MAX_BUCKETS = 10_000
"""Tenants whose rate is remembered. A tenant that is forgotten starts with a full bucket."""


class Ledger:
    def __init__(self, config: ServeConfig, clock: Clock, on_rejection: Callable[[str], None]) -> None:
        """`on_rejection` gets the name of the limit whenever one rejects something: it feeds the metric."""
        self._config, self._clock, self._on_rejection = config, clock, on_rejection
        self._limits = {limit.setting.name: limit for limit in LIMITS}
        self._used: dict[tuple[str, str], int] = {}
        """(resource, tenant) → what it holds now. For connections, an address stands for the tenant."""
        self._totals: dict[str, int] = {}
        self._holders: dict[str, int] = {}
        """Resource → tenants that hold some of it."""
        self._bounds: dict[str, dict[str, str]] = {}
        """Resource → scope → the limit's name."""
        for limit in LIMITS:
            if limit.resource:
                self._bounds.setdefault(limit.resource, {})[limit.scope] = limit.setting.name
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tenant → requests that it may still send at once, and when that was true."""
        self._poll_buckets: dict[str, tuple[float, float]] = {}
        self._decompressed: dict[str, tuple[float, float]] = {}
        """Tenant → bytes that may still be decompressed for it at once, less than none after a large body, and when
        that was true."""

    def value(self, name: str) -> Any:
        """Return what a limit is set to."""
        return getattr(self._config, name)

    def rejection(self, name: str, reason: str, retry_after_s: int = 1, *, value: object = None) -> RequestRejected:
        """Count a rejection by this limit and return the error: what is too much, the limit, its flag, what to do.

        `value` is the limit where it is not set and the service found one itself.
        """
        self.note_exceeded(name)
        limit, most = self._limits[name], self.value(name) if value is None else value
        headers = {"retry-after": str(retry_after_s)} if limit.status in (429, 503) else {}
        return RequestRejected(
            limit.status,
            f"{reason}, and the limit is {most} ({limit.setting.flag}). {limit.remedy}",
            limit.code,
            "server" if limit.status in (429, 503) else "user",
            headers,
        )

    def note_exceeded(self, name: str) -> None:
        """Count that this limit rejected or deleted something, for the metric."""
        self._on_rejection(name)

    def check(self, name: str, amount: float, reason: str) -> None:
        """Reject an amount above a limit. None as a limit allows everything."""
        if (most := self.value(name)) is not None and amount > most:
            raise self.rejection(name, reason)

    @contextmanager
    def hold(self, resource: str, tenant: str, amount: int, noun: str) -> Iterator[None]:
        """Hold an amount of a resource while the block runs. Rejects it if the tenant or the service has no more."""
        self.take(resource, tenant, amount, noun)
        try:
            yield
        finally:
            self.give_back(resource, tenant, amount)

    def take(self, resource: str, tenant: str, amount: int, noun: str) -> None:
        """Hold an amount of a resource until `give_back`. `noun` says what it is, for the message."""
        own, total = self.used(resource, tenant) + amount, self._totals.get(resource, 0) + amount
        if (scope := self._exceeded(resource, own, total, amount)) is not None:
            who = {"tenant": "This key", "address": "This address", "service": "The service"}[scope]
            reason = f"{who} would hold {total if scope == 'service' else own} {noun}"
            raise self.rejection(self._bounds[resource][scope], reason)
        self.count(resource, tenant, amount)

    def count(self, resource: str, tenant: str, amount: int) -> None:
        """Hold an amount of a resource until `give_back`, whatever the limit."""
        if not amount:
            return
        own = self.used(resource, tenant) + amount
        if own == amount:
            self._holders[resource] = self._holders.get(resource, 0) + 1
        self._used[resource, tenant] = own
        self._totals[resource] = self.total(resource) + amount

    def has_room(self, resource: str, tenant: str, amount: int) -> bool:
        """Whether `take` would accept this amount. Counts nothing."""
        own, total = self.used(resource, tenant) + amount, self._totals.get(resource, 0) + amount
        return self._exceeded(resource, own, total, amount) is None

    def _exceeded(self, resource: str, own: int, total: int, amount: int) -> str | None:
        """Return the scope of the limit that a new amount would break, if there is one."""
        bounds = self._bounds[resource]
        scope = "tenant" if "tenant" in bounds else "address"
        if scope in bounds and own > self.value(bounds[scope]):
            return scope
        if "service" in bounds and total > (most := self.value(bounds["service"])):
            holders = self._holders.get(resource, 0) + (own == amount)
            if own > most // holders or total > 2 * most:
                return "service"
        return None

    def give_back(self, resource: str, tenant: str, amount: int) -> None:
        if not amount:
            return
        self._totals[resource] -= amount
        own = self._used[resource, tenant] - amount
        if own:
            self._used[resource, tenant] = own
        else:
            del self._used[resource, tenant]
            self._holders[resource] -= 1

    def used(self, resource: str, tenant: str) -> int:
        return self._used.get((resource, tenant), 0)

    def total(self, resource: str) -> int:
        return self._totals.get(resource, 0)

    def spend_request(self, tenant: str) -> None:
        """Count one request of a tenant. Rejects it, with `Retry-After: 1`, if the tenant sends too many per second."""
        if not self._spend(self._buckets, tenant, self.value("max_requests_per_s")):
            raise self.rejection("max_requests_per_s", "This key sends too many requests per second")

    async def pace_poll(self, tenant: str) -> None:
        """Count one poll or heartbeat of a tenant. Waits a second if the tenant sends too many.

        It is never rejected: official clients give a result up for good after a 429, and ask again at once after a 408.
        """
        if not self._spend(self._poll_buckets, tenant, POLLS_PER_REQUEST * self.value("max_requests_per_s")):
            await self._clock.sleep(POLL_DELAY_S)

    def check_decompressed(self, tenant: str) -> None:
        """Reject a compressed body, before any of it is decompressed, while its tenant has used up its rate.

        What a body will become is not known before. So one is let in as long as anything is left, and
        `charge_decompressed` may take more than there is.
        """
        rate = float(self.value("max_decompressed_per_s"))
        left = self._filled(self._decompressed, tenant, rate, rate * DECOMPRESSED_BURST_S)
        if left <= 0:
            reason = "This key's compressed bodies become too many bytes per second"
            raise self.rejection("max_decompressed_per_s", reason, math.floor(-left / rate) + 1)

    def charge_decompressed(self, tenant: str, size: int) -> None:
        """Charge a tenant for bytes that were decompressed for it, whether the request is accepted or not."""
        rate = float(self.value("max_decompressed_per_s"))
        left = self._filled(self._decompressed, tenant, rate, rate * DECOMPRESSED_BURST_S)
        self._decompressed[tenant] = left - size, self._clock.now()

    def _spend(self, buckets: dict[str, tuple[float, float]], tenant: str, rate: float) -> bool:
        """Take one from a tenant's bucket, which fills at this rate. Return False if it is empty."""
        left = self._filled(buckets, tenant, rate, rate * BURST_S)
        buckets[tenant] = (left - 1 if left >= 1 else left, self._clock.now())
        return left >= 1

    def _filled(self, buckets: dict[str, tuple[float, float]], tenant: str, rate: float, most: float) -> float:
        """Return what is in a tenant's bucket now. It fills at this rate, and has so much at most."""
        now = self._clock.now()
        left, at = buckets.get(tenant, (most, now))
        if tenant not in buckets and len(buckets) >= MAX_BUCKETS:
            buckets.clear()
        return min(left + (now - at) * rate, most)
