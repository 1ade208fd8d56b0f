"""Adds up the events of one training client: steps, loss, tokens, cost, speed, queue. Draws nothing.

Events arrive on the SDK's loop thread (`started`: on the caller's) and are only stored. Results are counted in the
order of the calls: the small response of an optim_step may arrive before the large one of the pass before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from tinkex.clock import Clock
from tinkex.events import QueueEvent, StartEvent, StepEvent, Usage
from tinkex.rules.metrics import is_mean, step_loss
from tinkex.watch.prices import Price, Prices

RECENT = 10
"""Steps over which speed and cost per step are averaged: an average since the start says little about now."""
SAMPLES = ("sample", "stream")
PASSES = ("forward_backward", "forward_backward_custom")


class StepRecord(NamedTuple):
    """One `optim_step` with the passes before it. Tokens, seconds and cost are those of this step alone."""

    step: int
    loss: float | None
    """Per unit of weight where the service reports `weight:sum`, else the sum. None without a loss, or where the
    weights do not sum to a positive number."""
    tokens: int
    seconds: float
    learning_rate: float | None
    cost: float | None
    failed: int = 0
    """How many of its calls failed; `failure` is the first of them and its reason."""
    failure: str = ""
    is_mean: bool = False
    """Whether the loss is per unit of weight: per token, where all weights are 1."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Those of its last pass and of its optim_step, as the service returned them; of a custom loss your own too."""


class Mark(NamedTuple):
    """Time, steps and tokens at the end of a step."""

    time: float
    steps: int
    tokens: int


