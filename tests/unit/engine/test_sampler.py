"""The sampler: where a sequence ends, streaming, limits, turns, cancellation, and requests that are rejected."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.engine.sampling_oracle import (
    answer,
    finish,
    prompts,
    same,
    sampled,
    sampler,
    spec,
)
from tinkex.engine.contract import EngineFault, ModelInfo, Sampled, SampleSpec, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling import decode_batch

pytestmark = pytest.mark.usefixtures("runner", "one_thread")


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


def test_zero_tokens_and_zero_samples_may_be_requested(tiny: Model) -> None:
    found = answer(tiny, spec(b"abc", max_tokens=0, num_samples=2, prompt_logprobs=True))
    assert [(row.tokens, row.stop_reason) for row in found.sequences] == [([], "length")] * 2
    assert found.prompt_logprobs is not None
    assert answer(tiny, spec(b"abc", num_samples=0, prompt_logprobs=True)).prompt_logprobs == found.prompt_logprobs


def test_streamed_tokens_come_one_by_one_and_equal_the_result(tiny: Model) -> None:
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


def test_a_hundred_requests_stay_within_the_limits_and_free_all_memory(tiny: Model, adapter_folders: list[str]) -> None:
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
def test_a_request_larger_than_the_limits_runs_in_parts_with_the_same_result(
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


def test_a_large_request_does_not_starve(tiny: Model) -> None:
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


def test_a_request_can_be_cancelled_in_every_stage_without_changing_others(
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, 263)}, "prompt: entry 1 is token 263; tinkex/tiny has tokens 0 to 262"),
        ({"prompt": (-1,)}, "is token -1"),
        ({"prompt": (1,) * 3000}, "has 3000 tokens, but the context of tinkex/tiny takes at most 2048"),
        ({"prompt": (1, 2, 3), "targets": ((1,),)}, "for 1 positions, but a prompt of 3 tokens has 2"),
        ({"prompt": (1, 2), "targets": ((999,),)}, "target_prompt_logprobs: entry 0 is token 999"),
        ({"base": "other/model", "prompt": (1,)}, "no model other/model"),
    ],
)
def test_a_request_that_cannot_run_is_rejected_with_the_reason(
    tiny: Model, options: dict[str, Any], words: str
) -> None:
    running = sampler(tiny)
    with pytest.raises(EngineFault, match=words) as fault:
        running.add(1, SampleSpec(**{"base": "tinkex/tiny", **options}))
    assert fault.value.category == "user"
    assert not running.has_work
