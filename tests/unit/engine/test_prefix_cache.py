"""The prefix cache: a shared prefix is computed once, for requests of one tenant and one set of weights."""

from __future__ import annotations

import pytest

from tests.unit.engine.sampling_oracle import (
    TEXT,
    answer,
    finish,
    first_arguments,
    same,
    sampled,
    sampler,
    spec,
)
from tinkex.engine.models.loaded_model import Model

pytestmark = pytest.mark.usefixtures("runner", "one_thread")


def test_a_shared_prompt_is_computed_once_and_a_longer_one_only_from_its_new_tokens(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = sampler(tiny)
    reads = first_arguments(monkeypatch, running._decoders[tiny], "prefill")
    long = list(TEXT.encode()) * 2
    group = {number: spec(long, max_tokens=3, seed=number) for number in range(6)}
    results = finish(running, group)
    assert sum(len(reading.tokens) for readings in reads for reading in readings) == len(long)
    assert [sampled(results, number).cache_hit_tokens for number in group] == [0] + [len(long)] * 5
    reads.clear()
    turn = [*long, *sampled(results, 0).sequences[0].tokens, 7, 8, 9]
    results = finish(running, {7: spec(turn, max_tokens=5, seed=0)})
    assert [len(reading.tokens) for readings in reads for reading in readings] == [6]
    assert sampled(results, 7).cache_hit_tokens == len(long)
    same(sampled(results, 7), answer(tiny, spec(turn, max_tokens=5, seed=0)))


def test_cached_prompts_are_not_shared_between_tenants_or_weights(tiny: Model, adapter_folders: list[str]) -> None:
    running = sampler(tiny)
    long = list(TEXT.encode()) * 2

    def hits(tenant: str, weights: str | None) -> int:
        return sampled(
            finish(running, {1: spec(long, weights=weights, max_tokens=1, tenant=tenant)}), 1
        ).cache_hit_tokens

    assert hits("a", adapter_folders[0]) == 0
    assert hits("b", adapter_folders[0]) == 0
    assert hits("a", adapter_folders[0]) == len(long)
    assert hits("a", adapter_folders[1]) == 0
    assert hits("a", None) == 0
    assert hits("b", None) == 0
    assert hits("b", None) == len(long)


def test_a_cached_prompt_does_not_keep_its_adapter_in_memory(tiny: Model, adapter_folders: list[str]) -> None:
    running = sampler(tiny)
    for number, folder in enumerate(adapter_folders):
        finish(running, {number: spec(list(TEXT.encode()), weights=folder, max_tokens=1)})
    assert running._prefix_cache.tokens > 0
    assert all(prompt.weights is None for prompt in running._prefix_cache._prompts.values())


def test_cached_prompts_stay_within_the_limit(tiny: Model) -> None:
    running = sampler(tiny, max_cache_tokens=8 * 400)
    for number in range(10):
        finish(running, {number: spec([number] * 100, max_tokens=1)})
        assert running._prefix_cache.tokens <= 400
    assert running._prefix_cache.tokens > 0
