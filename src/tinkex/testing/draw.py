"""Samples from the small model: tokens depend on the prompt, the seed and nothing else."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.testing.model import Array, Weights

Ranked = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled sequence."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk: list[Ranked] | None = None


@dataclass(frozen=True, slots=True)
class Csr:
    """Where the values of a sparse tensor belong."""

    crow: list[int]
    col: list[int]


@dataclass(frozen=True, slots=True)
class Draw:
    """All that one sampling request found. Absent parts were not asked for."""

    sequences: list[Drawn]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt: list[Ranked | None] | None = None
    target_prompt: tuple[Array, Csr | None] | None = None
    alternatives: tuple[Array, Array] | None = None


def draw(weights: Weights, prompt: Sequence[int], body: Mapping[str, Any], vocabulary: int, max_tokens: int) -> Draw:
    """Serve a sampling request's body. `max_tokens` is the limit when the request names none."""
    params = body.get("sampling_params") or {}
    stops = _stops(params.get("stop"))
    limit = params.get("max_tokens")
    limit = max_tokens if limit is None else limit
    is_greedy = params.get("temperature") == 0
    root = struct.pack(f"<{len(prompt)}i", *prompt) + (b"greedy" if is_greedy else str(params.get("seed")).encode())
    topk = body.get("topk_sample_logprobs") or 0
    last = prompt[-1] if prompt else 0
    sequences = []
    for index in range(body.get("num_samples") or 1):
        tokens = _tokens(root if is_greedy else root + b"/%d" % index, limit, vocabulary)
        cut = next((i + 1 for i, token in enumerate(tokens) if token in stops), 0) if stops else 0
        tokens = tokens[:cut] if cut else tokens
        logprobs = weights.logprobs([last, *tokens], tokens)
        ranked = _ranked(weights, [last, *tokens[:-1]], tokens, topk, vocabulary) if topk else None
        sequences.append(Drawn(tokens, logprobs, "stop" if cut else "length", ranked))
    return Draw(sequences, **_about_prompt(weights, prompt, body, vocabulary))


def _tokens(key: bytes, count: int, vocabulary: int) -> list[int]:
    return [word % vocabulary for word in struct.unpack(f"<{count}I", hashlib.shake_128(key).digest(4 * count))]


def _stops(stop: Any) -> frozenset[int]:
    # Text cannot match: this model has no tokenizer.
    entries = stop if isinstance(stop, list) else []
    return frozenset(entry for entry in entries if isinstance(entry, int))


def _about_prompt(weights: Weights, prompt: Sequence[int], body: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before, tokens = prompt[:-1], prompt[1:]
    last_n = body.get("prompt_logprobs_last_n") or len(tokens)
    skipped = max(0, len(tokens) - last_n)
    if body.get("prompt_logprobs"):
        logprobs = weights.logprobs(before[skipped:], tokens[skipped:])
        found["prompt_logprobs"] = [None] * min(len(prompt), skipped + 1) + logprobs
    if k := body.get("topk_prompt_logprobs"):
        ranked = _ranked(weights, before[skipped:], tokens[skipped:], k, vocabulary)
        found["topk_prompt"] = [None] * min(len(prompt), skipped + 1) + ranked
    if wanted := body.get("target_prompt_logprobs"):
        found["target_prompt"] = _targets(weights, before, wanted)
    if k := body.get("prompt_alt_tokens_k"):
        flat = _tokens(struct.pack(f"<{len(prompt)}i", *prompt) + b"alternatives", len(tokens) * k, vocabulary)
        spread = [token for token in before for _ in range(k)]
        shape = (len(tokens), k)
        found["alternatives"] = (Array(flat, shape), Array(weights.logprobs(spread, flat), shape))
    return found


def _ranked(weights: Weights, before: Sequence[int], tokens: Sequence[int], k: int, vocabulary: int) -> list[Ranked]:
    """At each place, the token itself and its neighbours, most likely first."""
    places = []
    for previous, token in zip(before, tokens, strict=True):
        near = [(token + step) % vocabulary for step in range(k)]
        found = zip(near, weights.logprobs([previous] * k, near), strict=True)
        places.append(sorted(found, key=lambda pair: -pair[1]))
    return places


def _targets(weights: Weights, before: Sequence[int], wanted: Mapping[str, Any]) -> tuple[Array, Csr | None]:
    rows, width = wanted["shape"]
    ids = wanted["data"]
    crow, col = wanted.get("sparse_crow_indices"), wanted.get("sparse_col_indices")
    if crow is None or col is None:
        spread = [token for token in before for _ in range(width)]
        layout = None
    else:
        spread = [before[row] for row in range(rows) for _ in range(crow[row], crow[row + 1])]
        layout = Csr(crow, col)
    logprobs = weights.logprobs(spread, ids)
    # -1 marks places that ask for nothing.
    return Array([lp if token >= 0 else 0.0 for lp, token in zip(logprobs, ids, strict=True)], (rows, width)), layout
