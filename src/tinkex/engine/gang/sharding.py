"""A base model whose weights are divided between the processes of a gang (FSDP2, `torch.distributed.fsdp.fully_shard`).

Each decoder layer is gathered right before it runs and freed after it, forward and backward; embedding, final norm and
unembedding are one more group, gathered around everything that is computed in one call of `run`. Adapters are not
part of it: they are whole wherever they are used.

All processes must gather the same groups in the same order. A process that has nothing to compute runs one token
(`take_part`). So that no backward pass skips a layer, the embeddings require a gradient: an adapter on the unembedding
alone would otherwise gather no layer, and one that trains all of them, in another process, would wait for ever.

Axes: B rows, T tokens, N flat tokens, V vocabulary.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tinkex.engine import heap
from tinkex.engine.contract import EngineFault
from tinkex.engine.models.loaded_model import Model

logger = logging.getLogger("tinkex.engine")

T = TypeVar("T")


def join(index: int, size: int, folder: Path, device: torch.device, wait_s: float) -> DeviceMesh:
    """Meet the other processes at a file in a private folder. Every later collective has `wait_s` as its deadline."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(folder / "store"), size),
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=wait_s),
    )
    return init_device_mesh(device.type, (size,))


def device_of(kind: torch.device, index: int, size: int) -> torch.device:
    """Return the device of a process. Raises if there are too few of that kind."""
    if kind.type == "cpu":
        return kind
    count = torch.cuda.device_count() if kind.type == "cuda" else 1
    if count < size or kind.index is not None:
        raise EngineFault(
            f"--devices-per-engine {size} needs {size} devices and takes the first {size}; --device {kind} is one, and "
            f"this machine has {count} of its kind. Choose fewer, or --device cuda or cpu.",
            "server",
        )
    return torch.device(kind.type, index)


class _Root(nn.Module):
    """Makes any computation with a model a forward pass of one module, which FSDP knows as the root of all groups."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class ShardedModel:
    """The part of a base model that one process has. `model` computes with it inside `run`."""

    def __init__(self, model: Model, mesh: DeviceMesh, device: torch.device) -> None:
        """Shards a model that is on the CPU and whole; only the parts go to the device. Talks with no other process."""
        self.model = model
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self._root: Any = fully_shard(_Root(model.module), mesh=mesh, reshard_after_forward=True)
        model.device = device
        model.module.get_input_embeddings().register_forward_hook(_require_gradient)
        self._one_token_BT = torch.zeros(1, 1, dtype=torch.long, device=device)
        gc.collect()
        heap.trim()  # the rest of the weights: this process would keep the memory of all of them

    def run(self, work: Callable[[], T]) -> T:
        """Compute with the model. Every process of the gang must call this, or `take_part`, at the same time."""
        result: T = self._root(work)
        return result

    def take_part(self, passes: int = 1, *, needs_gradient: bool = False) -> None:
        """Do what keeps the others from waiting while they run the layers so many times (0: the unembedding alone)."""
        with torch.set_grad_enabled(needs_gradient):
            hidden = self.run(lambda: [self.model.hidden(self._one_token_BT) for _ in range(passes)])
            if needs_gradient:
                torch.autograd.backward(hidden, [torch.zeros_like(part) for part in hidden])

    def gather(self, name: str) -> Tensor:
        """Return a whole weight. Every process must call this at the same time."""
        weight: Tensor = self.model.module.state_dict()[name]
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    @property
    def nbytes(self) -> int:
        """The bytes of the weights in this process."""
        parts = (part.to_local() if isinstance(part, DTensor) else part for part in self.model.module.parameters())
        return sum(part.nbytes for part in parts)


def _layers(model: Model) -> Iterator[nn.Module]:
    """Yield the decoder layers, which transformers names for tools like this one."""
    names = set(getattr(model.module, "_no_split_modules", None) or ())
    layers = [module for module in model.module.modules() if type(module).__name__ in names]
    if not layers:
        logger.warning("%s: its layers are not known, so each pass gathers the whole model", model.info.name)
    yield from layers


def _require_gradient(module: nn.Module, args: object, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()
