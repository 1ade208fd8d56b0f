"""The decode batch against plain transformers and PEFT: right tokens and numbers, whatever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from tests.unit.engine.oracle import Session, datum, plain_model, randomise
from tests.unit.engine.sampling_oracle import (
    TEXT,
    Results,
    answer,
    check_logprobs,
    finish,
    first_arguments,
    greedy,
    plain_logprobs,
    prompts,
    same,
    sampled,
    sampler,
    spec,
)
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, LoraSpec, ModelInfo, Sampled, SampleSpec, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling import decode_batch

pytestmark = pytest.mark.usefixtures("runner", "one_thread")


def test_greedy_tokens_equal_generate_in_a_batch_of_many_lengths(tiny: Model, plain_tiny: Any) -> None:
    given = prompts(12)
    results = finish(sampler(tiny), {n: spec(p, max_tokens=5 + n, temperature=0.0) for n, p in enumerate(given)})
    for number, prompt in enumerate(given):
        assert sampled(results, number).sequences[0].tokens == greedy(plain_tiny, prompt, 5 + number)


def test_greedy_tokens_with_an_adapter_equal_peft(
    tiny: Model, tiny_info: ModelInfo, adapter_folders: list[str]
) -> None:
    given = prompts(4, seed=1)
    specs = {
        10 * a + n: spec(p, max_tokens=10, temperature=0.0, weights=folder)
        for a, folder in enumerate(adapter_folders)
        for n, p in enumerate(given)
    }
    results = finish(sampler(tiny), specs)
    for a, folder in enumerate(adapter_folders):
        peft = PeftModel.from_pretrained(plain_model(tiny_info.folder), folder).eval()
        for n, prompt in enumerate(given):
            assert sampled(results, 10 * a + n).sequences[0].tokens == greedy(peft, prompt, 10)


def test_smollm2_equals_generate_and_a_plain_forward(smollm2: Model, smollm2_info: ModelInfo) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{smollm2_info.folder}/tokenizer.json")
    texts = ["The capital of France is", "1, 2, 3,"]
    specs = {
        n: spec(tokenizer.encode(text).ids, smollm2_info.name, max_tokens=6, temperature=0.0, prompt_logprobs=True)
        for n, text in enumerate(texts)
    }
    results = finish(sampler(smollm2), specs)
    for number, given in specs.items():
        found = sampled(results, number)
        assert found.sequences[0].tokens == greedy(smollm2.module, given.prompt, 6)
        check_logprobs(smollm2.module, given, found)
    assert "Paris" in tokenizer.decode(sampled(results, 0).sequences[0].tokens)


def test_logprobs_ignore_temperature_filters_and_penalties(tiny: Model, plain_tiny: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.5, "min_p": 0.05},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    ]
    specs = {
        n: spec(p, max_tokens=20, num_samples=2, seed=n, prompt_logprobs=True, **kind)
        for n, (p, kind) in enumerate(zip(prompts(4, seed=2), kinds, strict=True))
    }
    results = finish(sampler(tiny), specs)
    for number, given in specs.items():
        check_logprobs(plain_tiny, given, sampled(results, number))


def test_sampled_logprobs_equal_the_trainers(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = randomise(session.create(rank=8))
    checkpoint.save(adapter, tmp_path / "w", with_optimizer=False)
    prompt = list(TEXT.encode())
    sequence = answer(tiny, spec(prompt, weights=str(tmp_path / "w"), max_tokens=30, seed=4)).sequences[0]
    tokens = [*prompt, *sequence.tokens]
    trained = session.logprobs([datum(tokens[:-1], target_tokens=tokens[1:])])[0]
    assert sequence.logprobs == pytest.approx(trained[len(prompt) - 1 :].tolist(), abs=1e-3)


def test_penalties_count_the_tokens_of_the_sequence(tiny: Model) -> None:
    found = answer(tiny, spec(b"aaaa", max_tokens=100, temperature=0.0, presence_penalty=50.0))
    tokens = found.sequences[0].tokens
    assert len(set(tokens)) == len(tokens) == 100


def mixed_specs(folders: list[str]) -> dict[int, SampleSpec]:
    source = random.Random(5)
    specs = {}
    for number, prompt in enumerate(prompts(24, seed=3)):
        specs[number] = spec(
            prompt,
            weights=source.choice([None, *folders]),
            num_samples=source.randint(1, 3),
            max_tokens=source.randint(1, 25),
            temperature=source.choice([0.0, 0.7, 1.0]),
            top_k=source.choice([-1, 10]),
            top_p=source.choice([1.0, 0.9]),
            repetition_penalty=source.choice([1.0, 1.2]),
            seed=number,
            topk_sample=source.choice([0, 3]),
        )
    return specs


def test_tokens_do_not_depend_on_the_batch_nor_on_when_a_request_joined(
    tiny: Model, adapter_folders: list[str]
) -> None:
    specs = mixed_specs(adapter_folders)
    alone = {number: answer(tiny, given) for number, given in specs.items()}
    together = finish(sampler(tiny), specs)
    for number in specs:
        same(sampled(together, number), alone[number])

    running, source, coming = sampler(tiny, max_rows=7), random.Random(6), list(specs.items())
    results: Results = {}
    while running.has_work or coming:
        if coming and source.random() < 0.3:
            running.add(*coming.pop())
        results |= {number: event for number, event in running.step() if not isinstance(event, Tokens)}
    for number in specs:
        same(sampled(results, number), alone[number])


def test_samples_of_one_call_differ_and_the_same_seed_repeats_them(tiny: Model) -> None:
    given = spec(b"abc", num_samples=8, max_tokens=10, seed=11)
    first = [sequence.tokens for sequence in answer(tiny, given).sequences]
    assert len({tuple(tokens) for tokens in first}) == 8
    assert [sequence.tokens for sequence in answer(tiny, given).sequences] == first
    fewer = answer(tiny, spec(b"abc", num_samples=3, max_tokens=10, seed=11))
    assert [sequence.tokens for sequence in fewer.sequences] == first[:3]


def test_sampled_tokens_have_the_models_distribution(tiny: Model, plain_tiny: Any) -> None:
    hoped_V = plain_logprobs(plain_tiny, b"xyz")[-1].exp()
    found = answer(tiny, spec(b"xyz", num_samples=2000, max_tokens=1, seed=1), max_rows=4096)
    counts_V = torch.bincount(torch.tensor([sequence.tokens[0] for sequence in found.sequences]), minlength=263)
    # The likely tokens each, the rest together, so that every cell is expected ten times and more.
    likely = (hoped_V * 2000 >= 10).nonzero()[:, 0]
    seen = [*counts_V[likely].tolist(), 2000 - int(counts_V[likely].sum())]
    expected = [*(hoped_V[likely] * 2000).tolist(), 2000 * (1 - float(hoped_V[likely].sum()))]
    statistic = sum((count - hope) ** 2 / hope for count, hope in zip(seen, expected, strict=True))
    free = len(likely)
    # Mean and deviation of chi-square are f and √2f: four deviations are never reached by chance.
    assert free > 20
    assert statistic < free + 4 * (2 * free) ** 0.5


def test_a_chunked_prefill_equals_a_whole_one(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec(prompts(1, longest=60)[0] * 5, max_tokens=12, temperature=0.0, prompt_logprobs=True, topk_prompt=2)
    whole = answer(tiny, given)
    for chunk in (1, 7, 64):
        monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", chunk)
        parts = answer(tiny, given)
        same(parts, whole)
        assert parts.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        assert parts.prompt_logprobs[1:] == pytest.approx(whole.prompt_logprobs[1:], abs=1e-4)


def test_one_step_prefills_one_chunk(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 16)
    running = sampler(tiny)
    reads = first_arguments(monkeypatch, running._decoders[tiny], "prefill")
    steps = first_arguments(monkeypatch, running._decoders[tiny], "step")
    finish(running, {1: spec(range(100), max_tokens=3, num_samples=4)})
    assert [len(reading.tokens) for (reading,) in reads] == [16] * 6 + [4]
    assert len(steps) == 2


def test_decoding_continues_while_a_long_prompt_is_prefilled(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 8)
    running = sampler(tiny)
    running.add(1, spec(b"abc", max_tokens=30))
    running.step()
    running.add(2, spec([1] * 800, max_tokens=1))
    order = list(finish(running))
    assert order == [1, 2]


def test_a_prompt_too_large_for_the_memory_fails_alone(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    running = sampler(tiny)
    decoder: Any = running._decoders[tiny]
    prefill = decoder.prefill

    def short_of_memory(readings: Any) -> Any:
        found = prefill(readings)  # the caches have their new columns by now
        if any(len(reading.tokens) > 100 for reading in readings):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate a lot")
        return found

    monkeypatch.setattr(decoder, "prefill", short_of_memory)
    results = finish(running, {1: spec(b"abc"), 2: spec([1] * 200), 3: spec(b"abc")})
    fault = results[2]
    assert isinstance(fault, EngineFault)
    assert fault.category == "server"
    assert "not enough memory" in str(fault)
    assert "200 tokens" in str(fault)
    assert "Allocator" not in str(fault)
    same(sampled(results, 1), answer(tiny, spec(b"abc")))


def test_a_batch_that_outgrows_memory_loses_its_last_request_only(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {n: spec(p, max_tokens=10, seed=n) for n, p in enumerate(prompts(3, seed=12))}
    alone = {number: answer(tiny, one) for number, one in given.items()}
    running = sampler(tiny)
    decoder: Any = running._decoders[tiny]
    step = decoder.step

    def fail_half_way(cache: Any, rows: Any) -> Tensor:
        found: Tensor = step(cache, rows)  # the cache has its new column by now
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no more")
        return found

    monkeypatch.setattr(decoder, "step", fail_half_way)
    results = finish(running, given)
    assert isinstance(results[2], EngineFault)
    for number in (0, 1):
        same(sampled(results, number), alone[number])


def test_rows_of_many_adapters_share_steps_and_equal_each_alone(
    tiny: Model, adapter_folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [None, *adapter_folders, adapter_folders[0], None]
    given = {
        number: spec(prompt, weights=weights, max_tokens=12, seed=number)
        for number, (weights, prompt) in enumerate(zip(asked, prompts(len(asked), seed=3), strict=True))
    }
    running = sampler(tiny)
    steps = first_arguments(monkeypatch, running._decoders[tiny], "step")
    results = finish(running, given)
    assert len(steps) == 11
    for number, one in given.items():
        same(sampled(results, number), answer(tiny, one))


def test_rows_that_share_a_prompt_equal_each_alone(tiny: Model, adapter_folders: list[str]) -> None:
    long = list(TEXT.encode()) * 4
    given = {
        1: spec(long, num_samples=5, max_tokens=20, seed=1),
        2: spec(long, max_tokens=30, seed=2),
        3: spec(long, weights=adapter_folders[0], num_samples=3, max_tokens=25, seed=3),
        4: spec(b"short", max_tokens=40, seed=4),
    }
    results = finish(sampler(tiny), given)
    for number, one in given.items():
        for index in range(one.num_samples):
            found = sampled(results, number).sequences[index]
            # A prompt that is looked at and one that is copied differ in the order of additions alone.
            assert found.tokens == answer(tiny, one).sequences[index].tokens
            alone = answer(tiny, one, max_rows=1).sequences[index]
            assert found.tokens == alone.tokens
            assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_base_prompt_prefilled_with_an_adapters_prompt_equals_the_base_model(
    tiny: Model, adapter_folders: list[str]
) -> None:
    given = {
        1: spec([7, 8, 9, 10] * 100, weights=adapter_folders[0], max_tokens=2, seed=1),
        2: spec(list(TEXT.encode()), max_tokens=6, seed=2, prompt_logprobs=True),
    }
    results = finish(sampler(tiny), given)
    for number, one in given.items():
        same(sampled(results, number), answer(tiny, one))
    alone = answer(tiny, given[2]).prompt_logprobs
    assert sampled(results, 2).prompt_logprobs == pytest.approx(alone, abs=1e-4)


def test_a_short_prompt_does_not_wait_for_long_ones(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 64)
    running = sampler(tiny)
    for number in range(5):
        running.add(number, spec([number] * 1000, max_tokens=1))
    running.add(9, spec(b"short", max_tokens=1))
    for _ in range(12):
        if any(number == 9 for number, _ in running.step()):
            return
    raise AssertionError("it waits for all of the long ones")


def test_diverged_adapters_fail_alone_and_the_error_says_so(tiny: Model, tmp_path: Path) -> None:
    adapter = randomise(Adapter(tiny, LoraSpec(rank=2)))
    with torch.no_grad():
        adapter.weights_P.fill_(1e25)  # finite, but what they make of a prompt is not
    checkpoint.save(adapter, tmp_path / "large", with_optimizer=False)
    weights = str(tmp_path / "large")
    specs = {
        1: spec(b"abc", weights=weights),
        2: spec(b"abc", weights=weights, prompt_logprobs=True),
        3: spec(b"abc", max_tokens=4),
    }
    results = finish(sampler(tiny), specs)
    for number in (1, 2):
        fault = results[number]
        assert isinstance(fault, EngineFault)
        assert fault.category == "user"
        assert "diverged" in str(fault)
    assert isinstance(results[3], Sampled)
