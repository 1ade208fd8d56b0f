"""Keys and values of the rows of one decode batch, which rows join and leave between steps.

Rows are aligned on the right: the newest token of every row stands in the same column and shorter rows are padded on
the left, so that a plain two-dimensional mask says all and each architecture makes its own masks of it (sliding
windows included: within a row, distances between columns are distances between tokens). A prompt is one row.

Axes: B rows, H heads, T columns, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

COLUMN_STEP = 64
"""Columns are added by a quarter, but never fewer than these: growing copies everything."""


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types here
    """One layer: buffers with room to grow, of which rows [0, rows) and columns [start, end) are in use.

    Padding inside those columns is always finite: it is masked, but zero times NaN would be NaN.
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
        self._open(key_states, value_states, key_states.shape[0], key_states.shape[2])
        self.rows = key_states.shape[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns of all rows and return what attention is to see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.reserve(key_states.shape[2])
        new, used = slice(at, self.end), slice(self.start, self.end)
        self.keys[: self.rows, :, new] = key_states
        self.values[: self.rows, :, new] = value_states
        return self.keys[: self.rows, :, used], self.values[: self.rows, :, used]

    def reserve(self, count: int) -> int:
        """Columns for the next tokens of all rows, which the caller fills; where the first of them is."""
        if self.end + count > self.keys.shape[2]:
            self._lay_out(self.keys.shape[0], self.width, _grown(self.width + count))
        self.end += count
        return self.end - count

    def join(self, prompt: RowLayer, count: int, *, is_copied: bool = True, coming: int = 0) -> None:
        """Add `count` rows that hold what the one row of `prompt` holds, or nothing. So many more are `coming`."""
        taken = prompt.width if is_copied else 0
        if not self.is_initialized:
            self._open(prompt.keys, prompt.values, count + coming, _grown(taken))
            self.start = self.end = taken
        rows, width = self.rows + count, max(self.width, taken)
        if rows > self.keys.shape[0] or width > self.end:
            has_room = rows <= self.keys.shape[0]
            self._lay_out(self.keys.shape[0] if has_room else rows + max(coming, rows // 4), width, _grown(width))
        start, first = self.end - width, self.end - taken
        for buffer, source in ((self.keys, prompt.keys), (self.values, prompt.values)):
            buffer[: self.rows, :, start : self.start] = 0
            buffer[self.rows : rows, :, start:first] = 0
            buffer[self.rows : rows, :, first : self.end] = source[:1, :, prompt.start : prompt.start + taken]
        self.start, self.rows = start, rows

    def head(self, width: int) -> RowLayer:
        """A copy of the first `width` columns, with room to grow."""
        copy = RowLayer()
        copy._open(self.keys, self.values, self.rows, _grown(width))
        taken = slice(self.start, self.start + width)
        copy.keys[:, :, :width] = self.keys[: self.rows, :, taken]
        copy.values[:, :, :width] = self.values[: self.rows, :, taken]
        copy.rows, copy.end = self.rows, width
        return copy

    def keep(self, order: Sequence[int], width: int) -> None:
        """Only these rows stay, in this order, and only the last `width` columns."""
        self.start = self.end - width
        used = slice(self.start, self.end)
        for target, source in enumerate(order):
            if source != target:
                self.keys[target, :, used] = self.keys[source, :, used]
                self.values[target, :, used] = self.values[source, :, used]
        self.rows = len(order)

    def _open(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> None:
        self.keys, self.values = _zeros(keys, rows, columns), _zeros(values, rows, columns)
        self.is_initialized = True

    def _lay_out(self, rows: int, width: int, columns: int) -> None:
        """Move into new buffers of `rows` × `columns`, with `width` columns in use (new ones on the left)."""
        used, at = slice(self.start, self.end), slice(width - self.width, width)
        keys, values = _zeros(self.keys, rows, columns), _zeros(self.values, rows, columns)
        keys[: self.rows, :, at] = self.keys[: self.rows, :, used]
        values[: self.rows, :, at] = self.values[: self.rows, :, used]
        self.keys, self.values = keys, values
        self.start, self.end = 0, width

    def get_seq_length(self) -> int:
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """All layers. Rows are known by their number; `leave` says where they went."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    @property
    def row_layers(self) -> list[RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowLayer) and layer.is_initialized]

    @property
    def rows(self) -> int:
        return max((layer.rows for layer in self.row_layers), default=0)

    @property
    def width(self) -> int:
        return max((layer.width for layer in self.row_layers), default=0)

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.row_layers)

    def head(self, width: int) -> RowCache:
        """A copy of the first `width` columns."""
        copy = RowCache()
        for layer in self.layers:
            copy.layers.append(
                layer.head(width) if isinstance(layer, RowLayer) and layer.is_initialized else RowLayer()
            )
        return copy

    def join(self, prompt: RowCache, count: int, *, is_copied: bool = True, coming: int = 0) -> None:
        """Add `count` rows after the last one, with the prompt's keys and values or without. All of it or nothing.

        `coming`: rows that join next, for whom room is made too."""
        while len(self.layers) < len(prompt.layers):
            self.layers.append(RowLayer())
        rows, width = self.rows, self.width
        try:
            for layer, source in zip(self.layers, prompt.layers, strict=True):
                # A layer that borrows another's keys (as some models' do) never writes any.
                if isinstance(layer, RowLayer) and isinstance(source, RowLayer) and source.is_initialized:
                    layer.join(source, count, is_copied=is_copied, coming=coming)
        except BaseException:
            for layer in self.row_layers:
                layer.keep(range(rows), width)
            raise

    def leave(self, gone: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Take rows out and return the old number of every row that stays, in the new order.

        The last rows move into the holes; columns that only longer rows had go. `lengths` are those of all old rows.
        """
        order = after_leaving(len(lengths), gone)
        width = max((lengths[row] for row in order), default=0)
        for layer in self.row_layers:
            layer.keep(order, width)
        return order

    def roll_back(self, width: int) -> None:
        """Forget what a pass wrote before it failed: all layers hold `width` columns again."""
        for layer in self.row_layers:
            layer.end = layer.start + width


def after_leaving(count: int, gone: Sequence[int]) -> list[int]:
    """Which old row stands where, once `gone` have left and the last rows fill the holes."""
    left = set(gone)
    kept = count - len(left)
    fillers = [row for row in range(kept, count) if row not in left]
    return [row if row not in left else fillers.pop() for row in range(kept)]


def padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """What of [B, T] is tokens, or None if all is: attention without a mask is faster."""
    if all(length == width for length in lengths):
        return None
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    return torch.arange(width, device=device)[None] >= width - lengths_B1


def _zeros(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], columns, like.shape[3])


def _grown(columns: int) -> int:
    return columns + max(columns // 4, COLUMN_STEP)