class Tally:
    """Counts events; thread-safe. The owner passes it the events, and calls `next_step` if it iterates."""

    def __init__(
        self,
        model_id: str,
        session_id: str,
        samplers: frozenset[str] | None,
        clock: Clock,
        prices: Prices | None = None,
        price: Price | None = None,
        first_step: int = 0,
    ) -> None:
        self._model_id, self._session_id, self._samplers = model_id, session_id, samplers
        self._clock, self._prices, self._price = clock, prices, price
        self._changed = threading.Condition()
        self._open: dict[int, StepEvent | None] = {}
        self._order: deque[int] = deque()
        self._samples: dict[int, Usage] = {}
        self._losses: list[StepEvent] = []
        self.first_step = first_step
        self._optim_calls = self._optim_ends = 0
        self._loop_begun = self._loop_closed = self._loop_done = 0
        self._ends: deque[int] = deque()
        self._steps = 0
        self._paid = 0.0
        self._step_paid = 0.0
        self._step_tokens = 0
        self._step_began = clock.now()
        self._costs: deque[float] = deque(maxlen=RECENT)
        self._cost_at_step = 0.0
        self._marks: deque[Mark] = deque([Mark(self._step_began, first_step, 0)], maxlen=RECENT + 1)
        self.began = self._step_began
        self.cost = 0.0
        """The cost of all calls that have not failed."""
        self.unpriced: dict[str, int] = {}
        """Tokens of models that are not in the price table."""
        self.tokens = 0
        self.history: list[StepRecord] = []
        self.on_record: Callable[[StepRecord], object] = lambda record: None
        """Called with every record, on the thread of the event: it must be quick."""
        self.failures: list[str] = []
        """The calls that failed, each with its reason."""
        self._step_failures: list[str] = []
        self._queues: dict[int, QueueEvent] = {}

    def begin(self) -> None:
        """Start the clock."""
        with self._changed:
            self.began = self._step_began = self._clock.now()
            self._marks[0] = self._marks[0]._replace(time=self.began)

    # -- events -----------------------------------------------------------------------------------------------------

    def started(self, event: StartEvent) -> None:
        with self._changed:
            if event.model_id == self._model_id:
                self._open[event.number] = None
                self._order.append(event.number)
                self._optim_calls += event.operation == "optim_step"
            elif self._is_our_sample(event):
                self._samples[event.number] = event.usage
            else:
                return
            self.cost += self._cost(event.usage)

    def ended(self, event: StepEvent) -> None:
        with self._changed:
            if event.number in self._samples:
                self._settle_sample(self._samples.pop(event.number), event)
            elif event.number in self._open:
                self._open[event.number] = event
                if not event.ok:
                    self.cost -= self._cost(event.usage)
                while self._order and (first := self._open[self._order[0]]) is not None:
                    del self._open[self._order.popleft()]
                    self._settle(first)
            else:
                return
            self._queues.pop(event.number, None)
            self._changed.notify_all()

    def queued(self, event: QueueEvent) -> None:
        with self._changed:
            if event.number in self._open or event.number in self._samples:
                self._queues[event.number] = event

    # -- the loop ---------------------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """Begin another step of the caller's loop; the one before is done once its optim_steps have ended."""
        with self._changed:
            if self._loop_begun:
                self._close_step()
            self._loop_begun += 1

    def last_step(self) -> None:
        """End the caller's loop."""
        with self._changed:
            if self._loop_begun > self._loop_closed:
                self._close_step()

    def wait(self, seconds: float) -> bool:
        """Wait until all calls have ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    # -- totals -----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that are done, including those before `first_step`."""
        return self.first_step + (self._loop_done if self._loop_begun else self._steps)

    @property
    def loop_step(self) -> int:
        """The number of the step that the caller's loop is in; 0 if it does not iterate."""
        return self.first_step + self._loop_begun if self._loop_begun else 0

    def queue(self) -> QueueEvent | None:
        """Return why the first operation that is held back waits. "Active" only means that it is in the queue."""
        with self._changed:
            waiting = [n for n, event in self._queues.items() if event.state not in ("active", "unknown", "")]
            return self._queues[min(waiting)] if waiting else None

    def step_cost(self) -> float:
        """Return the expected cost of the next step."""
        with self._changed:
            return fmean(self._costs) if self._costs else 0.0

    def cost_at(self, steps: int) -> float | None:
        """Return the expected cost of so many steps; None before the first is done."""
        with self._changed:
            if not self._costs:
                return None
            behind = self.first_step + (self._loop_closed if self._loop_begun else self._steps)
            return max(self.cost, self._cost_at_step + max(steps - behind, 0) * fmean(self._costs))

    def seconds_left(self, steps: int) -> float | None:
        with self._changed:
            first, last = self._marks[0], self._marks[-1]
            if last.steps <= first.steps:
                return None
            pace_s = (last.time - first.time) / (last.steps - first.steps)
            # A step that takes longer than the mean does not shorten the estimate for those after it.
            this_s = max(pace_s - (self._clock.now() - last.time), 0.0)
            return this_s + pace_s * max(steps - last.steps - 1, 0)

    def tokens_per_s(self) -> float | None:
        with self._changed:
            first, last = self._marks[0], self._marks[-1]
            took_s = last.time - first.time
            return (last.tokens - first.tokens) / took_s if took_s > 0 and last.tokens > first.tokens else None

    # -- private, with the lock held --------------------------------------------------------------------------------

    def _is_our_sample(self, event: StartEvent) -> bool:
        if event.operation not in SAMPLES:
            return False
        if self._samplers is not None:
            return event.model_id in self._samplers
        return bool(event.session_id) and event.session_id == self._session_id

    def _cost(self, usage: Usage) -> float:
        if self._prices is None or self._price is None:
            return 0.0
        # A sampler created from a path does not know its model: most often it is the one being trained.
        price = self._prices.models.get(usage.base_model) if usage.base_model else self._price
        return 0.0 if price is None else price.of(usage)

    def _count(self, usage: Usage) -> None:
        tokens = usage.train_tokens + usage.prefill_tokens + usage.sampled_tokens
        self.tokens += tokens
        self._step_tokens += tokens
        paid = self._cost(usage)
        self._paid += paid
        self._step_paid += paid
        if self._prices is not None and usage.base_model and usage.base_model not in self._prices.models:
            self.unpriced[usage.base_model] = self.unpriced.get(usage.base_model, 0) + tokens

    def _settle_sample(self, begun: Usage, event: StepEvent) -> None:
        self.cost += (self._cost(event.usage) if event.ok else 0.0) - self._cost(begun)
        if event.ok:
            self._count(event.usage)

    def _settle(self, event: StepEvent) -> None:
        if event.ok:
            self._count(event.usage)
        elif event.reason:  # it was not cancelled
            self.failures.append(f"{event.operation}: {event.reason}")
            self._step_failures.append(self.failures[-1])
        if event.operation in PASSES:  # a failed one has no loss
            self._losses.append(event)
        elif event.operation == "optim_step":
            self._optim_ends += 1
            self._record(event)
            self._advance()

    def _record(self, event: StepEvent) -> None:
        now = self._clock.now()
        self._steps += 1
        rate = event.metrics.get("learning_rate")
        cost = None if self._prices is None else self._step_paid
        seconds = now - self._step_began
        step = self.first_step + self._steps
        loss, failures = loss_of(self._losses), self._step_failures
        self.history.append(
            StepRecord(
                step, loss, self._step_tokens, seconds, rate, cost, len(failures), failures[0] if failures else "",
                is_mean=loss is not None and is_mean(event.metrics for event in self._losses if event.ok),
                metrics=_metrics_of([*self._losses, event]),
            )
        )  # fmt: skip
        self._step_failures = []
        self.on_record(self.history[-1])
        if not self._loop_begun:
            self._costs.append(self._paid - self._cost_at_step)
            self._cost_at_step = self._paid
        self._losses, self._step_paid, self._step_tokens, self._step_began = [], 0.0, 0, now

    def _close_step(self) -> None:
        self._costs.append(self.cost - self._cost_at_step)
        self._cost_at_step = self.cost
        self._loop_closed += 1
        self._ends.append(self._optim_calls)
        self._advance()

    def _advance(self) -> None:
        """Store a mark if a step has ended."""
        while self._ends and self._ends[0] <= self._optim_ends:
            self._ends.popleft()
            self._loop_done += 1
        if self.step > self._marks[-1].steps:
            self._marks.append(Mark(self._clock.now(), self.step, self.tokens))


def _metrics_of(calls: list[StepEvent]) -> Mapping[str, float]:
    metrics: dict[str, float] = {}
    for event in calls:
        metrics |= event.metrics
    metrics.pop("learning_rate", None)  # it has a field
    return metrics


def loss_of(passes: list[StepEvent]) -> float | None:
    """Return one number for all passes of a step: a batch may have been sent in several.

    The weights of a custom loss are gradients of its surrogate, and no measure of the caller's loss: they are left out.
    """
    return step_loss(
        event.metrics if event.operation == "forward_backward" else {"loss:sum": event.metrics.get("loss:sum")}
        for event in passes
    )
