"""A trainer and a vLLM sampler on one model, driven in this process: two engines, no service."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests import tools
from tinkex.engine.contract import Engine, ModelInfo, Sampled, SampleEvent, SampleSpec, pass_frame, read_outputs
from tinkex.engine.frames import Frame
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import tiny
from tinkex.engine.split import SplitEngine
from tinkex.engine.vllm.launch import vllm_engine
from tinkex.types.inputs import Datum, ModelInput

T = TypeVar("T")

MAX_RANK, SLOTS = 32, 4
LONGEST_S = 1200.0


def small_model(folder: Path) -> Path:
    """Write `tinkex/tiny` with wider heads and return its folder: vLLM's CPU attention knows no heads of 16."""
    target = folder / "small"
    target.mkdir(parents=True)
    heads = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tiny.write_files(target, {**tiny.CONFIG, **heads}, tiny.weights(), tiny.tokenizer(), tokens)
    return target


class Writer:
    """Trains adapters and saves them, on an engine."""

    def __init__(self, model: ModelInfo, folder: Path, engine: Engine) -> None:
        self.model, self.folder, self.engine = model, folder, engine
        self._saved = 0

    def tokens(self, seed: object, count: int) -> list[int]:
        choice = random.Random(f"{seed}")
        return [choice.randrange(min(self.model.vocab_size, 20_000)) for _ in range(count)]

    async def train(self, adapter: str, rank: int, *, steps: int = 3, learning_rate: float = 2e-3) -> None:
        """Create an adapter and train it on tokens of its own."""
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        create = {"op": "create", "adapter": adapter, "base": self.model.name, "rank": rank, "seed": rank, **flags}
        await self.engine.run(Frame(create))
        settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        tokens = self.tokens(adapter, 33)
        for _ in range(steps):
            await self.engine.run(pass_frame("forward_backward", adapter, [_datum(tokens)], "cross_entropy", None))
            step = {"op": "optim_step", "adapter": adapter, "learning_rate": learning_rate, **settings}
            await self.engine.run(Frame(step))

    async def save(self, adapter: str) -> Path:
        """Save an adapter's weights for sampling, as the service does."""
        self._saved += 1
        folder = self.folder / "checkpoints" / adapter / "sampler_weights" / str(self._saved)
        command = {"op": "save", "adapter": adapter, "base": self.model.name, "folder": str(folder)}
        await self.engine.run(Frame({**command, "with_optimizer": False}))
        return folder

    async def trained(self, adapter: str, rank: int, **how: Any) -> Path:
        await self.train(adapter, rank, **how)
        return await self.save(adapter)


class Rig(Writer):
    """Call `run` with what the engines are to do: their tasks live on a loop that turns only meanwhile."""

    def __init__(
        self,
        model: ModelInfo,
        folder: Path,
        *,
        dtype: str = "float32",
        trainer: LocalEngine | None = None,
        threads: int = 1,
    ) -> None:
        """`threads` of vLLM: two of them on two busy cores wait for each other, and a sample took 50 s."""
        self._loop = asyncio.new_event_loop()
        self.trainer = trainer or LocalEngine([model], dtype=dtype)
        self.sampler = vllm_engine(
            model,
            python=str(tools.make("vllm")),
            links=folder / "links",
            max_rank=MAX_RANK,
            slots=SLOTS,
            cache_gb=1.0,
            dtype=dtype,
            threads=threads,
        )
        super().__init__(model, folder, SplitEngine([model], self.trainer, {model.name: self.sampler}))

    def run(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, LONGEST_S))

    def start(self) -> None:
        self.run(self.engine.start())

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.close()

    async def trainer_logprobs(self, adapter: str, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of every token after the first, as the trainer computes it."""
        reply = await self.trainer.run(pass_frame("forward", adapter, [_datum(tokens)], "cross_entropy", None))
        return [float(value) for value in read_outputs(reply)[0]["logprobs"].data]

    def spec(self, weights: Path | None = None, **fields: Any) -> SampleSpec:
        given = {"prompt": tuple(self.tokens("prompt", 12)), "tenant": "a", "seed": 5, **fields}
        return SampleSpec(base=self.model.name, weights=None if weights is None else str(weights), **given)

    def events(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        return self.engine.sample(spec)

    async def sample(self, weights: Path | None = None, **fields: Any) -> Sampled:
        return await last(self.engine.sample(self.spec(weights, **fields)))

    def copy(self, folder: Path, name: str) -> Path:
        target = folder.with_name(name)
        shutil.copytree(folder, target)
        return target


async def last(events: AsyncIterator[SampleEvent]) -> Sampled:
    result = [event async for event in events][-1]
    assert isinstance(result, Sampled)
    return result


def _datum(tokens: Sequence[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )
