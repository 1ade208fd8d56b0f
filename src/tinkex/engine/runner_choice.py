"""Which runner and decoder a base model gets, and why: packed if its family allows it and its numbers prove right, else
general."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from tinkex.engine.models.loaded_model import Model
from tinkex.engine.packed.decoder import TOLERANCE, PackedDecoder
from tinkex.engine.packed.kernels import binding
from tinkex.engine.packed.quantized import Divergence, divergence
from tinkex.engine.packed.runner import PackedRunner
from tinkex.engine.packed.selfcheck import run_selfcheck
from tinkex.engine.packed.weights import Weights, fuse, unsupported_reason
from tinkex.engine.sampling.decoder import Decoder, GeneralDecoder, Next
from tinkex.engine.sampling.kv_cache import RowCache
from tinkex.engine.training.general_runner import GeneralRunner
from tinkex.engine.training.runner import Runner

logger = logging.getLogger("tinkex.engine")

PROBE = 48
"""Tokens along which weights of fewer bits are compared."""


def runner_for(model: Model, prefer: str = "auto") -> Runner:
    """`prefer`: auto or general."""
    weights = None if prefer == "general" else packed_weights(model)
    return GeneralRunner(model) if weights is None else PackedRunner(weights)


def decoder_for(model: Model, prefer: str = "auto", kind: str = "float32") -> Decoder:
    """`kind`: of the weights that are sampled with (`packed.formats`)."""
    weights = None if prefer == "general" else packed_weights(model)
    if weights is None:
        if kind != "float32":
            logger.warning("%s: sampled with its own weights; %s needs the packed runner", model.info.name, kind)
        return GeneralDecoder(model)
    decoder = PackedDecoder(weights, kind)
    if kind != "float32":
        first = getattr(model.module.config.get_text_config(), "bos_token_id", None) or 0
        logger.warning("%s: sampled with %s weights: %s", model.info.name, kind, _off(weights, decoder, first))
    return decoder


def _off(weights: Weights, decoder: PackedDecoder, first: int) -> Divergence:
    """How far a decoder's next tokens are from the model's own, along a text that it draws itself."""
    tokens, rounded, cache = [first], [], RowCache()
    drawn = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for at in range(PROBE):
            hidden_1D = decoder.step(cache, [Next(tokens[-1], at, at, None)])
            rounded.append(decoder.logits(hidden_1D, [None]))
            tokens.append(int(torch.multinomial(rounded[-1][0].softmax(0), 1, generator=drawn)))
        own_TD = PackedRunner(weights).hidden(torch.tensor(tokens[:-1]))
        return divergence(decoder.logits(own_TD, [None] * PROBE), torch.cat(rounded))


def packed_weights(model: Model) -> Weights | None:
    """The model laid out for the packed runner, or None if it cannot be. Decided once, and said."""
    if model.packed is None:
        reason = unsupported_reason(model.module, model.device)
        if reason is None:
            weights = _proved(fuse(model.module, binding.find()))
            worst = _distance(model, PackedRunner(weights))
            if worst <= TOLERANCE:
                by = "torch alone" if weights.kernels is None else f"kernels for {weights.kernels.variant}"
                logger.info("%s: packed runner, by %s", model.info.name, by)
                model.packed = weights
                return weights
            reason = f"computed packed, its hidden states differ by {worst:.2g}"
        logger.info("%s: general runner (%s)", model.info.name, reason)
        model.packed = False
    return model.packed or None


def _distance(model: Model, runner: PackedRunner) -> float:
    """How far the packed hidden states are from the model's own, beside the largest of them."""
    with torch.inference_mode():
        tokens_T = torch.arange(5, 29) * 997 % model.vocab_size
        own_TD = model.hidden(tokens_T[None])[0]
        return float((runner.hidden(tokens_T) - own_TD).abs().max() / own_TD.abs().max())


def _proved(weights: Weights) -> Weights:
    """With kernels only if all that they do, there and back, is what torch does: they were built elsewhere."""
    if weights.kernels is None:
        return weights
    plain = replace(weights, kernels=None)
    for one, other in zip(run_selfcheck(weights), run_selfcheck(plain), strict=True):
        if not float((one - other).norm()) <= TOLERANCE * float(other.norm()):
            logger.warning("The C kernels give wrong numbers here: torch computes in their place, more slowly.")
            return plain
    return weights
