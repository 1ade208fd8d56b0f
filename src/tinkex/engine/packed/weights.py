"""What of a model the packed runner computes with: its layers' weights, those that share an input in one matrix.

Which models that can be is said here too. Nothing is held twice: the module's own parameters become views. Weights that
lie in a row in a mapped file, as gate and up do by their names, are used where they are.

Axes: D model width, O out, F width of the MLP, V vocabulary, H query heads, K key heads, W width of a head.
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
"""Those whose angles do not depend on how long a text is."""


@dataclass(frozen=True, slots=True)
class Group:
    """Linear layers that read the same input, as one matrix. `places`: site → its rows of it."""

    weight_OD: Tensor
    bias_O: Tensor | None
    places: Mapping[str, slice]


@dataclass(frozen=True, slots=True)
class Layer:
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
    """For whatever they can do; torch does the rest."""

    @property
    def scale(self) -> float:
        """Of the scores of attention."""
        return float(self.head_width**-0.5)

    def embedded(self, tokens_N: Tensor) -> Tensor:
        x_ND = self.embedding_VD[tokens_N]
        return x_ND if self.embedding_scale == 1.0 else x_ND.mul_(self.embedding_scale)

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, W/2] of rotary positions: their second half repeats the first."""
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
        return f"it looks back {window} tokens only"
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", ""))
    if rope not in STEADY_ROPES:
        return f"its positions ({rope or 'unknown'}) depend on the length of the text"
    if getattr(config, "use_bidirectional_attention", None):
        return "it looks ahead"
    if str(config.hidden_act) not in ("silu", "gelu_pytorch_tanh"):
        return f"its activation ({config.hidden_act}) is not known"
    return None


def fuse(module: Any, found: Kernels | None = None) -> Weights:
    """Lay a model's weights out. Its own parameters are views of them afterwards. `found`: kernels to compute with."""
    config = module.config.get_text_config()
    names = {id(part): name for name, part in module.named_modules()}
    body, head = module.base_model, module.get_output_embeddings()
    is_gemma = config.model_type == "gemma"

    def norm(part: Any) -> Tensor:
        weight: Tensor = part.weight.detach()
        return weight + 1 if is_gemma else weight

    layers = []
    for part in body.layers[: config.num_hidden_layers]:
        attention, mlp = part.self_attn, part.mlp
        layers.append(
            Layer(
                norm(part.input_layernorm),
                _group(names, attention.q_proj, attention.k_proj, attention.v_proj),
                norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
                norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
                _group(names, attention.o_proj),
                norm(part.post_attention_layernorm),
                _group(names, mlp.gate_proj, mlp.up_proj),
                _group(names, mlp.down_proj),
            )
        )
    heads = int(config.num_attention_heads)
    return Weights(
        layers=tuple(layers),
        embedding_VD=body.embed_tokens.weight.detach(),
        embedding_scale=float(config.hidden_size**0.5) if is_gemma else 1.0,
        norm_D=norm(body.norm),
        head_VD=head.weight.detach(),
        head_site=names[id(head)],
        eps=float(config.rms_norm_eps),
        heads=heads,
        key_heads=int(config.num_key_value_heads),
        head_width=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        is_gelu=config.hidden_act != "silu",
        rotary=body.rotary_emb,
        kernels=found,
    )


def _group(names: Mapping[int, str], *parts: Any) -> Group:
    weight_OD = parts[0].weight.detach()
    bias_O = None if parts[0].bias is None else parts[0].bias.detach()
    if len(parts) > 1:
        weight_OD = _below_each_other([part.weight.detach() for part in parts])
        bias_O = None if bias_O is None else torch.cat([part.bias.detach() for part in parts])
    places, at = {}, 0
    for part in parts:
        place = places[names[id(part)]] = slice(at, at + int(part.out_features))
        part.weight.data = weight_OD[place]
        if bias_O is not None:
            part.bias.data = bias_O[place]
        at = place.stop
    return Group(weight_OD, bias_O, places)


def _below_each_other(weights: Sequence[Tensor]) -> Tensor:
    """Matrices of one width as one: a view if they follow each other in memory, else a copy."""
    is_plain = all(one.is_contiguous() and one.dtype == weights[0].dtype for one in weights)
    if not is_plain or any(one.data_ptr() + one.nbytes != other.data_ptr() for one, other in pairwise(weights)):
        return torch.cat(list(weights))
    memory = (ctypes.c_char * sum(one.nbytes for one in weights)).from_address(weights[0].data_ptr())
    memory.owners = list(weights)  # type: ignore[attr-defined]  # they hold the mapping; the tensor holds the memory
    return torch.frombuffer(memory, dtype=weights[0].dtype).view(-1, weights[0].shape[1])
