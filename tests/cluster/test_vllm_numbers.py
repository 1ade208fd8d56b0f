"""A vLLM sampler beside the trainer: the same numbers, adapters through few slots, adapters that are not what they say.

On a real vLLM (`tests.tools`), with both built-in models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.vllm_rig import MAX_RANK, SLOTS, Rig, Writer, small_model
from tests.integration.service.live import CACHE
from tinkex.engine import proofs
from tinkex.engine.contract import EngineFault, Sampled, Tokens
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import registry
from tinkex.engine.split import SplitEngine

pytestmark = [pytest.mark.full]

RANKS = (4, 8, 16, 32)
ADAPTERS, REQUESTS, DRAWN = 16, 10, 64
"""16 × 10 × 64 = 10,240 tokens."""
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["small", "smollm2-135m"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    name = str(small_model(folder)) if request.param == "small" else request.param
    rig = Rig(registry.resolve(name, CACHE), folder)
    try:
        rig.start()
        yield rig
    finally:
        rig.close()


def test_sixteen_adapters_through_four_slots_have_the_trainers_numbers(rig: Rig) -> None:
    async def compare() -> tuple[int, float]:
        folders = {}
        for number in range(ADAPTERS):
            name = f"parity-{number}"
            folders[name] = await rig.trained(name, RANKS[number % len(RANKS)])

        async def one(name: str, folder: Path, number: int) -> tuple[str, list[int], Sampled]:
            prompt = tuple(rig.tokens(f"{name} {number}", 8 + number))
            return name, list(prompt), await rig.sample(folder, prompt=prompt, max_tokens=DRAWN, seed=number)

        work = [one(name, folder, number) for number in range(REQUESTS) for name, folder in folders.items()]
        count, worst = 0, 0.0
        for name, prompt, sampled in await asyncio.gather(*work):
            [row] = sampled.sequences
            logprobs = await rig.trainer_logprobs(name, prompt + row.tokens)
            apart = [abs(a - b) for a, b in zip(logprobs[len(prompt) - 1 :], row.logprobs, strict=True)]
            count, worst = count + len(apart), max(worst, *apart)
        return count, worst

    count, worst = rig.run(compare())
    print(f"{rig.model.name}: {count} tokens of {ADAPTERS} adapters, largest difference {worst:.2e}")
    assert count >= 10_000 and worst <= TOLERANCE


def test_the_base_model_is_itself_after_adapters_have_filled_all_slots(rig: Rig) -> None:
    """vLLM's kernels for CPUs take "no adapter" for the last slot."""

    async def check() -> None:
        folders = [await rig.trained(f"slot-{number}", 8) for number in range(SLOTS + 1)]
        await asyncio.gather(*(rig.sample(folder, max_tokens=4) for folder in folders))
        beside = [asyncio.create_task(rig.sample(folder, max_tokens=32)) for folder in folders]
        sampled = await rig.sample(max_tokens=16)
        await asyncio.gather(*beside)
        alone = await rig.sample(max_tokens=16, seed=6)
        for [row] in (sampled.sequences, alone.sequences):
            tokens = (*rig.spec().prompt, *row.tokens)
            ours = await last_of_own(rig, prompt=tokens, prompt_logprobs=True, max_tokens=1)
            assert ours.prompt_logprobs is not None
            expected = ours.prompt_logprobs[-len(row.tokens) :]
            assert max(abs((a or 0) - b) for a, b in zip(expected, row.logprobs, strict=True)) <= TOLERANCE

    rig.run(check())


POISONS = (
    "missing folder",
    "torn file",
    "wrong names",
    "rank too high",
    "unknown module",
    "other base",
    "other numbers",
)


async def poisoned(rig: Rig, kind: str) -> Path:
    """Return a folder that must not be served."""
    name = kind.replace(" ", "-")
    if kind == "rank too high":
        return await rig.trained(name, 2 * MAX_RANK)
    if kind == "other base":
        return await adapter_of_other_base(rig)
    folder = rig.copy(await rig.trained(name, 8), name)
    weights = folder / "adapter_model.safetensors"
    match kind:
        case "missing folder":
            return folder.with_name("nothing-here")
        case "torn file":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "wrong names":  # vLLM finds none of its layers in them, and says nothing
            _rename(weights, "base_model.model.model.", "base_model.model.language_model.")
        case "unknown module":
            _rename(weights, "self_attn.q_proj", "self_attn.x_proj")
        case "other numbers":  # of a base with the same layers and shapes: only the proof tells
            proof = json.loads((folder / proofs.FILE).read_text())
            proof["logprobs"] = [value - 0.05 for value in proof["logprobs"]]
            (folder / proofs.FILE).write_text(json.dumps(proof))
    return folder


