"""`tinkex export`: adapters for other programs. What is merged is held against PEFT, and what is wrong is not kept."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinkex.cli.commands.export import tensor_names, vllm_remark
from tinkex.engine.adapters import checkpoint, export
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import LoraSpec
from tinkex.engine.models import loaded_model, registry

from .conftest import Saved, Tinkex

TOKENS = torch.tensor([[1, 5, 9, 100, 200, 30, 31, 32, 255, 7, 8, 90]])
ROUNDING = 1e-4
"""Two orders of additions in float32 on the tiny model; measured 1.5e-5."""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> loaded_model.Model:
    cache = tmp_path_factory.mktemp("cache")
    return loaded_model.load(registry.resolve("tinkex/tiny", cache), torch.device("cpu"), torch.float32)


@pytest.fixture
def make(tiny: loaded_model.Model, tmp_path: Path) -> Make:
    """Writes an adapter as a training checkpoint: weights that do something, and an optimizer's state."""

    def adapter(name: str = "adapter", **flags: Any) -> Path:
        made = Adapter(tiny, LoraSpec(rank=flags.pop("rank", 8), seed=3, **flags))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            made.weights_P.copy_(torch.randn(made.weights_P.shape, generator=generator) * 0.05)
        checkpoint.save(made, tmp_path / name, with_optimizer=True)
        return tmp_path / name

    return adapter


def logprobs(folder: Path, adapter: Path | None = None, *, is_merged: bool = False) -> torch.Tensor:
    """What transformers, with PEFT where there is an adapter, makes of it."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tied layers are hard to merge: it is what we take care of
            module = PeftModel.from_pretrained(module, str(adapter))
        if is_merged:
            module = module.merge_and_unload()
    with torch.inference_mode():
        return module.eval()(input_ids=TOKENS).logits.float().log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_merged_folder_gives_what_pefts_own_merge_gives(
    run: Tinkex, make: Make, tiny: loaded_model.Model, tmp_path: Path
) -> None:
    adapter, out = make(train_unembed=False), tmp_path / "merged"
    ran = run("export", str(adapter), "--out", str(out), "--merge", "-o", "json")
    assert ran.code == 0, ran.err
    base = Path(tiny.info.folder)
    expected = logprobs(base, adapter, is_merged=True)
    assert (logprobs(out) - expected).abs().max() < ROUNDING
    assert (logprobs(base) - expected).abs().max() > 0.1, "the adapter does something"
    assert ran.json["difference"] < ROUNDING and ran.json["effect"] > 0.1
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert AutoTokenizer.from_pretrained(out).encode("abc") == [97, 98, 99]
    assert {"model.safetensors", "generation_config.json", "tokenizer.json"} <= set(ran.json["files"])


@pytest.mark.slow
def test_an_adapter_on_the_unembedding_unties_it_and_leaves_the_embedding_alone(
    run: Tinkex, make: Make, tiny: loaded_model.Model, tmp_path: Path
) -> None:
    adapter, out = make(), tmp_path / "merged"
    ran = run("export", str(adapter), "--out", str(out), "--merge")
    assert ran.code == 0, ran.err
    assert "differ by at most" in ran.err and "no longer tied" in ran.err
    assert (logprobs(out) - logprobs(Path(tiny.info.folder), adapter)).abs().max() < ROUNDING
    merged: Any = AutoModelForCausalLM.from_pretrained(out)
    assert merged.config.tie_word_embeddings is False
    assert torch.equal(merged.get_input_embeddings().weight, tiny.module.get_input_embeddings().weight)
    assert not torch.equal(merged.get_output_embeddings().weight, merged.get_input_embeddings().weight)


def test_a_merge_that_is_not_right_leaves_nothing_behind(
    run: Tinkex, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = export._add_adapter

    def forgetful(base: loaded_model.Model, weights: LoraWeights) -> bool:
        name = next(name for name in weights.pairs if name.endswith("layers.1.mlp.down_proj"))
        return add(base, LoraWeights(weights.spec, {k: v for k, v in weights.pairs.items() if k != name}))

    monkeypatch.setattr(export, "_add_adapter", forgetful)
    adapter = make()
    ran = run("export", str(adapter), "--out", str(tmp_path / "merged"), "--merge")
    assert ran.code == 1
    assert "was not kept" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir() if "merged" in path.name) == []


def test_an_adapter_of_another_base_is_refused_before_anything_is_written(
    run: Tinkex, make: Make, tmp_path: Path
) -> None:
    adapter = make()
    ours = json.loads((adapter / "tinkex.json").read_text())
    (adapter / "tinkex.json").write_text(json.dumps({**ours, "base": "another/model"}))
    ran = run("export", str(adapter), "--out", str(tmp_path / "m"), "--merge", "--base-model", "tinkex/tiny")
    assert ran.code == 1
    assert "another/model" in ran.err and not (tmp_path / "m").exists()


def test_without_merge_the_two_files_that_others_read_are_copied(run: Tinkex, make: Make, tmp_path: Path) -> None:
    adapter, out = make(), tmp_path / "out"
    out.mkdir()
    ran = run("export", str(adapter), "--out", str(out))
    assert ran.code == 0
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    assert "lm_head" in ran.err and "--merge" in ran.err and "train_unembed=False" in ran.err
    quiet = run("export", str(make("plain", train_unembed=False)), "--out", str(tmp_path / "plain-out"))
    assert quiet.code == 0 and quiet.err == ""


def test_key_names_are_those_that_vllm_reads(make: Make) -> None:
    """vLLM's list for Llama: q, k, v, o, gate, up and down projections of each layer, and nothing else."""
    modules = {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    expected = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"
        for layer in range(2)
        for module in modules
        for letter in "AB"
    }
    plain = make("plain", train_unembed=False)
    assert set(tensor_names(plain / "adapter_model.safetensors")) == expected
    assert vllm_remark(plain) is None
    whole = make("whole")
    extra = set(tensor_names(whole / "adapter_model.safetensors")) - expected
    assert extra == {f"base_model.model.lm_head.lora_{letter}.weight" for letter in "AB"}
    assert vllm_remark(whole) is not None


def test_a_checkpoint_is_fetched_from_the_service_and_the_fetched_files_go(
    run: Tinkex, saved: Saved, tmp_path: Path
) -> None:
    ran = run("export", saved.state, "--out", str(tmp_path / "out"), "-o", "json")
    assert ran.code == 0, ran.err
    assert set(ran.json["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_nothing_is_ever_written_over(run: Tinkex, make: Make, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("precious")
    ran = run("export", str(make()), "--out", str(tmp_path / "taken"))
    assert ran.code == 1 and "already exists" in ran.err
    assert (tmp_path / "taken" / "mine").read_text() == "precious"


@pytest.mark.parametrize("source", ["nowhere", "empty"])
def test_what_is_no_adapter_is_refused_with_what_is_missing(run: Tinkex, tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("export", str(tmp_path / source), "--out", str(tmp_path / "out"))
    assert ran.code == 1
    assert ("neither" if source == "nowhere" else "adapter_model.safetensors") in ran.err
    assert not (tmp_path / "out").exists()


def test_a_damaged_adapter_is_one_sentence(run: Tinkex, make: Make, tmp_path: Path) -> None:
    adapter = make()
    (adapter / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    ran = run("export", str(adapter), "--out", str(tmp_path / "out"))
    assert ran.code == 1
    assert "damaged" in ran.err and len(ran.err.splitlines()) == 1
