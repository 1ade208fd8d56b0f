"""One engine in two processes, each with half of the weights (FSDP2 over gloo), beside an engine in one process.

Tolerance: 1e-5, relative to the norm of each tensor. Both compute in float32, in another order of additions.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.gang_work import create, load, running, sample, save, train, worst
from tests.prepare import CACHE
from tests.unit.engine.architectures import SMALL, saved
from tinkex.engine.contract import EngineFault, ModelInfo, SampleSpec
from tinkex.engine.frames import Frame
from tinkex.engine.models import registry

pytestmark = pytest.mark.full

TOLERANCE = 1e-5
STEPS = range(4)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"tie_word_embeddings": False},
    "Gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0, "sliding_window": 8},
}


def model(kind: str, folder: Path) -> ModelInfo:
    if kind == "tiny":
        return registry.resolve("tinkex/tiny", CACHE)
    info = saved(folder / kind, kind, **FAMILIES[kind])
    return replace(info, vocab_size=SMALL["vocab_size"], max_context_length=SMALL["max_position_embeddings"])


@pytest.mark.parametrize(("kind", "size"), [("tiny", 2), ("tiny", 3), ("Qwen3", 2), ("Gemma2", 2)])
def test_several_processes_train_as_one_does(kind: str, size: int, tmp_path: Path) -> None:
    info = model(kind, tmp_path)

    async def run() -> None:
        found = []
        for devices in (1, size):
            async with running(info, devices) as engine:
                await create(engine, info)
                found.append(await train(engine, info, STEPS, tmp_path / f"snapshots-{devices}"))
        differences = worst(found[1], found[0])
        print(kind, size, differences)
        assert all(value <= TOLERANCE for value in differences.values()), differences
        assert all(float(gradient.norm()) > 0 for run in found[1].gradients.values() for gradient in run)

    asyncio.run(run())


def test_a_checkpoint_goes_on_in_the_other_kind_of_engine(tmp_path: Path) -> None:
    """Each kind saves with optimizer state, the other loads it, and both go on to the same numbers."""
    info = model("tiny", tmp_path)
    first, second, tenants = range(2), range(2, 4), ("ann", "bob")

    async def run() -> None:
        for devices in (1, 2):
            async with running(info, devices) as engine:
                await create(engine, info, tenants)
                await train(engine, info, first, tmp_path / f"start-{devices}", tenants)
                for tenant in tenants:
                    await save(engine, tenant, tmp_path / f"{tenant}-by-{devices}")
        for saved_by in (1, 2):
            found = []
            for devices in (1, 2):
                async with running(info, devices) as engine:
                    await create(engine, info, tenants)
                    for tenant in tenants:
                        await load(engine, tenant, tmp_path / f"{tenant}-by-{saved_by}")
                    folder = tmp_path / f"second-{saved_by}-{devices}"
                    found.append(await train(engine, info, second, folder, tenants))
            differences = worst(found[1], found[0])
            print(f"saved by {saved_by}:", differences)
            assert all(value <= TOLERANCE for value in differences.values()), differences

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tiny", *FAMILIES])
def test_two_processes_sample_as_one_does(kind: str, tmp_path: Path) -> None:
    """Base model and adapters in one batch, prompts of several lengths, with log-probabilities of the prompts too."""
    info = model(kind, tmp_path)
    tenants = ("ann", "bob")

    async def run() -> None:
        found = []
        for devices in (1, 2):
            async with running(info, devices) as engine:
                if devices == 1:
                    await create(engine, info, tenants)
                    await train(engine, info, STEPS, tmp_path / "snapshots", tenants)
                    for tenant in tenants:
                        await save(engine, tenant, tmp_path / tenant)
                specs = [
                    SampleSpec(
                        base=info.name,
                        weights=None if tenant is None else str(tmp_path / tenant),
                        prompt=tuple((7 * at + length) % info.vocab_size for at in range(length)),
                        max_tokens=12,
                        num_samples=2,
                        temperature=0.0,
                        prompt_logprobs=length % 2 == 0,
                        topk_sample=2,
                    )
                    for tenant in (None, *tenants)
                    for length in (3, 8, 21)
                ]
                found.append(await asyncio.gather(*(sample(engine, spec) for spec in specs)))
        for one, gang in zip(*found, strict=True):
            for expected, actual in zip(one.sequences, gang.sequences, strict=True):
                assert actual.tokens == expected.tokens
                assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
            if one.prompt_logprobs is not None and gang.prompt_logprobs is not None:
                assert gang.prompt_logprobs[1:] == pytest.approx(one.prompt_logprobs[1:], abs=1e-3)

    asyncio.run(run())


def test_training_goes_on_between_samples(tmp_path: Path) -> None:
    """Samples are drawn while passes run: the processes stay in step, and neither kind changes the other's numbers."""
    info = model("tiny", tmp_path)
    prompt = tuple(range(20, 40))

    async def run() -> None:
        async with running(info, 2) as engine:
            await create(engine, info)
            undisturbed = await train(engine, info, STEPS, tmp_path / "undisturbed")
        async with running(info, 2) as engine:
            await create(engine, info)
            spec = SampleSpec(base=info.name, prompt=prompt, max_tokens=200, temperature=1.0, seed=1)
            samples = [asyncio.create_task(sample(engine, spec)) for _ in range(4)]
            disturbed = await train(engine, info, STEPS, tmp_path / "disturbed")
            texts = [(await task).sequences[0].tokens for task in samples]
        assert all(text == texts[0] for text in texts)
        differences = worst(disturbed, undisturbed)
        assert all(value <= TOLERANCE for value in differences.values()), differences

    asyncio.run(run())


def test_an_upload_with_a_weight_of_the_base_model_is_compared_with_the_whole_weight(tmp_path: Path) -> None:
    """PEFT adds the frozen embedding to the file of an adapter on the unembedding. No process has all of it here."""
    info = model("tiny", tmp_path)
    name = "model.embed_tokens.weight"
    embedding = load_file(Path(info.folder) / "model.safetensors")[name]

    async def run() -> None:
        async with running(info, 2) as engine:
            await create(engine, info, ("ann",))
            await save(engine, "ann", tmp_path / "saved")
            file = tmp_path / "saved" / "adapter_model.safetensors"
            tensors = load_file(file)
            upload = Frame({"op": "load", "adapter": "ann", "folder": str(file.parent), "with_optimizer": False})
            save_file({**tensors, f"base_model.model.{name}": embedding}, file)
            await engine.run(upload)
            save_file({**tensors, f"base_model.model.{name}": embedding + 1}, file)
            with pytest.raises(EngineFault, match="which tinkex/tiny has no layer for"):
                await engine.run(upload)
            await train(engine, info, range(1), tmp_path / "after", ("ann",))

    asyncio.run(run())
