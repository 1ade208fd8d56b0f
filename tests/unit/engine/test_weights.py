"""A model's weights in memory: held once, and where its file is mapped if they lie there in a row."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.engine.architectures import CPU
from tinkex.engine.contract import ModelInfo
from tinkex.engine.models.loaded_model import load
from tinkex.engine.packed.weights import _stack_rows, fuse


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
    gate_up_OD, qkv_OD = layer.gate_up.weight_OD, layer.qkv.weight_OD
    del model, layer  # nothing else holds the mapping now
    gc.collect()
    if sys.platform == "linux":
        place = file_at(gate_up_OD.data_ptr())  # not in the assertion: showing the tensor would end the process
        assert place.endswith("model.safetensors")
    folder = tiny_info.folder
    assert torch.equal(gate_up_OD, in_the_file(folder, "mlp.gate_proj", "mlp.up_proj"))
    assert torch.equal(qkv_OD, in_the_file(folder, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))


def test_only_plain_matrices_that_follow_each_other_are_used_where_they_are() -> None:
    whole = torch.arange(48.0).view(8, 6)
    one, two, three = whole[:2], whole[2:5], whole[5:]
    assert _stack_rows([one, two, three]).data_ptr() == whole.data_ptr()
    for parts in ([one, three, two], [one, three], [two, one], [one, two, one]):
        found = _stack_rows(parts)
        assert torch.equal(found, torch.cat(parts)) and found.data_ptr() != whole.data_ptr()
    turned = [whole.view(-1)[start : start + 24].view(6, 4).t() for start in (0, 24)]  # in a row, but by columns
    assert torch.equal(_stack_rows(turned), torch.cat(turned))


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
