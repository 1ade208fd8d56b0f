"""A base model in memory: which layers take adapters, and that numbers which would be wrong are refused instead."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.unit.engine.architectures import CPU, SMALL, saved
from tinkex.engine.adapters.lora import LoraWeights, Role, Segment
from tinkex.engine.contract import EngineFault, LoraSpec, ModelInfo
from tinkex.engine.models import tiny as tiny_model
from tinkex.engine.models.loaded_model import Model, load

DENSE: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5},
    "Gemma3Text": {},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "SmolLM3": {},
}
"""Those with their own way from hidden states to logits get a setting that shows."""


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_model_takes_adapters_on_attention_mlp_and_unembedding(kind: str, tmp_path: Path) -> None:
    loaded = load(saved(tmp_path, kind, **DENSE[kind]), CPU, torch.float32)
    parts = defaultdict(list)
    for site in loaded.sites:
        parts[site.role].append(site.name.rsplit(".", 1)[-1])
    assert parts == {
        Role.ATTENTION: ["q_proj", "k_proj", "v_proj", "o_proj"] * 2,
        Role.MLP: ["gate_proj", "up_proj", "down_proj"] * 2,
        Role.UNEMBED: ["lm_head"],
    }
    shapes = {site.name: (site.d_in, site.d_out) for site in loaded.sites}
    assert shapes["model.layers.1.self_attn.k_proj"] == (32, 16)
    assert shapes["model.layers.0.mlp.down_proj"] == (48, 32)
    assert shapes["lm_head"] == (32, 96)


@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "Cohere"])
def test_a_model_loads_in_half_precision_although_its_logits_are_rounded_earlier(kind: str, tmp_path: Path) -> None:
    assert load(saved(tmp_path, kind, **DENSE[kind]), CPU, torch.bfloat16).module.dtype == torch.bfloat16


def test_both_built_ins_load_frozen_and_in_full_precision(tiny: Model, smollm2: Model) -> None:
    for loaded, layers in ((tiny, 2), (smollm2, 30)):
        assert len(loaded.sites) == 7 * layers + 1
        assert loaded.vocab_size == loaded.info.vocab_size
        assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}
        assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_smollm2_from_the_gguf_answers_a_question(smollm2: Model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.info.folder)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    tokens: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = smollm2.module.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, tokens["input_ids"].shape[1] :])


def test_each_row_of_a_batch_has_the_adapter_of_its_segment_at_every_site(tiny: Model) -> None:
    """Two adapters and the base in one pass equal three passes: 1e-5, because batching changes the order of sums."""
    tokens_BT = torch.tensor([list(b"one two"), list(b"three 3"), list(b"four 44")])

    def random_adapter(seed: int) -> LoraWeights:
        drawn = torch.Generator().manual_seed(seed)
        pairs = {
            site.name: (
                torch.randn(4, site.d_in, generator=drawn) * 0.1,
                torch.randn(site.d_out, 4, generator=drawn) * 0.1,
            )
            for site in tiny.sites
        }
        return LoraWeights(LoraSpec(rank=4), pairs)

    def logits(rows: Tensor, segments: list[Segment]) -> Tensor:
        with torch.inference_mode():
            hidden = tiny.hidden(rows, segments)
            flat = [Segment(s.weights, s.start * rows.shape[1], s.stop * rows.shape[1]) for s in segments]
            logits: Tensor = tiny.logits(hidden.flatten(0, 1), flat).unflatten(0, rows.shape)
            return logits

    first, second = random_adapter(1), random_adapter(2)
    together = logits(tokens_BT, [Segment(first, 0, 1), Segment(second, 2, 3)])
    alone = [logits(tokens_BT[:1], [Segment(first, 0, 1)]), logits(tokens_BT[1:2], [])]
    alone.append(logits(tokens_BT[2:], [Segment(second, 0, 1)]))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert (together[0] - logits(tokens_BT[:1], [])[0]).abs().max() > 0.1


class LoudLlama(LlamaForCausalLM):
    """Turns hidden states into logits in a way of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class FlatLlama(LlamaForCausalLM):
    """Its first feed-forward layer sees tokens, not rows of tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner = self.model.layers[0].mlp

        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x_BTD: Tensor) -> Tensor:
                out: Tensor = inner(x_BTD.flatten(0, 1)).unflatten(0, x_BTD.shape[:2])
                return out

        self.model.layers[0].mlp = Flat()


def test_a_model_whose_logits_cannot_be_reproduced_is_rejected() -> None:
    with pytest.raises(EngineFault, match="does not know") as caught:
        Model(ModelInfo(name="test/loud", folder=""), LoudLlama(LlamaConfig(**SMALL)), CPU)
    assert caught.value.category == "server"


def test_a_model_whose_layers_mix_the_rows_of_a_batch_is_rejected() -> None:
    with pytest.raises(EngineFault, match=r"layers\.0\.mlp\.inner\.gate_proj mixes the rows"):
        Model(ModelInfo(name="test/flat", folder=""), FlatLlama(LlamaConfig(**SMALL)), CPU)


@pytest.mark.parametrize(
    ("kind", "settings", "lacking"),
    [
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "train_mlp"),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "train_attn"),
    ],
)
def test_a_model_on_which_a_flag_would_train_nothing_is_rejected(
    kind: str, settings: dict[str, Any], lacking: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineFault, match=f"no linear layer was found for {lacking}"):
        load(saved(tmp_path, kind, **settings), CPU, torch.float32)


@pytest.mark.parametrize("how", ["absent", "another shape"])
def test_missing_or_misshapen_weights_are_rejected_and_not_filled_with_random_numbers(how: str, tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "absent":
        del weights[name]
    else:
        weights[name] = weights[name][:7].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineFault, match=name.replace(".", r"\.")):
        load(ModelInfo(name="test/holed", folder=str(tmp_path)), CPU, torch.float32)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineFault, match=r"test/pickled .* cannot be loaded"):
        load(ModelInfo(name="test/pickled", folder=str(tmp_path)), CPU, torch.float32)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_model.CONFIG, "model_type": "other", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(EngineFault, match=r"test/evil .* cannot be loaded"):
        load(ModelInfo(name="test/evil", folder=str(tmp_path)), CPU, torch.float32)
    assert not (tmp_path / "ran").exists()
