"""The sampler against plain transformers and PEFT: right tokens, right numbers, whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine import oracle
from tests.unit.engine.oracle import Session, datum, randomise
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, LoraSpec, ModelInfo, Sampled, SampleSpec, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.runner_choice import choose_decoder
from tinkex.engine.sampling import adapter_cache, decode_batch, prompt_logprobs
from tinkex.engine.sampling.kv_cache import KVCache
from tinkex.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("runner")

Answers = dict[int, Sampled | EngineFault]
TEXT = "The quick brown fox jumps over the lazy dog. "


def sampler(model: Model, **bounds: int) -> Sampler:
    models = dict.fromkeys(model.info.names, model)
    return Sampler(models, choose_decoder=partial(choose_decoder, prefer=oracle.RUNNER), **bounds)


def spec(prompt: Iterable[int], base: str = "tinkex/tiny", **options: Any) -> SampleSpec:
    return SampleSpec(base=base, prompt=tuple(prompt), **options)


def finish(running: Sampler, specs: Mapping[int, SampleSpec] | None = None) -> Answers:
    """Add requests and run until nothing is left."""
    for number, given in (specs or {}).items():
        running.add(number, given)
    answers: Answers = {}
    while running.has_work:
        for number, event in running.step():
            if not isinstance(event, Tokens):
                assert number not in answers
                answers[number] = event
    assert running.cache_bytes == 0
    return answers


def answer(model: Model, given: SampleSpec, **bounds: int) -> Sampled:
    found = finish(sampler(model, **bounds), {1: given})[1]
    assert isinstance(found, Sampled)
    return found


def sampled(answers: Answers, number: int) -> Sampled:
    found = answers[number]
    assert isinstance(found, Sampled), found
    return found


def plain_model(info: ModelInfo) -> Any:
    """The base model as any user of transformers would load it."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(info.folder, dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def plain_logprobs(module: Any, tokens: Iterable[int]) -> Tensor:
    """[T, V] of one uncached forward pass."""
    with torch.inference_mode():
        found: Tensor = module(input_ids=torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)
    return found


