"""A model's weights as the packed runner uses them: layers that read the same input are fused into one matrix.

Also decides which models can run packed. Nothing is held twice: the module's own parameters become views of the fused
matrices. Weights that follow each other in a mapped file, as gate and up do by their names, are used where they are.

Axes: N tokens, D model width, O out, F width of the MLP, V vocabulary, H query heads, K key heads, W width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.packed.kernels.binding import Kernels

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
STEADY_ROPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles do not depend on the length of the text."""


@dataclass(frozen=True, slots=True)
class Group:
    """Linear layers that read the same input, fused into one matrix: query, key and value; or gate and up."""

    weight_OD: Tensor
    bias_O: Tensor | None
    slices: Mapping[str, slice]
    """Name of the layer (the LoRA site) → its rows of the fused weight, which are its columns of the output."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    norm_in_D: Tensor
    qkv: Group
    q_norm_W: Tensor | None
    k_norm_W: Tensor | None
    out: Group
    norm_mlp_D: Tensor
    gate_up: Group
    down: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, and how to compute with it."""

    layers: tuple[Layer, ...]
    embedding_VD: Tensor
    embedding_scale: float
    norm_D: Tensor
    head_VD: Tensor
    head_site: str
    eps: float
    heads: int
    key_heads: int
    head_width: int
    is_gelu: bool
    rotary: Any
    kernels: Kernels | None
    """Used for whatever they support; torch does the rest. None: torch does everything."""

    @property
    def scale(self) -> float:
        """The factor of attention's scores."""
        return float(self.head_width**-0.5)

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """Return the embeddings of tokens [N, D]."""
        x_ND = self.embedding_VD[tokens_N]
        return x_ND if self.embedding_scale == 1.0 else x_ND.mul_(self.embedding_scale)

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, W/2] of RoPE's angles, without their second half, which repeats the first."""
        cos_1NW, sin_1NW = self.rotary(self.embedding_VD, positions_N[None])
        half = self.head_width // 2
        return cos_1NW[0, :, None, :half].contiguous(), sin_1NW[0, :, None, :half].contiguous()


def unsupported_reason(module: Any, device: torch.device) -> str | None:
    """Return why a model cannot run packed, or None if it can."""
    config = module.config.get_text_config()
    kind = str(config.model_type)
    if kind not in FAMILIES:
        return f"its family ({kind}) is not one of {', '.join(FAMILIES)}"
    if device.type != "cpu" or module.dtype != torch.float32:
        return f"it runs in {str(module.dtype).removeprefix('torch.')} on {device.type}, not in float32 on a CPU"
    window, context = getattr(config, "sliding_window", None), int(config.max_position_embeddings)
    is_sliding = kind == "mistral" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if is_sliding and window is not None and window < context:
        return f"its attention is limited to the last {window} tokens"
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", ""))
    if rope not in STEADY_ROPES:
        return f"its RoPE angles ({rope or 'unknown type'}) depend on the length of the text"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    if str(config.hidden_act) not in ("silu", "gelu_pytorch_tanh"):
        return f"its activation ({config.hidden_act}) is not supported"
    return None


def fuse(module: Any, kernels: Kernels | None = None) -> Weights:
    """Return a model's weights, fused. The module's own parameters are views of them afterwards."""
    config = module.config.get_text_config()
    names = {id(part): name for name, part in module.named_modules()}
    body, head = module.base_model, module.get_output_embeddings()
    is_gemma = config.model_type == "gemma"

    def gain(norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        return weight + 1 if is_gemma else weight  # Gemma stores the gain minus 1

    layers = []
    for part in body.layers[: config.num_hidden_layers]:
        attention, mlp = part.self_attn, part.mlp
        layers.append(
            Layer(
                gain(part.input_layernorm),
                _group(names, attention.q_proj, attention.k_proj, attention.v_proj),
                gain(attention.q_norm) if hasattr(attention, "q_norm") else None,
                gain(attention.k_norm) if hasattr(attention, "k_norm") else None,
                _group(names, attention.o_proj),
                gain(part.post_attention_layernorm),
                _group(names, mlp.gate_proj, mlp.up_proj),
                _group(names, mlp.down_proj),
            )
        )
    heads = int(config.num_attention_heads)
    return Weights(
        layers=tuple(layers),
        embedding_VD=body.embed_tokens.weight.detach(),
        embedding_scale=float(config.hidden_size**0.5) if is_gemma else 1.0,
        norm_D=gain(body.norm),
        head_VD=head.weight.detach(),
        head_site=names[id(head)],
        eps=float(config.rms_norm_eps),
        heads=heads,
        key_heads=int(config.num_key_value_heads),
        head_width=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        is_gelu=config.hidden_act != "silu",
        rotary=body.rotary_emb,
        kernels=kernels,
    )


def _group(names: Mapping[int, str], *parts: Any) -> Group:
    """Fuse the linear modules `parts` into one group."""
    weight_OD = parts[0].weight.detach()
    bias_O = None if parts[0].bias is None else parts[0].bias.detach()
    if len(parts) > 1:
        weight_OD = _stack_rows([part.weight.detach() for part in parts])
        bias_O = None if bias_O is None else torch.cat([part.bias.detach() for part in parts])
    slices, at = {}, 0
    for part in parts:
        rows = slices[names[id(part)]] = slice(at, at + int(part.out_features))
        part.weight.data = weight_OD[rows]
        if bias_O is not None:
            part.bias.data = bias_O[rows]
        at = rows.stop
    return Group(weight_OD, bias_O, slices)


def _stack_rows(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices of one width stacked into one: a view if they follow each other in memory, else a copy."""
    is_plain = all(weight.is_contiguous() and weight.dtype == weights[0].dtype for weight in weights)
    if not is_plain or any(
        weight.data_ptr() + weight.nbytes != following.data_ptr() for weight, following in pairwise(weights)
    ):
        return torch.cat(list(weights))
    memory = (ctypes.c_char * sum(weight.nbytes for weight in weights)).from_address(weights[0].data_ptr())
    memory.owners = list(weights)  # type: ignore[attr-defined]  # they keep the mapping alive, the tensor keeps `memory`
    return torch.frombuffer(memory, dtype=weights[0].dtype).view(-1, weights[0].shape[1])
