"""The base models of an engine: loads and unloads them, for the trainer and the sampler together.

Loading and unloading happen between two turns, on the engine's only thread: what transformers sets while it loads (the
default type of numbers, how modules are initialized) is of the whole process, and would change what runs beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.engine import heap
from tinkex.engine.contract import EngineFault, ModelInfo, model_info
from tinkex.engine.frames import Frame
from tinkex.engine.process.loop import moment_s

if TYPE_CHECKING:
    from tinkex.engine.models.loaded_model import Model
    from tinkex.engine.sampling.decoder import Decoder
    from tinkex.engine.sampling.sampler import Sampler
    from tinkex.engine.training.runner import Runner
    from tinkex.engine.training.trainer import Trainer

DECODE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Of a number in the copy of the weights that packed models decode with (`packed.linear.PackedLinear`)."""


class ModelBackend(NamedTuple):
    """How base models are loaded, trained and sampled: in this process alone, or in a gang."""

    load: Callable[[ModelInfo], Model]
    choose_runner: Callable[[Model], Runner]
    choose_decoder: Callable[..., Decoder]


class LoadedModels:
    """`trainer` and `sampler` know the models that are added here, and no others."""

    def __init__(
        self,
        load: Callable[[ModelInfo], Model],
        trainer: Trainer,
        sampler: Sampler,
        device: str = "cpu",
        decode_weights: str = "float32",
    ) -> None:
        self._load, self._trainer, self._sampler, self._device = load, trainer, sampler, device
        self._decode_bytes = DECODE_BYTES[decode_weights]
        self._models: dict[str, Model] = {}

    def load(self, info: ModelInfo) -> None:
        """Load a model. Raises EngineFault if it cannot be used here, and then nothing of it is left."""
        if info.name in self._models:
            return
        try:
            model = self._load(info)
            self._trainer.add_model(model)
            self._sampler.add_model(model)
        except BaseException:
            self._trainer.remove_model(info.name)
            self._sampler.remove_model(info.name)
            raise
        self._models[info.name] = model

    def unload(self, name: str) -> None:
        """Free a model's memory. Raises EngineFault if something uses it."""
        if name not in self._models:
            return
        if self._trainer.uses_model(name) or self._sampler.uses_model(name):
            raise EngineFault(f"Base model {name} is in use, so it stays.", "server")
        del self._models[name]
        self._trainer.remove_model(name)
        self._sampler.remove_model(name)
        gc.unfreeze()  # a model is full of cycles, and those of the start are frozen
        gc.collect()
        gc.freeze()
        heap.trim()

    def run(self, command: Mapping[str, Any]) -> Frame:
        """Run a command of the server: `load_model` or `unload_model`."""
        if command["op"] == "unload_model":
            self.unload(command["base"])
            return Frame({})
        info = model_info(command["model"])
        self.load(info)
        return Frame({"size_bytes": self.sizes[info.name], "lora_sizes": self.lora_sizes[info.name]})

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each model, with the copy of its weights that is made at the first sample."""
        return {name: self._size_of(model) for name, model in self._models.items()}

    @property
    def lora_sizes(self) -> dict[str, dict[str, int]]:
        from tinkex.engine.adapters.lora import group_sizes

        return {name: group_sizes(model.sites) for name, model in self._models.items()}

    @property
    def moment_s(self) -> float:
        """How long an idle engine waits for company (`loop`): by the largest model."""
        return moment_s(max(map(_weights_bytes, self._models.values()), default=0), self._device)

    def _size_of(self, model: Model) -> int:
        weights = _weights_bytes(model)
        numbers = sum(part.numel() for part in model.module.parameters())
        return weights + (numbers * self._decode_bytes if model.packed else 0)


def _weights_bytes(model: Model) -> int:
    return sum(part.nbytes for part in model.module.parameters())
