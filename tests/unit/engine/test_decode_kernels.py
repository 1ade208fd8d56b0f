"""The C kernels: right numbers in every variant, rows that do not depend on each other, and torch where there are none.

Tolerances are for float32: a sum of a few hundred terms of about 1 is off by some 1e-6 of their norm.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import kernel_driver
from tests.unit.engine.architectures import CPU, PACKED, saved
from tests.unit.engine.oracle import Session, randomise
from tests.unit.engine.sampling_oracle import answer, finish, sampled, sampler, spec
from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import LoraSpec
from tinkex.engine.models.loaded_model import Model, load
from tinkex.engine.packed import linear, lora_decode
from tinkex.engine.packed.decode_attention import (
    AttentionOutput,
    KernelDecodeAttention,
    TorchDecodeAttention,
    decode_attention_for,
)
from tinkex.engine.packed.kernels import binding, build
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.weights import Weights, fuse
from tinkex.engine.runner_choice import packed_weights
from tinkex.engine.sampling.decoder import RowInput
from tinkex.engine.sampling.kv_cache import KVCache, KVLayer

TARGET = build.TARGETS.get(build.this_machine())
VARIANTS = [name for name in (TARGET.variants if TARGET else ()) if binding.find(name) is not None]
"""Those that this processor can run. `test_kernel_build` fails if there could be some and are none."""
BY_QEMU = ["neon_by_qemu"] if "neon" not in VARIANTS and kernel_driver.missing_reason() is None else []
each_variant = pytest.mark.parametrize("kernels", [*VARIANTS, *BY_QEMU], indirect=True)
with_kernels = pytest.mark.skipif(not VARIANTS, reason="no kernels on this machine")


def test_neon_is_tested() -> None:
    """A parameter that is missing would be missed by nobody."""
    if "neon" not in VARIANTS and (reason := kernel_driver.missing_reason()):
        pytest.skip(reason)
    assert "neon" in VARIANTS or BY_QEMU


@with_kernels
def test_threads_are_torchs_own_whatever_else_was_loaded(tmp_path: Path) -> None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = next(line.split()[-1] for line in maps if "libgomp" in line)
    stranger = ctypes.CDLL(str(shutil.copy(loaded, tmp_path / "libgomp-000.so")))
    torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def place(library: ctypes.CDLL) -> Any:
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value

    assert place(binding._openmp()) == place(torchs) != place(stranger)


@each_variant
@pytest.mark.parametrize(("out", "width"), [(96, 64), (37, 50), (33, 1), (1, 33), (64, 300)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 30])
def test_a_product_is_that_of_float64(kernels: Kernels, out: int, width: int, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias, residual = (
        torch.randn(rows, width),
        torch.randn(out, width),
        torch.randn(out),
        torch.randn(rows, out),
    )
    panels = kernels.in_panels(weight)
    plain = x.double() @ weight.double().t()
    close = {"atol": 1e-6 * width**0.5 * 4, "rtol": 1e-6}
    torch.testing.assert_close(kernels.linear(x, panels, out).double(), plain, **close)
    torch.testing.assert_close(
        kernels.linear(x, panels, out, bias, residual).double(), plain + bias + residual, **close
    )


@each_variant
def test_a_row_has_the_same_bits_alone_and_among_others(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, panels = torch.randn(29, 70), kernels.in_panels(torch.randn(50, 70))
    together = kernels.linear(x, panels, 50)
    for row in range(29):
        assert torch.equal(kernels.linear(x[row : row + 1], panels, 50)[0], together[row])


@each_variant
def test_a_row_that_is_not_finite_spoils_no_other(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, panels = torch.randn(4, 64), kernels.in_panels(torch.randn(64, 64))
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for y in (
        kernels.linear(x, panels, 64),
        kernels.rmsnorm(x, torch.ones(64), 1e-6),
        kernels.swiglu(torch.cat([x, x], 1)),
    ):
        assert y[[0, 3]].isfinite().all() and not y[1].isfinite().all() and not y[2].isfinite().all()


@each_variant
@pytest.mark.parametrize("width", [1, 16, 50, 577])
def test_a_norm_is_that_of_torch(kernels: Kernels, width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width), torch.randn(width)
    wanted = torch.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(kernels.rmsnorm(x, weight, 1e-5).double(), wanted, atol=2e-6, rtol=2e-6)


@each_variant
def test_swiglu_is_right_from_the_smallest_to_the_largest_number(kernels: Kernels) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30])])
    gate = torch.nn.functional.pad(gate, (0, -len(gate) % 16))[None]
    up = torch.linspace(-3, 3, gate.shape[1])[None]
    wanted = torch.nn.functional.silu(gate.double()) * up
    # Where e^-gate is near the end of float32 its last bits go; there the product is below 1e-35.
    torch.testing.assert_close(kernels.swiglu(torch.cat([gate, up], 1)).double(), wanted, atol=1e-34, rtol=1e-6)


def attended(
    attention: TorchDecodeAttention | KernelDecodeAttention,
    qkv: Tensor,
    layer: KVLayer,
    held: list[int],
    needs_logsumexp: bool = True,
) -> AttentionOutput:
    attention.begin(
        [RowInput(0, 3 * own + 1, own, None) for own in held], layer.width + 1 if layer.is_initialized else 1
    )
    return attention.attend(layer, qkv.clone(), needs_logsumexp=needs_logsumexp)


@each_variant
@pytest.mark.parametrize("held", [[0], [1, 5, 2], [63, 64, 65], [200, 0, 127, 128], [130] * 3])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 2, 16), (9, 3, 64), (2, 2, 128), (8, 1, 32)])
def test_attention_is_that_of_torch(kernels: Kernels, held: list[int], heads: int, keys: int, width: int) -> None:
    torch.manual_seed(0)
    weights = _attention_only(heads, keys, width)
    past = torch.randn(2, len(held), keys, max(held), width)
    qkv = torch.randn(len(held), (heads + 2 * keys) * width)
    results, caches = [], []
    for attention in (KernelDecodeAttention(weights, kernels), TorchDecodeAttention(weights)):
        layer = KVLayer()
        if max(held):
            layer.update(past[0].clone(), past[1].clone())
        results.append(attended(attention, qkv, layer, held))
        caches.append((layer.keys[:, :, : layer.end].clone(), layer.values[:, :, : layer.end].clone(), layer.width))
    for ours, theirs in zip(results[0], results[1], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)
    assert caches[0][2] == caches[1][2] == max(held) + 1
    torch.testing.assert_close(caches[0][:2], caches[1][:2], atol=1e-6, rtol=1e-6)


def _attention_only(heads: int, keys: int, width: int) -> Weights:
    """The weights of a model, of which attention needs the shape alone."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=keys, head_dim=width, **sizes)
    return fuse(transformers.AutoModelForCausalLM.from_config(config))


