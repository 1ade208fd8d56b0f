"""The trainer: runs the commands that make, train, keep and forget adapters, one micro-batch at a time.

A command either succeeds or leaves its adapter as it was: weights, moments and pending gradient, bit for bit.

Axes: B datums of a micro-batch, T tokens, N their tokens without padding, E targets of those, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from tinkex.engine import batch, checkpoint, losses, optimizer
from tinkex.engine.adapters import Adapter
from tinkex.engine.base import EngineFault, LoraSpec
from tinkex.engine.batch import Datum
from tinkex.engine.frames import Frame
from tinkex.engine.losses import Config, Loss, Metrics
from tinkex.engine.model import Model

LOGITS = 2**25
"""Logits held at a time (128 MB in float32)."""
MOST_ROWS = 512
"""Positions unembedded at a time: measured to be as fast as more."""


class Outcome(NamedTuple):
    """What a pass says about one datum."""

    logprobs: Tensor
    metrics: Metrics


class Trainer:
    """Holds the adapters in memory. `models` has every name and alias."""

    def __init__(self, models: Mapping[str, Model], *, token_budget: int = 4096) -> None:
        self._models = models
        self._token_budget = token_budget
        self.adapters: dict[str, Adapter] = {}
        self._in_passes: set[str] = set()

    def run(self, command: Frame) -> Generator[None, None, Frame]:
        """Run one command. Yields between micro-batches, so that others can take turns. Raises EngineFault."""
        head = command.head
        name = head["adapter"]
        if name in self._in_passes:
            raise EngineFault(f"Adapter {name} is in the middle of another operation.", "server")
        match head["op"]:
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
        match head["op"]:
            case "forward" | "forward_backward":
                self._in_passes.add(name)
                try:
                    return (yield from self._pass(command, adapter))
                finally:
                    self._in_passes.discard(name)
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
        raise EngineFault(f"The engine knows no operation {head['op']!r}.", "server")

    def _model(self, base: str) -> Model:
        if base not in self._models:
            raise EngineFault(f"Base model {base!r} is not loaded. Loaded: {', '.join(self._models)}.")
        return self._models[base]

    def _find(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise EngineFault(f"Adapter {name} is not in this engine. Create or restore it first.", "server")
        return self.adapters[name]

    def _pass(self, command: Frame, adapter: Adapter) -> Generator[None, None, Frame]:
        head = command.head
        loss = losses.find(head["loss_fn"])
        config = losses.settings(loss, head["config"])
        data = batch.read(command, loss, adapter.model)
        outcomes: dict[int, Outcome] = {}
        needs_gradient = head["op"] == "forward_backward"
        undo = adapter.gradient_P.clone() if needs_gradient and adapter.has_gradient else None
        try:
            for group in batch.plan([len(datum.tokens_T) for datum in data], self._token_budget):
                if outcomes:
                    yield
                found = _micro_batch(adapter, [data[index] for index in group], loss, config, needs_gradient)
                outcomes.update(zip(group, found, strict=True))
            if needs_gradient and not math.isfinite(optimizer.norm(adapter.gradient_P)):
                raise EngineFault(
                    "The gradient of this batch is beyond the range of float32 (inf or nan), so it was not added. Look "
                    "for very large weights or advantages, or logprobs far below the model's own."
                )
        except BaseException as problem:  # also when the generator is closed half-way
            if undo is not None:
                adapter.gradient_P.copy_(undo)
            elif needs_gradient:
                adapter.gradient_P.zero_()
            if _is_out_of_memory(problem):
                raise EngineFault(
                    f"Out of memory in a pass over {len(data)} datums, the longest of "
                    f"{max(len(datum.tokens_T) for datum in data)} tokens; nothing of it was added. Send shorter "
                    "datums, or start the server with a smaller --max-batch-tokens.",
                    "server",
                ) from None
            raise
        adapter.has_gradient = adapter.has_gradient or needs_gradient
        return _reply([outcomes[index] for index in range(len(data))])


def target_logprobs(adapter: Adapter, data: Sequence[Datum]) -> list[Tensor]:
    """For each datum the log-probabilities of its targets, in their shape.

    Logits exist only for a few positions at a time; a backward pass computes them again instead of keeping them.
    """
    model = adapter.model
    tokens_BT = batch.pad(data)
    hidden_BTD = model.hidden(tokens_BT, adapter.segments(len(data)))
    lengths = [len(datum.tokens_T) for datum in data]
    places_N = torch.cat([torch.arange(n) + row * tokens_BT.shape[1] for row, n in enumerate(lengths)])
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, places_N.to(model.device))
    # A position has as many targets as its datum's rows do: `ends_N` is where they end among all of them.
    counts_N = torch.cat([torch.full((n,), datum.targets.numel() // n) for n, datum in zip(lengths, data, strict=True)])
    ends_N = [0, *counts_N.cumsum(0).tolist()]
    rows_E = torch.arange(len(counts_N)).repeat_interleave(counts_N).to(model.device)
    targets_E = torch.cat([datum.targets.flatten() for datum in data])

    def pick(hidden_ND: Tensor, rows_E: Tensor, targets_E: Tensor) -> Tensor:
        logits_NV = model.logits(hidden_ND, adapter.segments(len(hidden_ND)))
        picked_E = logits_NV.flatten().gather(0, rows_E * logits_NV.shape[1] + targets_E)
        return picked_E - logits_NV.logsumexp(-1).index_select(0, rows_E)

    pieces = []
    step = max(1, min(MOST_ROWS, LOGITS // model.vocab_size))
    for start in range(0, len(hidden_ND), step):
        stop = min(start + step, len(hidden_ND))
        wanted = slice(ends_N[start], ends_N[stop])
        given = (hidden_ND[start:stop], rows_E[wanted] - start, targets_E[wanted])
        if torch.is_grad_enabled():
            pieces.append(recomputed(pick, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(pick(*given))
    parts = torch.split(torch.cat(pieces), [datum.targets.numel() for datum in data])
    return [part.view(datum.targets.shape) for part, datum in zip(parts, data, strict=True)]


def _micro_batch(
    adapter: Adapter, data: Sequence[Datum], loss: Loss, config: Config, needs_gradient: bool
) -> list[Outcome]:
    outcomes, terms = [], []
    with torch.set_grad_enabled(needs_gradient):
        for datum, logprobs in zip(data, target_logprobs(adapter, data), strict=True):
            try:
                term, metrics = loss.compute(logprobs, datum.inputs, config)
            except EngineFault as fault:
                raise EngineFault(f"data[{datum.index}]: {fault}", fault.category) from None
            metrics = {"loss:sum": float(term.detach()), **metrics}
            _check_finite(datum, logprobs, metrics)
            terms.append(term)
            outcomes.append(Outcome(logprobs.detach().cpu(), metrics))
        if needs_gradient:
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    return outcomes


def _check_finite(datum: Datum, logprobs: Tensor, metrics: Metrics) -> None:
    if not bool(logprobs.detach().isfinite().all()):
        raise EngineFault(
            f"data[{datum.index}]: the model's log-probabilities are not finite, so its weights have grown too large. "
            "Load an earlier checkpoint and use a smaller learning rate."
        )
    wrong = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise EngineFault(
            f"data[{datum.index}]: {wrong[0]}. Look for logprobs far from the model's own, or very large weights or "
            "advantages."
        )


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
