"""Combines metrics: those of the parts of one call into those of the call, and those of a step's passes into its loss.

A metric is called `name:reducer`:

| reducer | over the parts that report the key |
|---|---|
| mean | average, weighted by each part's number of outputs |
| slack | largest value minus that average |
| sum, min, max | as named |
| unique | every value: the first under its key, the others under `key_1`, `key_2` … |
| hash2 | sum modulo 2^64, as an integer |
| hash_unordered | a hash of the values that does not depend on their order, as an integer |
| none, or unknown | the value if the parts agree, else that of the last part: the newest reading of a gauge |

Integers stay integers, so counts and hashes lose no bits. No input makes this fail: a metric must never lose a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

Number = float  # `float` admits int: integers stay what they are
Metrics = Mapping[str, Number]


def combine(parts: Iterable[tuple[Metrics, int]]) -> dict[str, Number]:
    """Return the metrics of a whole call, keys in the order in which its parts first name them.

    Every part comes with its number of outputs. An engine's parts are datums, with one output each; a client's are the
    chunks of a large call.
    """
    reported: dict[str, list[tuple[Number, int]]] = {}
    for metrics, weight in parts:
        for key, value in metrics.items():
            reported.setdefault(key, []).append((value, weight))
    combined: dict[str, Number] = {}
    for key, entries in reported.items():
        values = [value for value, _ in entries]
        reducer = key.rpartition(":")[2] if ":" in key else ""
        if reducer in ("mean", "slack"):
            mean = _mean(values, [weight for _, weight in entries])
            combined[key] = mean if reducer == "mean" else _largest(values) - mean
        elif reducer == "unique":
            combined[key] = values[0]
            # A key that a part itself reported is never overwritten by a numbered one.
            combined.update({f"{key}_{n}": v for n, v in enumerate(values[1:], 1) if f"{key}_{n}" not in reported})
        else:
            try:
                combined[key] = _REDUCERS.get(reducer, _last)(values)
            except (ValueError, OverflowError):  # a hash over NaN or infinity
                combined[key] = math.nan
    return combined


def step_loss(passes: Iterable[Mapping[str, Number | None]]) -> float | None:
    """Return the loss of one optimizer step from the metrics of its passes: a caller may send a batch in several.

    If every pass reports its weight, the loss is the weighted mean; otherwise it is the sum. It is None without a loss,
    and where the weights do not sum to a positive number: custom losses send surrogate weights (zeros, then gradients),
    over which a mean is meaningless.
    """
    reported = [metrics for metrics in passes if metrics.get("loss:sum") is not None]
    if not reported:
        return None
    total = _sum([metrics["loss:sum"] or 0.0 for metrics in reported])  # NaN stays NaN: the user must see it
    if any(metrics.get("weight:sum") is None for metrics in reported):
        return total
    weight = _sum([metrics["weight:sum"] or 0.0 for metrics in reported])
    return total / weight if weight > 0 else None


def is_mean(passes: Iterable[Mapping[str, Number | None]]) -> bool:
    """Whether `step_loss` of these passes is a mean over their weights, not a sum."""
    reported = [metrics for metrics in passes if metrics.get("loss:sum") is not None]
    return bool(reported) and all(metrics.get("weight:sum") is not None for metrics in reported)


def _mean(values: list[Number], weights: list[int]) -> Number:
    if not any(weights):
        weights = [1] * len(values)
    # A part without outputs has nothing to average: its value, even NaN, must not spoil the others.
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len(counted) == 1:
        return counted[0][0]
    return _sum([value * weight for value, weight in counted]) / sum(weights)


def _sum(values: list[Number]) -> Number:
    if all(isinstance(value, int) for value in values):
        return sum(values)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # inf - inf, or beyond the largest float: plain addition gives nan or inf
        return sum(map(float, values))


def _smallest(values: list[Number]) -> Number:
    return next((value for value in values if value != value), min(values))  # NaN wins, wherever it stands


def _largest(values: list[Number]) -> Number:
    return next((value for value in values if value != value), max(values))


def _last(values: list[Number]) -> Number:
    return values[-1]


_REDUCERS: Final[dict[str, Callable[[list[Number]], Number]]] = {
    "sum": _sum,
    "min": _smallest,
    "max": _largest,
    "hash2": lambda values: sum(map(int, values)) % 2**64,
    "hash_unordered": lambda values: hash(tuple(sorted(map(int, values)))),
}
