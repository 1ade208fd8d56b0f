"""Adapters: their seeds, their layers and their buffers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.engine.oracle import Session
from tinkex.engine.contract import EngineFault
from tinkex.engine.models.loaded_model import Model


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(tiny: Model) -> None:
    session = Session(tiny)
    one, same, other = (session.create(name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", -4)))
    assert torch.equal(one.weights_P, same.weights_P) and not torch.equal(one.weights_P, other.weights_P)


def test_a_new_adapter_has_a_uniform_within_its_bound_and_b_zero(tiny: Model) -> None:
    adapter = Session(tiny).create(rank=64)
    for site in adapter.sites:
        a_RD, b_OR = (leaf.detach() for leaf in adapter.lora.pairs[site.name])
        bound = 1 / math.sqrt(site.d_in)
        assert 0.98 * bound < float(a_RD.abs().max()) <= bound and not bool(b_OR.any())
        assert float(a_RD.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_flags_choose_the_layers(tiny: Model) -> None:
    session = Session(tiny)
    names = {site.name.rpartition(".")[2] for site in session.create(train_mlp=False, train_unembed=False).sites}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    names = {site.name.rpartition(".")[2] for site in session.create(train_attn=False).sites}
    assert names == {"gate_proj", "up_proj", "down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "rank is 0; it must be at least 1"),
        ({"rank": 100_000}, "rank is 100000; tinkex/tiny allows 1 to 512"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "leave nothing to train"),
    ],
)
def test_an_impossible_adapter_is_rejected(tiny: Model, given: Any, words: str) -> None:
    with pytest.raises(EngineFault, match=words) as refused:
        Session(tiny).create(**given)
    assert refused.value.category == "user"