def first_arguments(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Those of all calls of `owner.name` from now on, which goes on as before."""
    seen, original = [], getattr(owner, name)

    def call(first: Any, *args: Any, **options: Any) -> Any:
        seen.append(first)
        return original(first, *args, **options)

    monkeypatch.setattr(owner, name, call)
    return seen


def greedy(module: Any, prompt: Iterable[int], count: int) -> list[int]:
    tokens_BT = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out_BT = module.generate(input_ids=tokens_BT, max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens: list[int] = out_BT[0, tokens_BT.shape[1] :].tolist()
    return tokens


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(source.randint(1, longest))] for _ in range(count)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors as small as these a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain_tiny(tiny_info: ModelInfo) -> Any:
    return plain_model(tiny_info)


@pytest.fixture(scope="module")
def adapter_folders(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three adapters of different ranks, on all layers."""
    folders = []
    for seed, rank in enumerate((4, 8, 3)):
        folder = tmp_path_factory.mktemp("adapters") / str(seed)
        made = randomise(Adapter(tiny, LoraSpec(rank=rank, seed=seed)), seed)
        checkpoint.save(made, folder, with_optimizer=False)
        folders.append(str(folder))
    return folders


# Right tokens, right numbers


def test_greedy_tokens_are_those_of_generate_in_a_batch_of_many_lengths(tiny: Model, plain_tiny: Any) -> None:
    given = prompts(12)
    answers = finish(sampler(tiny), {n: spec(p, max_tokens=5 + n, temperature=0.0) for n, p in enumerate(given)})
    for number, prompt in enumerate(given):
        assert sampled(answers, number).sequences[0].tokens == greedy(plain_tiny, prompt, 5 + number)


def test_greedy_tokens_with_an_adapter_are_those_of_peft(
    tiny: Model, tiny_info: ModelInfo, adapter_folders: list[str]
) -> None:
    given = prompts(4, seed=1)
    specs = {
        10 * a + n: spec(p, max_tokens=10, temperature=0.0, weights=folder)
        for a, folder in enumerate(adapter_folders)
        for n, p in enumerate(given)
    }
    answers = finish(sampler(tiny), specs)
    for a, folder in enumerate(adapter_folders):
        peft = PeftModel.from_pretrained(plain_model(tiny_info), folder).eval()
        for n, prompt in enumerate(given):
            assert sampled(answers, 10 * a + n).sequences[0].tokens == greedy(peft, prompt, 10)


def test_smollm2_gives_the_tokens_of_generate_and_the_numbers_of_a_plain_forward(
    smollm2: Model, smollm2_info: ModelInfo
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{smollm2_info.folder}/tokenizer.json")
    texts = ["The capital of France is", "1, 2, 3,"]
    specs = {
        n: spec(tokenizer.encode(text).ids, smollm2_info.name, max_tokens=6, temperature=0.0, prompt_logprobs=True)
        for n, text in enumerate(texts)
    }
    answers = finish(sampler(smollm2), specs)
    for number, given in specs.items():
        found = sampled(answers, number)
        assert found.sequences[0].tokens == greedy(smollm2.module, given.prompt, 6)
        check_logprobs(smollm2.module, given, found)
    assert "Paris" in tokenizer.decode(sampled(answers, 0).sequences[0].tokens)


def check_logprobs(module: Any, given: SampleSpec, found: Sampled) -> None:
    size = len(given.prompt)
    for sequence in found.sequences:
        plain_TV = plain_logprobs(module, [*given.prompt, *sequence.tokens])
        for place, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
            assert logprob == pytest.approx(plain_TV[size - 1 + place, token].item(), abs=1e-4)
    if found.prompt_logprobs is not None:
        plain_TV = plain_logprobs(module, given.prompt)
        hoped = [plain_TV[place - 1, token].item() for place, token in enumerate(given.prompt)][1:]
        assert found.prompt_logprobs[0] is None
        assert found.prompt_logprobs[1:] == pytest.approx(hoped, abs=1e-4)


def test_logprobs_are_the_models_own_whatever_the_temperature_and_the_filters(tiny: Model, plain_tiny: Any) -> None:
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
    answers = finish(sampler(tiny), specs)
    for number, given in specs.items():
        check_logprobs(plain_tiny, given, sampled(answers, number))


def test_the_samplers_logprobs_are_the_trainers(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = randomise(session.create(rank=8))
    checkpoint.save(adapter, tmp_path / "w", with_optimizer=False)
    prompt = list(TEXT.encode())
    sequence = answer(tiny, spec(prompt, weights=str(tmp_path / "w"), max_tokens=30, seed=4)).sequences[0]
    tokens = [*prompt, *sequence.tokens]
    trained = session.logprobs([datum(tokens[:-1], target_tokens=tokens[1:])])[0]
    assert sequence.logprobs == pytest.approx(trained[len(prompt) - 1 :].tolist(), abs=1e-3)


def test_penalties_act_on_what_the_sequence_has_drawn(tiny: Model) -> None:
    found = answer(tiny, spec(b"aaaa", max_tokens=100, temperature=0.0, presence_penalty=50.0))
    tokens = found.sequences[0].tokens
    assert len(set(tokens)) == len(tokens) == 100


# Who else is in the batch changes nothing


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


def same(one: Sampled, other: Sampled) -> None:
    for left, right in zip(one.sequences, other.sequences, strict=True):
        assert left.tokens == right.tokens
        assert left.stop_reason == right.stop_reason
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_tokens_do_not_depend_on_the_batch_nor_on_when_a_request_joined(
    tiny: Model, adapter_folders: list[str]
) -> None:
    specs = mixed_specs(adapter_folders)
    alone = {number: answer(tiny, given) for number, given in specs.items()}
    together = finish(sampler(tiny), specs)
    for number in specs:
        same(sampled(together, number), alone[number])

    running, source, coming = sampler(tiny, max_rows=7), random.Random(6), list(specs.items())
    answers: Answers = {}
    while running.has_work or coming:
        if coming and source.random() < 0.3:
            running.add(*coming.pop())
        answers |= {number: event for number, event in running.step() if not isinstance(event, Tokens)}
    for number in specs:
        same(sampled(answers, number), alone[number])


def test_the_samples_of_one_call_differ_and_another_call_with_the_seed_repeats_them(tiny: Model) -> None:
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


# Prompts


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


def test_one_step_reads_a_chunk_of_a_prompt_and_no_more(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 16)
    running = sampler(tiny)
    reads = first_arguments(monkeypatch, running._decoders[tiny], "prefill")
    steps = first_arguments(monkeypatch, running._decoders[tiny], "step")
    finish(running, {1: spec(range(100), max_tokens=3, num_samples=4)})
    assert [len(reading.tokens) for (reading,) in reads] == [16] * 6 + [4]
    assert len(steps) == 2


def test_everything_about_a_prompt_equals_a_plain_forward(tiny: Model, plain_tiny: Any) -> None:
    prompt = list(TEXT.encode())
    size = len(prompt)
    targets = tuple(tuple(range(place % 4)) for place in range(size - 1))
    given = spec(
        prompt, max_tokens=2, prompt_logprobs=True, topk_prompt=5, topk_sample=4, targets=targets, alt_k=3, seed=2
    )
    found = answer(tiny, given)
    plain_TV = plain_logprobs(plain_tiny, prompt)
    check_logprobs(plain_tiny, given, found)
    assert found.prompt_tokens == size
    assert found.topk_prompt is not None
    assert found.targets is not None
    assert found.alternatives is not None
    assert found.topk_prompt[0] is None
    assert len(found.topk_prompt) == size
    assert len(found.targets) == len(found.alternatives) == size - 1
    for place in range(1, size):
        row_V = plain_TV[place - 1]
        top = row_V.topk(5)
        ranking = found.topk_prompt[place]
        assert ranking is not None
        assert [token for token, _ in ranking] == top.indices.tolist()
        assert [logprob for _, logprob in ranking] == pytest.approx(top.values.tolist(), abs=1e-4)
        hoped = [row_V[token].item() for token in targets[place - 1]]
        assert found.targets[place - 1] == pytest.approx(hoped, abs=1e-4)
        assert len(found.alternatives[place - 1]) == 3
        for token, logprob in found.alternatives[place - 1]:
            assert logprob == pytest.approx(row_V[token].item(), abs=1e-4)
    ranks = found.sequences[0].topk
    assert ranks is not None
    assert [len(row) for row in ranks] == [4, 4]
    assert [token for token, _ in ranks[0]] == plain_TV[-1].topk(4).indices.tolist()


def test_alternatives_are_drawn_from_the_models_distribution(tiny: Model, plain_tiny: Any) -> None:
    found = answer(tiny, spec(b"ab", max_tokens=1, alt_k=3000, seed=9)).alternatives
    assert found is not None
    hoped_V = plain_logprobs(plain_tiny, b"ab")[0].exp()
    best = int(hoped_V.argmax())
    share = sum(token == best for token, _ in found[0]) / 3000
    deviation = (hoped_V[best].item() * (1 - hoped_V[best].item()) / 3000) ** 0.5
    assert abs(share - hoped_V[best].item()) < 4 * deviation
    assert len({token for token, _ in found[0]}) > 50


@pytest.mark.parametrize("last_n", [0, 1, 5, 200])
def test_only_the_last_n_prompt_entries_are_computed(
    tiny: Model, plain_tiny: Any, last_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(TEXT.encode())
    running = sampler(tiny)
    unembedded = first_arguments(monkeypatch, running._decoders[tiny], "logits")
    monkeypatch.setattr(prompt_logprobs, "LOGITS_AT_ONCE", 263 * 8)
    given = spec(prompt, max_tokens=1, prompt_logprobs=True, topk_prompt=2, last_n=last_n)
    found = sampled(finish(running, {1: given}), 1)
    wanted = min(last_n, len(prompt) - 1)
    rows = [hidden_ND.shape[0] for hidden_ND in unembedded]
    assert sum(rows) == wanted + 1
    assert max(rows) <= 8
    plain_TV = plain_logprobs(plain_tiny, prompt)
    hoped = [plain_TV[place - 1, prompt[place]].item() for place in range(len(prompt) - wanted, len(prompt))]
    assert found.prompt_logprobs is not None
    assert found.topk_prompt is not None
    nothing = [None] * (len(prompt) - wanted)
    assert found.prompt_logprobs[: len(nothing)] == nothing
    assert found.topk_prompt[: len(nothing)] == nothing
    assert found.prompt_logprobs[len(nothing) :] == pytest.approx(hoped, abs=1e-4)
    assert None not in found.topk_prompt[len(nothing) :]


def test_a_prompt_of_one_token_has_one_entry_that_is_none(tiny: Model) -> None:
    found = answer(tiny, spec([5], max_tokens=1, prompt_logprobs=True, topk_prompt=2, targets=(), alt_k=2))
    assert (found.prompt_logprobs, found.topk_prompt, found.targets, found.alternatives) == ([None], [None], [], [])


# Where a sequence ends


def test_a_stop_token_is_included_and_ends_its_sequence_alone(tiny: Model) -> None:
    free = answer(tiny, spec(b"abc", num_samples=4, max_tokens=30, seed=3)).sequences
    stop = free[0].tokens[7]
    for before, after in zip(
        free,
        answer(tiny, spec(b"abc", num_samples=4, max_tokens=30, seed=3, stop_tokens=(stop,))).sequences,
        strict=True,
    ):
        hoped = before.tokens[: before.tokens.index(stop) + 1] if stop in before.tokens else before.tokens
        assert after.tokens == hoped
        assert after.stop_reason == ("stop" if stop in before.tokens else "length")


def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(tiny: Model) -> None:
    given = spec(b"abc", max_tokens=60, seed=3, top_k=20)
    tokens = answer(tiny, given).sequences[0].tokens
    place = next(at for at in range(10, 59) if all(32 <= token < 127 for token in tokens[at : at + 2]))
    string = bytes(tokens[place : place + 2]).decode()
    found = answer(tiny, spec(b"abc", max_tokens=60, seed=3, top_k=20, stop_strings=("", "nowhere", string)))
    first = next(at for at in range(59) if tokens[at : at + 2] == tokens[place : place + 2])
    assert found.sequences[0].tokens == tokens[: first + 2]
    assert found.sequences[0].stop_reason == "stop"


def test_a_full_context_ends_a_sequence(tiny: Model, tiny_info: ModelInfo) -> None:
    room = tiny_info.max_context_length
    for size, hoped in ((room - 3, 3), (room, 0)):
        sequence = answer(tiny, spec([1] * size, max_tokens=50)).sequences[0]
        assert (len(sequence.tokens), sequence.stop_reason) == (hoped, "length")


def test_no_tokens_and_no_samples_may_be_asked_for(tiny: Model) -> None:
    found = answer(tiny, spec(b"abc", max_tokens=0, num_samples=2, prompt_logprobs=True))
    assert [(row.tokens, row.stop_reason) for row in found.sequences] == [([], "length")] * 2
    assert found.prompt_logprobs is not None
    assert answer(tiny, spec(b"abc", num_samples=0, prompt_logprobs=True)).prompt_logprobs == found.prompt_logprobs


def test_streamed_tokens_come_one_by_one_and_are_those_of_the_answer(tiny: Model) -> None:
    running = sampler(tiny)
    running.add(1, spec(b"abc", num_samples=3, max_tokens=9, is_streamed=True))
    running.add(2, spec(b"abc", max_tokens=9))
    drawn: dict[int, list[tuple[int, float]]] = {0: [], 1: [], 2: []}
    steps = 0
    while running.has_work:
        steps += 1
        for number, event in running.step():
            if isinstance(event, Tokens):
                assert number == 1
                drawn[event.index] += zip(event.tokens, event.logprobs, strict=True)
            elif number == 1:
                assert isinstance(event, Sampled)
                for index, row in enumerate(event.sequences):
                    assert drawn[index] == list(zip(row.tokens, row.logprobs, strict=True))
    assert steps == 9


# Bounds, turns, cancellation


def test_a_hundred_requests_at_once_finish_within_the_bounds_and_leave_nothing(
    tiny: Model, adapter_folders: list[str]
) -> None:
    running = sampler(tiny, max_rows=8, max_cache_tokens=1500)
    source = random.Random(1)
    for number, prompt in enumerate(prompts(100, seed=8)):
        weights = source.choice([None, *adapter_folders])
        running.add(number, spec(prompt, weights=weights, num_samples=source.randint(1, 3), max_tokens=6, seed=number))
    done, most_bytes = set(), 0
    while running.has_work:
        done |= {number for number, event in running.step() if isinstance(event, Sampled)}
        loads = [batch.load for batch in running._batches.values()]
        assert all(rows <= 8 for rows, _ in loads)
        assert sum(rows * longest for rows, longest in loads) <= 1500
        most_bytes = max(most_bytes, running.cache_bytes)
    assert done == set(range(100))
    assert most_bytes > 0
    assert running.cache_bytes == 0


@pytest.mark.parametrize(
    "bounds", [{"max_rows": 3}, {"max_cache_tokens": 60}, {"max_cache_tokens": 5}, {"max_rows": 1}]
)
def test_a_request_larger_than_the_bounds_runs_in_parts_with_the_same_result(
    tiny: Model, bounds: dict[str, int]
) -> None:
    given = spec(b"abcdef", num_samples=10, max_tokens=8, seed=5)
    running = sampler(tiny, **bounds)
    running.add(1, given)
    most = 0
    found = None
    while running.has_work:
        for _, event in running.step():
            found = event
        most = max([most, *(len(batch.rows) for batch in running._batches.values())])
    assert isinstance(found, Sampled)
    same(found, answer(tiny, given))
    assert most <= bounds.get("max_rows", 4)


def test_a_large_request_is_not_overtaken_for_ever(tiny: Model) -> None:
    running = sampler(tiny, max_cache_tokens=400)
    running.add(0, spec(b"ab", max_tokens=20))
    running.step()
    running.add(1, spec([1] * 300, max_tokens=60))
    order: list[int] = []
    for number in range(2, 40):
        running.add(number, spec(b"ab", max_tokens=20))
        order += [done for done, event in running.step() if isinstance(event, Sampled)]
    order += list(finish(running))
    assert order.index(1) == 1


def test_batches_of_different_weights_take_turns(tiny: Model, adapter_folders: list[str]) -> None:
    running = sampler(tiny)
    for number, weights in enumerate([None, *adapter_folders]):
        running.add(number, spec(b"abc", weights=weights, max_tokens=20, is_streamed=True))
    turns: list[int] = []
    while running.has_work:
        turns += {number: None for number, event in running.step() if isinstance(event, Tokens)}
    for at in range(0, len(turns), 4):
        assert sorted(turns[at : at + 4]) == [0, 1, 2, 3]


def test_decoding_goes_on_while_a_long_prompt_is_read(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 8)
    running = sampler(tiny)
    running.add(1, spec(b"abc", max_tokens=30))
    running.step()
    running.add(2, spec([1] * 800, max_tokens=1))
    order = list(finish(running))
    assert order == [1, 2]


def test_a_cancelled_request_leaves_at_once_wherever_it_is_and_the_others_stay_right(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 4)
    given = {n: spec(p, num_samples=2, max_tokens=12, seed=n) for n, p in enumerate(prompts(6, seed=4, longest=20))}
    alone = {number: answer(tiny, one) for number, one in given.items()}
    for steps in range(0, 30, 2):
        running = sampler(tiny, max_rows=6)
        for number, one in given.items():
            running.add(number, one)
        before = [number for _ in range(steps) for number, _ in running.step()]
        for number in (1, 3, 99):
            running.cancel(number)
        assert not any(request.number in (1, 3) for batch in running._batches.values() for request in batch.samples)
        after = finish(running)
        assert set(after) == {0, 2, 4, 5} - set(before)
        for number in after:
            same(sampled(after, number), alone[number])


def test_cancelling_the_only_request_frees_its_memory(tiny: Model) -> None:
    running = sampler(tiny)
    running.add(1, spec(b"abc", num_samples=4, max_tokens=50))
    running.step()
    running.step()
    assert running.cache_bytes > 0
    running.cancel(1)
    assert running.cache_bytes == 0
    assert not running.has_work


# Weights


def test_weights_are_read_once_kept_within_bounds_and_usable_after_the_folder_is_gone(
    tiny: Model, adapter_folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one"
    checkpoint.save(randomise(Adapter(tiny, LoraSpec(rank=4))), folder, with_optimizer=False)
    running = sampler(tiny)
    first = sampled(finish(running, {1: spec(b"abc", weights=str(folder))}), 1)
    for path in folder.iterdir():
        path.unlink()
    same(sampled(finish(running, {2: spec(b"abc", weights=str(folder))}), 2), first)

    read = first_arguments(monkeypatch, adapter_cache, "read_weights")
    narrow = sampler(tiny, adapters_bytes=1)
    for weights in (0, 0, 1, 0):
        finish(narrow, {1: spec(b"abc", weights=adapter_folders[weights])})
    assert read == [adapter_folders[place] for place in (0, 1, 0)]
    assert len(narrow._adapters._weights) == 1
    # All at once they cannot be held: they run one after the other.
    answers = finish(narrow, {n: spec(b"abc", weights=at, max_tokens=3) for n, at in enumerate(adapter_folders)})
    assert all(isinstance(found, Sampled) for found in answers.values())


def test_sampling_leaves_the_weights_in_training_alone(tiny: Model, adapter_folders: list[str]) -> None:
    session = Session(tiny)
    adapter = randomise(session.create(rank=4))
    before = adapter.weights_P.clone()
    data = [datum(b"abcdef", target_tokens=list(b"bcdefg"))]
    numbers = session.logprobs(data)[0]
    finish(sampler(tiny), {n: spec(b"abc", weights=at, max_tokens=5) for n, at in enumerate(adapter_folders)})
    assert torch.equal(adapter.weights_P, before)
    assert torch.equal(session.logprobs(data)[0], numbers)


# Faults


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, 263)}, r"Token 263 is not in the vocabulary of tinkex/tiny \(0 to 262\)"),
        ({"prompt": (-1,)}, "Token -1"),
        ({"prompt": (1,) * 3000}, "has 3000 tokens, but tinkex/tiny takes 2048"),
        ({"prompt": (1, 2, 3), "targets": ((1,),)}, "for 1 positions, but a prompt of 3 tokens has 2"),
        ({"prompt": (1, 2), "targets": ((999,),)}, "Token 999"),
        ({"base": "other/model", "prompt": (1,)}, "no model other/model"),
    ],
)
def test_what_cannot_run_is_refused_in_words(tiny: Model, options: dict[str, Any], words: str) -> None:
    running = sampler(tiny)
    with pytest.raises(EngineFault, match=words) as fault:
        running.add(1, SampleSpec(**{"base": "tinkex/tiny", **options}))
    assert fault.value.category == "user"
    assert not running.has_work


