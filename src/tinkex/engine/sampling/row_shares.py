"""Decides which tenant gets the next row of a decode batch, and tokens of a prefill. Pure: numbers in, numbers out.

Every tenant has an account. A sequence is charged when it gets its row: the tokens that sequences of its tenant usually
have, times the weight of the row. When it ends, the account is set right. The tenant that was charged least is next.

Samples of hundreds of tokens leave their rows seldom, and all at once. So a tenant that comes beside a full batch does
not wait for a free row. A batch may exceed its rows by a quarter for tenants that have less than an even part of them,
and by three eighths for tenants without a row; the memory by an eighth for these. No row is kept free of a tenant that
is alone: it would sample slower for a neighbour that may never come. Rows that tenants with short samples had a moment
ago are kept free of tenants with long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tinkex.engine.contract import SampleSpec

SPARE_DIVISOR = 8
"""A batch has three parts of spare rows, and the memory has one: an eighth each."""
HALF_LIFE_STEPS = 256
"""After how many steps half of the rows that a tenant had are still kept for it."""
KEPT_PER_USED = 16.0
"""Rows are kept up to so many times what a tenant used on average. One that drew 64 tokens in 256 steps kept a third of
another tenant's rows free."""
SHORT_RATIO = 4.0
"""Samples are short beside those that are so many times as long: a row taken by one of these is back too late."""
TYPICAL_TOKENS = 256.0
"""What a sequence of a tenant is expected to have before one has ended, if more are requested."""
PROMPT_TOKENS = 16
"""Tokens of a prompt that cost as much as one that is drawn: they are computed together."""
RANKED_PER_ROW = 8
"""Ranked tokens that cost as much as a row without any."""


def row_cost(spec: SampleSpec) -> float:
    """Return what one row of a request costs, counted in rows without ranked tokens."""
    return 1 + spec.topk_sample / RANKED_PER_ROW


def prompt_token_cost(spec: SampleSpec) -> float:
    """Return what one token of a prompt costs, counted in tokens that nothing is asked about."""
    return 1 + max(spec.topk_prompt, spec.alt_k) / RANKED_PER_ROW


def chunk_sizes(prompts: Sequence[tuple[SampleSpec, int]], budget: float) -> list[int]:
    """Return how many tokens of each prompt to prefill now, of those that it still needs.

    Every tenant may fill an even part of the budget, in which tokens that are asked about cost more; what one leaves
    over the others take. So the prompt of one tenant does not wait for all prompts of another. A tenant alone fills the
    budget with tokens of any kind: nobody waits for it.
    """
    sizes = [0] * len(prompts)
    tenants = {spec.tenant for spec, _ in prompts}
    parts = dict.fromkeys(tenants, budget / max(len(tenants), 1))
    for is_even in (True, False) if len(tenants) > 1 else (False,):
        for index, (spec, left) in enumerate(prompts):
            if budget <= 0:
                break
            cost = prompt_token_cost(spec) if len(tenants) > 1 else 1.0
            room = min(parts[spec.tenant], budget) if is_even else budget
            size = min(left - sizes[index], max(math.ceil(room / cost), 0))
            sizes[index] += size
            parts[spec.tenant] -= size * cost
            budget -= size * cost
    return sizes


