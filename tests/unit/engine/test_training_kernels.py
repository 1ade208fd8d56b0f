"""The C kernels of training passes: right numbers forward and backward, whatever else is in the pass.

Compared with autograd in float64. Tolerances are for float32: a sum of a few hundred terms of about 1 is off by some
1e-6 of their norm.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.architectures import CPU, PACKED, saved
from tests.unit.engine.oracle import Session, assert_alike, both, datum, randomise
from tests.unit.engine.test_decode_kernels import each_variant, with_kernels
from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.contract import LoraSpec
from tinkex.engine.models.loaded_model import Model, load
from tinkex.engine.packed import linear, lora_train
from tinkex.engine.packed.kernels import binding
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.lora_train import PackedLora
from tinkex.engine.packed.weights import Group
from tinkex.engine.runner_choice import packed_weights

pytestmark = with_kernels
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def gradient(formula: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    """By autograd in float64."""
    leaf = x.double().requires_grad_()
    formula(leaf).backward(dy.double())
    assert leaf.grad is not None
    return leaf.grad


@each_variant
@pytest.mark.parametrize("width", [7, 16, 50, 577])
@pytest.mark.parametrize("rows", [5, 700])
def test_the_gradient_of_rmsnorm_is_that_of_autograd(kernels: Kernels, width: int, rows: int) -> None:
    torch.manual_seed(0)
    x, gain, dy, residual = (
        torch.randn(rows, width),
        torch.randn(width),
        torch.randn(rows, width),
        torch.randn(rows, width),
    )
    wanted = gradient(lambda leaf: torch.rms_norm(leaf, (width,), gain.double(), 1e-5), x, dy)
    torch.testing.assert_close(kernels.rmsnorm_backward(x, gain, 1e-5, dy.clone(), None).double(), wanted, **CLOSE)
    torch.testing.assert_close(
        kernels.rmsnorm_backward(x, gain, 1e-5, dy, residual).double(), wanted + residual, **CLOSE
    )


@each_variant
@pytest.mark.parametrize("rows", [3, 900])
def test_the_gradient_of_swiglu_is_that_of_autograd(kernels: Kernels, rows: int) -> None:
    torch.manual_seed(0)
    gate_up, dy = torch.randn(rows, 96) * 8, torch.randn(rows, 48)
    formula: Callable[[Tensor], Tensor] = lambda leaf: torch.nn.functional.silu(leaf[:, :48]) * leaf[:, 48:]  # noqa: E731
    torch.testing.assert_close(kernels.swiglu_backward(gate_up, dy).double(), gradient(formula, gate_up, dy), **CLOSE)
    torch.testing.assert_close(kernels.swiglu(gate_up).double(), formula(gate_up.double()), **CLOSE)


@each_variant
@pytest.mark.parametrize("width", [2, 16, 34])
@pytest.mark.parametrize("rows", [3, 900])
def test_heads_are_rotated_and_rotated_back(kernels: Kernels, width: int, rows: int) -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(rows, 4 * width), torch.randn(rows, 1, width // 2)
    one, other = qkv.double().view(rows, 4, 2, -1).unbind(2)
    cos, sin = angles.double().cos(), angles.double().sin()
    wanted = torch.stack([one * cos - other * sin, other * cos + one * sin], 2).view(rows, -1)
    wanted[:, 3 * width :] = qkv[:, 3 * width :]  # the values
    rotated = qkv.clone()
    kernels.rope(rotated, angles.cos(), angles.sin(), 3, width, is_back=False)
    torch.testing.assert_close(rotated.double(), wanted, **CLOSE)
    kernels.rope(rotated, angles.cos(), angles.sin(), 3, width, is_back=True)
    torch.testing.assert_close(rotated, qkv, **CLOSE)


# Adapters


def adapter(rank: int, group: Group, without: str = "") -> LoraWeights:
    pairs = {}
    for site, place in group.slices.items():
        if site != without:
            shapes = (rank, group.weight_OD.shape[1]), (place.stop - place.start, rank)
            pairs[site] = torch.randn(shapes[0]), torch.randn(shapes[1])
            for part in pairs[site]:
                part.requires_grad_().grad = torch.randn_like(part)  # a gradient is added to, not set
    return LoraWeights(LoraSpec(rank=rank), pairs)


def grouped(width: int) -> Group:
    """Sites with nothing a whole number of registers, but for one."""
    return Group(torch.randn(64 + 17 + 50, width), None, {"q": slice(0, 64), "k": slice(64, 81), "v": slice(81, 131)})


def run(
    kernels: Kernels | None, group: Group, segments: list[Segment], count: int, x: Tensor, dy: Tensor
) -> list[Tensor]:
    """Output, dx, and all gradients, which start anew."""
    torch.manual_seed(7)
    leaves = [part for segment in segments for pair in segment.weights.pairs.values() for part in pair]
    for part in leaves:
        part.grad = torch.randn_like(part)
    with torch.no_grad():
        pack = PackedLora(segments, count, count, kernels=kernels)
        return [
            pack.forward(group, x),
            pack.backward(group, x, dy),
            *(part.grad for part in leaves if part.grad is not None),
        ]


@each_variant
@pytest.mark.parametrize("ranks", [(8, 8, 8), (1, 3, 5), (4, 16, 9), (64, 2, 33)])
@pytest.mark.parametrize("width", [64, 50, 7])
def test_adapters_are_those_of_torch_for_any_rank_length_and_width(
    kernels: Kernels, ranks: tuple[int, ...], width: int
) -> None:
    torch.manual_seed(0)
    group = grouped(width)
    acting = [adapter(rank, group, without) for rank, without in zip(ranks, ("", "k", "q"), strict=True)]
    # The base model's own tokens stand in the middle and at the end; the last adapter has more than a batch of rows.
    places = [(0, 5), (9, 25), (25, 165)]
    segments = [Segment(one, *place) for one, place in zip(acting, places, strict=True)]
    x, dy = torch.randn(170, width), torch.randn(170, 131)
    double = Group(group.weight_OD.double(), None, group.slices)
    wanted_y, wanted_dx = x.double() @ double.weight_OD.t(), dy.double() @ double.weight_OD
    for weights, start, stop in segments:
        for site, (a, b) in weights.pairs.items():
            delta = b.detach().double() @ a.detach().double() * weights.spec.scale
            wanted_y[start:stop, group.slices[site]] += x[start:stop].double() @ delta.t()
            wanted_dx[start:stop] += dy[start:stop, group.slices[site]].double() @ delta
    ours, theirs = run(kernels, group, segments, 170, x, dy), run(None, group, segments, 170, x, dy)
    for one, wanted in ((ours[0], wanted_y), (ours[1], wanted_dx)):
        assert float((one - wanted).norm() / wanted.norm()) <= 2e-6
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        assert float((one - other).norm() / other.norm()) <= 5e-6


@each_variant
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("width", [96, 50])
def test_an_adapter_has_the_same_bits_alone_and_among_others_with_any_number_of_threads(
    kernels: Kernels, rank: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    group = grouped(width)
    one, other = adapter(rank, group), adapter(5, group)
    x, dy = torch.randn(64, width), torch.randn(64, 131)
    # Without the base product, whose bits are another library's.
    monkeypatch.setattr(linear, "linear", lambda x_ND, weight_OD, bias_O=None: torch.zeros(len(x_ND), len(weight_OD)))
    alone = run(kernels, group, [Segment(one, 0, 37)], 37, x[20:57], dy[20:57])
    others = [Segment(other, 0, 20), Segment(adapter(lora_train.THIN + 1, group), 57, 64)]
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        together = run(kernels, group, [Segment(one, 20, 57), *others], 64, x, dy)
        for whole, part in zip(together[:2], alone[:2], strict=True):
            assert torch.equal(whole[20:57], part)
        for gradients, own in zip(together[2:8], alone[2:8], strict=True):
            assert torch.equal(gradients, own)


@each_variant
def test_tokens_without_a_gradient_give_none(kernels: Kernels) -> None:
    torch.manual_seed(0)
    group = grouped(16)
    one, other = adapter(4, group), adapter(4, group)
    x, dy = torch.randn(10, 16), torch.randn(10, 131)
    for by in (kernels, None):
        before = [part.grad.clone() for pair in other.pairs.values() for part in pair if part.grad is not None]
        with torch.no_grad():
            pack = PackedLora([Segment(one, 0, 6), Segment(other, 6, 10)], 10, 6, kernels=by)
            pack.forward(group, x)
            pack.backward(group, x[:6], dy[:6])
        after = [part.grad for pair in other.pairs.values() for part in pair]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True) if new is not None)


def test_wide_adapters_go_to_torch_and_thin_ones_beside_them_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = binding.find()
    assert kernels is not None
    ranks: list[list[int]] = []
    group = grouped(16)
    own = kernels.lora_forward

    def noted(batch: Any) -> None:
        sites = ctypes.cast(batch.sites, ctypes.POINTER(binding.LoraSite))
        ranks.append([sites[number].rank for number in range(batch.count)])
        own(batch)

    monkeypatch.setattr(kernels, "lora_forward", noted)
    acting = [adapter(rank, group) for rank in (lora_train.THIN + 1, lora_train.THIN, 2)]
    segments = [Segment(one, 4 * number, 4 * number + 4) for number, one in enumerate(acting)]
    x, dy = torch.randn(12, 16), torch.randn(12, 131)
    ours, theirs = run(kernels, group, segments, 12, x, dy), run(None, group, segments, 12, x, dy)
    assert ranks == [[lora_train.THIN] * 3 + [2] * 3]
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm() / other.norm()) <= 5e-6


@each_variant
def test_work_between_products_is_the_same_with_any_number_of_threads(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, dy, gain, angles = torch.randn(800, 96), torch.randn(800, 48), torch.randn(96), torch.randn(800, 1, 8)
    assert x.numel() > binding.SINGLE_THREAD_UP_TO
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rotated = x.clone()
        kernels.rope(rotated, angles.cos(), angles.sin(), 6, 16, is_back=False)
        back = kernels.rmsnorm_backward(x, gain, 1e-5, x.flip(0), None)
        results.append(
            [kernels.rmsnorm(x, gain, 1e-5), back, rotated, kernels.swiglu(x), kernels.swiglu_backward(x, dy)]
        )
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


# On the path


@each_variant
@pytest.mark.parametrize("inner", [48, 37])  # whole registers, and not
@pytest.mark.parametrize("kind", PACKED)
def test_every_family_has_the_gradient_of_the_general_runner(
    kind: str, inner: int, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "find", lambda variant="auto": kernels)
    model = load(saved(tmp_path, kind, **{**PACKED[kind], "intermediate_size": inner}), CPU, torch.float32)
    weights = packed_weights(model)
    assert weights is not None and weights.kernels is kernels
    assert_alike(both(model, monkeypatch))


KERNELS = ("_rmsnorm", "_rmsnorm_backward", "_rope", "_swiglu", "_swiglu_backward", "_lora_forward", "_lora_backward")


def test_a_training_pass_runs_every_kernel(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = binding.find()
    assert kernels is not None and packed_weights(tiny)  # the self-check has run: it calls them too
    used: set[str] = set()

    def noting(name: str, own: Any) -> Any:
        return lambda *given: (used.add(name), own(*given))[1]

    for name in KERNELS:
        monkeypatch.setattr(kernels, name, noting(name, getattr(kernels, name)))
    session = Session(tiny)
    randomise(session.create(rank=2))
    session.passes([datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[1.0] * 3)], "cross_entropy")
    assert used == set(KERNELS)


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize(
    "name", ["rmsnorm", "rmsnorm_backward", "rope", "swiglu", "swiglu_backward", "lora_forward", "lora_backward"]
)
def test_kernels_that_give_wrong_numbers_are_not_trained_with(
    name: str, value: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = binding.find()
    assert kernels is not None
    own = getattr(kernels, name)

    def wrong(*given: Any, **named: Any) -> Any:
        y = own(*given, **named)
        result = y if isinstance(y, Tensor) else given[0] if isinstance(given[0], Tensor) else None
        if result is not None:
            result[0, 0] = result[0, 0] + 1000 if value is None else value
        else:  # a batch of sites
            sites = ctypes.cast(given[0].sites, ctypes.POINTER(binding.LoraSite))
            address = given[0].y if name == "lora_forward" else sites[0].db
            numbers = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            numbers[0] = numbers[0] + 1000 if value is None else value
        return y

    monkeypatch.setattr(kernels, name, wrong)
    model = load(saved(tmp_path, "Llama"), CPU, torch.float32)
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        weights = packed_weights(model)
    assert weights is not None and weights.kernels is None
    assert "wrong numbers" in caplog.text
