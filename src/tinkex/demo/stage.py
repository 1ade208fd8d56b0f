"""What both demos stand on: a folder that stays, a private service in it, and a memory of how far they came.

The service journals every step it accepts, so a demo that was stopped, however rudely, goes on with the same run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import threading
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
from tinkex.terminal.live import size_of
from tinkex.types import RunStep

NEEDED_BYTES = 1_500_000_000
"""The model as it comes and as it is kept, and the demo's own data."""
CATCH_UP_S = 120.0
MEMORY, SERVICE, ADAPTER = "demo.json", "service", "adapter"
NAME = "demo"
"""Of the checkpoints that are saved."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """How far a demo came."""

    model: str
    seed: int
    steps: int
    run_id: str = ""
    answers: list[str] = field(default_factory=list)
    """Those before training."""
    rewards: list[float] = field(default_factory=list)


class Stage:
    """`command` is what the user typed, for messages that tell what to type next."""

    def __init__(
        self, folder: Path, model: str, seed: int, steps: int, *, is_fresh: bool = False, command: str = "tinkex demo"
    ) -> None:
        self.folder, self.command = folder, command
        self.memory = Memory(model=model, seed=seed, steps=steps)
        self.began = REAL.now()
        before = None if is_fresh else self._read()
        if before is not None and (before.model, before.seed, before.steps) == (model, seed, steps):
            self.memory = before

    # -- the folder -------------------------------------------------------------------------------------------------

    def _read(self) -> Memory | None:
        try:
            return Memory(**json.loads((self.folder / MEMORY).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # none, or of another release: begin anew
            return None

    def remember(self) -> None:
        file = self.folder / MEMORY
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self.memory), indent=1), encoding="utf-8")
        os.replace(unfinished, file)

    def forget(self) -> None:
        """The demo came to its end: the next one begins anew. What was trained stays."""
        (self.folder / MEMORY).unlink(missing_ok=True)

    # -- the service ------------------------------------------------------------------------------------------------

    @contextmanager
    def service(self) -> Iterator[LocalServiceClient]:
        """A private service on this folder, gone when the block is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as problem:
            raise TinkexError(
                f"{self.folder} cannot be used: {problem.strerror}. Name another with --folder."
            ) from None
        if free < NEEDED_BYTES:
            raise TinkexError(
                f"{self.folder} has {free / 1e9:.1f} GB left and the demo needs {NEEDED_BYTES / 1e9:.1f} GB. "
                "Free some space, or name a folder on another disk with --folder."
            )
        # Nothing need be waited for when it ends: whatever was accepted is in the journal.
        with local(self.memory.model, data_dir=self.folder / SERVICE, drain_s=0) as service:
            yield service

    def training(self, service: LocalServiceClient, rank: int) -> tuple[TrainingClient, int, bool]:
        """A new run, or the one that was stopped; how many steps it has made; whether a gradient waits for the next."""
        if self.memory.run_id:
            try:
                training = service.create_training_client_from_run(self.memory.run_id)
                steps, is_open = self._catch_up(service)
                say(f"Going on after step {len(steps)}; --fresh begins anew.")
                return training, len(steps), is_open
            except NotFoundError:
                say("The run that was stopped is gone. Beginning anew.")
        self.memory.rewards = []
        training = service.create_lora_training_client(self.memory.model, rank=rank, seed=self.memory.seed)
        self.memory.run_id = training.model_id
        self.remember()
        return training, 0, False

    def steps(self, service: LocalServiceClient) -> list[RunStep]:
        """The run's steps as the service knows them, also those of an earlier sitting."""
        return self._read_steps(service)[0]

    def _read_steps(self, service: LocalServiceClient) -> tuple[list[RunStep], bool, bool]:
        """Page by page; whether a gradient waits, and whether operations still do."""
        rest, after = service.create_rest_client(), -1
        steps: list[RunStep] = []
        while True:
            found = rest.get_run_steps(self.memory.run_id, after).result()
            if not found.steps:
                return steps, found.open_passes > 0, found.is_active
            steps += found.steps
            after = found.next_seq_id

    def _catch_up(self, service: LocalServiceClient) -> tuple[list[RunStep], bool]:
        """Wait until what was accepted before the stop has run."""
        began = REAL.now()
        while True:
            steps, is_open, is_active = self._read_steps(service)
            if not is_active:
                return steps, is_open
            if REAL.now() - began > CATCH_UP_S:
                raise DeadlineExceeded(
                    f"The run's last steps did not end within {CATCH_UP_S:.0f} s. --fresh begins anew."
                )
            pause(0.2)

    # -- the end ----------------------------------------------------------------------------------------------------

    def keep(self, service: LocalServiceClient, training: TrainingClient) -> str:
        """Save the adapter twice: on the service for sampling, and as files beside it. Returns its path there."""
        saving, state = training.save_weights_for_sampler(NAME), training.save_state(NAME)
        path = saving.result().path
        state.result()
        assert path is not None
        fetched = self.folder / ADAPTER
        shutil.rmtree(fetched, ignore_errors=True)
        download_checkpoint(service.create_rest_client(), path, fetched).result()
        return path

    def closing_words(self, path: str) -> None:
        adapter, data = _shown(self.folder / ADAPTER), self.folder / SERVICE
        say(f"\nDone in {(REAL.now() - self.began) / 60:.1f} minutes. What you have now:")
        say(f"  the adapter        {adapter}  (PEFT files)")
        say(f"  merge it           tinkex export {adapter} --out my-model --merge")
        say(f"  the console        {self.command} --console  (runs, curves, downloads, a playground)")
        say("  the same in code:")
        say(
            textwrap.indent(
                f'import tinkex\n\nwith tinkex.local("{self.memory.model}", data_dir="{_shown(data)}") as service:\n'
                f'    sampler = service.create_sampling_client(model_path="{path}")',
                " " * 6,
            )
        )
        say("  and training itself is ten lines: README.md, examples/01_chat_fine_tune.py")


def say(text: str = "") -> None:
    print(text, flush=True)


def draw(values: Sequence[float | None], name: str) -> str:
    """A curve over all steps, as wide as the terminal allows."""
    points = [curves.Point(number, value) for number, value in enumerate(values, 1) if value is not None]
    width = min(size_of(sys.stdout)[0], 80)
    return curves.draw(points, name, width, 12, sys.stdout.encoding)


def _shown(place: Path) -> str:
    """A path as short as it can be and still be typed."""
    try:
        return str(place.relative_to(Path.cwd()))
    except ValueError:
        return str(place)


def pause(seconds: float) -> None:
    """Wait; Ctrl-C ends it."""
    threading.Event().wait(seconds)
