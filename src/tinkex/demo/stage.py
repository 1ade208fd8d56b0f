"""What both demos share: a folder, the service of this machine, and the saved state.

The run is on the home, like those of every other program; the folder has the state and the trained adapter. The
service journals every step it accepts, so a demo that was stopped, even by `kill -9`, continues the same run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinkex.client.download import download_checkpoint
from tinkex.client.training import TrainingClient
from tinkex.clock import REAL
from tinkex.errors import DeadlineExceeded, NotFoundError, TinkexError
from tinkex.local_service import LocalServiceClient, local
from tinkex.terminal import curve as curves
from tinkex.terminal.format import duration, size
from tinkex.terminal.live import size_of
from tinkex.types import RunStep

NEEDED_BYTES = 1_500_000_000
"""The model as downloaded and as unpacked, and the demo's own data."""
CATCH_UP_S = 120.0
STATE, ADAPTER = "demo.json", "adapter"
NAME = "demo"
"""The name of the saved checkpoints."""


@dataclass(slots=True, kw_only=True)
class DemoState:
    """The saved state of a demo that was stopped."""

    model: str
    seed: int
    steps: int
    run_id: str = ""
    answers: list[str] = field(default_factory=list)
    """Answers before training."""
    rewards: list[float] = field(default_factory=list)


class Stage:
    """A demo's folder, service and state. `command` is what the user typed, for messages about what to type next."""

    def __init__(
        self,
        folder: Path,
        model: str,
        seed: int,
        steps: int,
        *,
        data_dir: Path | None = None,
        is_fresh: bool = False,
        command: str = "tinkex demo",
    ) -> None:
        """`data_dir`: another home than the one that all programs share."""
        self.folder, self.data_dir, self.command = folder, data_dir, command
        self.state = DemoState(model=model, seed=seed, steps=steps)
        self.began = REAL.now()
        before = None if is_fresh else self._read()
        if before is not None and (before.model, before.seed, before.steps) == (model, seed, steps):
            self.state = before

    # -- the folder -------------------------------------------------------------------------------------------------

    def _read(self) -> DemoState | None:
        try:
            return DemoState(**json.loads((self.folder / STATE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # no state, or one of another release: start from the beginning
            return None

    def save_state(self) -> None:
        file = self.folder / STATE
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self.state), indent=1), encoding="utf-8")
        os.replace(unfinished, file)

    def clear_state(self) -> None:
        """Make the next demo start from the beginning. The trained adapter stays."""
        (self.folder / STATE).unlink(missing_ok=True)

    # -- the service ------------------------------------------------------------------------------------------------

    @contextmanager
    def service(self) -> Iterator[LocalServiceClient]:
        """Use the service of this machine, which is started if none runs, until the block ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise TinkexError(
                f"{self.folder} cannot be used: {error.strerror}. Name another folder with --folder."
            ) from None
        if free < NEEDED_BYTES:
            raise TinkexError(
                f"{self.folder} has {size(free)} left and the demo needs {size(NEEDED_BYTES)}. "
                "Free some space, or name a folder on another disk with --folder."
            )
        with local(self.state.model, data_dir=self.data_dir) as service:
            yield service

    def training(self, service: LocalServiceClient, rank: int) -> tuple[TrainingClient, int, bool]:
        """Return a new run or the one that was stopped, its number of steps, and whether a gradient is pending."""
        if self.state.run_id:
            try:
                training = service.create_training_client_from_run(self.state.run_id)
                steps, is_open = self._catch_up(service)
                say(f"Continuing after step {len(steps)}; --fresh starts from the beginning.")
                return training, len(steps), is_open
            except NotFoundError:
                say("The stopped run no longer exists. Starting from the beginning.")
        self.state.rewards = []
        training = service.create_lora_training_client(self.state.model, rank=rank, seed=self.state.seed)
        self.state.run_id = training.model_id
        self.save_state()
        return training, 0, False

    def read_steps(self, service: LocalServiceClient) -> tuple[list[RunStep], bool, bool]:
        """Return all steps of the run, whether a gradient is pending, and whether operations are running."""
        rest, after = service.create_rest_client(), -1
        steps: list[RunStep] = []
        while True:
            page = rest.get_run_steps(self.state.run_id, after).result()
            if not page.steps:
                return steps, page.open_passes > 0, page.is_active
            steps += page.steps
            after = page.next_seq_id

    def _catch_up(self, service: LocalServiceClient) -> tuple[list[RunStep], bool]:
        """Wait until the operations that were accepted before the stop have run."""
        began = REAL.now()
        while True:
            steps, is_open, is_active = self.read_steps(service)
            if not is_active:
                return steps, is_open
            if REAL.now() - began > CATCH_UP_S:
                raise DeadlineExceeded(
                    f"The run's last steps did not finish within {CATCH_UP_S:.0f} s. --fresh starts from the beginning."
                )
            REAL.pause(0.2)

    # -- the end ----------------------------------------------------------------------------------------------------

    def save_adapter(self, service: LocalServiceClient, training: TrainingClient) -> str:
        """Save the adapter on the service for sampling, and as files in the folder. Returns its tinker:// path."""
        saving, state = training.save_weights_for_sampler(NAME), training.save_state(NAME)
        path = saving.result().path
        state.result()
        assert path is not None
        folder = self.folder / ADAPTER
        shutil.rmtree(folder, ignore_errors=True)
        download_checkpoint(service.create_rest_client(), path, folder).result()
        return path

    def print_next_steps(self, path: str) -> None:
        adapter = _shown(self.folder / ADAPTER)
        data = "" if self.data_dir is None else f', data_dir="{_shown(self.data_dir)}"'
        say(f"\nDone in {duration(REAL.now() - self.began)}. What you can do now:")
        say(f"  use the adapter    {adapter}  (PEFT files)")
        say(f"  merge it           tinkex export {adapter} --out my-model --merge")
        say(f"  open the console   {self.command} --console  (runs, curves, downloads, a playground)")
        say("  sample in Python:")
        say(
            textwrap.indent(
                f'import tinkex\n\npath = "{path}"\n'
                f'with tinkex.local("{self.state.model}"{data}) as service:\n'
                "    sampler = service.create_sampling_client(model_path=path)",
                " " * 6,
            )
        )
        say("  train your own: README.md, examples/01_chat_fine_tune.py")


def say(text: str = "") -> None:
    print(text, flush=True)


def draw(values: Sequence[float | None], name: str) -> str:
    """Return a curve over all steps, as wide as the terminal allows."""
    points = [curves.Point(number, value) for number, value in enumerate(values, 1) if value is not None]
    width = min(size_of(sys.stdout)[0], 80)
    return curves.draw(points, name, width, 12, sys.stdout.encoding)


def _shown(path: Path) -> str:
    """Return a path relative to the current folder, if possible."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