def test_unreadable_weights_are_the_trouble_of_those_who_ask_for_them(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    good = spec(b"abc", max_tokens=5)
    answers = finish(sampler(tiny), {1: good, 2: spec(b"abc", weights=str(tmp_path / "bad")), 3: good})
    fault = answers[2]
    assert isinstance(fault, EngineFault)
    assert str(tmp_path) not in str(fault)
    same(sampled(answers, 1), sampled(answers, 3))


def test_a_prompt_that_does_not_fit_into_memory_fails_alone(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    running = sampler(tiny)
    decoder: Any = running._decoders[tiny]
    prefill = decoder.prefill

    def short_of_memory(readings: Any) -> Any:
        found = prefill(readings)  # the caches have their new columns by now
        if any(len(reading.tokens) > 100 for reading in readings):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate a lot")
        return found

    monkeypatch.setattr(decoder, "prefill", short_of_memory)
    answers = finish(running, {1: spec(b"abc"), 2: spec([1] * 200), 3: spec(b"abc")})
    fault = answers[2]
    assert isinstance(fault, EngineFault)
    assert fault.category == "server"
    assert "not enough memory" in str(fault)
    assert "200 tokens" in str(fault)
    assert "Allocator" not in str(fault)
    same(sampled(answers, 1), answer(tiny, spec(b"abc")))


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
    answers = finish(running, given)
    assert isinstance(answers[2], EngineFault)
    for number in (0, 1):
        same(sampled(answers, number), alone[number])


def test_rows_of_many_adapters_step_together_and_equal_each_alone(
    tiny: Model, adapter_folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [None, *adapter_folders, adapter_folders[0], None]
    given = {
        number: spec(prompt, weights=weights, max_tokens=12, seed=number)
        for number, (weights, prompt) in enumerate(zip(asked, prompts(len(asked), seed=3), strict=True))
    }
    running = sampler(tiny)
    steps = first_arguments(monkeypatch, running._decoders[tiny], "step")
    answers = finish(running, given)
    assert len(steps) == 11
    for number, one in given.items():
        same(sampled(answers, number), answer(tiny, one))


def test_rows_that_share_a_prompt_draw_what_each_would_alone(tiny: Model, adapter_folders: list[str]) -> None:
    long = list(TEXT.encode()) * 4
    given = {
        1: spec(long, num_samples=5, max_tokens=20, seed=1),
        2: spec(long, max_tokens=30, seed=2),
        3: spec(long, weights=adapter_folders[0], num_samples=3, max_tokens=25, seed=3),
        4: spec(b"short", max_tokens=40, seed=4),
    }
    answers = finish(sampler(tiny), given)
    for number, one in given.items():
        for index in range(one.num_samples):
            found = sampled(answers, number).sequences[index]
            # A prompt that is looked at and one that is copied differ in the order of additions alone.
            assert found.tokens == answer(tiny, one).sequences[index].tokens
            alone = answer(tiny, one, max_rows=1).sequences[index]
            assert found.tokens == alone.tokens
            assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_prompt_is_read_once_for_all_calls_that_have_it_and_turns_read_what_is_new(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = sampler(tiny)
    reads = first_arguments(monkeypatch, running._decoders[tiny], "prefill")
    long = list(TEXT.encode()) * 2
    group = {number: spec(long, max_tokens=3, seed=number) for number in range(6)}
    answers = finish(running, group)
    assert sum(len(reading.tokens) for readings in reads for reading in readings) == len(long)
    assert [sampled(answers, number).cache_hit_tokens for number in group] == [0] + [len(long)] * 5
    reads.clear()
    turn = [*long, *sampled(answers, 0).sequences[0].tokens, 7, 8, 9]
    answers = finish(running, {7: spec(turn, max_tokens=5, seed=0)})
    assert [len(reading.tokens) for readings in reads for reading in readings] == [6]
    assert sampled(answers, 7).cache_hit_tokens == len(long)
    same(sampled(answers, 7), answer(tiny, spec(turn, max_tokens=5, seed=0)))


def test_what_was_read_for_one_party_serves_no_other(tiny: Model, adapter_folders: list[str]) -> None:
    running = sampler(tiny)
    long = list(TEXT.encode()) * 2

    def hits(party: str, weights: str | None) -> int:
        return sampled(finish(running, {1: spec(long, weights=weights, max_tokens=1, party=party)}), 1).cache_hit_tokens

    assert hits("a", adapter_folders[0]) == 0
    assert hits("b", adapter_folders[0]) == 0
    assert hits("a", adapter_folders[0]) == len(long)
    assert hits("a", adapter_folders[1]) == 0
    assert hits("a", None) == 0
    assert hits("b", None) == 0
    assert hits("b", None) == len(long)


def test_a_base_prompt_read_beside_a_long_one_with_an_adapter_is_the_base_models_own(
    tiny: Model, adapter_folders: list[str]
) -> None:
    given = {
        1: spec([7, 8, 9, 10] * 100, weights=adapter_folders[0], max_tokens=2, seed=1),
        2: spec(list(TEXT.encode()), max_tokens=6, seed=2, prompt_logprobs=True),
    }
    answers = finish(sampler(tiny), given)
    for number, one in given.items():
        same(sampled(answers, number), answer(tiny, one))
    alone = answer(tiny, given[2]).prompt_logprobs
    assert sampled(answers, 2).prompt_logprobs == pytest.approx(alone, abs=1e-4)


def test_a_kept_prompt_keeps_no_adapter(tiny: Model, adapter_folders: list[str]) -> None:
    running = sampler(tiny)
    for number, folder in enumerate(adapter_folders):
        finish(running, {number: spec(list(TEXT.encode()), weights=folder, max_tokens=1)})
    assert running._prefix_cache.tokens > 0
    assert all(prompt.weights is None for prompt in running._prefix_cache._prompts.values())


def test_a_short_prompt_is_not_kept_waiting_by_long_ones(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "CHUNK_TOKENS", 64)
    running = sampler(tiny)
    for number in range(5):
        running.add(number, spec([number] * 1000, max_tokens=1))
    running.add(9, spec(b"short", max_tokens=1))
    for _ in range(12):
        if any(number == 9 for number, _ in running.step()):
            return
    raise AssertionError("it waits for all of the long ones")


def test_prompts_are_kept_within_a_bound(tiny: Model) -> None:
    running = sampler(tiny, max_cache_tokens=8 * 400)
    for number in range(10):
        finish(running, {number: spec([number] * 100, max_tokens=1)})
        assert running._prefix_cache.tokens <= 400
    assert running._prefix_cache.nbytes > 0


def test_weights_that_have_diverged_are_named_as_the_reason(tiny: Model, tmp_path: Path) -> None:
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
    answers = finish(sampler(tiny), specs)
    for number in (1, 2):
        fault = answers[number]
        assert isinstance(fault, EngineFault)
        assert fault.category == "user"
        assert "diverged" in str(fault)
    assert isinstance(answers[3], Sampled)


def test_what_a_diverged_row_leaves_in_the_cache_never_reaches_another() -> None:
    def prompt(value: float, width: int) -> KVCache:
        made = KVCache()
        made.update(torch.full((1, 2, width, 4), value), torch.full((1, 2, width, 4), value), 0)
        return made

    cache = KVCache()
    for value, width in ((1.0, 3), (torch.nan, 9), (torch.nan, 9)):
        cache.add_rows(prompt(value, width), 1)
    assert cache.remove_rows([1, 2], [3, 9, 9]) == [0]
    cache.add_rows(prompt(2.0, 4), 1)
    cache.add_rows(prompt(3.0, 8), 1)
    layer = cache.kv_layers[0]
    used_BT = layer.keys[:3, 0, layer.start : layer.end, 0]
    # Masked padding is multiplied by zero, which makes nothing of a number, but NaN of NaN.
    assert used_BT.tolist() == [[0.0] * 5 + [1.0] * 3, [0.0] * 4 + [2.0] * 4, [3.0] * 8]
