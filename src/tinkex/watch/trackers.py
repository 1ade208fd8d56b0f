"""Sends the numbers of a progress to a tracker too: Weights & Biases, trackio, TensorBoard or MLflow.

Each is imported only when it is asked for. Its calls may wait for a network, so they run on a thread of their own; a
tracker that fails is left alone after one line in the log, and the training goes on.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tinkex.clock import REAL
from tinkex.errors import MissingExtra, ValidationError

log = logging.getLogger("tinkex.progress")
PROJECT = "tinkex"
"""The project, or experiment, where the tracker has no run of the caller's yet."""
MOST_WAITING = 10_000
CLOSE_S = 30.0
"""How long the end of a progress waits for the trackers."""

TrackerName = Literal["wandb", "trackio", "tensorboard", "mlflow"]
Numbers = Mapping[str, float]


class Log(NamedTuple):
    step: int
    numbers: Numbers


class Tracker(NamedTuple):
    """An open tracker. `close` ends what was opened here, not a run that the caller had opened."""

    log: Callable[[int, Numbers], object]
    close: Callable[[], object]


class Trackers:
    """The trackers of one progress, and the thread that calls them."""

    def __init__(self, names: Sequence[TrackerName], run: str, folder: Path) -> None:
        self._names = names
        self._openers = [_OPENERS[name](run, folder) for name in names]
        self._rows: queue.Queue[Log | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._has_lost = False

    def open(self) -> None:
        """Open them on the caller's thread: what is wrong with a login or an address is raised here."""
        trackers = {name: opener() for name, opener in zip(self._names, self._openers, strict=True)}
        self._thread = threading.Thread(target=self._work, args=(trackers,), name="tinkex-trackers", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Numbers) -> None:
        """Log numbers soon. From any thread; never waits."""
        try:
            self._rows.put_nowait(Log(step, numbers))
        except queue.Full:
            if not self._has_lost:
                self._has_lost = True
                log.warning("%s cannot keep up: some numbers are only in metrics.jsonl.", ", ".join(self._names))

    def close(self) -> None:
        """Wait until all is logged, or for half a minute."""
        if self._thread is not None:
            try:
                self._rows.put(None, timeout=CLOSE_S)
            except queue.Full:
                log.warning("%s did not take all numbers in time.", ", ".join(self._names))
                return
            self._thread.join(CLOSE_S)

    def _work(self, trackers: dict[TrackerName, Tracker]) -> None:
        while (row := self._rows.get()) is not None:
            for name, tracker in list(trackers.items()):
                try:
                    tracker.log(row.step, row.numbers)
                except Exception:  # an edge: a tracker's fault must not end the others
                    log.exception("%s failed; nothing more is sent to it", name)
                    del trackers[name]
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception:
                log.exception("%s could not be closed", name)


def names_of(log_to: TrackerName | Sequence[TrackerName] | None) -> list[TrackerName]:
    """Return the trackers that were named. Raises ValidationError for one that is not known."""
    names = [log_to] if isinstance(log_to, str) else list(log_to or ())
    known = get_args(TrackerName)
    for name in names:
        if name not in known:
            raise ValidationError(f"log_to names {name!r}; it can be {', '.join(map(repr, known))}, or a list of them.")
    return names


# -- one function for each: it imports the package, and returns what opens it ------------------------------------------


def _wandb(run: str, folder: Path) -> Callable[[], Tracker]:
    wandb = _imported("wandb", "wandb", "wandb")

    def start() -> Tracker:
        is_ours = wandb.run is None
        current = wandb.init(project=PROJECT, name=run) if is_ours else wandb.run
        # Numbers of a step may come after those of a later one, which wandb's own counter does not allow.
        current.define_metric("step", hidden=True)
        current.define_metric("*", step_metric="step")
        close = current.finish if is_ours else _nothing
        return Tracker(lambda step, numbers: current.log({**numbers, "step": step}), close)

    return start


def _trackio(run: str, folder: Path) -> Callable[[], Tracker]:
    trackio = _imported("trackio", "trackio", "trackio")

    def start() -> Tracker:
        # Its own run, and not the caller's: it keeps the current one by thread.
        current = trackio.init(project=PROJECT, name=run, embed=False)
        return Tracker(lambda step, numbers: current.log(dict(numbers), step=step), current.finish)

    return start


def _tensorboard(run: str, folder: Path) -> Callable[[], Tracker]:
    tensorboard = _imported("tensorboardX", "tensorboard", "TensorBoard")

    def start() -> Tracker:
        writer = tensorboard.SummaryWriter(str(folder))

        def write(step: int, numbers: Numbers) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return Tracker(write, writer.close)

    return start


def _mlflow(run: str, folder: Path) -> Callable[[], Tracker]:
    mlflow = _imported("mlflow", "mlflow", "MLflow")

    def start() -> Tracker:
        active = mlflow.active_run()
        if active is None:
            mlflow.set_experiment(PROJECT)
        client = mlflow.MlflowClient()
        current = active or mlflow.start_run(run_name=run)
        run_id = current.info.run_id  # the active run is that of a thread: ours has none

        def write(step: int, numbers: Numbers) -> None:
            at = int(REAL.wall() * 1000)
            rows = [mlflow.entities.Metric(_mlflow_name(name), value, at, step) for name, value in numbers.items()]
            client.log_batch(run_id, rows)

        return Tracker(write, _nothing if active else lambda: client.set_terminated(run_id))

    return start


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes: others it rejects."""
    return "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in name)


_OPENERS: Mapping[TrackerName, Callable[[str, Path], Callable[[], Tracker]]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}


def _imported(module: str, extra: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(f"log_to={extra!r} ({name})", extra) from None


def _nothing() -> None:
    pass
