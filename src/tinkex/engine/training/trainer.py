"""The trainer: takes the commands that make, train, keep and forget adapters, and runs them turn by turn.

Commands of one adapter run in the order of their coming. Passes of different adapters on one base model share
micro-batches (`passes`), and optimizer steps of the same settings a kernel. Between micro-batches short commands run.

A command either succeeds or leaves its adapter as it was: weights, moments and pending gradient, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from tinkex.engine.adapters import checkpoint, optimizer
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, LoraSpec
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.runner_choice import runner_for
from tinkex.engine.training import datum_tensors, losses
from tinkex.engine.training.micro_batches import Pass, share
from tinkex.engine.training.runner import Item

PASSES = ("forward", "forward_backward")

Reply = tuple[int, Frame | Exception]
"""A command's number and what came of it."""


class Trainer:
    """Holds the adapters in memory. `models` has every name and alias. `step` while it `has_work`."""

    def __init__(self, models: Mapping[str, Model], *, token_budget: int = 2048, runner: str = "auto") -> None:
        self._models = models
        self._token_budget = token_budget
        self._runners = {model: runner_for(model, runner) for model in dict.fromkeys(models.values())}
        self.adapters: dict[str, Adapter] = {}
        self._queue: deque[tuple[int, Frame]] = deque()
        self._passes: list[Pass] = []
        self._running: Generator[None, None, None] | None = None
        self._batch: list[Pass] = []
        """Those that have items in the micro-batch that is running."""
        self._batch_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._passes)

    @property
    def passes(self) -> int:
        """Under way or waiting."""
        return len(self._passes) + sum(command.head.get("op") in PASSES for _, command in self._queue)

    def add(self, number: int, command: Frame) -> None:
        self._queue.append((number, command))

    def step(self) -> list[Reply]:
        """One turn: what is short, or a part of a micro-batch. Returns what is finished."""
        if self._running is None:
            replies = self._admit()
            if self._passes:
                self._running = self._next_batch()  # however many short commands keep coming
            if replies or self._running is None:
                return replies
        began = perf_counter()
        try:
            next(self._running)
            self._batch_s += perf_counter() - began
            return []
        except StopIteration:
            self._batch_s += perf_counter() - began
            self._running = None
            return self._settle()
        except Exception as problem:
            self._running = None
            return self._broken(problem)

    # What is short

    def _admit(self) -> list[Reply]:
        """Begin passes and run short commands, as far as their adapters are free."""
        replies: list[Reply] = []
        busy = {one.name for one in self._passes}
        left: deque[tuple[int, Frame]] = deque()
        steps: dict[str, Step] = {}
        """Optimizer steps, together as far as nothing of the same adapters comes between."""
        while self._queue:
            number, command = self._queue.popleft()
            name = str(command.head.get("adapter"))
            if name in busy:
                left.append((number, command))
                continue
            if name in steps:
                replies += _steps(steps)
            try:
                if command.head.get("op") == "optim_step":
                    steps[name] = Step(number, self._find(name), optimizer.AdamW.read(command.head))
                elif command.head.get("op") in PASSES:
                    self._passes.append(self._begin(number, command))
                    busy.add(name)
                else:
                    replies.append((number, self._short(command)))
            except Exception as problem:
                replies.append((number, problem))
        self._queue = left
        return replies + _steps(steps)

    def _short(self, command: Frame) -> Frame:
        head = command.head
        name = head["adapter"]
        match head.get("op"):
            case "create":
                self.adapters[name] = Adapter(self._model(head["base"]), _spec(head))
                return Frame({})
            case "restore":
                self.adapters[name] = checkpoint.restore(Path(head["folder"]), self._model)
                return Frame({})
            case "drop":
                self.adapters.pop(name, None)
                return Frame({})
        adapter = self._find(name)
        match head.get("op"):
            case "snapshot":
                return Frame({"size_bytes": checkpoint.snapshot(adapter, Path(head["folder"]))})
            case "save":
                files = checkpoint.save(adapter, Path(head["folder"]), with_optimizer=bool(head["with_optimizer"]))
                return Frame({"files": files, "size_bytes": sum(entry["size_bytes"] for entry in files.values())})
            case "load":
                checkpoint.load(adapter, Path(head["folder"]), with_optimizer=bool(head["with_optimizer"]))
                return Frame({})
        raise EngineFault(f"The engine knows no operation {head.get('op')!r}.", "server")

    def _model(self, base: str) -> Model:
        if base not in self._models:
            raise EngineFault(f"Base model {base!r} is not loaded. Loaded: {', '.join(self._models)}.")
        return self._models[base]

    def _find(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise EngineFault(f"Adapter {name} is not in this engine. Create or restore it first.", "server")
        return self.adapters[name]

    # Passes

    def _begin(self, number: int, command: Frame) -> Pass:
        head = command.head
        adapter = self._find(head["adapter"])
        loss = losses.find(head["loss_fn"])
        config = losses.settings(loss, head["config"])
        needs_gradient = head["op"] == "forward_backward"
        data = datum_tensors.read(command, loss, adapter.model)
        items = [Item(adapter, datum, loss, config, needs_gradient) for datum in data]
        return Pass(number, head["adapter"], items, str(head.get("party", "")))

    def _next_batch(self) -> Generator[None, None, None]:
        """The next micro-batch, of the base model whose turn it is."""
        first = self._passes[0]
        model = first.adapter.model
        chosen = [first] if first.is_alone else [one for one in self._passes if _goes_with(one, model)]
        runner = self._runners[model]
        items = share(chosen, self._token_budget, runner)
        self._batch, self._batch_s = [one for one in chosen if one.running], 0.0
        # Parties that had a turn go behind the others, and within a party its passes.
        served = {one.party for one in self._batch}
        self._passes.sort(key=lambda one: (one.party in served, one in self._batch))
        return runner.run(items)

    def _settle(self) -> list[Reply]:
        """After a micro-batch: answer the passes that are over, well or badly."""
        replies: list[Reply] = []
        tokens = sum(item.length for one in self._batch for item in one.running)
        for one in self._batch:
            one.seconds += self._batch_s * sum(item.length for item in one.running) / tokens
            fault = next((item.outcome for item in one.running if isinstance(item.outcome, EngineFault)), None)
            one.running.clear()
            if fault is None and one.left:
                continue
            self._passes.remove(one)
            try:
                if fault is not None:
                    raise fault
                replies.append((one.number, one.finish()))
            except Exception as problem:
                one.undo()
                replies.append((one.number, problem))
        self._batch = []
        return replies

    def _broken(self, problem: Exception) -> list[Reply]:
        """A micro-batch came to nothing. Its passes run again, each alone, so that only the guilty one fails."""
        together, self._batch = self._batch, []
        for one in together:
            one.undo()
        if len(together) > 1:
            for one in together:
                one.begin_again()
            return []
        (guilty,) = together
        self._passes.remove(guilty)
        if _is_out_of_memory(problem):
            problem = EngineFault(
                f"Out of memory in a pass over {len(guilty.items)} datums, the longest of "
                f"{max(item.length for item in guilty.items)} tokens; nothing of it was added. Send shorter datums, or "
                "start the server with a smaller --max-batch-tokens.",
                "server",
            )
        return [(guilty.number, problem)]


class Step(NamedTuple):
    """An `optim_step` that waits for others like it."""

    number: int
    adapter: Adapter
    settings: optimizer.AdamW


def _steps(waiting: dict[str, Step]) -> list[Reply]:
    """Take steps, those of the same settings together. None is left waiting."""
    alike: dict[tuple[optimizer.AdamW, torch.device], list[Step]] = {}
    for one in waiting.values():
        alike.setdefault((one.settings, one.adapter.model.device), []).append(one)
    waiting.clear()
    replies: list[Reply] = []
    for (settings, _), together in alike.items():
        left = {id(one.adapter): one.number for one in together}
        problem = _step_all([one.adapter for one in together], settings, left, replies)
        # Those that are not done are as they were: each has another try, alone.
        for one in together if problem is not None else ():
            if id(one.adapter) in left:
                alone = _step_all([one.adapter], settings, left, replies)
                replies += [(one.number, alone)] if alone is not None else []
    return replies


def _step_all(
    adapters: Sequence[Adapter], settings: optimizer.AdamW, left: dict[int, int], replies: list[Reply]
) -> Exception | None:
    """Takes those that are done out of `left`; what stopped it, if anything did."""
    try:
        for adapter, metrics in optimizer.step_all(adapters, settings):
            replies.append((left.pop(id(adapter)), Frame({"metrics": metrics})))
        return None
    except Exception as problem:
        return problem


def _goes_with(one: Pass, model: Model) -> bool:
    return one.adapter.model is model and not one.is_alone


def _is_out_of_memory(problem: BaseException) -> bool:
    if isinstance(problem, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)


def _spec(head: Mapping[str, Any]) -> LoraSpec:
    flags = {name: bool(head.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
    return LoraSpec(rank=int(head["rank"]), seed=int(head["seed"]), **flags)
