"""The shipped kernels: right numbers on both variants, rows that do not know of each other, and a way without them.

Tolerances are for float32: a sum of a few hundred terms of about 1 is off by some 1e-6 of their norm.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.architectures import CPU, PACKED, saved
from tests.unit.engine.oracle import Session, randomise
from tests.unit.engine.sampling_oracle import answer, finish, sampled, sampler, spec
from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import LoraSpec
from tinkex.engine.models.loaded_model import Model, load
from tinkex.engine.packed import linear, lora_decode
from tinkex.engine.packed.decode_attention import Gathered, KernelSteps, Steps, TorchSteps, steps_for
from tinkex.engine.packed.kernels import binding
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.weights import Weights, fuse
from tinkex.engine.runner_choice import packed_weights
from tinkex.engine.sampling.decoder import RowInput
from tinkex.engine.sampling.kv_cache import KVCache, KVLayer

FOUND = [found for found in map(binding.find, binding.VARIANTS) if found is not None]
pytestmark = pytest.mark.skipif(not FOUND, reason="the kernels are for x86-64 Linux with AVX2")
each_variant = pytest.mark.parametrize("found", FOUND, ids=lambda found: found.variant)


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    file = Path(__file__).parents[3] / "scripts" / "make_kernels.py"
    spec = importlib.util.spec_from_file_location("make_kernels", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_library_was_built_from_the_source_beside_it(builder: ModuleType) -> None:
    library = ctypes.CDLL(str(binding.LIBRARY))
    for variant in binding.VARIANTS:
        digest = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"digest_{variant}")))
        assert digest.decode() == builder.digest(), "run `make kernels`"


def test_another_build_has_the_same_bytes(builder: ModuleType, tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    version = subprocess.run([gcc, "-dumpfullversion"], capture_output=True, text=True).stdout.strip() if gcc else ""
    if version != builder.GCC:
        pytest.skip(f"the library was built with gcc {builder.GCC}")
    builder.main(tmp_path / "again.lib")
    assert (tmp_path / "again.lib").read_bytes() == binding.LIBRARY.read_bytes()


def test_threads_are_torchs_own_whatever_else_was_loaded(tmp_path: Path) -> None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = next(line.split()[-1] for line in maps if "libgomp" in line)
    stranger = ctypes.CDLL(shutil.copy(loaded, tmp_path / "libgomp-000.so"))
    torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def place(library: ctypes.CDLL) -> Any:
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value

    assert place(binding._openmp()) == place(torchs) != place(stranger)


@each_variant
@pytest.mark.parametrize(("out", "width"), [(96, 64), (37, 50), (33, 1), (1, 33), (64, 300)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 30])
def test_a_product_is_that_of_float64(found: Kernels, out: int, width: int, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias, onto = torch.randn(rows, width), torch.randn(out, width), torch.randn(out), torch.randn(rows, out)
    panels = found.in_panels(weight)
    plain = x.double() @ weight.double().t()
    close = {"atol": 1e-6 * width**0.5 * 4, "rtol": 1e-6}
    torch.testing.assert_close(found.linear(x, panels, out).double(), plain, **close)
    torch.testing.assert_close(found.linear(x, panels, out, bias, onto).double(), plain + bias + onto, **close)


@each_variant
def test_a_row_has_the_same_bits_alone_and_among_others(found: Kernels) -> None:
    torch.manual_seed(0)
    x, panels = torch.randn(29, 70), found.in_panels(torch.randn(50, 70))
    together = found.linear(x, panels, 50)
    for row in range(29):
        assert torch.equal(found.linear(x[row : row + 1], panels, 50)[0], together[row])


@each_variant
def test_a_row_that_is_not_finite_spoils_no_other(found: Kernels) -> None:
    torch.manual_seed(0)
    x, panels = torch.randn(4, 64), found.in_panels(torch.randn(64, 64))
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for y in (found.linear(x, panels, 64), found.norm(x, torch.ones(64), 1e-6), found.gate(torch.cat([x, x], 1))):
        assert y[[0, 3]].isfinite().all() and not y[1].isfinite().all() and not y[2].isfinite().all()


@each_variant
@pytest.mark.parametrize("width", [1, 16, 50, 577])
def test_a_norm_is_that_of_torch(found: Kernels, width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width), torch.randn(width)
    wanted = torch.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(found.norm(x, weight, 1e-5).double(), wanted, atol=2e-6, rtol=2e-6)


@each_variant
def test_a_gate_is_right_from_the_smallest_to_the_largest_number(found: Kernels) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30])])
    gate = torch.nn.functional.pad(gate, (0, -len(gate) % 16))[None]
    up = torch.linspace(-3, 3, gate.shape[1])[None]
    wanted = torch.nn.functional.silu(gate.double()) * up
    # Where e^-gate is near the end of float32 its last bits go; there the product is below 1e-35.
    torch.testing.assert_close(found.gate(torch.cat([gate, up], 1)).double(), wanted, atol=1e-34, rtol=1e-6)


def gathered(steps: Steps, qkv: Tensor, layer: KVLayer, held: list[int], needs_total: bool = True) -> Gathered:
    steps.begin([RowInput(0, 3 * own + 1, own, None) for own in held], layer.width + 1 if layer.is_initialized else 1)
    return steps.attend(layer, qkv.clone(), needs_total=needs_total)


@each_variant
@pytest.mark.parametrize("held", [[0], [1, 5, 2], [63, 64, 65], [200, 0, 127, 128], [130] * 3])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 2, 16), (9, 3, 64), (2, 2, 128), (8, 1, 32)])
def test_attention_is_that_of_torch(found: Kernels, held: list[int], heads: int, keys: int, width: int) -> None:
    torch.manual_seed(0)
    weights = _attention_only(heads, keys, width)
    past = torch.randn(2, len(held), keys, max(held), width)
    qkv = torch.randn(len(held), (heads + 2 * keys) * width)
    results, caches = [], []
    for steps in (KernelSteps(weights, found), TorchSteps(weights)):
        layer = KVLayer()
        if max(held):
            layer.update(past[0].clone(), past[1].clone())
        results.append(gathered(steps, qkv, layer, held))
        caches.append((layer.keys[:, :, : layer.end].clone(), layer.values[:, :, : layer.end].clone(), layer.width))
    for ours, theirs in zip(results[0], results[1], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)
    assert caches[0][2] == caches[1][2] == max(held) + 1
    torch.testing.assert_close(caches[0][:2], caches[1][:2], atol=1e-6, rtol=1e-6)


def _attention_only(heads: int, keys: int, width: int) -> Weights:
    """The weights of a model, of which attention needs the shape alone."""
    import transformers

    sizes = {"hidden_size": 72, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=keys, head_dim=width, **sizes)
    return fuse(transformers.AutoModelForCausalLM.from_config(config))


@each_variant
def test_attention_sees_only_its_own_columns_of_a_cache_with_room_to_spare(found: Kernels) -> None:
    torch.manual_seed(0)
    weights = _attention_only(4, 2, 16)
    prompts = torch.randn(3, 2, 1, 2, 9, 16)
    results = []
    for steps in (KernelSteps(weights, found), TorchSteps(weights)):
        cache = KVCache()
        for number, length in enumerate((9, 4, 6)):
            prompt = KVCache()
            prompt.update(*prompts[number, :, :, :, :length].clone(), 0)
            cache.add_rows(prompt, 1, reserved_rows=5)
        cache.remove_rows([0], [9, 4, 6])
        layer = cache.layers[0]
        assert isinstance(layer, KVLayer) and layer.start > 0 and layer.keys.shape[0] > layer.rows == 2
        torch.manual_seed(1)
        results.append(gathered(steps, torch.randn(2, 8 * 16), layer, [6, 4]))
    torch.testing.assert_close(tuple(results[0]), tuple(results[1]), atol=3e-6, rtol=3e-6)


@each_variant
def test_rows_that_the_cache_does_not_hold_are_refused(found: Kernels) -> None:
    weights = _attention_only(4, 2, 16)
    for rows, held in ((3, 4), (2, 5)):
        layer = KVLayer()
        layer.update(*torch.randn(2, 2, 2, 4, 16))
        with pytest.raises(ValueError, match="rows of up to"):
            gathered(KernelSteps(weights, found), torch.randn(rows, 8 * 16), layer, [held] * rows)


@each_variant
def test_scores_beyond_the_range_of_float32_hide_nothing_that_is_within(found: Kernels) -> None:
    """A block of keys that are infinitely far away has no share, and leaves that of the others as it is."""
    weights = _attention_only(1, 1, 16)
    keys, values, qkv = torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16), torch.randn(1, 3 * 16)
    keys[:, :, :64], qkv[:, :16] = -3e38, qkv[:, :16].abs() + 10
    layers = [KVLayer(), KVLayer()]
    results = []
    for steps, layer in zip((KernelSteps(weights, found), TorchSteps(weights)), layers, strict=True):
        layer.update(keys.clone(), values.clone())
        steps.begin([RowInput(0, 0, 70, None)], 71)
        results.append(steps.attend(layer, qkv.clone(), needs_total=False).out_BKGW)
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@each_variant
def test_adapters_of_a_step_are_those_of_float64_and_know_nothing_of_each_other(found: Kernels) -> None:
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
    stacked = lora_decode.Stacks([sites], [50], found)
    alone, together, inside = y.clone(), y.clone(), torch.zeros(7, 37)
    stacked.arrange(acting)
    stacked.add(0, x, together)
    torch.testing.assert_close(together.double(), wanted, atol=1e-4, rtol=1e-5)
    weight = torch.randn(37, 50)
    inside = linear.Packed(weight, None, found)(x, y, stacked.job(0))
    torch.testing.assert_close(inside.double(), wanted + x.double() @ weight.double().t(), atol=2e-4, rtol=1e-5)
    for row, weights in enumerate(acting):
        stacked.arrange([weights])
        stacked.add(0, x[row : row + 1], alone[row : row + 1])
        assert torch.equal(alone[row], together[row]), row


def _adapter(rank: int, sites: Mapping[str, tuple[int, int]]) -> Any:
    pairs = {site: (torch.randn(rank, width), torch.randn(out, rank)) for site, (width, out) in sites.items()}
    return LoraWeights(LoraSpec(rank=rank, seed=0), pairs)


def test_kernels_that_give_wrong_numbers_are_not_used(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = binding.find()
    assert found is not None
    right = answer(tiny, spec([1, 2, 3], max_tokens=5, seed=1))
    own = found._gate

    def wrong(gate_up: int, y: int, *sizes: int) -> None:
        own(gate_up, y, *sizes)
        ctypes.cast(y, ctypes.POINTER(ctypes.c_float))[0] += 1.0

    monkeypatch.setattr(found, "_gate", wrong)
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        again = answer(tiny, spec([1, 2, 3], max_tokens=5, seed=1))
    assert "wrong numbers" in caplog.text
    assert again.sequences[0].tokens == right.sequences[0].tokens


@pytest.mark.parametrize("kind", PACKED)
@each_variant
def test_every_family_samples_the_same_with_kernels_and_without(
    kind: str, found: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(tmp_path / "model", kind, **{**PACKED[kind], "head_dim": 16}), CPU, torch.float32)
    places = []
    for number, (rank, flags) in enumerate([(3, {}), (5, {"train_attn": False}), (5, {})]):
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
    monkeypatch.setattr(binding, "find", lambda variant="auto": found)
    model.packed = None  # chosen anew, with these
    weights = packed_weights(model)
    assert weights is not None and weights.kernels is found and isinstance(steps_for(weights), KernelSteps)
    with_kernels = finish(sampler(model), asked)
    model.packed = replace(weights, kernels=None)
    assert isinstance(steps_for(model.packed), TorchSteps)
    plain = finish(sampler(model), asked)
    for number in asked:
        for one, other in zip(sampled(with_kernels, number).sequences, sampled(plain, number).sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_step_runs_every_kernel(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, norms, gates, attention and adapters: each is on the path."""
    found = binding.find()
    assert found is not None
    used: set[str] = set()

    def noting(name: str, own: Any) -> Any:
        def noted(*given: Any) -> None:
            used.add(name)
            own(*given)

        return noted

    for name in ("_linear", "_norm", "_gate", "_attend"):
        monkeypatch.setattr(found, name, noting(name, getattr(found, name)))
    session = Session(tiny)
    session.create(rank=2)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    answer(tiny, spec([1, 2, 3], max_tokens=3, weights=str(tmp_path / "saved")))
    assert used == {"_linear", "_norm", "_gate", "_attend"}


def test_without_its_library_everything_runs_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(binding, "LIBRARY", tmp_path / "gone.lib")
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        assert binding.find.__wrapped__() is None
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("system", [("darwin", "x86_64"), ("linux", "aarch64")])
def test_on_another_machine_nothing_is_loaded(system: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.sys, "platform", system[0])
    monkeypatch.setattr(binding.platform, "machine", lambda: system[1])
    assert binding.find.__wrapped__() is None