class Accounts:
    """What each tenant was charged for rows of one base model. All start level, and so does one that comes back."""

    def __init__(self) -> None:
        self._charged: dict[str, float] = {}
        self._typical: dict[str, float] = {}
        self._most_rows: dict[str, tuple[float, int]] = {}
        """The most rows that a tenant had of late, and at which step it had them."""
        self._drawn: dict[str, tuple[float, int]] = {}
        """The tokens of a tenant's ended sequences at some step; after `HALF_LIFE_STEPS` they count half."""
        self.steps = 0
        """Of the batch, so far."""
        self._level = 0.0
        """The account of the tenant that was served last: where one starts that comes while nobody waits."""

    def charged(self, tenant: str) -> float:
        return self._charged.get(tenant, self._level)

    def enter(self, tenant: str, waiting: Iterable[str]) -> None:
        """Begin the account of a tenant that comes: level with the least of those that wait. A debt stays."""
        least = min(map(self.charged, waiting), default=self._level)
        self._charged[tenant] = max(self._charged.get(tenant, least), least)

    def serve(self, tenant: str, cost: float) -> None:
        """Charge a tenant for a row that it gets now."""
        self._level = self.charged(tenant)
        self.charge(tenant, cost)

    def charge(self, tenant: str, cost: float) -> None:
        """Charge a tenant, or give back what was too much."""
        self._charged[tenant] = self.charged(tenant) + cost

    def raise_to_level(self, tenant: str) -> None:
        """Raise an account to the level while its tenant waits for memory of adapters: waiting earns no credit."""
        self._charged[tenant] = max(self.charged(tenant), self._level)

    def expected_tokens(self, tenant: str, most: int) -> float:
        """Return how many tokens a sequence is charged when it starts: clients often allow many more than they get."""
        return max(min(most, self._typical.get(tenant, TYPICAL_TOKENS)), 1.0)

    def settle(self, tenant: str, tokens: int, cost: float) -> None:
        """Set an account right when a sequence has ended: charge `cost`, and remember how long it was."""
        self.charge(tenant, cost)
        typical = self._typical.get(tenant)
        self._typical[tenant] = tokens if typical is None else typical + (tokens - typical) / 8
        drawn, step = self._drawn.get(tenant, (0.0, 0))
        self._drawn[tenant] = tokens + drawn * self._fading(step), self.steps

    def note_rows(self, rows: Mapping[str, int]) -> None:
        """Remember how many rows each tenant has now, and forget those that had some long ago."""
        for tenant, count in rows.items():
            most, step = self._most_rows.get(tenant, (0.0, 0))
            if count >= most * self._fading(step):
                self._most_rows[tenant] = count, self.steps
        for tenant, (most, step) in list(self._most_rows.items()):
            if most * self._fading(step) < 0.5:
                del self._most_rows[tenant]
        for tenant in [name for name in self._drawn if name not in self._most_rows]:
            del self._drawn[tenant]

    def recent_rows(self) -> dict[str, int]:
        """Return how many rows each tenant had of late: the most, up to so many times what it used on average."""
        recent = {}
        for tenant, (most, step) in self._most_rows.items():
            drawn, drawn_step = self._drawn.get(tenant, (0.0, 0))
            used = drawn * self._fading(drawn_step) * math.log(2) / HALF_LIFE_STEPS
            recent[tenant] = round(min(most * self._fading(step), KEPT_PER_USED * used))
        return recent

    def kept_rows(self, tenant: str, most: int, rows: Mapping[str, int], recent: Mapping[str, int], even: int) -> int:
        """Return how many rows are kept free of one more sequence of a tenant, for others with much shorter ones.

        These lost their rows otherwise whenever they had nothing waiting, and got them back 256 steps later. Each
        other tenant has the rows kept that it had of late and has not now, up to an even part. Between tenants with
        samples of one length no row is kept: they take turns anyway.
        """
        tokens = self.expected_tokens(tenant, most) / SHORT_RATIO
        return sum(
            max(min(count, even) - rows.get(name, 0), 0)
            for name, count in recent.items()
            if name != tenant and self._typical.get(name, TYPICAL_TOKENS) <= tokens
        )

    def _fading(self, step: int) -> float:
        """Return what is left now of a count from that step."""
        return float(0.5 ** ((self.steps - step) / HALF_LIFE_STEPS))

    def forget(self, active: Iterable[str]) -> None:
        """Drop the accounts of tenants that have nothing here and no debt."""
        kept = set(active)
        for tenant in [name for name, charged in self._charged.items() if name not in kept and charged <= self._level]:
            del self._charged[tenant]
            self._typical.pop(tenant, None)


class RowLimits(NamedTuple):
    """The rows of one batch, and the tokens of all batches together."""

    max_rows: int
    max_tokens: int

    def weight(self, spec: SampleSpec, width: int) -> float:
        """Return what a token of a row costs: more if tokens are ranked, or if the row takes the memory of several."""
        return row_cost(spec) * max(width * self.max_rows / self.max_tokens, 1.0)

    def spare_parts(self, own: int, tenants: int) -> int:
        """Return how many parts of the spare rows a tenant with `own` rows may use, one of so many tenants."""
        if own == 0:
            return 3
        return 2 if tenants > 1 and own < self.max_rows // tenants else 0

    def has_rows(self, rows: int, spare_parts: int, kept: int) -> bool:
        """Return whether a batch may have so many rows besides those that are kept for other tenants."""
        return rows + kept <= self.max_rows + spare_parts * max(self.max_rows // SPARE_DIVISOR, 1)

    def has_tokens(self, tokens: int, *, may_spare: bool) -> bool:
        """Return whether all batches may have so many tokens."""
        return tokens <= self.max_tokens + (self.max_tokens // SPARE_DIVISOR if may_spare else 0)
