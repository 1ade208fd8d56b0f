"""The choice of the next micro-batch: fair shares for tenants, and no pass starves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch

from tests.unit.engine.oracle import Session
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training import losses
from tinkex.engine.training.micro_batches import Pass, next_micro_batch
from tinkex.engine.training.runner import Item


class Whole:
    """A runner that counts tokens and runs nothing."""

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        return total

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        yield


def passes_of(tiny: Model, lengths: dict[str, list[int]], tenants: dict[str, str] | None = None) -> list[Pass]:
    adapter = Session(tiny).create()
    loss = losses.find_loss("cross_entropy")
    found = []
    for name, given in lengths.items():
        items = [
            Item(
                adapter=adapter,
                loss=loss,
                config={},
                needs_gradient=False,
                index=index,
                tokens_T=torch.zeros(size, dtype=torch.long),
                targets=torch.zeros(size),
                inputs={},
            )
            for index, size in enumerate(given)
        ]
        found.append(Pass(0, name, items, (tenants or {}).get(name, name)))
    return found


def sizes(tiny: Model, budget: int, lengths: dict[str, list[int]], tenants: dict[str, str] | None = None) -> Any:
    passes = passes_of(tiny, lengths, tenants)
    next_micro_batch(passes, budget, Whole())
    return {one.adapter_name: [item.length for item in one.running] for one in passes}


@pytest.mark.parametrize(
    ("lengths", "budget", "first"),
    [
        ([4, 4, 4], 8, [4, 4]),
        ([1, 9, 2, 8], 18, [9, 8]),
        ([100, 1, 1], 10, [100]),
        ([5], 1, [5]),
    ],
)
def test_a_micro_batch_takes_the_longest_first_and_keeps_the_budget(
    tiny: Model, lengths: list[int], budget: int, first: list[int]
) -> None:
    assert sizes(tiny, budget, {"a": lengths}) == {"a": first}


def test_a_short_pass_is_in_the_next_micro_batch_beside_a_long_one(tiny: Model) -> None:
    assert sizes(tiny, 100, {"long": [10] * 50, "short": [10]}) == {"long": [10] * 9, "short": [10]}


def test_tenants_get_equal_tokens_however_many_passes_and_datums_they_have(tiny: Model) -> None:
    lengths = {"a1": [10] * 9, "a2": [10] * 9, "a3": [10] * 9, "b": [30, 30, 30]}
    found = sizes(tiny, 120, lengths, {"a1": "a", "a2": "a", "a3": "a", "b": "b"})
    assert sum(found["b"]) == 60 and [sum(found[name]) for name in ("a1", "a2", "a3")] == [30, 20, 10]


def test_a_datum_longer_than_the_budget_runs_when_its_pass_has_waited_longest(tiny: Model) -> None:
    assert sizes(tiny, 100, {"huge": [500], "small": [10]}) == {"huge": [500], "small": []}
