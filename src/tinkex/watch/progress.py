"""`tinkex.progress(training, steps=100)`: one line about a training loop, its cost, and a budget that ends it.

It listens to the SDK's events; what the caller logs is sent in the background. It never disturbs the loop: a line that
cannot be drawn is left out, and so is a number that is not known.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex import events
from tinkex.clock import REAL
from tinkex.errors import ConfigError, ValidationError
from tinkex.terminal import curve as curves
from tinkex.terminal import live as live_lines
from tinkex.terminal import screen as screens
from tinkex.watch import prices as price_tables
from tinkex.watch.prices import Price, PriceTable
from tinkex.watch.report import Report
from tinkex.watch.tally import StepRecord, Tally
from tinkex.watch.trackers import TrackerName, Trackers, names_of

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.training import TrainingClient

WAIT_S = 0.2
_TRACKED = ("loss", "tokens", "seconds", "learning_rate", "cost", "failed")
ROUNDING = 1e-9
"""Allowed excess over the budget: sums of floats differ a little from the caller's exact figure."""


def progress(
    training: TrainingClient,
    steps: int | None = None,
    *,
    prices: PriceTable | None = None,
    budget: float | None = None,
    start: int = 0,
    samplers: Sequence[SamplingClient] | None = None,
    label: str = "",
    file: Any = None,
    live: bool | None = None,
    every_s: float = 0.2,
    on_failure: Literal["raise", "show"] = "raise",
    log_to: TrackerName | Sequence[TrackerName] | None = None,
) -> Progress:
    """Show a training loop: step, loss, tokens, time left, why it waits, and what it costs.

    Iterate over it to get the step numbers, or let it count the optim_steps. `prices` are per base model and million
    tokens: a mapping, or the path of a TOML or JSON file. With a `budget` the iteration ends before a step that would
    exceed it. `start` is the first step of a resumed run. Samples of all samplers of the same `ServiceClient` count,
    unless `samplers` names some. The line is written to stderr, or to `file`; `live` overrules whether it is drawn
    over or written as whole lines.

    A call that failed and whose future nobody has read is raised at the next step, or at the end of the `with` block:
    the loop would go on without its gradient. With `on_failure="show"` it is only shown.

    `log_to` names trackers that get the same numbers: "wandb", "trackio", "tensorboard", "mlflow", or several.

    >>> training = service.create_lora_training_client("Qwen/Qwen3-8B")
    >>> datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]})
    >>> with tinkex.progress(training, steps=3) as progress:
    ...     for step in progress:
    ...         passed = training.forward_backward([datum], "cross_entropy")
    ...         stepped = training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
    >>> [record.tokens for record in progress.history]
    [2, 2, 2]
    """
    _check(steps, start, budget, prices is not None)
    if on_failure not in ("raise", "show"):
        raise ValidationError(f"on_failure is {on_failure!r}; it must be 'raise' or 'show'.")
    table = None if prices is None else price_tables.read(prices)
    price: Price | None = None
    if table is not None:
        price = table.of(training.base_model or training.get_info().model_data.model_name or "")
    sampler_ids = None if samplers is None else frozenset(sampler.sampling_session_id for sampler in samplers)
    tally = Tally(training.model_id, training.session_id or "", sampler_ids, REAL, table, price, start)
    report = Report(tally, steps, table, budget, label, REAL)
    trackers = _trackers_of(training, names_of(log_to), label)
    raises = on_failure == "raise"
    return Progress(training, tally, report, file, live, max(every_s, 0.01), raises=raises, trackers=trackers)


