"""Which runner a base model gets, and why: packed if its family allows it and its numbers prove right, else general."""

from __future__ import annotations

import logging

import torch

from tinkex.engine.general import GeneralRunner
from tinkex.engine.model import Model
from tinkex.engine.packed.runner import PackedRunner
from tinkex.engine.packed.weights import fuse, why_not
from tinkex.engine.runner import Runner

logger = logging.getLogger("tinkex.engine")

TOLERANCE = 1e-3
"""Of the largest hidden state: float32 in another order differs by 1e-6 to 1e-4, a wrong formula by far more."""


def choose(model: Model, prefer: str = "auto") -> Runner:
    """`prefer`: auto or general."""
    reason = "asked for" if prefer == "general" else why_not(model.module, model.device)
    if not reason:
        runner = PackedRunner(fuse(model.module))
        worst = _distance(model, runner)
        if worst <= TOLERANCE:
            logger.info("%s: packed runner", model.info.name)
            return runner
        reason = f"computed packed, its hidden states differ by {worst:.2g}"
    logger.info("%s: general runner (%s)", model.info.name, reason)
    return GeneralRunner(model)


def _distance(model: Model, runner: PackedRunner) -> float:
    """How far the packed hidden states are from the model's own, beside the largest of them."""
    with torch.inference_mode():
        tokens_T = torch.arange(5, 29) * 997 % model.vocab_size
        own_TD = model.hidden(tokens_T[None])[0]
        return float((runner.hidden(tokens_T) - own_TD).abs().max() / own_TD.abs().max())