async def adapter_of_other_base(rig: Rig) -> Path:
    """Return an adapter of the other of both models, with its own proof."""
    folder = rig.folder / f"other-{uuid4().hex[:6]}"
    is_small = rig.model.vocab_size < 1000
    other = registry.resolve("smollm2-135m" if is_small else str(small_model(folder)), CACHE)
    engine = SplitEngine([other], LocalEngine([other], threads=1), {})
    try:
        await engine.start()
        return await Writer(other, folder, engine).trained("other-base", 8)
    finally:
        await engine.close()


def _rename(weights: Path, old: str, new: str) -> None:
    save_file({name.replace(old, new): tensor for name, tensor in load_file(weights).items()}, weights)


@pytest.mark.parametrize("kind", POISONS)
def test_a_poisoned_adapter_fails_alone(rig: Rig, kind: str) -> None:
    async def check() -> None:
        good, bad = await rig.trained(f"good-{kind}", 8), await poisoned(rig, kind)
        before = await rig.sample(good, max_tokens=8)
        generation = rig.sampler.state.generation
        beside = [asyncio.create_task(rig.sample(good, max_tokens=64, seed=seed)) for seed in range(4)]
        for _ in range(2):
            with pytest.raises(EngineFault) as caught:
                await rig.sample(bad, max_tokens=8)
            print(f"{kind}: {caught.value}")
            assert caught.value.category == "server" and bad.name in str(caught.value)
            assert str(rig.folder) not in str(caught.value)
        await asyncio.gather(*beside)
        assert (await rig.sample(good, max_tokens=8)).sequences[0].tokens == before.sequences[0].tokens
        assert rig.sampler.state.generation == generation  # nothing has ended

    rig.run(check())


def test_a_deleted_folder_is_sampled_after_its_adapter_has_left_the_slots(rig: Rig) -> None:

    async def check() -> None:
        first = await rig.trained("first", 8)
        before = await rig.sample(first, max_tokens=8)
        for path in sorted(first.iterdir(), reverse=True):
            path.unlink()
        for number in range(6):
            await rig.sample(await rig.trained(f"other-{number}", 4), max_tokens=4)
        assert (await rig.sample(first, max_tokens=8)).sequences[0].tokens == before.sequences[0].tokens

    rig.run(check())


def test_weights_without_a_proof_are_proved_by_our_own_sampler(rig: Rig) -> None:
    async def check() -> None:
        folder = await rig.trained("no-proof", 8)
        (folder / proofs.FILE).unlink()
        assert (await rig.sample(folder, max_tokens=4)).sequences[0].length == 4

    rig.run(check())


def test_a_seed_gives_the_same_tokens_alone_and_in_company(rig: Rig) -> None:
    async def check() -> None:
        folder = await rig.trained("seeds", 8)
        alone = await rig.sample(folder, max_tokens=24, num_samples=3)
        rows = await asyncio.gather(*(rig.sample(folder, max_tokens=24, num_samples=3, seed=s) for s in (5, 6, 7)))
        assert [row.tokens for row in rows[0].sequences] == [row.tokens for row in alone.sequences]
        texts = [tuple(row.tokens) for sampled in rows for row in sampled.sequences]
        assert len(set(texts)) == len(texts)  # nine different ones

    rig.run(check())


def test_stops_end_a_sample_as_with_our_own_sampler(rig: Rig) -> None:
    async def check() -> None:
        greedy = await rig.sample(max_tokens=16, temperature=0.0)
        own = await last_of_own(rig, max_tokens=16, temperature=0.0)
        tokens = greedy.sequences[0].tokens
        assert tokens == own.sequences[0].tokens and greedy.sequences[0].stop_reason == "length"
        for stops in ({"stop_tokens": (tokens[5],)}, {"stop_strings": (text_of(rig, tokens),)}):
            sampled, ours = [
                (await how(rig, max_tokens=16, temperature=0.0, **stops)).sequences[0] for how in (of_vllm, last_of_own)
            ]
            assert (sampled.tokens, sampled.stop_reason) == (ours.tokens, "stop")

    rig.run(check())


