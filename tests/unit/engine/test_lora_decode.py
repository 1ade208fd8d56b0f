"""LoRA of a decode step, stacked or adapter by adapter: the same numbers, and no stale stack after a failure."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import LoraSpec
from tinkex.engine.packed.lora_decode import StackedLora, is_wasteful

SITES = {"one": slice(0, 6), "two": slice(6, 10)}


def weights(rank: int, seed: int, *sites: str) -> LoraWeights:
    drawn = torch.Generator().manual_seed(seed)
    pairs = {
        site: (
            torch.randn(rank, 5, generator=drawn),
            torch.randn(SITES[site].stop - SITES[site].start, rank, generator=drawn),
        )
        for site in sites or SITES
    }
    return LoraWeights(LoraSpec(rank=rank), pairs)


def expected(x_BD: torch.Tensor, acting: list[LoraWeights | None]) -> torch.Tensor:
    y_BO = torch.zeros(len(acting), 10)
    for row, one in enumerate(acting):
        for site, (a_RD, b_OR) in (one.pairs if one is not None else {}).items():
            y_BO[row, SITES[site]] += one.spec.scale * b_OR @ (a_RD @ x_BD[row])  # type: ignore[union-attr]
    return y_BO


def added(lora: StackedLora, x_BD: torch.Tensor, acting: list[LoraWeights | None]) -> torch.Tensor:
    y_BO = torch.zeros(len(acting), 10)
    lora.prepare(acting)
    lora.apply(0, x_BD, y_BO)
    return y_BO


@pytest.mark.parametrize("largest", [3, 400])
def test_any_mixture_of_adapters_ranks_and_absent_sites(largest: int) -> None:
    a, b, c = weights(2, 1), weights(largest, 2), weights(1, 3, "two")
    assert is_wasteful([2, largest, 1]) == (largest == 400)
    lora = StackedLora([SITES], [5])
    x_BD = torch.randn(6, 5)
    for acting in ([a, b, c, a, None, b], [None] * 6, [a] * 6, [a, a, b, b, c, c], [None, None, None, None, None, c]):
        torch.testing.assert_close(added(lora, x_BD, list(acting)), expected(x_BD, list(acting)), rtol=1e-4, atol=1e-4)


def test_a_stack_that_could_not_be_made_leaves_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = weights(2, 1), weights(2, 2)
    lora, x_BD = StackedLora([SITES], [5]), torch.randn(1, 5)
    added(lora, x_BD, [a])

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StackedLora, "_stack", fail)
        with pytest.raises(MemoryError):
            lora.prepare([b])
    torch.testing.assert_close(added(lora, x_BD, [b]), expected(x_BD, [b]), rtol=1e-4, atol=1e-4)
