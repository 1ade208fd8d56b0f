"""The small language model behind the scripted service: no tensors, no randomness, and yet its loss falls.

It is a table of 4,096 log-probabilities looked up by the last token and the next one, scaled by one number, the
*skill*. An optimizer step with a gradient raises the skill, so losses fall; weights are the skill and a step count.
Samples depend on the prompt, the seed and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from tinkex.rules.losses import LOSSES

_SIZE = 4096
# Surprise of a fresh model, 0.25 … 4.25, spread by Knuth's multiplicative hash.
_SURPRISE = [0.25 + 4.0 * ((i * 2654435761) % 2**32) / 2**32 for i in range(_SIZE)]
_GAIN = 4.0  # skill per unit of learning rate: twelve steps of 5e-3 lower a loss by a fifth
_SKILL_LIMIT = 8.0
_DEFAULT_MAX_TOKENS = 16
_NO_TOKEN = -1  # stands for each place of an image or of audio

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
class Pass:
    """What a forward pass found: log-probabilities per datum, shaped like the targets, the loss and its gradient."""

    logprobs: list[dict[str, Any]]
    loss: float
    gradient: float


def run(weights: Weights, data: Sequence[Mapping[str, Any]], loss_fn: str, config: Mapping[str, Any]) -> Pass:
    """One pass over the data of a request. Losses are sums over tokens."""
    if loss_fn not in OFFERED:
        raise BadData(f"loss_fn {loss_fn!r} is not offered. Offered: {', '.join(sorted(OFFERED))}")
    if not data:
        raise BadData("no data")
    found = []
    loss = gradient = 0.0
    for index, datum in enumerate(data):
        tokens = tokens_of(datum["model_input"]["chunks"])
        inputs = {name: _values(tensor) for name, tensor in datum["loss_fn_inputs"].items()}
        shape = _target_shape(datum["loss_fn_inputs"], len(tokens), index)
        logprobs = weights.logprobs(_each_times(math.prod(shape[1:]), tokens), map(int, inputs["target_tokens"]))
        added, pull = _loss(loss_fn, logprobs, inputs, index, config)
        loss += added
        gradient += pull
        found.append(_tensor(logprobs, shape))
    return Pass(found, loss, gradient)


def tokens_of(chunks: Iterable[Mapping[str, Any]]) -> list[int]:
    """The tokens of a model input; the chunks' kinds show in their shape, as old clients send no `type`."""
    found: list[int] = []
    for chunk in chunks:
        tokens = chunk.get("tokens")
        if isinstance(tokens, Sequence):
            found += tokens
        else:
            count = chunk.get("expected_tokens") or tokens or (len(chunk["dmel"]) if "dmel" in chunk else 1)
            found += [_NO_TOKEN] * int(count)
    return found


def _target_shape(inputs: Mapping[str, Any], length: int, index: int) -> tuple[int, ...]:
    targets = inputs.get("target_tokens")
    if targets is None:
        raise BadData(f"datum {index}: loss_fn_inputs lack 'target_tokens'")
    shape = tuple(targets.get("shape") or (len(targets["data"]),))
    if shape[0] != length:
        raise BadData(
            f"datum {index}: target_tokens has {shape[0]} positions, model_input has {length}; they must be equal"
        )
    return shape


def _values(tensor: Mapping[str, Any]) -> Sequence[float]:
    """Row by row; a sparse tensor is filled up with zeros."""
    values: Sequence[float] = tensor["data"]
    shape = list(tensor.get("shape") or (len(values),))
    crow, col = tensor.get("sparse_crow_indices"), tensor.get("sparse_col_indices")
    if crow is not None and col is not None:
        rows, width = shape
        flat: list[float] = [0] * (rows * width)
        for row in range(rows):
            for place in range(crow[row], crow[row + 1]):
                flat[row * width + col[place]] = values[place]
        return flat
    if math.prod(shape) != len(values):
        raise BadData(f"a tensor of shape {shape} came with {len(values)} values")
    return values


def _loss(
    name: str, logprobs: Sequence[float], inputs: Mapping[str, Sequence[float]], index: int, config: Mapping[str, Any]
) -> tuple[float, float]:
    """The loss of one datum, and how hard it pulls its log-probabilities up."""

    def needed(key: str) -> Sequence[float]:
        if key not in inputs:
            raise BadData(f"datum {index}: {name} needs {key!r} among the loss_fn_inputs")
        if len(inputs[key]) != len(logprobs):
            raise BadData(f"datum {index}: {key} has {len(inputs[key])} values, target_tokens has {len(logprobs)}")
        return inputs[key]

    if name in ("cross_entropy", "custom", "kl_divergence"):
        weights = needed("weights") if "weights" in inputs else [1.0] * len(logprobs)
        return -sum(map(mul, logprobs, weights)), sum(weights)
    sampled, advantages = needed("logprobs"), needed("advantages")
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    loss = 0.0
    for lp, q, advantage in zip(logprobs, sampled, advantages, strict=True):
        ratio = math.exp(min(lp - q, 50.0))
        gain = ratio * advantage
        if name == "ppo":
            gain = min(gain, max(low, min(ratio, high)) * advantage)
        loss -= gain
    return loss, sum(advantages)


