"""A cache of adapter weights for sampling, read from their folders. Weights in training are never touched."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from tinkex.engine.adapters.checkpoint import WEIGHTS, read_weights
from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import SampleSpec
from tinkex.engine.models.loaded_model import Model


class WeightsKey(NamedTuple):
    """Identifies weights: the base model's first name, the folder of an adapter, and the version of its file.

    The version is needed because a folder may be deleted and written again under the same name.
    """

    base: str
    folder: str | None
    version: tuple[int, int] | None
    """The inode and modification time of the weights file; None if there is no file."""


class AdapterCache:
    """Weights in use, and the most recently used others, as long as all together stay within a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._weights: OrderedDict[WeightsKey, tuple[LoraWeights, int]] = OrderedDict()
        """With their size in bytes, the least recently used first."""

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._weights.values())

    def key_of(self, spec: SampleSpec, model: Model) -> WeightsKey:
        """Return the key of the weights that a request needs. Cached weights stay usable when their folder is gone."""
        key = WeightsKey(model.info.name, spec.weights, None)
        if spec.weights is None:
            return key
        try:
            status = os.stat(os.path.join(spec.weights, WEIGHTS))
        except OSError:
            return next((cached for cached in reversed(self._weights) if cached[:2] == key[:2]), key)
        return key._replace(version=(status.st_ino, status.st_mtime_ns))

    def forget(self, base: str) -> None:
        """Drop the weights on a base model, which no request uses."""
        for key in [key for key in self._weights if key.base == base]:
            del self._weights[key]

    def has_room(self, used: Collection[WeightsKey]) -> bool:
        """Return whether the weights in use leave room for others."""
        return sum(size for key, (_, size) in self._weights.items() if key in used) < self._limit_bytes

    def get(self, model: Model, key: WeightsKey, used: Collection[WeightsKey]) -> LoraWeights | None:
        """Return the weights, read from disk if they are not cached; None for the base model. Drops unused ones above
        the limit."""
        if key.folder is None:
            return None
        if key not in self._weights:
            weights = read_weights(key.folder, model)
            self._weights[key] = weights, sum(a_RD.nbytes + b_OR.nbytes for a_RD, b_OR in weights.pairs.values())
        self._weights.move_to_end(key)
        for unused in [cached for cached in self._weights if cached != key and cached not in used]:
            if self.nbytes <= self._limit_bytes:
                break
            del self._weights[unused]
        return self._weights[key][0]