def test_ranked_tokens_are_those_of_our_own_sampler(rig: Rig) -> None:
    async def check() -> None:
        folder = await rig.trained("ranked", 8)
        asked = {"max_tokens": 4, "temperature": 0.0, "topk_sample": 3}
        sampled, ours = await rig.sample(folder, **asked), await last_of_own(rig, folder, **asked)
        theirs, own = sampled.sequences[0].topk, ours.sequences[0].topk
        assert theirs is not None and own is not None
        for row, expected in zip(theirs.to_lists(), own.to_lists(), strict=True):
            assert [token for token, _ in row or ()] == [token for token, _ in expected or ()]

    rig.run(check())


def test_what_vllm_lacks_is_sampled_by_our_own_sampler(rig: Rig) -> None:
    async def check() -> None:
        folder, prompt = await rig.trained("lacks", 8), tuple(rig.tokens("lacks", 6))
        assert (await rig.sample(folder, prompt=prompt, alt_k=3)).alternatives is not None
        targets = tuple((token,) for token in prompt[1:])
        assert (await rig.sample(folder, prompt=prompt, targets=targets)).targets is not None
        beside = [asyncio.create_task(rig.sample(folder, max_tokens=48, seed=seed)) for seed in range(4)]
        scored = await rig.sample(folder, prompt=prompt, prompt_logprobs=True, max_tokens=1)
        expected = await rig.trainer_logprobs("lacks", prompt)
        assert scored.prompt_logprobs is not None
        apart = [abs((a or 0) - b) for a, b in zip(scored.prompt_logprobs[1:], expected, strict=True)]
        assert max(apart) <= TOLERANCE
        await asyncio.gather(*beside)

    rig.run(check())


def test_a_prompt_is_cached_for_its_own_tenant_and_adapter_alone(rig: Rig) -> None:
    async def check() -> None:
        folder, other = await rig.trained("cached", 8), await rig.trained("cached-too", 8)
        prompt = tuple(rig.tokens("cached", 200))
        hits = [
            (await rig.sample(weights, prompt=prompt, tenant=tenant, max_tokens=1)).cache_hit_tokens
            for weights, tenant in ((folder, "a"), (folder, "a"), (folder, "b"), (other, "a"))
        ]
        assert hits[0] == 0 and hits[1] >= 128 and hits[2:] == [0, 0]

    rig.run(check())


def test_a_stream_sends_tokens_as_they_come_and_ends_when_it_is_left(rig: Rig) -> None:
    async def check() -> None:
        spec = rig.spec(max_tokens=24, num_samples=2, is_streamed=True)
        events = [event async for event in rig.events(spec)]
        *pieces, result = events
        assert isinstance(result, Sampled) and len(pieces) > 10
        for index, row in enumerate(result.sequences):
            streamed = [
                token
                for piece in pieces
                if isinstance(piece, Tokens) and piece.index == index
                for token in piece.tokens
            ]
            assert streamed == row.tokens
        endless = rig.events(rig.spec(max_tokens=1500, is_streamed=True))
        async for _ in endless:
            break
        await endless.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while rig.sampler.state.extras.get("samples_running"):
                await asyncio.sleep(0.2)

    rig.run(check())


async def of_vllm(rig: Rig, weights: Path | None = None, **fields: object) -> Sampled:
    return await rig.sample(weights, **fields)


async def last_of_own(rig: Rig, weights: Path | None = None, **fields: object) -> Sampled:
    from tests.cluster.vllm_rig import last

    return await last(rig.trainer.sample(rig.spec(weights, **fields)))


def text_of(rig: Rig, tokens: list[int]) -> str:
    """Return the text of the first token that is one in ASCII: random bytes make no characters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(rig.model.folder, "tokenizer.json")))
    texts = (str(tokenizer.decode([token], skip_special_tokens=False)).strip() for token in tokens[2:])
    return next(text for text in texts if text and text.isascii() and text.isprintable())
