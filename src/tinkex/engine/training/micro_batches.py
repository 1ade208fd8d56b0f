"""Passes in progress, and the choice of the items that go into the next micro-batch.

A pass is one `forward` or `forward_backward` command; its datums are its items. Each tenant gets an equal share of a
micro-batch's tokens, and the others take what a tenant leaves over. So a short pass is finished by the next
micro-batch, however long the other passes are.

Axes: P all numbers of an adapter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tinkex.engine.adapters import optimizer
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame
from tinkex.engine.training.runner import Item, Runner
from tinkex.rules.metrics import combine


class Pass:
    """A `forward` or `forward_backward` in progress.

    Every item is first in `pending`, then in `running` while its micro-batch runs, and has its results after that.
    """

    def __init__(self, number: int, adapter_name: str, items: Sequence[Item], tenant: str = "") -> None:
        self.number, self.adapter_name, self.items = number, adapter_name, items
        self.adapter = items[0].adapter
        self.needs_gradient = items[0].needs_gradient
        self.tenant = tenant
        """Whose pass it is: tenants get equal shares, however many passes they have."""
        self.runs_alone = False
        """Whether it shares no micro-batch, because it was in one that failed."""
        self.seconds = 0.0
        """Its share, by tokens, of the time of its micro-batches."""
        self.pending = self._longest_first()
        self.running: list[Item] = []
        # The gradient before the pass, so that a failure can be undone. None means that it was zero.
        had_gradient = self.needs_gradient and self.adapter.has_gradient
        self._gradient_before_P: Tensor | None = self.adapter.gradient_P.clone() if had_gradient else None

    def _longest_first(self) -> deque[Item]:
        """All items in the order in which they run: items of similar length share a micro-batch."""
        return deque(sorted(self.items, key=lambda item: (-item.length, item.index)))

    def finish(self) -> Frame:
        """Return the reply of a pass whose items all have results. Raises if its gradient is not finite."""
        if self.needs_gradient and not math.isfinite(optimizer.norm(self.adapter.gradient_P)):
            raise EngineFault(
                "The gradient of this batch is beyond the range of float32 (inf or nan), so it was not added. Look "
                "for very large weights or advantages, or logprobs far below the model's own."
            )
        self.adapter.has_gradient = self.adapter.has_gradient or self.needs_gradient
        outputs: list[dict[str, Any]] = []
        buffers: list[bytes] = []
        for index, item in enumerate(self.items):
            outputs.append({"logprobs": {"dtype": "float32", "shape": list(item.logprobs.shape), "data": index}})
            buffers.append(item.logprobs.numpy().tobytes())
        metrics = combine((item.metrics, 1) for item in self.items)
        return Frame({"metrics": metrics, "outputs": outputs, "seconds": self.seconds}, buffers)

    def undo_gradient(self) -> None:
        """Restore the gradient to what it was before the pass, bit for bit."""
        if self._gradient_before_P is not None:
            self.adapter.gradient_P.copy_(self._gradient_before_P)
        elif self.needs_gradient:
            self.adapter.gradient_P.zero_()

    def restart_alone(self) -> None:
        """Run all items again, in micro-batches of this pass only."""
        self.runs_alone = True
        self.running.clear()
        for item in self.items:
            item.fault = None
        self.pending = self._longest_first()


def next_micro_batch(passes: Sequence[Pass], token_budget: int, runner: Runner) -> list[Item]:
    """Choose the items of the next micro-batch and move them from `pending` to `running`.

    `passes` are in the order of their waiting. Items are chosen in three rounds:

    1. The pass that has waited longest gets one item, however long it is. So no pass starves.
    2. Every tenant may fill an equal share of the budget. Its passes take one item each in turn.
    3. Tokens that are still free go to the passes in order.
    """
    batch: list[Item] = []
    total = longest = 0

    def add_next_item(pass_: Pass, room: int) -> int:
        """Add the next item of a pass if it fits into `room` and into the budget. Returns its tokens, else 0."""
        nonlocal total, longest
        length = pass_.pending[0].length if pass_.pending else 0
        cost = runner.cost_tokens(len(batch) + 1, max(longest, length), total + length)
        # An empty micro-batch takes any item, also one that is longer than the whole budget.
        if not length or (batch and (length > room or cost > token_budget)):
            return 0
        total, longest = total + length, max(longest, length)
        pass_.running.append(pass_.pending.popleft())
        batch.append(pass_.running[-1])
        return length

    first_tokens = add_next_item(passes[0], token_budget)
    by_tenant: dict[str, list[Pass]] = {}
    for pass_ in passes:
        by_tenant.setdefault(pass_.tenant, []).append(pass_)
    for members in by_tenant.values():
        room = token_budget // len(by_tenant) - (first_tokens if passes[0] in members else 0)
        taking_turns = deque(members)
        while taking_turns:
            pass_ = taking_turns.popleft()
            if used := add_next_item(pass_, room):
                room -= used
                taking_turns.append(pass_)
    for pass_ in passes:
        while add_next_item(pass_, token_budget):
            pass
    return batch