@each_variant
def test_attention_sees_only_its_own_columns_of_a_cache_with_room_to_spare(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weights = _attention_only(4, 2, 16)
    prompts = torch.randn(3, 2, 1, 2, 9, 16)
    results = []
    for attention in (KernelDecodeAttention(weights, kernels), TorchDecodeAttention(weights)):
        cache = KVCache()
        for number, length in enumerate((9, 4, 6)):
            prompt = KVCache()
            prompt.update(*prompts[number, :, :, :, :length].clone(), 0)
            cache.add_rows(prompt, 1, reserved_rows=5)
        cache.remove_rows([0], [9, 4, 6])
        layer = cache.layers[0]
        assert isinstance(layer, KVLayer) and layer.start > 0 and layer.keys.shape[0] > layer.rows == 2
        torch.manual_seed(1)
        results.append(attended(attention, torch.randn(2, 8 * 16), layer, [6, 4]))
    torch.testing.assert_close(tuple(results[0]), tuple(results[1]), atol=3e-6, rtol=3e-6)


@each_variant
def test_rows_that_the_cache_does_not_have_are_rejected(kernels: Kernels) -> None:
    weights = _attention_only(4, 2, 16)
    for rows, held in ((3, 4), (2, 5)):
        layer = KVLayer()
        layer.update(*torch.randn(2, 2, 2, 4, 16))
        with pytest.raises(ValueError, match="rows of up to"):
            attended(KernelDecodeAttention(weights, kernels), torch.randn(rows, 8 * 16), layer, [held] * rows)


@each_variant
def test_scores_beyond_the_range_of_float32_hide_nothing_that_is_within(kernels: Kernels) -> None:
    """A block of keys that are infinitely far away has no share, and leaves that of the others as it is."""
    weights = _attention_only(1, 1, 16)
    keys, values, qkv = torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16), torch.randn(1, 3 * 16)
    keys[:, :, :64], qkv[:, :16] = -3e38, qkv[:, :16].abs() + 10
    layers = [KVLayer(), KVLayer()]
    results = []
    both: tuple[Any, Any] = (KernelDecodeAttention(weights, kernels), TorchDecodeAttention(weights))
    for attention, layer in zip(both, layers, strict=True):
        layer.update(keys.clone(), values.clone())
        attention.begin([RowInput(0, 0, 70, None)], 71)
        results.append(attention.attend(layer, qkv.clone(), needs_logsumexp=False).out_BKGW)
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@each_variant
def test_adapters_of_a_step_are_those_of_float64_and_know_nothing_of_each_other(kernels: Kernels) -> None:
    torch.manual_seed(0)
    sites = {"q": slice(0, 17), "v": slice(20, 37)}  # with a gap, and nothing a whole number of registers
    both = _adapter(3, {"q": (50, 17), "v": (50, 17)})
    one = _adapter(5, {"v": (50, 17)})
    acting = [one, None, both, one, both, None, both]
    x, y = torch.randn(7, 50), torch.randn(7, 37)
    wanted = y.double()
    for row, weights in enumerate(acting):
        for site, (a_RD, b_OR) in weights.pairs.items() if weights is not None else ():
            wanted[row, sites[site]] += weights.spec.scale * b_OR.double() @ (a_RD.double() @ x[row].double())
    stacked = lora_decode.StackedLora([sites], [50], kernels)
    alone, together, inside = y.clone(), y.clone(), torch.zeros(7, 37)
    stacked.prepare(acting)
    stacked.apply(0, x, together)
    torch.testing.assert_close(together.double(), wanted, atol=1e-4, rtol=1e-5)
    weight = torch.randn(37, 50)
    inside = linear.PackedLinear(weight, None, kernels)(x, y, stacked.kernel_args(0))
    torch.testing.assert_close(inside.double(), wanted + x.double() @ weight.double().t(), atol=2e-4, rtol=1e-5)
    for row, weights in enumerate(acting):
        stacked.prepare([weights])
        stacked.apply(0, x[row : row + 1], alone[row : row + 1])
        assert torch.equal(alone[row], together[row]), row


