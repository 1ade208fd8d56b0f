"""Writes the built-in model `tinkex/tiny`: two Llama layers with random weights, one token per byte. For tests.

Made with numpy in milliseconds, without torch. The bits are the same on every machine: the weights are bytes of a hash,
scaled by powers of two, so they depend on no version of a random generator or maths library.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "tinkex/tiny"
VERSION = 1
"""Part of the cached folder's name. Increase it when the files change."""

WIDTH, MLP_WIDTH, LAYERS, HEADS, KV_HEADS = 64, 192, 2, 4, 2
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BOS, EOS, PAD = 256, 257, 258
VOCABULARY = 256 + len(SPECIAL_TOKENS)
CONTEXT = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": True,
    # Both spellings: transformers 4 reads `torch_dtype`, 5 reads `dtype`.
    "dtype": "float32",
    "torch_dtype": "float32",
    "use_cache": True,
}
"""The settings that both built-in models have."""

CONFIG: dict[str, Any] = {
    **LLAMA,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "head_dim": WIDTH // HEADS,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": MLP_WIDTH,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
}


def write(folder: Path) -> None:
    """Write the whole model into an empty folder."""
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    write_files(folder, CONFIG, weights(), tokenizer(), {**tokens, "chat_template": CHAT_TEMPLATE})


def write_files(
    folder: Path, config: dict[str, Any], weights: dict[str, Any], tokenizer: Any, tokenizer_config: dict[str, Any]
) -> None:
    """Write config, weights (numpy), tokenizer and chat template as transformers reads them."""
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for file, content in {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **tokenizer_config,
        },
    }.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def weights() -> dict[str, Any]:
    """Return every tensor by its name, as numpy float32."""
    import numpy as np

    kv_width = WIDTH // HEADS * KV_HEADS
    tensors = {
        "model.embed_tokens.weight": _noise("embed_tokens", VOCABULARY, WIDTH),
        "model.norm.weight": np.ones(WIDTH, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(WIDTH, np.float32)
        for name, out_width, in_width in (
            ("self_attn.q_proj", WIDTH, WIDTH),
            ("self_attn.k_proj", kv_width, WIDTH),
            ("self_attn.v_proj", kv_width, WIDTH),
            ("self_attn.o_proj", WIDTH, WIDTH),
            ("mlp.gate_proj", MLP_WIDTH, WIDTH),
            ("mlp.up_proj", MLP_WIDTH, WIDTH),
            ("mlp.down_proj", WIDTH, MLP_WIDTH),
        ):
            tensors[f"{prefix}{name}.weight"] = _noise(f"{layer}.{name}", out_width, in_width)
    return tensors


def _noise(name: str, rows: int, columns: int) -> Any:
    """Return uniform noise in [-1/4, 1/4): it about preserves the norm of a 64-wide vector, and logits spread by 1."""
    import numpy as np

    raw = hashlib.shake_256(f"{NAME} {VERSION} {name}".encode()).digest(2 * rows * columns)
    return (np.frombuffer(raw, "<i2").astype(np.float32) * np.float32(2.0**-17)).reshape(rows, columns)


def tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer` in which token n is byte n, and the special tokens follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_tokenizer = Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[])
    )
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    byte_tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return byte_tokenizer


def _byte_letters() -> list[str]:
    """Return how byte-level tokenizers spell bytes 0 to 255: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
