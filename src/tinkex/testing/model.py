"""The small language model behind the scripted service: no tensors, no randomness, and yet its loss falls.

It is a table of 4,096 log-probabilities looked up by the last token and the next one, scaled by one number, the
*skill*. An optimizer step with a gradient raises the skill, so losses fall; weights are the skill and a step count.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinkex.rules.losses import LOSSES

_SIZE = 4096
# Surprise of a fresh model, 0.25 … 4.25, spread by Knuth's multiplicative hash.
_SURPRISE = [0.25 + 4.0 * ((i * 2654435761) % 2**32) / 2**32 for i in range(_SIZE)]
_GAIN = 4.0  # skill per unit of learning rate: twelve steps of 5e-3 lower a loss by a fifth
_SKILL_LIMIT = 8.0

OFFERED = frozenset((*LOSSES, "custom"))
"""Every known loss. What this model computes for them is made up; only the kinds of their inputs are real."""


class BadData(Exception):
    """The caller's data do not fit: the operation fails with category user."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All there is to train and to save."""

    skill: float = 0.0
    steps: int = 0

    def logprobs(self, before: Iterable[int], tokens: Iterable[int]) -> list[float]:
        """Of each token, given the one before it."""
        table = _table(self.skill)
        return [table[(31 * a + b) & 4095] for a, b in zip(before, tokens, strict=False)]

    def step(self, gradient: float, learning_rate: float) -> Weights:
        """As sign descent: only the gradient's direction counts."""
        direction = (gradient > 0) - (gradient < 0)
        skill = self.skill + _GAIN * learning_rate * direction
        return Weights(max(-_SKILL_LIMIT, min(skill, _SKILL_LIMIT)), self.steps + 1)


@functools.lru_cache(maxsize=256)
def _table(skill: float) -> list[float]:
    scale = math.exp(-skill)
    # Rounded to float32 once, so that the JSON and protobuf answers carry the same numbers.
    return list(struct.unpack(f"<{_SIZE}f", struct.pack(f"<{_SIZE}f", *(-scale * x for x in _SURPRISE))))


@dataclass(frozen=True, slots=True)
class Array:
    """A loss input: its values, row by row, and its shape."""

    values: Sequence[float]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A datum, whichever dialect it came in."""

    tokens: Sequence[int]
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass found: log-probabilities per datum, shaped like the targets, the loss and its gradient."""

    logprobs: list[Array]
    loss: float
    gradient: float


def run(weights: Weights, rows: Sequence[Row], loss_fn: str, config: Mapping[str, object]) -> Pass:
    """One pass over the data. Losses are sums over tokens."""
    if loss_fn not in OFFERED:
        raise BadData(f"loss_fn {loss_fn!r} is not offered. Offered: {', '.join(sorted(OFFERED))}")
    if not rows:
        raise BadData("no data")
    found: list[Array] = []
    loss = gradient = 0.0
    for index, row in enumerate(rows):
        targets = _targets(row, index)
        before: Iterable[int] = row.tokens
        if len(targets.shape) == 2:
            before = [token for token in row.tokens for _ in range(targets.shape[1])]
        logprobs = weights.logprobs(before, map(int, targets.values))
        added, pull = _loss(loss_fn, logprobs, row, index, config)
        loss += added
        gradient += pull
        found.append(Array(logprobs, targets.shape))
    return Pass(found, loss, gradient)


def _targets(row: Row, index: int) -> Array:
    targets = row.inputs.get("target_tokens")
    if targets is None:
        raise BadData(f"datum {index}: loss_fn_inputs lack 'target_tokens'")
    if targets.shape[0] != len(row.tokens):
        raise BadData(
            f"datum {index}: target_tokens has {targets.shape[0]} positions, model_input has {len(row.tokens)}; "
            "they must be equal"
        )
    return targets


def _loss(
    name: str, logprobs: Sequence[float], row: Row, index: int, config: Mapping[str, object]
) -> tuple[float, float]:
    """The loss of one datum, and how hard it pulls its log-probabilities up."""
    if name in ("cross_entropy", "custom", "kl_divergence"):
        weights = row.inputs.get("weights")
        if weights is None:
            return -sum(logprobs), float(len(logprobs))
        _same_length(weights, logprobs, "weights", index)
        return -sum(map(float.__mul__, logprobs, map(float, weights.values))), sum(weights.values)
    sampled, advantages = (_needed(row, key, index, name) for key in ("logprobs", "advantages"))
    for key, array in (("logprobs", sampled), ("advantages", advantages)):
        _same_length(array, logprobs, key, index)
    low, high = (_number(config, f"clip_{side}_threshold", default) for side, default in (("low", 0.8), ("high", 1.2)))
    loss = 0.0
    for lp, q, advantage in zip(logprobs, sampled.values, advantages.values, strict=True):
        ratio = math.exp(min(lp - q, 50.0))
        gain = ratio * advantage
        if name == "ppo":
            gain = min(gain, max(low, min(ratio, high)) * advantage)
        loss -= gain
    return loss, sum(advantages.values)


def _needed(row: Row, key: str, index: int, loss_fn: str) -> Array:
    if key not in row.inputs:
        raise BadData(f"datum {index}: {loss_fn} needs {key!r} among the loss_fn_inputs")
    return row.inputs[key]


def _same_length(array: Array, logprobs: Sequence[float], key: str, index: int) -> None:
    if len(array.values) != len(logprobs):
        raise BadData(f"datum {index}: {key} has {len(array.values)} values, target_tokens has {len(logprobs)}")


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key, default)
    return float(value) if isinstance(value, (int, float)) else default
