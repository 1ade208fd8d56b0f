"""Chooses the runner and the decoder of a base model: packed if the model's family allows it and its numbers are right,
else general. Logs the choice and the reason.

The packed code and its kernels must prove themselves on this machine before they are used: hidden states are compared
with those of transformers, and every kernel with torch.

Axes: T tokens, D model width, V vocabulary.
"""

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
from tinkex.engine.sampling.decoder import Decoder, GeneralDecoder, RowInput
from tinkex.engine.sampling.kv_cache import KVCache
from tinkex.engine.training.general_runner import GeneralRunner
from tinkex.engine.training.runner import Runner

logger = logging.getLogger("tinkex.engine")

COMPARED_TOKENS = 48
"""Length of the text along which quantized weights are compared with the exact ones."""


def choose_runner(model: Model, prefer: str = "auto") -> Runner:
    """Return the runner of a model. `prefer`: auto or general."""
    weights = None if prefer == "general" else packed_weights(model)
    return GeneralRunner(model) if weights is None else PackedRunner(weights)


def choose_decoder(model: Model, prefer: str = "auto", weight_format: str = "float32") -> Decoder:
    """Return the decoder of a model. `weight_format`: one of `packed.quantized.FORMATS`, which is sampled with."""
    weights = None if prefer == "general" else packed_weights(model)
    if weights is None:
        if weight_format != "float32":
            logger.warning(
                "%s: sampled with its own weights, because %s needs the packed runner", model.info.name, weight_format
            )
        return GeneralDecoder(model)
    decoder = PackedDecoder(weights, weight_format)
    if weight_format != "float32":
        first_token = getattr(model.module.config.get_text_config(), "bos_token_id", None) or 0
        difference = _divergence_from_exact(weights, decoder, first_token)
        logger.warning("%s: sampled with %s weights: %s", model.info.name, weight_format, difference)
    return decoder


def packed_weights(model: Model) -> Weights | None:
    """Return the model's weights in the packed layout, or None if it cannot run packed. Decided and logged once."""
    if model.packed is None:
        model.packed = _pack_weights(model) or False
    weights: Weights | None = model.packed or None
    return weights


def _pack_weights(model: Model) -> Weights | None:
    reason = unsupported_reason(model.module, model.device)
    if reason is None:
        weights = check_kernels(fuse(model.module, binding.find()))
        difference = _hidden_difference(model, PackedRunner(weights))
        if difference <= TOLERANCE:
            by = "torch only" if weights.kernels is None else f"kernels for {weights.kernels.variant}"
            logger.info("%s: packed runner, with %s", model.info.name, by)
            return weights
        reason = f"computed packed, its hidden states differ by {difference:.2g}"
    logger.info("%s: general runner (%s)", model.info.name, reason)
    return None


def _hidden_difference(model: Model, runner: PackedRunner) -> float:
    """Return the largest difference of packed hidden states from the model's own, relative to the largest of those."""
    with torch.inference_mode():
        tokens_T = torch.arange(5, 29) * 997 % model.vocab_size
        exact_TD = model.hidden(tokens_T[None])[0]
        return float((runner.hidden(tokens_T) - exact_TD).abs().max() / exact_TD.abs().max())


def check_kernels(weights: Weights) -> Weights:
    """Return the weights, without kernels if any kernel differs from torch here: they were built on another machine."""
    if weights.kernels is None:
        return weights
    without_kernels = replace(weights, kernels=None)
    for by_kernel, by_torch in zip(run_selfcheck(weights), run_selfcheck(without_kernels), strict=True):
        if not float((by_kernel - by_torch).norm()) <= TOLERANCE * float(by_torch.norm()):
            logger.warning("The C kernels give wrong numbers here: torch computes in their place, more slowly.")
            return without_kernels
    return weights


def _divergence_from_exact(weights: Weights, decoder: PackedDecoder, first_token: int) -> Divergence:
    """Compare a decoder's next-token logits with the exact model's, along a text that the decoder samples itself."""
    tokens, logits, cache = [first_token], [], KVCache()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for position in range(COMPARED_TOKENS):
            hidden_1D = decoder.step(cache, [RowInput(tokens[-1], position, position, None)])
            logits.append(decoder.logits(hidden_1D, [None]))
            tokens.append(int(torch.multinomial(logits[-1][0].softmax(0), 1, generator=generator)))
        exact_TD = PackedRunner(weights).hidden(torch.tensor(tokens[:-1]))
        return divergence(decoder.logits(exact_TD, [None] * COMPARED_TOKENS), torch.cat(logits))
