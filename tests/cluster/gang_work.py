"""What the tests of a gang let an engine do: training by several tenants, as any engine does it, and its numbers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tinkex.engine.contract import ModelInfo, Sampled, SampleSpec, pass_frame, read_outputs
from tinkex.engine.frames import Frame
from tinkex.engine.host import LocalEngine
from tinkex.types.inputs import Datum, ModelInput

READY_WITHIN_S = 240.0
DONE_WITHIN_S = 120.0
RANKS = {"ann": 4, "bob": 8, "cyd": 3}
LOSSES = {"ann": "cross_entropy", "bob": "importance_sampling", "cyd": "cross_entropy"}
LENGTHS = {"ann": (5, 17, 9), "bob": (30, 2, 11, 12, 1), "cyd": (7,)}
"""Ragged. The one row of `cyd` alone leaves a process without any."""


@asynccontextmanager
async def running(info: ModelInfo, devices: int, **settings: Any) -> AsyncIterator[LocalEngine]:
    """A real engine in its own process, or processes, with the same threads in all: two cores are there for tests."""
    engine = LocalEngine([info], device="cpu", threads=1, devices=devices, **settings)
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await engine.start()
        async with asyncio.timeout(DONE_WITHIN_S):
            yield engine
    finally:
        await engine.close()


def data_of(tenant: str, step: int, vocab_size: int) -> list[Datum]:
    dice = random.Random(f"{tenant} {step}")
    data = []
    for length in LENGTHS[tenant]:
        tokens = [dice.randrange(vocab_size) for _ in range(length + 1)]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if LOSSES[tenant] == "importance_sampling":
            guess = -math.log(vocab_size)
            inputs["logprobs"] = [guess + dice.uniform(-0.5, 0.5) for _ in range(length)]
            inputs["advantages"] = [dice.uniform(-1, 1) for _ in range(length)]
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


@dataclass
class Recorded:
    """The numbers of a run: by tenant, and of all its steps."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    logprobs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Weights and moments at the end, from a snapshot."""


async def create(engine: LocalEngine, info: ModelInfo, tenants: Sequence[str] = tuple(RANKS)) -> None:
    """`cyd` trains the unembedding alone: no layer of the model has a gradient of its own then."""
    for seed, tenant in enumerate(tenants):
        only_head = {"train_attn": tenant != "cyd", "train_mlp": tenant != "cyd", "train_unembed": True}
        head = {"op": "create", "adapter": tenant, "base": info.name, "rank": RANKS[tenant], "seed": seed}
        await engine.run(Frame({**head, **only_head}))


async def train(
    engine: LocalEngine, info: ModelInfo, steps: range, folder: Path, tenants: Sequence[str] = tuple(RANKS)
) -> Recorded:
    """Train all tenants at the same time, so that they share micro-batches. Reads gradients out of snapshots."""
    found = Recorded()
    for step in steps:
        passes = [
            pass_frame("forward_backward", tenant, data_of(tenant, step, info.vocab_size), LOSSES[tenant], None)
            for tenant in tenants
        ]
        forwards = [pass_frame("forward", "ann", data_of("ann", step + 100, info.vocab_size), "cross_entropy", None)]
        replies = await asyncio.gather(
            *(engine.run(frame, tenant=tenant) for frame, tenant in zip(passes, tenants, strict=True)),
            *(engine.run(frame, tenant="ann") for frame in (forwards if "ann" in tenants else [])),
        )
        for tenant, reply in zip([*tenants, "ann forward"], replies, strict=False):
            found.losses.setdefault(tenant, []).append(reply.head["metrics"]["loss:sum"])
            outputs = [output["logprobs"].to_torch() for output in read_outputs(reply)]
            found.logprobs.setdefault(tenant, []).append(torch.cat(outputs))
        for tenant in tenants:
            state = await snapshot(engine, tenant, folder / f"{tenant}-{step}")
            found.gradients.setdefault(tenant, []).append(state["gradient"])
        settings = {"learning_rate": 1e-3, "grad_clip_norm": 1.0, "weight_decay": 0.01}
        replies = await asyncio.gather(
            *(engine.run(Frame({"op": "optim_step", "adapter": tenant, **settings})) for tenant in tenants)
        )
        for tenant, reply in zip(tenants, replies, strict=True):
            found.metrics.setdefault(tenant, []).append(reply.head["metrics"])
    for tenant in tenants:
        found.states[tenant] = await snapshot(engine, tenant, folder / f"{tenant}-end")
    return found


async def snapshot(engine: LocalEngine, adapter: str, folder: Path) -> dict[str, Tensor]:
    await engine.run(Frame({"op": "snapshot", "adapter": adapter, "folder": str(folder)}))
    return load_file(folder / "state.safetensors")


async def save(engine: LocalEngine, adapter: str, folder: Path) -> None:
    await engine.run(Frame({"op": "save", "adapter": adapter, "folder": str(folder), "with_optimizer": True}))


async def load(engine: LocalEngine, adapter: str, folder: Path) -> None:
    await engine.run(Frame({"op": "load", "adapter": adapter, "folder": str(folder), "with_optimizer": True}))


async def sample(engine: LocalEngine, spec: SampleSpec) -> Sampled:
    events = [event async for event in engine.sample(spec)]
    assert isinstance(events[-1], Sampled)
    return events[-1]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected; absolute where that is zero."""
    size = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / (size or 1.0)


def worst(actual: Recorded, expected: Recorded) -> dict[str, float]:
    """The largest relative difference of each kind of number."""
    worst: dict[str, float] = {}

    def note(kind: str, value: float) -> None:
        worst[kind] = max(worst.get(kind, 0.0), value)

    for tenant, losses in expected.losses.items():
        for step, loss in enumerate(losses):
            note("losses", abs(actual.losses[tenant][step] - loss) / abs(loss))
            note("logprobs", distance(actual.logprobs[tenant][step], expected.logprobs[tenant][step]))
    for tenant, gradients in expected.gradients.items():
        for step, gradient in enumerate(gradients):
            note("gradients", distance(actual.gradients[tenant][step], gradient))
            for name, value in expected.metrics[tenant][step].items():
                note("metrics of steps", abs(actual.metrics[tenant][step][name] - value) / (abs(value) or 1.0))
        for name, state in expected.states[tenant].items():
            note(name, distance(actual.states[tenant][name], state))
    return worst
