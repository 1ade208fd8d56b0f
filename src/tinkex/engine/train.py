"""The trainer: takes the commands that make, train, keep and forget adapters, and runs them turn by turn.

Commands of one adapter run in the order of their coming. Passes of different adapters on one base model share
micro-batches: each party (the server says who) gets an equal share of a micro-batch's tokens, and what one leaves over
the others take, so that a short pass is over with the next micro-batch however long the others are. Between
micro-batches short commands run.

A command either succeeds or leaves its adapter as it was: weights, moments and pending gradient, bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine import batch, checkpoint, losses, optimizer
from tinkex.engine.adapters import Adapter
from tinkex.engine.base import EngineFault, LoraSpec
from tinkex.engine.frames import Frame
from tinkex.engine.model import Model
from tinkex.engine.runner import Item, Outcome, Runner
from tinkex.engine.runners import runner_for

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

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._passes)

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._passes)

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
        try:
            next(self._running)
            return []
        except StopIteration:
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
        while self._queue:
            number, command = self._queue.popleft()
            name = str(command.head.get("adapter"))
            if name in busy:
                left.append((number, command))
                continue
            try:
                if command.head.get("op") in PASSES:
                    self._passes.append(self._begin(number, command))
                    busy.add(name)
                else:
                    replies.append((number, self._short(command)))
            except Exception as problem:
                replies.append((number, problem))
        self._queue = left
        return replies

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
            case "optim_step":
                return Frame({"metrics": optimizer.step(adapter, optimizer.AdamW.read(head))})
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
        data = batch.read(command, loss, adapter.model)
        items = [Item(adapter, datum, loss, config, needs_gradient) for datum in data]
        return Pass(number, head["adapter"], items, str(head.get("party", "")))

    def _next_batch(self) -> Generator[None, None, None]:
        """The next micro-batch, of the base model whose turn it is."""
        first = self._passes[0]
        model = first.adapter.model
        chosen = [first] if first.is_alone else [one for one in self._passes if _goes_with(one, model)]
        runner = self._runners[model]
        items = share(chosen, self._token_budget, runner)
        self._batch = [one for one in chosen if one.running]
        # Parties that had a turn go behind the others, and within a party its passes.
        served = {one.party for one in self._batch}
        self._passes.sort(key=lambda one: (one.party in served, one in self._batch))
        return runner.run(items)

    def _settle(self) -> list[Reply]:
        """After a micro-batch: answer the passes that are over, well or badly."""
        replies: list[Reply] = []
        for one in self._batch:
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
        return _reply([item.outcome for item in self.items if isinstance(item.outcome, Outcome)])

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


def _goes_with(one: Pass, model: Model) -> bool:
    return one.adapter.model is model and not one.is_alone


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


def _is_out_of_memory(problem: BaseException) -> bool:
    if isinstance(problem, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)


def _reply(outcomes: Sequence[Outcome]) -> Frame:
    rows: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for index, (logprobs, _) in enumerate(outcomes):
        rows.append({"logprobs": {"dtype": "float32", "shape": list(logprobs.shape), "data": index}})
        buffers.append(logprobs.numpy().tobytes())
    return Frame({"metrics": losses.combine([outcome.metrics for outcome in outcomes]), "outputs": rows}, buffers)


def _spec(head: Mapping[str, Any]) -> LoraSpec:
    flags = {name: bool(head.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
    return LoraSpec(rank=int(head["rank"]), seed=int(head["seed"]), **flags)
