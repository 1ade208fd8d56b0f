"""One engine trains and others sample: who gets what, proofs with saved weights, weights without one."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.oracle import Session, datum
from tinkex.engine import proofs
from tinkex.engine.contract import (
    EngineFault,
    EngineState,
    ModelInfo,
    Proof,
    ProofMissing,
    Sampled,
    SampleEvent,
    SampleSpec,
    SequenceOutput,
)
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.split import SplitEngine

MODELS = [ModelInfo(name="m", aliases=("alias",), folder="/m", vocab_size=100, max_context_length=64)]


class Recorder:
    """An engine that notes what it is asked."""

    def __init__(self, name: str, *, generation: int = 1) -> None:
        self.name, self.state = name, EngineState(is_ready=True, generation=generation)
        self.commands: list[Frame | bytes] = []
        self.specs: list[SampleSpec] = []
        self.needs_proof = self.has_diverged = False

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        self.commands.append(command)
        if isinstance(command, Frame) and command.head["op"] == "forward":
            if self.has_diverged:
                raise EngineFault("not finite")
            values = b"".join(bytes(4) for _ in range(proofs.PROBE_TOKENS - 1))
            entry = {"logprobs": {"dtype": "float32", "shape": [proofs.PROBE_TOKENS - 1], "data": 0}}
            return Frame({"outputs": [entry]}, [values])
        return Frame({})

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        self.specs.append(spec)
        if self.needs_proof and spec.proof is None:
            raise ProofMissing("no proof", "server")
        values = [None, *(-float(n) for n in range(1, len(spec.prompt)))] if spec.prompt_logprobs else None
        row = SequenceOutput(tokens=[1], logprobs=[-1.0], stop_reason=self.name)
        yield Sampled(sequences=[row], prompt_logprobs=values)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


async def sampled_by(engine: SplitEngine, spec: SampleSpec) -> str:
    [event] = [event async for event in engine.sample(spec)]
    assert isinstance(event, Sampled)
    return event.sequences[0].stop_reason


def test_samples_go_to_the_sampler_and_what_it_lacks_to_the_trainer() -> None:
    async def test() -> None:
        trainer, sampler = Recorder("trainer", generation=3), Recorder("sampler", generation=9)
        engine = SplitEngine(MODELS, trainer, {"m": sampler})
        assert await sampled_by(engine, SampleSpec(base="m", prompt=(1,))) == "sampler"
        assert await sampled_by(engine, SampleSpec(base="alias", prompt=(1,))) == "sampler"
        assert await sampled_by(engine, SampleSpec(base="m", prompt=(1, 2), alt_k=1)) == "trainer"
        assert await sampled_by(engine, SampleSpec(base="unknown", prompt=(1,))) == "trainer"
        assert engine.state.generation == 3  # adapters in training do not care how often a sampler was started
        assert engine.state.extras["samplers"]["m"].generation == 9

    run(test())


def test_weights_that_can_be_sampled_are_saved_with_a_proof() -> None:
    async def test() -> None:
        trainer = Recorder("trainer")
        engine = SplitEngine(MODELS, trainer, {})
        await engine.run(Frame({"op": "save", "adapter": "a", "base": "m", "folder": "/f", "with_optimizer": False}))
        probe, save = trainer.commands
        assert isinstance(probe, Frame) and isinstance(save, Frame)
        assert probe.head["op"] == "forward" and probe.head["adapter"] == "a"
        proof = save.head["proof"]
        assert len(proof["logprobs"]) == len(proof["base_logprobs"]) == len(proof["tokens"]) - 1
        assert [spec.weights for spec in trainer.specs] == [None]  # the base model's are computed once
        trainer.commands.clear()
        checkpoint = Frame({"op": "save", "adapter": "a", "base": "m", "folder": "/f", "with_optimizer": True})
        await engine.run(checkpoint)
        await engine.run(b"bytes of the journal")
        assert trainer.commands == [checkpoint, b"bytes of the journal"]

    run(test())


def test_weights_that_have_diverged_are_saved_without_a_proof() -> None:
    async def test() -> None:
        trainer = Recorder("trainer")
        trainer.has_diverged = True
        await SplitEngine(MODELS, trainer, {}).run(
            Frame({"op": "save", "adapter": "a", "base": "m", "folder": "/f", "with_optimizer": False})
        )
        assert isinstance(trainer.commands[1], Frame) and "proof" not in trainer.commands[1].head

    run(test())


def test_weights_without_a_proof_get_one_from_the_trainers_own_sampler() -> None:
    async def test() -> None:
        trainer, sampler = Recorder("trainer"), Recorder("sampler")
        sampler.needs_proof = True
        engine = SplitEngine(MODELS, trainer, {"m": sampler})
        assert await sampled_by(engine, SampleSpec(base="m", weights="/f", prompt=(1,))) == "sampler"
        assert [spec.weights for spec in trainer.specs] == ["/f", None]
        assert sampler.specs[-1].proof is not None
        assert sampler.specs[-1].proof.logprobs == tuple(-float(n) for n in range(1, proofs.PROBE_TOKENS))

    run(test())


def test_a_proof_lies_beside_the_weights_and_is_listed_with_their_files(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    session.create(rank=4)
    session.passes([datum(range(20), target_tokens=range(1, 21))], "cross_entropy")
    session.optim(learning_rate=1e-2)
    tokens = proofs.probe_tokens(tiny.vocab_size)
    logprobs = proofs.logprobs_of_pass(session.send(proofs.probe_frame("a", tokens)))
    proof = proofs.checked_proof(tokens, logprobs)
    saved = session.run("save", folder=str(tmp_path / "w"), with_optimizer=False, proof=proofs.as_json(proof))
    assert proofs.FILE in saved.head["files"] and proofs.read_proof(tmp_path / "w") == proof
    assert len(proof.logprobs) == len(tokens) - 1 and all(map(math.isfinite, proof.logprobs))


def test_a_proof_that_proves_nothing_is_damaged(tmp_path: Path) -> None:
    assert proofs.read_proof(tmp_path) is None
    for content in ({"tokens": [1], "logprobs": []}, {"tokens": [1, 2], "logprobs": [None]}, [], {"tokens": [1, 2]}):
        (tmp_path / proofs.FILE).write_text(json.dumps(content))
        with pytest.raises(EngineFault, match="damaged"):
            proofs.read_proof(tmp_path)


def test_a_difference_is_the_largest_one_and_infinite_for_what_is_no_number() -> None:
    proof = Proof(tokens=(1, 2, 3), logprobs=(-1.0, -2.0))
    assert proofs.difference(proof, [-1.5, -2.0]) == 0.5
    assert proofs.difference(proof, [-1.0]) == math.inf
    assert proofs.difference(proof, [-1.0, math.nan]) == math.inf
    tokens = proofs.probe_tokens(10)
    assert tokens == proofs.probe_tokens(10) and len(tokens) == proofs.PROBE_TOKENS and max(tokens) < 10


BASE = (-10.0, -12.0, -9.0, -15.0)
TRAINED = (-9.0, -12.5, -9.4, -14.0)
"""What an adapter makes of it: a change of 0.78, root mean square."""
NOISE = (0.2, -0.15, 0.1, -0.2)
"""By what a sound engine in bfloat16 differs."""


def plus(values: tuple[float, ...], noise: tuple[float, ...], times: float = 1.0) -> list[float]:
    return [value + times * by for value, by in zip(values, noise, strict=True)]


def test_in_bfloat16_what_the_adapter_changes_is_compared() -> None:
    proof = Proof(tokens=(1, 2, 3, 4, 5), logprobs=TRAINED, base_logprobs=BASE)
    base = plus(BASE, NOISE)
    assert proofs.mismatch(proof, plus(TRAINED, NOISE, 0.8), base, is_exact=False) == ""
    assert "differ by 0.2" in proofs.mismatch(proof, plus(TRAINED, NOISE), base, is_exact=True)
    assert "those of the base model" in proofs.mismatch(proof, base, base, is_exact=False)
    nearly_base = plus(BASE, NOISE, 1.001)  # in other company
    assert "by another amount" in proofs.mismatch(proof, nearly_base, base, is_exact=False)
    half = plus(base, tuple(own - before for own, before in zip(TRAINED, BASE, strict=True)), 0.4)  # type: ignore[arg-type]
    assert proofs.mismatch(proof, half, base, is_exact=False)
    assert proofs.mismatch(proof, [math.nan] * 4, base, is_exact=False)
    weak = Proof(tokens=(1, 2, 3, 4, 5), logprobs=tuple(plus(BASE, NOISE, 0.5)), base_logprobs=BASE)
    assert proofs.mismatch(weak, nearly_base, base, is_exact=False) == ""  # too little to tell
    assert proofs.mismatch(weak, base, base, is_exact=False)
    untrained = Proof(tokens=(1, 2, 3, 4, 5), logprobs=BASE, base_logprobs=BASE)
    assert proofs.mismatch(untrained, base, base, is_exact=False) == ""