def draw(weights: Weights, prompt: Sequence[int], body: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Serve a sampling request's body: the response, as JSON says it. What was not asked for is absent."""
    params = body.get("sampling_params") or {}
    # Text cannot match: this model has no tokenizer.
    stops = [stop for stop in params["stop"] if isinstance(stop, int)] if isinstance(params.get("stop"), list) else []
    limit = params.get("max_tokens")
    limit = _DEFAULT_MAX_TOKENS if limit is None else limit
    is_greedy = params.get("temperature") == 0
    root = _packed(prompt) + (b"greedy" if is_greedy else str(params.get("seed")).encode())
    last = prompt[-1] if prompt else 0
    sequences = []
    for index in range(body.get("num_samples") or 1):
        tokens = _tokens(root if is_greedy else root + b"/%d" % index, limit, vocabulary)
        cut = next((i + 1 for i, token in enumerate(tokens) if token in stops), 0)
        tokens = tokens[:cut] if cut else tokens
        before = [last, *tokens[:-1]]
        sequence: dict[str, Any] = {
            "stop_reason": "stop" if cut else "length",
            "tokens": tokens,
            "logprobs": weights.logprobs(before, tokens),
        }
        if k := body.get("topk_sample_logprobs"):
            sequence["topk_logprobs"] = _ranked(weights, before, tokens, k, vocabulary)
        sequences.append(sequence)
    return {"type": "sample", "sequences": sequences, **_about_prompt(weights, prompt, body, vocabulary)}


def _about_prompt(weights: Weights, prompt: Sequence[int], body: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before, tokens = prompt[:-1], prompt[1:]
    last_n = body.get("prompt_logprobs_last_n") or len(tokens)
    skipped = max(0, len(tokens) - last_n)
    nothing = [None] * min(len(prompt), skipped + 1)
    if body.get("prompt_logprobs"):
        found["prompt_logprobs"] = nothing + weights.logprobs(before[skipped:], tokens[skipped:])
    if k := body.get("topk_prompt_logprobs"):
        found["topk_prompt_logprobs"] = nothing + _ranked(weights, before[skipped:], tokens[skipped:], k, vocabulary)
    if wanted := body.get("target_prompt_logprobs"):
        found["target_prompt_logprobs"] = _target_logprobs(weights, before, wanted)
    if k := body.get("prompt_alt_tokens_k"):
        flat = _tokens(_packed(prompt) + b"alternatives", len(tokens) * k, vocabulary)
        logprobs = weights.logprobs(_each_times(k, before), flat)
        shape = (len(tokens), k)
        found["prompt_alt_tokens"] = {"tokens": _tensor(flat, shape, "int64"), "logprobs": _tensor(logprobs, shape)}
    return found


def _ranked(
    weights: Weights, before: Sequence[int], tokens: Sequence[int], k: int, vocabulary: int
) -> list[list[tuple[int, float]]]:
    """At each place, the token itself and its neighbours, most likely first."""
    places = []
    for previous, token in zip(before, tokens, strict=True):
        near = [(token + step) % vocabulary for step in range(k)]
        found = zip(near, weights.logprobs([previous] * k, near), strict=True)
        places.append(sorted(found, key=lambda pair: -pair[1]))
    return places


def _target_logprobs(weights: Weights, before: Sequence[int], wanted: Mapping[str, Any]) -> dict[str, Any]:
    rows, width = wanted["shape"]
    ids = wanted["data"]
    layout = {key: wanted[key] for key in ("sparse_crow_indices", "sparse_col_indices") if wanted.get(key) is not None}
    if len(layout) == 2:
        crow = layout["sparse_crow_indices"]
        spread = [before[row] for row in range(rows) for _ in range(crow[row], crow[row + 1])]
    else:
        spread = _each_times(width, before)
        layout = {}
    # -1 marks places that ask for nothing.
    logprobs = [lp if token >= 0 else 0.0 for lp, token in zip(weights.logprobs(spread, ids), ids, strict=True)]
    return {**_tensor(logprobs, (rows, width)), **layout}


def _each_times(count: int, tokens: Iterable[int]) -> list[int]:
    return [token for token in tokens for _ in range(count)]


def _packed(prompt: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(prompt)}i", *prompt)


def _tokens(key: bytes, count: int, vocabulary: int) -> list[int]:
    return [word % vocabulary for word in struct.unpack(f"<{count}I", hashlib.shake_128(key).digest(4 * count))]


def _tensor(values: Sequence[float], shape: Sequence[int], dtype: str = "float32") -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": shape}
