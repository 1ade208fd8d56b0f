"""Penalties, filters and draws against plain implementations of one row at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tinkex.engine.contract import SampleSpec
from tinkex.engine.sampling import next_token as module
from tinkex.engine.sampling.next_token import (
    TokenSampler,
    apply_penalties,
    inverse_cdf,
    rank_tokens,
    sample_next_tokens,
)

CPU = torch.device("cpu")
SPEC = SampleSpec(base="m", prompt=(1, 2), seed=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors as small as these a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def token_sampler(size: int, index: int = 0, **options: Any) -> TokenSampler:
    return TokenSampler(replace(SPEC, **options), index, size, CPU)


def draws(logits_V: Tensor, count: int, **options: Any) -> list[int]:
    """Many draws of one row's distribution, each with a sequence of its own."""
    size = logits_V.shape[0]
    return sample_next_tokens(
        logits_V.expand(count, size), [token_sampler(size, index, **options) for index in range(count)]
    )


def allowed(logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Tokens that may be drawn and how likely each is: plain Python, in the order temperature, min_p, top_k, top_p."""
    scaled = [value / temperature for value in logits_V.tolist()]
    best = max(scaled)
    weights = {token: math.exp(value - best) for token, value in enumerate(scaled)}
    weights = {token: weight for token, weight in weights.items() if weight >= min_p}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((seen - hoped) ** 2 / hoped for seen, hoped in zip(counts, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.8},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    ],
)
def test_tokens_are_drawn_from_the_filtered_distribution(options: dict[str, Any]) -> None:
    logits_V = torch.tensor([0.3, -1.0, 1.5, 0.0, 1.2, -0.4, 0.9, -2.0])
    full = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **options}
    hoped = allowed(logits_V, **full)
    drawn = draws(logits_V, 4000, **full)
    assert set(drawn) == set(hoped)
    statistic = chi_square([drawn.count(token) for token in hoped], [4000 * share for share in hoped.values()])
    # 99.99 % of right samplers stay below, whatever the seed; this one is fixed.
    assert statistic < {1: 1.0, 2: 15.1, 3: 18.4, 4: 21.1, 5: 23.5, 6: 25.7, 7: 27.9, 8: 29.9}[len(hoped)]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("top_k", [-1, 0, 7, 300, 5000])
def test_top_k_and_top_p_sets_are_right_in_a_large_vocabulary(top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (0.3, 4.0):
        logits_V = torch.randn(700, generator=generator) * spread
        hoped = allowed(logits_V, temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0)
        drawn = set(draws(logits_V, 400, top_k=top_k, top_p=top_p))
        assert drawn <= set(hoped)
        likely = {token for token, share in hoped.items() if share > 0.03}
        assert likely <= drawn


def test_a_top_p_set_of_any_size_is_exact() -> None:
    # Even logits: with top_p, exactly so many of the first tokens remain.
    for size, top_p in ((9000, 0.01), (9000, 0.2), (9000, 0.8)):
        one = token_sampler(size, top_p=top_p)
        one.uniform = 1.0 - 2.0**-53
        assert sample_next_tokens(torch.zeros(1, size), [one]) == [math.ceil(size * top_p) - 1]


def test_rows_of_every_kind_in_one_batch_equal_each_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_BV = torch.randn(7, 600, generator=generator)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.2, "temperature": 0.7},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0, "top_k": 400, "top_p": 0.99},
    ]
    before = logits_BV.clone()
    together = sample_next_tokens(logits_BV, [token_sampler(600, row, **kind) for row, kind in enumerate(kinds)])
    alone = [
        sample_next_tokens(logits_BV[row : row + 1], [token_sampler(600, row, **kind)])[0]
        for row, kind in enumerate(kinds)
    ]
    assert together == alone
    assert torch.equal(logits_BV, before)


def test_penalties_equal_the_formulas() -> None:
    generator = torch.Generator().manual_seed(4)
    logits_NV = torch.randn(3, 20, generator=generator)
    settings = [(1.5, 0.0, 0.0), (1.0, 0.7, 0.3), (0.8, -0.5, 1.1)]
    drawn = [[5, 5, 7], [3, 3, 3, 19], [0]]
    samplers = []
    for (repetition, presence, frequency), tokens in zip(settings, drawn, strict=True):
        one = token_sampler(20, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        for token in tokens:
            one.record_token(token)
        samplers.append(one)
    hoped = logits_NV.clone()
    for row, ((repetition, presence, frequency), tokens) in enumerate(zip(settings, drawn, strict=True)):
        for token in range(20):
            value = logits_NV[row, token].item()
            if token in tokens or token in SPEC.prompt:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * tokens.count(token) + presence * (token in tokens)
            hoped[row, token] = value
    assert torch.allclose(apply_penalties(logits_NV, samplers), hoped, atol=1e-6)


def test_a_penalised_greedy_row_does_not_repeat_a_token() -> None:
    logits_BV = torch.tensor([[0.0, 0.0, 0.0, 2.0, 1.5]])
    one = token_sampler(5, temperature=0.0, presence_penalty=1.0)
    first = sample_next_tokens(logits_BV, [one])[0]
    one.record_token(first)
    assert [first, *sample_next_tokens(logits_BV, [one])] == [3, 4]


def test_of_equal_logits_the_lower_token_wins() -> None:
    logits_V = torch.zeros(600)
    assert draws(logits_V, 1, temperature=0.0) == [0]
    assert set(draws(logits_V, 300, top_k=3)) == {0, 1, 2}
    values, tokens = rank_tokens(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]), 4)
    assert tokens.tolist() == [[1, 3, 0, 2]]
    assert values.tolist() == [[3.0, 3.0, 1.0, 1.0]]


def test_more_ranks_than_tokens_gives_all_tokens() -> None:
    assert rank_tokens(torch.tensor([[1.0, 2.0]]), 9)[1].tolist() == [[1, 0]]


def test_the_same_seed_draws_the_same_and_sequences_of_one_call_differ() -> None:
    logits_V = torch.zeros(1000)
    assert draws(logits_V, 20, seed=5) == draws(logits_V, 20, seed=5)
    assert draws(logits_V, 20, seed=5) != draws(logits_V, 20, seed=6)
    assert len(set(draws(logits_V, 20, seed=5))) > 15


def test_a_repeated_draw_is_the_same_until_the_token_is_recorded() -> None:
    logits_BV = torch.zeros(1, 1000)
    one = token_sampler(1000)
    first = sample_next_tokens(logits_BV, [one])
    assert sample_next_tokens(logits_BV, [one]) == first
    one.record_token(first[0])
    assert sample_next_tokens(logits_BV, [one]) != first


def test_a_token_without_probability_is_never_drawn() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    uniforms = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-53]], dtype=torch.float64)
    assert inverse_cdf(weights, uniforms).tolist() == [[1, 1, 3, 3, 3]]
    assert set(draws(torch.tensor([-torch.inf, 0.0, -torch.inf]), 200)) == {1}


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    logits_V = torch.tensor([1.0, 30.0, 29.0])
    assert set(draws(logits_V, 50, temperature=1e-30)) == {1}
    assert set(draws(logits_V, 50, temperature=1e-30, top_p=0.9)) == {1}


def test_a_row_without_a_filter_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def sorted_after_all(*_: Any) -> Any:
        raise AssertionError("sorted")

    monkeypatch.setattr(module, "rank_tokens", sorted_after_all)
    generator = torch.Generator().manual_seed(5)
    logits_BV = torch.randn(3, 50, generator=generator)
    sample_next_tokens(
        logits_BV,
        [token_sampler(50), token_sampler(50, temperature=0.0), token_sampler(50, min_p=0.1, presence_penalty=1.0)],
    )
    with pytest.raises(AssertionError, match="sorted"):
        sample_next_tokens(logits_BV[:1], [token_sampler(50, top_p=0.5)])


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_a_draw_is_the_first_column_whose_cumulative_weight_exceeds_it(size: int) -> None:
    weights = torch.rand(3, size, generator=torch.Generator().manual_seed(size))
    weights[:, ::3] = 0
    weights[:, size // 2] = 1
    uniforms = torch.linspace(0, 1, 201, dtype=torch.float64)[:-1].expand(3, -1)
    sums = weights.double().cumsum(1)
    drawn = torch.cat([inverse_cdf(weights, column) for column in uniforms.split(1, 1)], 1)
    assert bool((drawn != inverse_cdf(weights, uniforms)).sum() <= 2)  # all at once: other sums, another border
    assert bool((weights.gather(1, drawn) > 0).all())
    # Where a number falls on the border of two columns, rounding may decide.
    above, aims = sums.gather(1, drawn), uniforms * sums[:, -1:]
    assert bool((above >= aims - 1e-9).all() and (above - weights.gather(1, drawn) <= aims + 1e-9).all())


def test_a_temperature_too_small_for_float32_is_zero() -> None:
    assert draws(torch.tensor([1.0, 3.0, 2.0]), 3, temperature=1e-50) == [1, 1, 1]