class Progress:
    """Created by `tinkex.progress`. A context manager and an iterator; its numbers may be read at any time."""

    def __init__(
        self,
        training: TrainingClient,
        tally: Tally,
        report: Report,
        file: Any,
        live: bool | None,
        every_s: float,
        *,
        raises: bool,
        trackers: Trackers | None,
    ) -> None:
        self._training, self._raises, self._trackers = training, raises, trackers
        tally.on_record = self._keep
        self._tally, self._report = tally, report
        self._file, self._live, self._every_s = file, live, every_s
        self.steps, self.budget = report.steps, report.budget
        self.stopped_by: Literal["", "steps", "budget", "failed"] = ""
        """Why the iteration ended, unless the caller left it."""
        self._screen: screens.Screen | None = None
        self._stops: list[Callable[[], None]] = []
        self._pid = 0
        self._ended_s: float | None = None

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def history(self) -> list[StepRecord]:
        """One record per optim_step: step, loss, tokens, seconds, learning_rate, cost."""
        return list(self._tally.history)

    @property
    def metrics_file(self) -> Path | None:
        """Where steps and everything that was logged for the run are kept on this machine, as lines of JSON."""
        return self._training.metrics_file

    @property
    def notes(self) -> dict[str, list[curves.Point]]:
        """The numbers passed to `log`, by name."""
        return self._report.notes

    @property
    def failures(self) -> list[str]:
        """The calls that failed, each with its reason."""
        return list(self._tally.failures)

    @property
    def step(self) -> int:
        """How many steps are done, including those before `start`."""
        return self._tally.step

    @property
    def tokens(self) -> int:
        """Tokens of all kinds that have been processed."""
        return self._tally.tokens

    @property
    def seconds(self) -> float:
        return REAL.now() - self._tally.began if self._ended_s is None else self._ended_s

    @property
    def cost(self) -> float | None:
        """The cost of all calls that have not failed; None without prices."""
        return None if self._report.prices is None else self._tally.cost

    @property
    def expected_cost(self) -> float | None:
        """The expected cost of all steps, from the mean of the last ones; None before the first step is done."""
        return self._report.expected_cost()

    @property
    def is_over_budget(self) -> bool:
        return self.budget is not None and self._tally.cost > self.budget + ROUNDING

    # -- use --------------------------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float] | None = None, /, **numbers: float) -> None:
        """Show your own numbers beside the loss, and log them for the run: `progress.log(reward=0.4, kl=0.02)`.

        Numbers whose names are no words of Python go as a mapping. See `TrainingClient.log_metrics`.
        """
        together = {**(metrics or {}), **numbers}
        if not together:
            return
        step = self._step_now()
        self._training.log_metrics(together, step)
        if self._trackers is not None:
            self._trackers.log(step, {name: float(value) for name, value in together.items()})
        for name, value in together.items():
            self.notes.setdefault(name, []).append(curves.Point(step, float(value)))

    def note(self, **numbers: float) -> None:
        """Do the same as `log`."""
        self.log(numbers)

    def sample(self, prompt: str, text: str, reward: float | None = None, **metadata: Any) -> None:
        """Log a sample of this step, with whatever belongs to it: `progress.sample(prompt, text, 0.4, group=3)`."""
        self._training.log_sample(prompt, text, reward, step=self._step_now(), metadata=metadata)

    def _keep(self, record: StepRecord) -> None:
        row = {name: _finite(value) for name, value in record._asdict().items()}
        row["metrics"] = {name: _finite(value) for name, value in record.metrics.items()}
        self._training._keep_locally("step", {"time": REAL.wall(), **row})
        if self._trackers is not None:
            numbers = {name: value for name in _TRACKED if (value := getattr(record, name)) is not None}
            self._trackers.log(record.step, {**record.metrics, **numbers})

    def _step_now(self) -> int:
        return self._tally.loop_step or self._tally.step + 1

    def print(self, *values: object) -> None:
        """Print above the live line, without damaging it."""
        text = " ".join(map(str, values))
        if self._screen is None:
            print(text, file=self._file or live_lines.default_file())
        else:
            self._screen.print(text)

    def curve(self, name: str = "loss", *, width: int = 72, height: int = 12) -> str:
        """Return the loss over the steps as text, or the numbers noted under another name."""
        if name == "loss":
            points = [curves.Point(record.step, record.loss) for record in self.history if record.loss is not None]
        elif name in self.notes:
            points = list(self.notes[name])
        else:
            raise ValidationError(f"There is no curve of {name!r}. There are: {', '.join(['loss', *self.notes])}.")
        encoding = getattr(self._file or live_lines.default_file(), "encoding", None)
        return curves.draw(points, name, width, height, encoding)

    def __iter__(self) -> Iterator[int]:
        """Yield the steps, counted from 0 (or `start`), until they are done or the budget is used up."""
        if self._screen is not None:
            yield from self._steps()
            return
        with self:
            yield from self._steps()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the steps as `__iter__` does, for `async for`."""
        if self._screen is not None:
            for step in self._steps():
                yield step
            return
        async with self:
            for step in self._steps():
                yield step

    def __enter__(self) -> Self:
        if self._pid:
            raise ValidationError("This progress has been used already. Create another with tinkex.progress(...).")
        self._pid = os.getpid()
        if self._trackers is not None:
            self._trackers.open()
        self._tally.begin()
        file = live_lines.default_file() if self._file is None else self._file
        self._stops = [
            events.on("start", self._tally.started),
            events.on("step", self._tally.ended),
            events.on("queue", self._tally.queued),
        ]
        self._screen = screens.show(self._report, file, self._live, self._every_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid != os.getpid():
            return  # a forked child: the line and the work belong to the parent
        with self._ending(error):
            while error is None and not self._tally.wait(WAIT_S):
                pass  # the line stays live until all calls have ended
            if self._trackers is not None:
                self._trackers.close()
            if error is None:
                self._training.flush_metrics()
                self._raise_failure()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending(error):
            while error is None and not self._tally.wait(0):
                await asyncio.sleep(WAIT_S / 4)
            if self._trackers is not None:
                await asyncio.to_thread(self._trackers.close)
            if error is None:
                await asyncio.to_thread(self._training.flush_metrics)
                self._raise_failure()

    # -- private ----------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[int]:
        step = max(self._tally.loop_step, self._tally.first_step)
        while self.steps is None or step < self.steps:
            # Calls without a result count too: a loop that sends ahead ends no later than one that waits.
            if self.budget is not None and self._tally.cost + self._tally.step_cost() > self.budget + ROUNDING:
                self.stopped_by = "budget"
                return
            self._raise_failure()
            self._tally.next_step()
            yield step
            step += 1
        self.stopped_by = "steps"

    def _raise_failure(self) -> None:
        """Raise the error of a call that failed unread, if there is one."""
        if not self._raises or not self._tally.failures or (failure := self._training._take_failure()) is None:
            return
        name, error = failure
        self.stopped_by = "failed"
        error.add_note(
            f"{name} failed, and nobody has read its future, so tinkex.progress raises the error: the loop would go on "
            "without it. To go on all the same, pass on_failure='show'."
        )
        raise error

    @contextmanager
    def _ending(self, error: BaseException | None) -> Iterator[None]:
        """Leave the last line behind when the block has ended."""
        try:
            self._tally.last_step()
            yield
        except BaseException as interruption:
            error = interruption
            raise
        finally:
            for stop in self._stops:
                stop()
            self._ended_s = self.seconds
            if self._screen is not None:
                self._screen.remove(self._report, self._report.last(error, self.stopped_by, self.seconds))
            self._screen = None

    def __repr__(self) -> str:
        return f"<Progress: {self._report.last(None, self.stopped_by, self.seconds)}>"


def _trackers_of(training: TrainingClient, names: list[TrackerName], label: str) -> Trackers | None:
    if not names:
        return None
    kept = training.metrics_file
    folder = Path("runs") / training.model_id.replace(":", "-") if kept is None else kept.parent
    return Trackers(names, label or training.model_id, folder)


def _finite(value: Any) -> Any:
    """Return None for a number that JSON cannot say."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(steps: int | None, start: int, budget: float | None, has_prices: bool) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise ValidationError(f"steps is {steps!r}; it must be a whole number from 0 up, or None for no end.")
    if not isinstance(start, int) or start < 0:
        raise ValidationError(f"start is {start!r}; it must be the number of steps done before, from 0 up.")
    if budget is None:
        return
    if not budget > 0:
        raise ConfigError(f"budget is {budget!r}; it must be an amount above 0.")
    if not has_prices:
        raise ConfigError(
            "A budget needs prices: pass prices={base_model: {'train': ..., 'prefill': ..., 'sample': ...}}, per "
            "million tokens, or the path of a TOML or JSON file."
        )
