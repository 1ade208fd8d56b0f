"""The KV cache: rows are added and removed, and padding stays finite."""

from __future__ import annotations

import torch

from tinkex.engine.sampling.kv_cache import KVCache


def test_nan_of_a_removed_row_never_reaches_another_row() -> None:
    def prompt(value: float, width: int) -> KVCache:
        made = KVCache()
        made.update(torch.full((1, 2, width, 4), value), torch.full((1, 2, width, 4), value), 0)
        return made

    cache = KVCache()
    for value, width in ((1.0, 3), (torch.nan, 9), (torch.nan, 9)):
        cache.add_rows(prompt(value, width), 1)
    assert cache.remove_rows([1, 2], [3, 9, 9]) == [0]
    cache.add_rows(prompt(2.0, 4), 1)
    cache.add_rows(prompt(3.0, 8), 1)
    layer = cache.kv_layers[0]
    used_BT = layer.keys[:3, 0, layer.start : layer.end, 0]
    # Masked padding is multiplied by zero, which makes nothing of a number, but NaN of NaN.
    assert used_BT.tolist() == [[0.0] * 5 + [1.0] * 3, [0.0] * 4 + [2.0] * 4, [3.0] * 8]
