"""The trainer: runs the commands that create, train, save and drop adapters, turn by turn.

Commands of one adapter run in the order of their arrival. Passes of different adapters on one base model share
micro-batches (`micro_batches`), and optimizer steps with the same settings share a kernel call. Short commands run
between micro-batches. Adapters are written on a thread of its own (`saver`), and only their own commands wait for that.

A command either succeeds or leaves its adapter as it was: weights, moments and pending gradient, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tinkex.clock import REAL
from tinkex.engine import heap
from tinkex.engine.adapters import checkpoint, optimizer
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, LoraSpec, OutOfMemory, is_out_of_memory
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training import datum_tensors
from tinkex.engine.training.micro_batches import Pass, next_micro_batch
from tinkex.engine.training.runner import Runner
from tinkex.engine.training.saver import Pace, Saver

PASSES = ("forward", "forward_backward")
SAVES = ("save", "snapshot")

Reply = tuple[int, Frame | Exception]
"""A command's number, and its reply or the error that it raised."""


class Trainer:
    """Holds the adapters in memory. Call `step` while it `has_work`.

    `models` has every name and alias; `add_model` adds others. `choose_runner` is called once for each model
    (`runner_choice.choose_runner`).
    """

    def __init__(
        self, models: Mapping[str, Model], *, choose_runner: Callable[[Model], Runner], token_budget: int = 2048
    ) -> None:
        self._models = dict(models)
        self._choose_runner = choose_runner
        self._token_budget = token_budget
        self._runners = {model: choose_runner(model) for model in dict.fromkeys(models.values())}
        self.adapters: dict[str, Adapter] = {}
        self.saver = Saver()
        self._queue: deque[tuple[int, Frame]] = deque()
        self._passes: list[Pass] = []
        """Passes in progress, the one that has waited longest first."""
        self._running: Generator[None, None, None] | None = None
        """The micro-batch in progress."""
        self._batch: list[Pass] = []
        """The passes that have items in it."""
        self._batch_s = 0.0
        """Seconds that it has taken so far."""

    # Base models

    def add_model(self, model: Model) -> None:
        self._runners[model] = self._choose_runner(model)
        self._models.update(dict.fromkeys(model.info.names, model))

    def uses_model(self, name: str) -> bool:
        """Whether an adapter on a model is in memory."""
        return any(adapter.model is self._models.get(name) for adapter in self.adapters.values())

    def remove_model(self, name: str) -> None:
        """Forget a model that nothing uses."""
        if (model := self._models.get(name)) is not None:
            self._models = {known: other for known, other in self._models.items() if other is not model}
            del self._runners[model]

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: not while all that is queued waits for an adapter to be written."""
        if self._passes or self.saver.has_done:
            return True
        return any(str(command.head.get("adapter")) not in self.saver.names for _, command in self._queue)

    @property
    def passes(self) -> int:
        """How many passes are in progress or queued."""
        return len(self._passes) + sum(command.head.get("op") in PASSES for _, command in self._queue)

    def add(self, number: int, command: Frame) -> None:
        """Queue a command; `step` returns its reply under this number."""
        self._queue.append((number, command))

    def step(self) -> list[Reply]:
        """Take one turn: run the short commands, or a part of a micro-batch. Returns the replies that are ready."""
        return self.saver.take_done() + self._take_turn()

    def _take_turn(self) -> list[Reply]:
        if self._running is None:
            replies = self._start_commands()
            if self._passes:
                # Run in the next turn: a steady flow of short commands must not postpone passes for ever.
                self._running = self._start_micro_batch()
            if replies or self._running is None:
                return replies
        began = REAL.now()
        try:
            next(self._running)
            self._batch_s += REAL.now() - began
            return []
        except StopIteration:
            self._batch_s += REAL.now() - began
            self._running = None
            return self._finish_micro_batch()
        except Exception as error:
            self._running = None
            return self._recover_from(error)

    # Short commands

    def _start_commands(self) -> list[Reply]:
        """Run short commands and begin passes, except those whose adapter is in a pass or is being written."""
        replies: list[Reply] = []
        busy = {pass_.adapter_name for pass_ in self._passes} | self.saver.names
        delayed: deque[tuple[int, Frame]] = deque()
        steps: dict[str, WaitingStep] = {}
        """Optimizer steps that may still be joined by others: they run before the next command of their adapter."""
        while self._queue:
            number, command = self._queue.popleft()
            name = str(command.head.get("adapter"))
            if name in busy:
                delayed.append((number, command))
                continue
            if name in steps:
                replies += _run_optimizer_steps(steps)
            try:
                if command.head.get("op") == "optim_step":
                    steps[name] = WaitingStep(number, self._adapter(name), optimizer.AdamW.read(command.head))
                elif command.head.get("op") in PASSES:
                    self._passes.append(self._start_pass(number, command))
                    busy.add(name)
                elif command.head.get("op") in SAVES:
                    self._start_save(number, name, command.head)
                    busy.add(name)
                else:
                    replies.append((number, self._run_short_command(command)))
            except Exception as error:
                replies.append((number, error))
        self._queue = delayed
        return replies + _run_optimizer_steps(steps)

    def _run_short_command(self, command: Frame) -> Frame:
        head = command.head
        name = head["adapter"]
        match head.get("op"):
            case "create":
                self.adapters[name] = Adapter(self._base_model(head["base"]), _lora_spec(head))
            case "restore":
                self.adapters[name] = checkpoint.restore(Path(head["folder"]), self._base_model)
            case "drop":
                self.adapters.pop(name, None)
                heap.trim()
            case "size":
                size = checkpoint.expected_bytes(self._adapter(name), with_optimizer=bool(head["with_optimizer"]))
                return Frame({"size_bytes": size})
            case "load":
                checkpoint.load(
                    self._adapter(name),
                    Path(head["folder"]),
                    with_optimizer=bool(head["with_optimizer"]),
                    is_upload=bool(head.get("is_upload")),
                )
            case op:
                raise EngineFault(f"The engine knows no operation {op!r}.", "server")
        return Frame({})

    def _start_save(self, number: int, name: str, head: Mapping[str, Any]) -> None:
        """Have an adapter written as it is now. Its next command waits for that."""
        adapter, folder = self._adapter(name), Path(head["folder"])
        with_optimizer = bool(head.get("with_optimizer"))

        def save(pace: Pace) -> Frame:
            if head["op"] == "snapshot":
                return Frame({"size_bytes": checkpoint.snapshot(adapter, folder, pace=pace)})
            files = checkpoint.save(adapter, folder, with_optimizer=with_optimizer, proof=head.get("proof"), pace=pace)
            return Frame({"files": files, "size_bytes": sum(entry["size_bytes"] for entry in files.values())})

        self.saver.start(number, name, save)

    def _base_model(self, name: str) -> Model:
        if name not in self._models:
            raise EngineFault(f"Base model {name!r} is not loaded. Loaded: {', '.join(self._models)}.")
        return self._models[name]

    def _adapter(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise EngineFault(f"Adapter {name} is not in this engine. Create or restore it first.", "server")
        return self.adapters[name]

    # Passes

    def _start_pass(self, number: int, command: Frame) -> Pass:
        name = command.head["adapter"]
        items = datum_tensors.read_items(command, self._adapter(name))
        return Pass(number, name, items, str(command.head.get("tenant", "")))

    def _start_micro_batch(self) -> Generator[None, None, None]:
        """Start the next micro-batch, of the base model of the pass that has waited longest."""
        first = self._passes[0]
        model = first.adapter.model
        chosen = [first]
        if not first.runs_alone:
            chosen = [pass_ for pass_ in self._passes if pass_.adapter.model is model and not pass_.runs_alone]
        runner = self._runners[model]
        items = next_micro_batch(chosen, self._token_budget, runner)
        self._batch, self._batch_s = [pass_ for pass_ in chosen if pass_.running], 0.0
        # Tenants that are served go behind the others, and among the passes of a tenant those that are served.
        served = {pass_.tenant for pass_ in self._batch}
        self._passes.sort(key=lambda pass_: (pass_.tenant in served, pass_ in self._batch))
        return runner.run(items)

    def _finish_micro_batch(self) -> list[Reply]:
        """Return the replies of the passes that ended with this micro-batch, whether they succeeded or failed."""
        replies: list[Reply] = []
        tokens = sum(item.length for pass_ in self._batch for item in pass_.running)
        for pass_ in self._batch:
            pass_.seconds += self._batch_s * sum(item.length for item in pass_.running) / tokens
            fault = next((item.fault for item in pass_.running if item.fault is not None), None)
            pass_.running.clear()
            if fault is None and pass_.pending:
                continue
            self._passes.remove(pass_)
            try:
                if fault is not None:
                    raise fault
                replies.append((pass_.number, pass_.finish()))
            except Exception as error:
                pass_.undo_gradient()
                replies.append((pass_.number, error))
        self._batch = []
        return replies

    def _recover_from(self, error: Exception) -> list[Reply]:
        """Handle a micro-batch that raised. Its passes run again, each alone, so that only the cause of it fails."""
        failed, self._batch = self._batch, []
        for pass_ in failed:
            pass_.undo_gradient()
        if len(failed) > 1:
            for pass_ in failed:
                pass_.restart_alone()
            return []
        (culprit,) = failed
        self._passes.remove(culprit)
        if is_out_of_memory(error):
            error = OutOfMemory(
                f"Out of memory in a pass over {len(culprit.items)} datums, the longest of "
                f"{max(item.length for item in culprit.items)} tokens; nothing of it was added. Send shorter datums, "
                "or start the server with a smaller --max-batch-tokens.",
                "server",
            )
        return [(culprit.number, error)]


class WaitingStep(NamedTuple):
    """An `optim_step` that waits for others with the same settings."""

    number: int
    adapter: Adapter
    settings: optimizer.AdamW


def _run_optimizer_steps(waiting: dict[str, WaitingStep]) -> list[Reply]:
    """Run all waiting steps, those with the same settings together, and empty `waiting`."""
    groups: dict[tuple[optimizer.AdamW, torch.device], list[WaitingStep]] = {}
    for step in waiting.values():
        groups.setdefault((step.settings, step.adapter.model.device), []).append(step)
    waiting.clear()
    return [reply for group in groups.values() for reply in _run_together(group)]


def _run_together(steps: Sequence[WaitingStep], *, may_retry: bool = True) -> list[Reply]:
    """Run steps with the same settings in as few kernel calls as possible."""
    replies: list[Reply] = []
    undone = {step.adapter: step for step in steps}
    try:
        for adapter, metrics in optimizer.step_adapters(list(undone), steps[0].settings):
            replies.append((undone.pop(adapter).number, Frame({"metrics": metrics})))
    except Exception as error:
        # Adapters that are not done are unchanged: each has another try, alone.
        for step in undone.values():
            replies += _run_together([step], may_retry=False) if may_retry else [(step.number, error)]
    return replies


def _lora_spec(head: Mapping[str, Any]) -> LoraSpec:
    flags = {name: bool(head.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
    return LoraSpec(rank=int(head["rank"]), seed=int(head["seed"]), **flags)
