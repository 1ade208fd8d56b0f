"""Small models with random weights, one per architecture, written as a user's folder would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tinkex.engine.contract import ModelInfo

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PACKED: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh"},
}
"""Settings with which these run packed."""


def saved(folder: Path, kind: str, **settings: Any) -> ModelInfo:
    """A small model with random weights, written as a user's folder would be."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelInfo(name=f"test/{kind}", folder=str(folder), arch=kind)
