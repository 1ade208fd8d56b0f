"""Makes the text of a progress: the live line, whole lines for a file, the last line, a warning about the budget."""

from __future__ import annotations

from tinkex.clock import Clock
from tinkex.terminal.curve import Point
from tinkex.terminal.format import LinePart, bar, clean, cut, duration, fit, money, number, plural
from tinkex.watch.prices import CURRENCY, Prices
from tinkex.watch.tally import Tally

MOST_REASON = 300
"""Characters of the reason of a failure in the last line."""
TENTH_S, LINE_S, QUIET_S = 1.0, 10.0, 60.0
"""Minimum seconds between two whole lines: at every tenth of the steps, after a change, and without a change."""


class Report:
    """Turns a tally into text. `notes` are the caller's own numbers, by name."""

    def __init__(
        self, tally: Tally, steps: int | None, prices: Prices | None, budget: float | None, label: str, clock: Clock
    ) -> None:
        self.steps, self.prices, self.budget, self._tally, self._clock = steps, prices, budget, tally, clock
        self._name = f"{clean(label)}: " if label else ""
        self._has_warned = False
        self._last_at, self._last = clock.now(), (tally.step, "")
        self.notes: dict[str, list[Point]] = {}

    def live(self, width: int) -> str:
        """Return the line as it is now, at most `width` wide."""
        return fit(self._parts(with_bar=True), width)

    def due(self) -> str | None:
        """Return a whole line, if it is time for one."""
        now, step, queue = self._clock.now(), self._tally.step, self._queue()
        last_step, last_queue = self._last
        if self.steps and 10 * step // self.steps > 10 * last_step // self.steps:
            least_s = TENTH_S
        else:
            least_s = LINE_S if (step, queue) != (last_step, last_queue) else QUIET_S
        if now - self._last_at < least_s:
            return None
        self._last_at, self._last = now, (step, queue)
        return fit(self._parts(with_bar=False), 1_000)

    def remarks(self) -> list[str]:
        """Return one warning if the budget is used up and only the caller's own code can end the loop."""
        if self._has_warned or self.budget is None or self._tally.cost <= self.budget or self._tally.loop_step:
            return []
        self._has_warned = True
        return [
            f"{self._name}The budget of {self.money(self.budget)} is exceeded: {self.money(self._tally.cost)} after "
            f"{plural(self._tally.step, 'step')}. Iterate over the progress to be stopped, or check is_over_budget."
        ]

    def last(self, error: BaseException | None, stopped_by: str, seconds: float) -> str:
        """Return the last line: `100 steps · loss 2.31 → 0.42 · 48,200 tokens · 1 min 12 s · $0.03`"""
        tally, steps, done = self._tally, self.steps, self._tally.step
        total = "" if steps is None else f" of {steps:,}"
        if error is not None:
            where = f"in step {tally.loop_step:,}" if tally.loop_step else f"after step {done:,}"
            by = "" if isinstance(error, GeneratorExit) else f" by {type(error).__name__}"  # left with `break`
            head = f"stopped {where}{total}{by}"
        else:
            head = plural(done, "step") if steps in (None, done) else f"{done:,}{total} steps"
        if stopped_by == "budget" and self.budget is not None:
            head += f", stopped by the budget of {self.money(self.budget)}"
        failed = self._failed(MOST_REASON)
        curves = [f"{name} {number(values[0])} → {number(values[-1])}" for name, values in self._curves()]
        tokens = [plural(tally.tokens, "token")] if tally.tokens else []
        cost = [self._cost()] if self.prices is not None else []
        cost += [
            f"{plural(count, 'token')} of {name} without a price" for name, count in sorted(tally.unpriced.items())
        ]
        parts = [self._name + head, failed, *curves, *tokens, duration(seconds), *cost]
        return " · ".join(part for part in parts if part)

    def expected_cost(self) -> float | None:
        """Return the expected cost of all steps; None without prices, and before the first step is done."""
        return None if self.steps is None or self.prices is None else self._tally.cost_at(self.steps)

    def money(self, amount: float) -> str:
        return money(amount, CURRENCY if self.prices is None else self.prices.currency)

    def _parts(self, *, with_bar: bool) -> list[LinePart]:
        tally, steps, step = self._tally, self.steps, self._tally.step
        rate, left_s = tally.tokens_per_s(), None if steps is None else tally.seconds_left(steps)
        at_end = self.expected_cost()
        return [
            LinePart(f"{self._name}step {step:,}" + ("" if steps is None else f"/{steps:,}")),
            LinePart(bar(step, steps) if with_bar and steps else "", 7),
            LinePart(self._failed(60)),
            *(LinePart(f"{name} {number(values[-1])}", 1) for name, values in self._curves()),
            LinePart(plural(tally.tokens, "token") if tally.tokens else "", 6),
            LinePart(f"{rate:,.0f} tokens/s" if rate else "", 5),
            LinePart("" if left_s is None or step == steps else f"{duration(left_s)} left", 2),
            LinePart(
                "" if self.prices is None else self._cost(),
                3,
                "" if at_end is None else f"of about {self.money(at_end)}",
            ),
            LinePart(self._queue()),
        ]

    def _failed(self, width: int) -> str:
        """Return how many calls failed and why the first did; "" if none."""
        failures = list(self._tally.failures)
        return f"{len(failures):,} failed: {cut(clean(failures[0]), width)}" if failures else ""

    def _cost(self) -> str:
        return ("≥ " if self._tally.unpriced else "") + self.money(self._tally.cost)

    def _curves(self) -> list[tuple[str, list[float]]]:
        """Return the loss and the caller's notes, where there are values."""
        records = [record for record in list(self._tally.history) if record.loss is not None]
        losses = [record.loss for record in records if record.loss is not None]
        loss_name = "loss per token" if records and all(record.is_mean for record in records) else "loss"
        noted = [(clean(name), [point.value for point in points]) for name, points in list(self.notes.items())]
        return [(name, values) for name, values in [(loss_name, losses), *noted] if values]

    def _queue(self) -> str:
        if (queue := self._tally.queue()) is None:
            return ""
        return clean(f"queue {queue.state}: {queue.reason}" if queue.reason else f"queue {queue.state}")
