"""Passes on their way, and how they share micro-batches.

Each party (the server says who) gets an equal share of a micro-batch's tokens, and what one leaves over the others
take, so that a short pass is over with the next micro-batch however long the others are.
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
from tinkex.engine.training import losses
from tinkex.engine.training.runner import Item, Outcome, Runner


class Pass:
    """A `forward` or `forward_backward` on its way."""

    def __init__(self, number: int, name: str, items: Sequence[Item], party: str = "") -> None:
        self.number, self.name, self.items = number, name, items
        self.adapter = items[0].adapter
        self.needs_gradient = items[0].needs_gradient
        self.party = party
        """Whose it is: parties get equal shares, however many passes they have."""
        self.is_alone = False
        """Whether it shares no micro-batch: it was in one that failed."""
        self.seconds = 0.0
        """Its share, by tokens, of the time of the micro-batches that it was in."""
        self.running: list[Item] = []
        had_gradient = self.needs_gradient and self.adapter.has_gradient
        self._before_P: Tensor | None = self.adapter.gradient_P.clone() if had_gradient else None
        self.left = self._in_order()

    def _in_order(self) -> deque[Item]:
        """The longest first: those of similar length go together."""
        return deque(sorted(self.items, key=lambda item: (-item.length, item.datum.index)))

    def finish(self) -> Frame:
        if self.needs_gradient and not math.isfinite(optimizer.norm(self.adapter.gradient_P)):
            raise EngineFault(
                "The gradient of this batch is beyond the range of float32 (inf or nan), so it was not added. Look "
                "for very large weights or advantages, or logprobs far below the model's own."
            )
        self.adapter.has_gradient = self.adapter.has_gradient or self.needs_gradient
        return _reply([item.outcome for item in self.items if isinstance(item.outcome, Outcome)], self.seconds)

    def undo(self) -> None:
        """Leave no trace of it in the gradient."""
        if self._before_P is not None:
            self.adapter.gradient_P.copy_(self._before_P)
        elif self.needs_gradient:
            self.adapter.gradient_P.zero_()

    def begin_again(self) -> None:
        self.is_alone = True
        self.running.clear()
        for item in self.items:
            item.outcome = None
        self.left = self._in_order()


def share(passes: Sequence[Pass], token_budget: int, runner: Runner) -> list[Item]:
    """The items of the next micro-batch; they move from `left` to `running`.

    The pass that waits longest has at least one, however long: nobody starves. Then every party has an equal share of
    the tokens, and what is left over goes to whoever comes first.
    """
    taken: list[Item] = []
    total = longest = 0

    def take(one: Pass, room: int) -> int:
        """The next item of a pass, if it fits; how many tokens it has."""
        nonlocal total, longest
        length = one.left[0].length if one.left else 0
        size = runner.size(len(taken) + 1, max(longest, length), total + length)
        if not length or (taken and (length > room or size > token_budget)):
            return 0
        total, longest = total + length, max(longest, length)
        one.running.append(one.left.popleft())
        taken.append(one.running[-1])
        return length

    advance = take(passes[0], token_budget)
    parties: dict[str, list[Pass]] = {}
    for one in passes:
        parties.setdefault(one.party, []).append(one)
    for members in parties.values():
        room = token_budget // len(parties) - (advance if passes[0] in members else 0)
        waiting = deque(members)
        while waiting:  # one item of each in turn
            one = waiting.popleft()
            if used := take(one, room):
                room -= used
                waiting.append(one)
    for one in passes:
        while take(one, token_budget):
            pass
    return taken


def _reply(outcomes: Sequence[Outcome], seconds: float) -> Frame:
    rows: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for index, (logprobs, _) in enumerate(outcomes):
        rows.append({"logprobs": {"dtype": "float32", "shape": list(logprobs.shape), "data": index}})
        buffers.append(logprobs.numpy().tobytes())
    metrics = losses.combine([outcome.metrics for outcome in outcomes])
    return Frame({"metrics": metrics, "outputs": rows, "seconds": seconds}, buffers)