def _adapter(rank: int, sites: Mapping[str, tuple[int, int]]) -> Any:
    pairs = {site: (torch.randn(rank, width), torch.randn(out, rank)) for site, (width, out) in sites.items()}
    return LoraWeights(LoraSpec(rank=rank, seed=0), pairs)


@with_kernels
def test_kernels_that_give_wrong_numbers_are_not_used(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = binding.find()
    assert kernels is not None
    right = answer(tiny, spec([1, 2, 3], max_tokens=5, seed=1))
    own = kernels._swiglu

    def wrong(gate_up: int, y: int, *sizes: int) -> None:
        own(gate_up, y, *sizes)
        ctypes.cast(y, ctypes.POINTER(ctypes.c_float))[0] += 1.0

    monkeypatch.setattr(kernels, "_swiglu", wrong)
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        again = answer(tiny, spec([1, 2, 3], max_tokens=5, seed=1))
    assert "wrong numbers" in caplog.text
    assert again.sequences[0].tokens == right.sequences[0].tokens


@pytest.mark.parametrize("kind", PACKED)
@each_variant
def test_every_family_samples_the_same_with_kernels_and_without(
    kind: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(tmp_path / "model", kind, **{**PACKED[kind], "head_dim": 16}), CPU, torch.float32)
    places = []
    adapters: list[tuple[int, dict[str, Any]]] = [(3, {}), (5, {"train_attn": False}), (5, {})]
    for number, (rank, flags) in enumerate(adapters):
        session = Session(model)
        randomise(session.create(rank=rank, **flags), seed=number)
        places.append(str(tmp_path / f"adapter{number}"))
        session.run("save", folder=places[-1], with_optimizer=False)
    options: dict[str, Any] = {"base": model.info.name, "max_tokens": 9, "seed": 4}
    long = [(7 * at) % 90 for at in range(70)]  # long enough to be shared
    asked = {1: spec([3, 5, 7], **options), 2: spec(long, num_samples=3, **options)}
    for number, place in enumerate(places):
        asked[3 + number] = spec([3, 5, 7, number], weights=place, **options)
        asked[6 + number] = spec([5, 7, number], weights=place, **options)
    monkeypatch.setattr(binding, "find", lambda variant="auto": kernels)
    model.packed = None  # chosen anew, with these
    weights = packed_weights(model)
    assert (
        weights is not None
        and weights.kernels is kernels
        and isinstance(decode_attention_for(weights), KernelDecodeAttention)
    )
    with_kernels = finish(sampler(model), asked)
    model.packed = replace(weights, kernels=None)
    assert isinstance(decode_attention_for(model.packed), TorchDecodeAttention)
    plain = finish(sampler(model), asked)
    for number in asked:
        for one, other in zip(sampled(with_kernels, number).sequences, sampled(plain, number).sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@with_kernels
def test_a_step_runs_every_kernel(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, norms, gates, attention and adapters: each is on the path."""
    kernels = binding.find()
    assert kernels is not None
    used: set[str] = set()

    def noting(name: str, own: Any) -> Any:
        def noted(*given: Any) -> None:
            used.add(name)
            own(*given)

        return noted

    for name in ("_linear", "_rmsnorm", "_swiglu", "_attend"):
        monkeypatch.setattr(kernels, name, noting(name, getattr(kernels, name)))
    session = Session(tiny)
    session.create(rank=2)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    answer(tiny, spec([1, 2, 3], max_tokens=3, weights=str(tmp_path / "saved")))
    assert used == {"_linear", "_rmsnorm", "_swiglu", "_attend"}


# Where there is no library that fits


def log_of(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        assert binding.find.__wrapped__() is None
    (record,) = caplog.records  # one line, and no more
    assert "torch does their work" in record.getMessage()
    return record.getMessage()


@with_kernels
def test_a_missing_library_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "library_path", lambda target: Path("nowhere.lib"))
    assert "not built when tinkex was installed; `make kernels` builds them" in log_of(caplog)


@with_kernels
def test_a_library_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "source_digest", lambda: "another")
    assert "was built from other sources; run `make kernels`" in log_of(caplog)


@with_kernels
def test_a_file_that_is_no_library_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "broken.lib").write_bytes(b"no library")
    monkeypatch.setattr(build, "library_path", lambda target: tmp_path / "broken.lib")
    assert "broken.lib" in log_of(caplog)


def test_a_machine_without_kernels_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "there are none for riscv64-" in log_of(caplog)


def test_a_processor_without_wide_registers_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "this_machine", lambda: "x86_64-linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "has none of avx512, avx2" in log_of(caplog)
