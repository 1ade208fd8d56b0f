"""A model's weights in memory: held once, and where its file is mapped if they lie there in a row."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.test_model import CPU
from tinkex.engine.base import ModelInfo
from tinkex.engine.model import load
from tinkex.engine.packed.weights import fuse


def file_at(address: int) -> str:
    """Which file is mapped there; empty for plain memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def in_the_file(folder: str, *names: str) -> Tensor:
    held = load_file(Path(folder) / "model.safetensors")
    return torch.cat([held[f"model.layers.0.{name}.weight"] for name in names])


def test_fused_weights_outlive_the_module_they_came_from(tiny_info: ModelInfo) -> None:
    model = load(tiny_info, CPU, torch.float32)
    layer = fuse(model.module).layers[0]
    del model
    gc.collect()
    torch.randn(1 << 20)  # what was freed would be written over
    folder = tiny_info.folder
    assert torch.equal(layer.gate_up.weight_OD, in_the_file(folder, "mlp.gate_proj", "mlp.up_proj"))
    qkv_OD = in_the_file(folder, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert torch.equal(layer.qkv.weight_OD, qkv_OD)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc where memory comes from")
def test_weights_stay_in_the_mapped_file_and_are_held_once(tiny_info: ModelInfo) -> None:
    model = load(tiny_info, CPU, torch.float32)
    weights = fuse(model.module)
    for layer in weights.layers:
        for group in (layer.out, layer.gate_up, layer.down):
            assert file_at(group.weight_OD.data_ptr()).endswith("model.safetensors")
    assert file_at(weights.embedding_VD.data_ptr()).endswith("model.safetensors")
    mlp, layer = model.module.base_model.layers[0].mlp, weights.layers[0]
    assert mlp.gate_proj.weight.data_ptr() == layer.gate_up.weight_OD.data_ptr()
    assert mlp.up_proj.weight.data_ptr() == layer.gate_up.weight_OD[mlp.gate_proj.out_features :].data_ptr()
    attention = model.module.base_model.layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() == layer.qkv.weight_OD.data_ptr()
