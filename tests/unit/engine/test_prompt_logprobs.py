"""What a request asks about its prompt, compared with a plain forward pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.sampling_oracle import (
    TEXT,
    answer,
    check_logprobs,
    finish,
    first_arguments,
    plain_logprobs,
    sampled,
    sampler,
    spec,
)
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling import prompt_logprobs
from tinkex.types.packed import unpack

pytestmark = pytest.mark.usefixtures("runner", "one_thread")


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
    rankings, drawn, scored = found.topk_prompt.to_lists(), found.alternatives.to_lists(), unpack("f", found.targets)
    assert rankings[0] is None
    assert len(rankings) == size
    assert len(drawn) == size - 1
    assert len(scored) == sum(map(len, targets))
    for place in range(1, size):
        row_V = plain_TV[place - 1]
        top = row_V.topk(5)
        ranking = rankings[place]
        assert ranking is not None
        assert [token for token, _ in ranking] == top.indices.tolist()
        assert [logprob for _, logprob in ranking] == pytest.approx(top.values.tolist(), abs=1e-4)
        hoped = [row_V[token].item() for token in targets[place - 1]]
        assert [scored.pop(0) for _ in hoped] == pytest.approx(hoped, abs=1e-4)
        pairs = drawn[place - 1]
        assert pairs is not None
        assert len(pairs) == 3
        for token, logprob in pairs:
            assert logprob == pytest.approx(row_V[token].item(), abs=1e-4)
    ranked = found.sequences[0].topk
    assert ranked is not None
    ranks = ranked.to_lists()
    assert [len(row or ()) for row in ranks] == [4, 4]
    assert [token for token, _ in ranks[0] or ()] == plain_TV[-1].topk(4).indices.tolist()


def test_alternatives_are_drawn_from_the_models_distribution(tiny: Model, plain_tiny: Any) -> None:
    matrix = answer(tiny, spec(b"ab", max_tokens=1, alt_k=3000, seed=9)).alternatives
    assert matrix is not None
    [pairs] = matrix.to_lists()
    assert pairs is not None
    hoped_V = plain_logprobs(plain_tiny, b"ab")[0].exp()
    best = int(hoped_V.argmax())
    share = sum(token == best for token, _ in pairs) / 3000
    deviation = (hoped_V[best].item() * (1 - hoped_V[best].item()) / 3000) ** 0.5
    assert abs(share - hoped_V[best].item()) < 4 * deviation
    assert len({token for token, _ in pairs}) > 50


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
    rankings = found.topk_prompt.to_lists() or [None] * len(prompt)
    assert rankings[: len(nothing)] == nothing
    assert found.prompt_logprobs[len(nothing) :] == pytest.approx(hoped, abs=1e-4)
    assert None not in rankings[len(nothing) :]


def test_a_prompt_of_one_token_has_one_entry_that_is_none(tiny: Model) -> None:
    found = answer(tiny, spec([5], max_tokens=1, prompt_logprobs=True, topk_prompt=2, targets=(), alt_k=2))
    assert (found.prompt_logprobs, found.targets) == ([None], b"")
    assert found.topk_prompt is not None and found.alternatives is not None
    assert (found.topk_prompt.length, found.topk_prompt.k) == (1, 0)
    assert found.alternatives.to_lists() == []
