"""Combines the metrics of the chunks of one call: `name:reducer` says how.

| reducer | over the chunks that report the key |
|---|---|
| mean | average, weighted by each chunk's number of outputs |
| slack | largest value less that average |
| sum, min, max | as named |
| unique | every value: the first under its key, the others under `key_1`, `key_2` … |
| hash2 | sum modulo 2^64, as an integer |
| hash_unordered | a hash of the values that does not depend on their order, as an integer |
| none, or unknown | the value if the chunks agree, else that of the last chunk: the newest reading of a gauge |

Integers stay integers, so counts and hashes lose no bits. No input makes this fail: a metric must never lose a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinkex.types.training import ForwardBackwardOutput

Number = float  # `float` admits int: integers are kept as they come


def combine(outputs: Sequence[ForwardBackwardOutput]) -> dict[str, Number]:
    """The metrics of the whole call, keys in the order in which the chunks first name them."""
    reported: dict[str, list[tuple[Number, int]]] = {}
    for output in outputs:
        weight = len(output.loss_fn_outputs)
        for key, value in output.metrics.items():
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
            # A key that a chunk itself reported is never overwritten by a numbered one.
            combined.update({f"{key}_{n}": v for n, v in enumerate(values[1:], 1) if f"{key}_{n}" not in reported})
        else:
            combined[key] = _REDUCERS.get(reducer, _last)(values)
    return combined


def _mean(values: list[Number], weights: list[int]) -> Number:
    if not any(weights):
        weights = [1] * len(values)
    # A chunk without outputs has nothing to average: whatever it reports, NaN even, must not spoil the others.
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


def _hash2(values: list[Number]) -> Number:
    whole = _integers(values)
    return math.nan if whole is None else sum(whole) % 2**64


def _hash_unordered(values: list[Number]) -> Number:
    whole = _integers(values)
    return math.nan if whole is None else hash(tuple(sorted(whole)))


def _integers(values: list[Number]) -> list[int] | None:
    """The values as integers, or None if one of them is no number at all."""
    try:
        return [int(value) for value in values]
    except (ValueError, OverflowError):
        return None


_REDUCERS: Final[dict[str, Callable[[list[Number]], Number]]] = {
    "sum": _sum,
    "min": _smallest,
    "max": _largest,
    "hash2": _hash2,
    "hash_unordered": _hash_unordered,
}
