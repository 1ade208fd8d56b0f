"""Runs the sampler in tests, and computes the same with plain transformers for comparison."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import oracle
from tinkex.engine.contract import EngineFault, Sampled, SampleSpec, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.runner_choice import choose_decoder
from tinkex.engine.sampling.sampler import Sampler

Results = dict[int, Sampled | EngineFault]

TEXT = "The quick brown fox jumps over the lazy dog. "


def sampler(model: Model, **bounds: Any) -> Sampler:
    models = dict.fromkeys(model.info.names, model)
    return Sampler(models, choose_decoder=partial(choose_decoder, prefer=oracle.RUNNER), **bounds)


def spec(prompt: Iterable[int], base: str = "tinkex/tiny", **options: Any) -> SampleSpec:
    return SampleSpec(base=base, prompt=tuple(prompt), **options)


def finish(running: Sampler, specs: Mapping[int, SampleSpec] | None = None) -> Results:
    """Add requests and run until nothing is left."""
    for number, given in (specs or {}).items():
        running.add(number, given)
    results: Results = {}
    while running.has_work:
        for number, event in running.step():
            if not isinstance(event, Tokens):
                assert number not in results
                results[number] = event
    assert running.cache_bytes == 0
    return results


def answer(model: Model, given: SampleSpec, **bounds: int) -> Sampled:
    found = finish(sampler(model, **bounds), {1: given})[1]
    assert isinstance(found, Sampled)
    return found


def sampled(results: Results, number: int) -> Sampled:
    found = results[number]
    assert isinstance(found, Sampled), found
    return found


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


def same(one: Sampled, other: Sampled) -> None:
    for left, right in zip(one.sequences, other.sequences, strict=True):
        assert left.tokens == right.tokens
        assert left.stop_reason == right.stop_reason
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
