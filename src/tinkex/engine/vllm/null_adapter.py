"""An adapter that changes nothing, by which vLLM serves the base model on a CPU.

Its kernels for CPUs (0.32) take "no adapter" for the last slot: after adapters have filled all slots, requests of the
base model get the numbers of one of them, in silence. Those for GPUs leave such rows out. So on a CPU a request of the
base model names this adapter. It has one tensor, of a layer that no model has: vLLM loads it without a word, and
clears the slot.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

NUMBER = 2**31 - 1
"""No other adapter ever has it: those are counted from 1."""
LAYERS = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "dense")
"""How models call a layer of theirs. vLLM looks at the last part of a name, and rejects one that no layer has."""
RANK = 8


def write(folder: Path, layer: str) -> None:
    """Write the adapter into a new folder."""
    folder.mkdir()
    tensors, at = {}, 0
    for letter, shape in (("A", [RANK, 1]), ("B", [1, RANK])):
        name = f"base_model.model.no_such_part.{layer}.lora_{letter}.weight"
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * RANK]}
        at += 4 * RANK
    header = json.dumps(tensors).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(at))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [layer], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
