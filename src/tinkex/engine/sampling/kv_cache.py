"""The KV cache of one decode batch. Rows are added and removed between steps.

Rows are aligned on the right: the newest token of every row is in the same column, and shorter rows are padded on the
left. So a plain two-dimensional padding mask is enough, and every architecture makes its own masks from it (sliding
windows included: within a row, distances between columns are distances between tokens).

                        start                 end
    row 0   . . . . . .   a  b  c  d  e  f  g    . . .       `a` to `g`, `x`, `y`, `z`: tokens in the cache
    row 1   . . . . . .   0  0  0  0  x  y  z    . . .       0: padding, masked, always finite
            free columns                         free columns

The cache of a prompt is a `KVCache` with one row.

Axes of keys and values: B rows, H heads, T columns, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

COLUMN_STEP = 64
"""A full cache grows by a quarter, but at least by so many columns: growing copies everything."""


class KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types here
    """Keys and values of one layer: buffers with room to grow; rows [0, rows) and columns [start, end) are in use.

    Padding inside those columns must be finite: it is masked, but zero times NaN would be NaN.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # transformers has no types here
        self.rows = 0
        self.start = 0
        self.end = 0

    @property
    def width(self) -> int:
        return self.end - self.start

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states, value_states, key_states.shape[0], key_states.shape[2])
        self.rows = key_states.shape[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns of all rows, and return all keys and values in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.reserve_columns(key_states.shape[2])
        new, used = slice(first, self.end), slice(self.start, self.end)
        self.keys[: self.rows, :, new] = key_states
        self.values[: self.rows, :, new] = value_states
        return self.keys[: self.rows, :, used], self.values[: self.rows, :, used]

    def reserve_columns(self, count: int) -> int:
        """Add columns for the next tokens of all rows, which the caller must fill. Returns the first new column."""
        if self.end + count > self.keys.shape[2]:
            self._reallocate(self.keys.shape[0], self.width, _grown(self.width + count))
        self.end += count
        return self.end - count

    def add_rows(self, prompt: KVLayer, count: int, *, copies_prompt: bool = True, reserved_rows: int = 0) -> None:
        """Add `count` rows, each a copy of the one row of `prompt` or empty; see `KVCache.add_rows`."""
        copied = prompt.width if copies_prompt else 0
        if not self.is_initialized:
            self._allocate(prompt.keys, prompt.values, count + reserved_rows, _grown(copied))
            self.start = self.end = copied
        rows, width = self.rows + count, max(self.width, copied)
        # A wider prompt widens all rows to the left, so there must be `width` columns before `end`.
        if rows > self.keys.shape[0] or width > self.end:
            has_room = rows <= self.keys.shape[0]
            new_rows = self.keys.shape[0] if has_room else rows + max(reserved_rows, rows // 4)
            self._reallocate(new_rows, width, _grown(width))
        start, first_copied = self.end - width, self.end - copied
        for buffer, source in ((self.keys, prompt.keys), (self.values, prompt.values)):
            # The new padding may have old numbers in it, NaN among them: zero it.
            buffer[: self.rows, :, start : self.start] = 0
            buffer[self.rows : rows, :, start:first_copied] = 0
            buffer[self.rows : rows, :, first_copied : self.end] = source[:1, :, prompt.start : prompt.start + copied]
        self.start, self.rows = start, rows

    def copy_prefix(self, width: int) -> KVLayer:
        """Return a copy of the first `width` columns, with room to grow."""
        copy = KVLayer()
        if self.is_initialized:
            copy.keys, copy.values, copy.is_initialized = self.keys, self.values, True
            copy.rows, copy.start, copy.end = self.rows, self.start, self.start + width
            copy._reallocate(self.rows, width, _grown(width))
        return copy

    def keep_rows(self, order: Sequence[int], width: int) -> None:
        """Keep only these rows, in this order, and only the last `width` columns."""
        # Rows that move come from behind the last row that remains, so no row is overwritten that is still needed.
        self.start = self.end - width
        used = slice(self.start, self.end)
        for target, source in enumerate(order):
            if source != target:
                self.keys[target, :, used] = self.keys[source, :, used]
                self.values[target, :, used] = self.values[source, :, used]
        self.rows = len(order)

    def _allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> None:
        self.keys, self.values = _zeros(keys, rows, columns), _zeros(values, rows, columns)
        self.is_initialized = True

    def _reallocate(self, rows: int, width: int, columns: int) -> None:
        """Move into new buffers of `rows` × `columns`, with `width` columns in use (new ones on the left)."""
        used, moved = slice(self.start, self.end), slice(width - self.width, width)
        keys, values = _zeros(self.keys, rows, columns), _zeros(self.values, rows, columns)
        keys[: self.rows, :, moved] = self.keys[: self.rows, :, used]
        values[: self.rows, :, moved] = self.values[: self.rows, :, used]
        self.keys, self.values = keys, values
        self.start, self.end = 0, width

    # What transformers asks a cache layer

    def get_seq_length(self) -> int:
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """The cache of all layers. A row is known by its index; `remove_rows` returns the new order."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=KVLayer)

    @property
    def kv_layers(self) -> list[KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVLayer) and layer.is_initialized]

    @property
    def rows(self) -> int:
        return max((layer.rows for layer in self.kv_layers), default=0)

    @property
    def width(self) -> int:
        return max((layer.width for layer in self.kv_layers), default=0)

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.kv_layers)

    def copy_prefix(self, width: int) -> KVCache:
        copy = KVCache()
        copy.layers += [layer.copy_prefix(width) for layer in self.layers if isinstance(layer, KVLayer)]
        return copy

    def add_rows(self, prompt: KVCache, count: int, *, copies_prompt: bool = True, reserved_rows: int = 0) -> None:
        """Add `count` rows after the last one, with a copy of the prompt's keys and values or empty.

        `reserved_rows`: more rows that are added next, which memory is allocated for now. If an exception is raised,
        no layer has changed.
        """
        while len(self.layers) < len(prompt.layers):
            self.layers.append(KVLayer())
        rows, width = self.rows, self.width
        try:
            for layer, source in zip(self.layers, prompt.layers, strict=True):
                # A layer that uses the keys of another layer (some models have such) has none of its own.
                if isinstance(layer, KVLayer) and isinstance(source, KVLayer) and source.is_initialized:
                    layer.add_rows(source, count, copies_prompt=copies_prompt, reserved_rows=reserved_rows)
        except BaseException:
            for layer in self.kv_layers:
                layer.keep_rows(range(rows), width)
            raise

    def remove_rows(self, removed: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Remove rows, and return the old index of every remaining row, in the new order.

        The last rows move into the gaps, so that few rows are copied. Columns that only removed rows used are freed.
        `lengths`: the tokens of all old rows.
        """
        gaps = set(removed)
        remaining = len(lengths) - len(gaps)
        fillers = [row for row in range(remaining, len(lengths)) if row not in gaps]
        order = [row if row not in gaps else fillers.pop() for row in range(remaining)]
        width = max((lengths[row] for row in order), default=0)
        for layer in self.kv_layers:
            layer.keep_rows(order, width)
        return order

    def truncate(self, width: int) -> None:
        """Cut all layers back to `width` columns: removes what a forward pass wrote before it failed."""
        for layer in self.kv_layers:
            layer.end = layer.start + width


def padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Return a mask [B, T], true at tokens; None if there is no padding, because attention without a mask is faster."""
    if all(length == width for length in lengths):
        return None
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    return torch.arange(width, device=device)[None] >= width - lengths_B1


def _zeros(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], columns, like.shape[3])


def _grown(columns: int) -> int:
    return columns + max(columns // 4, COLUMN_STEP)
