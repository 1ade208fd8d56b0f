"""Counts the rows and tokens of the batches while sequences are chosen for one of them, before any of them starts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from tinkex.engine.sampling.decode_batch import ActiveSample, DecodeBatch
from tinkex.engine.sampling.row_shares import Accounts, RowLimits


class FillPlan:
    """What one batch would have if the sequences that were chosen had started. Reads the batches once."""

    def __init__(self, base: str, batches: Mapping[str, DecodeBatch], limits: RowLimits, accounts: Accounts) -> None:
        self.base = base
        self._limits, self._accounts = limits, accounts
        self.counts: dict[ActiveSample, int] = {}
        """How many sequences of each request are to start."""
        self.starting: dict[str, deque[ActiveSample]] = {}
        """Requests that have sequences left to start, by tenant."""
        self._rows, self._width, self._running = 0, 0, 0
        self._own: Counter[str] = Counter()
        """Rows by tenant that run or are to start."""
        self._with_prompt: Counter[str] = Counter()
        """Requests by tenant that still hold their prompt: it is computed, or they have sequences left to start."""
        self._present: set[str] = set()
        """Tenants of `_own` and `_with_prompt`."""
        self._recent = accounts.recent_rows()
        """Rows by tenant that may be kept for it: what it had of late."""
        self._other_tokens = 0
        for name, batch in batches.items():
            rows, width = batch.load
            if name != base:
                self._other_tokens += rows * width
                continue
            self._rows, self._width, self._running = rows, width, len(batch.rows)
            self._own.update(row.sample.tenant for row in batch.rows)
            self._with_prompt.update(sample.tenant for sample in (*batch.prefilling_samples, *batch.starting))
            self._present = {*self._own, *self._with_prompt}
            for sample in batch.starting:
                self.starting.setdefault(sample.tenant, deque()).append(sample)

        self._sharing = {*self._recent, *self._present}
        """Tenants that an even part is reckoned for."""

    def next_number(self, tenant: str, waiting: Mapping[str, Mapping[int, ActiveSample]]) -> int:
        """Return the number of a tenant's next request; 0 if it has none."""
        if (sample := self.next_of(tenant)) is not None:
            return sample.number
        return next(iter(waiting[tenant])) if tenant in waiting else 0

    def next_of(self, tenant: str) -> ActiveSample | None:
        """Return a tenant's next request with sequences left to start."""
        queue = self.starting.get(tenant)
        return queue[0] if queue else None

    def start(self, sample: ActiveSample, *, keeps_rows_free: bool) -> bool:
        """Choose one more sequence of a request, if there is room for it.

        The first sequence uses the row that was reserved when the request came in. The last one takes over the row of
        the prompt. The memory of a batch without rows is enough for one, so that it never stands still.
        """
        chosen = self.counts.get(sample, 0)
        left = sample.unstarted - chosen
        is_first = sample.started + chosen == 0
        rows = self._rows + (left > 1 and not is_first)
        if not is_first and self._running:
            own = self._own[sample.tenant]
            tokens = self._other_tokens + rows * self._width
            if (
                (keeps_rows_free and left > 1)
                or not self._limits.has_rows(rows, self._spare_parts(sample, own), self._kept_rows(sample, own))
                or not self._limits.has_tokens(tokens, may_spare=own == 0)
            ):
                return False
        self._rows = rows
        count = min(left, 1)  # a request without sequences has a prompt only
        self.counts[sample] = chosen + count
        self._running += count
        self._own[sample.tenant] += count
        self._present.add(sample.tenant)
        self._sharing.add(sample.tenant)
        if left <= 1:
            self.starting[sample.tenant].popleft()
        return True

    def has_rows_for(self, sample: ActiveSample, *, may_wait_for_memory: bool = False) -> bool:
        """Return whether a waiting request may come in; one row is enough for a tenant that has none.

        If the memory is full, a request for which rows are free blocks all others until it fits. Not if they are of the
        two parts of spare rows that have no spare memory: it would stop others that fit.
        """
        own = self._own[sample.tenant] + self._with_prompt[sample.tenant]
        parts = 0 if self._is_alone else self._spare_parts(sample, own)
        rows = self._rows + (1 if own == 0 and parts else sample.extra_rows)
        parts = max(parts - 2, 0) if may_wait_for_memory else parts
        return self._limits.has_rows(rows, parts, self._kept_rows(sample, own))

    def has_tokens_for(self, sample: ActiveSample) -> bool:
        tokens = self._other_tokens + (self._rows + sample.extra_rows) * max(self._width, sample.max_length)
        own = self._own[sample.tenant] + self._with_prompt[sample.tenant]
        return self._limits.has_tokens(tokens, may_spare=own == 0 and not self._is_alone)

    def add(self, sample: ActiveSample, batch: DecodeBatch) -> None:
        """Count a request that came in. Its prompt may be complete already."""
        self._rows += sample.extra_rows
        self._width = max(self._width, sample.max_length)
        self._with_prompt[sample.tenant] += 1
        self._present.add(sample.tenant)
        self._sharing.add(sample.tenant)
        if batch.starting and batch.starting[-1] is sample:
            self.starting.setdefault(sample.tenant, deque()).append(sample)

    @property
    def _is_alone(self) -> bool:
        """Whether nothing else is in any batch."""
        return self._rows == 0 and self._other_tokens == 0

    def _spare_parts(self, sample: ActiveSample, own: int) -> int:
        tenants = len(self._present) + (sample.tenant not in self._present)
        return self._limits.spare_parts(own, tenants)

    def _kept_rows(self, sample: ActiveSample, own: int) -> int:
        """Return how many rows are kept free of one more sequence: at most half of the batch, and none of a tenant
        with less than an even part. `own` are the tenant's rows; of a request that waits, with its other prompts."""
        even = self._limits.max_rows // (len(self._sharing) + (sample.tenant not in self._sharing))
        if own < max(even, 1) or even == 0:
            return 0
        kept = self._accounts.kept_rows(sample.tenant, sample.max_tokens, self._own, self._recent, even)
        return min(kept, self._limits.max_rows // 2)
