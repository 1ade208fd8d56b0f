"""A micro-batch on its way through a gang: how its rows are divided, its items as frames, and their results as frames.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.adapters.adapter import LoraBuffers
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame
from tinkex.engine.training.losses import find_loss
from tinkex.engine.training.runner import Item


def split_rows(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Divide items between processes: about as many tokens for each, and at most one item more than for another.

    The longest first, dealt out back and forth.
    """
    shares: list[list[Item]] = [[] for _ in range(size)]
    for place, item in enumerate(sorted(items, key=lambda item: -item.length)):
        turn, offset = divmod(place, size)
        shares[offset if turn % 2 == 0 else size - 1 - offset].append(item)
    return shares


def adapter_entry(number: int, adapter: LoraBuffers, *, has_changed: bool, is_trained: bool) -> dict[str, Any]:
    """Return an adapter as the members know it. `has_changed`: its weights have changed, and are broadcast."""
    return {"number": number, "spec": asdict(adapter.spec), "has_changed": has_changed, "is_trained": is_trained}


def item_frame(head: Mapping[str, Any], items: Sequence[Item], numbers: Mapping[LoraBuffers, int]) -> Frame:
    """Make the command for one member: `head`, and its items."""
    buffers: list[Any] = []

    def add_tensor(tensor: Tensor) -> dict[str, Any]:
        values = tensor.cpu().contiguous().numpy()
        buffers.append(values.reshape(-1).view(np.uint8).data)
        return {"dtype": str(values.dtype), "shape": list(values.shape), "data": len(buffers) - 1}

    entries = [
        {
            "adapter": numbers[item.adapter],
            "loss": item.loss.name,
            "config": dict(item.config),
            "needs_gradient": item.needs_gradient,
            "index": item.index,
            "tokens": add_tensor(item.tokens_T),
            "targets": add_tensor(item.targets),
            "inputs": {name: add_tensor(values) for name, values in item.inputs.items()},
        }
        for item in items
    ]
    return Frame({**head, "items": entries}, buffers)


def read_member_items(command: Frame, adapters: Mapping[int, LoraBuffers]) -> list[Item]:
    """Return the items of a member's command. They were checked before they were divided."""

    def tensor(entry: Mapping[str, Any], device: torch.device) -> Tensor:
        values = np.frombuffer(command.buffers[entry["data"]], entry["dtype"]).copy()  # its address may be unaligned
        return torch.from_numpy(values).reshape(entry["shape"]).to(device)

    items = []
    for entry in command.head["items"]:
        adapter = adapters[entry["adapter"]]
        device = adapter.model.device
        items.append(
            Item(
                adapter=adapter,
                loss=find_loss(entry["loss"]),
                config=entry["config"],
                needs_gradient=entry["needs_gradient"],
                index=entry["index"],
                tokens_T=tensor(entry["tokens"], device),
                targets=tensor(entry["targets"], device),
                inputs={name: tensor(values, device) for name, values in entry["inputs"].items()},
            )
        )
    return items


def result_frame(items: Sequence[Item]) -> Frame:
    """Make a member's reply: the results of its items."""
    entries = [
        {
            "metrics": item.metrics,
            "shape": list(item.logprobs.shape),
            "fault": None if item.fault is None else [str(item.fault), item.fault.category],
        }
        for item in items
    ]
    return Frame({"items": entries}, [item.logprobs.numpy().tobytes() for item in items])


def set_results(items: Sequence[Item], reply: Frame) -> None:
    """Set the results of the items that a member ran."""
    for item, entry, buffer in zip(items, reply.head["items"], reply.buffers, strict=True):
        if entry["fault"] is not None:
            item.fault = EngineFault(*entry["fault"])
            continue
        item.metrics = entry["metrics"]
        item.logprobs = torch.from_numpy(np.frombuffer(buffer, "<f4").copy()).reshape(entry["shape"])
