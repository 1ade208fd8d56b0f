"""Quantized weights: only decode steps use them, and the log says how far they are off."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.unit.engine.sampling_oracle import finish, sampled, spec
from tinkex.engine.contract import EngineFault
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.packed import quantized
from tinkex.engine.runner_choice import choose_decoder
from tinkex.engine.sampling.sampler import Sampler
from tinkex.server.main import engine_for
from tinkex.settings import ServeConfig

PROMPT = [5, 9, 2, 14, 7, 3, 30, 8]


def skip_unless_the_processor_can(kind: str) -> None:
    """bfloat16 needs AVX-512 or its like. What is said where it is lacking has a test of its own, below."""
    try:
        quantized.linear_for(kind, torch.ones(16, 16), None)
    except EngineFault as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2), ("int8", 2e-2)])
def test_a_product_is_near_the_one_of_the_models_own_weights(kind: str, tolerance: float) -> None:
    skip_unless_the_processor_can(kind)
    drawn = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=drawn) for shape in ((96, 64), (96,), (5, 64)))
    onto = torch.randn(5, 96, generator=drawn)
    linear = quantized.linear_for(kind, weight, bias)
    wanted = torch.nn.functional.linear(x, weight, bias)
    for found, expected in ((linear(x), wanted), (linear(x, onto.clone()), wanted + onto)):
        assert float((found - expected).norm() / expected.norm()) <= tolerance


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_what_is_rounded_is_said_and_prompts_are_read_exactly(
    tiny: Model, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    skip_unless_the_processor_can(kind)
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        rounded = Sampler({tiny.info.name: tiny}, choose_decoder=partial(choose_decoder, weight_format=kind))
    (record,) = caplog.records
    assert f"sampled with {kind} weights: over 48 tokens" in record.getMessage()
    assert "KL divergence from float32 is" in record.getMessage()
    exact = Sampler({tiny.info.name: tiny}, choose_decoder=choose_decoder)
    asked = spec(PROMPT, max_tokens=12, prompt_logprobs=True, temperature=0.0)
    found, wanted = (sampled(finish(one, {1: asked}), 1) for one in (rounded, exact))
    assert found.prompt_logprobs == wanted.prompt_logprobs
    assert found.sequences[0].tokens[0] == wanted.sequences[0].tokens[0]  # drawn from the prompt's own logits
    assert found.sequences[0].logprobs[1:] != wanted.sequences[0].logprobs[1:]
    assert found.sequences[0].logprobs[1] == pytest.approx(wanted.sequences[0].logprobs[1], abs=0.3)


def test_the_general_runner_keeps_the_models_own_weights_and_says_so(
    tiny: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        choose_decoder(tiny, "general", "int8")
    assert "int8 needs the packed runner" in caplog.text


def test_a_divergence_is_measured() -> None:
    own = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).double()
    found = quantized.divergence(own, torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    p = torch.tensor([1.0, 0.0]).double().softmax(0)
    expected = float((0.5 * (0.5 / p).log()).sum())
    assert found == pytest.approx((2, expected / 2, expected, 2))


def test_a_processor_that_cannot_is_named_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight_OD: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(quantized, "onednn_reorder", refuse)
    with pytest.raises(EngineFault, match=r"--decode-weights bfloat16.*no such instruction.*Remove the flag"):
        quantized.linear_for("bfloat16", torch.ones(2, 2), None)


def test_the_setting_reaches_the_engine() -> None:
    assert engine_for(ServeConfig(decode_weights="int8"), [])._start_frame.head["decode_weights"] == "int8"


@pytest.mark.parametrize("wrong", [1e3, 1e6, float("inf"), float("nan")])
def test_a_row_is_the_same_beside_any_other(wrong: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 64, generator=drawn), torch.randn(3, 64, generator=drawn)
    linear = quantized.linear_for("int8", weight, None)
    alone = linear(x[:1])
    x[2, 5] = wrong
    together = linear(x)
    assert torch.equal(together[:1], alone)
    assert bool(together[2].isfinite().all()) == (abs(wrong) < 1e9)


def test_an_engine_on_a_torch_without_onednn_can_be_imported() -> None:
    """As on a Mac: nothing is looked up before it is needed."""
    code = (
        "import torch\n"
        "class None_:\n"
        "    def __getattr__(self, name): raise AttributeError(name)\n"
        "torch.ops.mkldnn = None_()\n"
        "import tinkex.engine.training.trainer, tinkex.engine.sampling.sampler\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
