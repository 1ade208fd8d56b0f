"""The first process of a gang: the engine's own. Splits its work, and joins what comes back.

All of an adapter is here: weights, pending gradient, moments. The others get its weights when they have changed, before
a micro-batch that needs them, and give their part of its gradient after it; that is as much traffic as an all-reduce.
Commands, samples, files and the server are this process's alone, so that processes cannot come to differ about them.

An error in the middle of a step leaves the processes at different collectives. Nothing can be done about that but to
start again: the gang ends, and the server rebuilds the runs.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tinkex.engine import heap
from tinkex.engine.adapters.adapter import LoraBuffers
from tinkex.engine.contract import EngineFault, ModelInfo, first_line
from tinkex.engine.frames import Frame
from tinkex.engine.gang.passes import adapter_entry, item_frame, set_results, split_rows
from tinkex.engine.gang.processes import Processes
from tinkex.engine.gang.runner import ShardedRunner
from tinkex.engine.gang.sharding import ShardedModel, device_of, join
from tinkex.engine.models import loaded_model
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.decoder import GeneralDecoder, PromptChunk, RowAdapters, RowInput
from tinkex.engine.sampling.kv_cache import KVCache
from tinkex.engine.training.runner import Item

logger = logging.getLogger("tinkex.engine")

LOAD_WITHIN_S = 600.0
"""How long a process may take to import torch, or to load a model: as long as the server waits for the engine."""
FOLDER_PREFIX = "tinkex-gang-"


class Gang:
    """Loads base models into all processes, and gives the runner and the decoder of each."""

    def __init__(self, processes: Processes, start: Mapping[str, Any], device: torch.device, threads: int) -> None:
        """Meets the other processes. `device` is of the kind to use, `threads` those of one process."""
        self.processes = processes
        self.size = processes.size
        self._device = device_of(device, 0, self.size)
        self._dtype = getattr(torch, start["dtype"])
        self._bases: dict[Model, ShardedModel] = {}
        self.adapters = KnownAdapters()
        head = {"op": "start", "device": start["device"], "dtype": start["dtype"], "threads": threads}
        processes.send_each([Frame({**head, "index": index, "size": self.size}) for index in range(1, self.size)])
        processes.receive(wait_s=LOAD_WITHIN_S)
        with _meeting_folder() as folder:
            processes.send(Frame({"op": "join", "folder": str(folder), "wait_s": processes.wait_s}))
            self._mesh = join(0, self.size, folder, self._device, processes.wait_s)
            processes.receive()

    def load(self, info: ModelInfo) -> Model:
        """Load a model, one process after the other: on the way each has all of it in the machine's memory."""
        model = loaded_model.load(info, torch.device("cpu"), self._dtype)
        tokens_BT = torch.arange(2, 14).reshape(2, 6) % model.vocab_size
        with torch.no_grad():
            expected_NV = model.logits(model.hidden(tokens_BT).flatten(0, 1))
        base = self._bases[model] = ShardedModel(model, self._mesh, self._device)
        number = len(self._bases) - 1
        sizes = [base.nbytes]
        for index in range(1, self.size):
            reply = self.processes.ask(index, Frame({"op": "load", "model": asdict(info)}), wait_s=LOAD_WITHIN_S)
            sizes.append(reply.head["nbytes"])
        model.gather = partial(self._gather, number, base)
        # Not in inference mode, which sampling uses: what FSDP allocates in its first pass is used for training too.
        with self.in_step("the first pass"), torch.no_grad():
            self.processes.send(Frame({"op": "hidden", "model": number, "passes": 1}))
            tokens_BT = tokens_BT.to(self._device)
            logits_NV = base.run(lambda: model.logits(model.hidden(tokens_BT).flatten(0, 1))).cpu()
        self._check_logits(model, logits_NV, expected_NV)
        heap.trim()
        parts = ", ".join(f"{size / 1e6:.1f} MB" for size in sizes)
        logger.info("%s: general runner, weights divided between %d processes (%s)", info.name, self.size, parts)
        return model

    def _check_logits(self, model: Model, logits_NV: Tensor, expected_NV: Tensor) -> None:
        """Raise if the divided model computes other numbers than the whole one did on the CPU."""
        difference = float((logits_NV - expected_NV).abs().max() / expected_NV.abs().max())
        if not difference <= max(1e-3, 16 * torch.finfo(self._dtype).eps):
            raise EngineFault(
                f"{model.info.name}: divided between {self.size} devices, it computes other numbers (differs by "
                f"{difference:.2g}). Please report it; serve it on one device.",
                "server",
            )

    def choose_runner(self, model: Model) -> GangRunner:
        return GangRunner(self, self._number(model), self._bases[model])

    def choose_decoder(self, model: Model, weight_format: str = "float32") -> GangDecoder:
        if weight_format != "float32":
            logger.warning(
                "%s: sampled with its own weights, because %s needs one device", model.info.name, weight_format
            )
        return GangDecoder(self, self._number(model), self._bases[model])

    def _number(self, model: Model) -> int:
        return list(self._bases).index(model)

    def _gather(self, number: int, base: ShardedModel, name: str) -> Tensor:
        with self.in_step("gathering a weight"):
            self.processes.send(Frame({"op": "gather", "model": number, "name": name}))
            return base.gather(name)

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Run what all processes do together. Any error in it ends the gang."""
        try:
            yield
        except Exception as error:
            logger.info("%s failed", what, exc_info=True)
            reason = f"{type(error).__name__}: {first_line(error, 300).rstrip('.')}"
            self.processes.end_unless_noticed(f"{what} failed in process 0 of {self.size} ({reason})")


class GangRunner:
    """Implements `training.runner.Runner`: each process runs a part of the rows."""

    def __init__(self, gang: Gang, model_number: int, base: ShardedModel) -> None:
        self._gang, self._model_number = gang, model_number
        self._runner = ShardedRunner(base)

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        """Count what the process with the most rows has in memory."""
        return self._runner.cost_tokens(-(-count // self._gang.size), longest, total)

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Run the whole micro-batch in one turn, as the general runner does."""
        yield from ()
        processes = self._gang.processes
        with self._gang.in_step("a micro-batch"):
            shares = split_rows(items, self._gang.size)
            phases = [kind for kind in (True, False) if any(item.needs_gradient is kind for item in items)]
            trained = {item.adapter: None for item in items if item.needs_gradient}
            known = self._gang.adapters
            adapters = {item.adapter: known.number_of(item.adapter) for item in items}
            changed = [adapter for adapter in adapters if known.has_changed(adapter)]
            entries = [
                adapter_entry(number, adapter, has_changed=adapter in changed, is_trained=adapter in trained)
                for adapter, number in adapters.items()
            ]
            head = {"op": "pass", "model": self._model_number, "phases": phases, "adapters": entries}
            head["dropped"] = known.take_dropped()
            processes.send_each([item_frame(head, share, adapters) for share in shares[1:]])
            for adapter in changed:
                dist.broadcast(adapter.weights_P, 0)
                known.note_sent(adapter)
            self._runner.run_share(shares[0], phases)
            for adapter in adapters:
                if adapter in trained:  # what the members computed is added to what is here
                    dist.reduce(adapter.gradient_P, 0)
            for share, reply in zip(shares[1:], processes.receive(), strict=True):
                set_results(share, reply)


class KnownAdapters:
    """The adapters whose weights the members have, and which version of them."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[LoraBuffers, int] = weakref.WeakKeyDictionary()
        """What the members call an adapter."""
        self._sent: weakref.WeakKeyDictionary[LoraBuffers, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._dropped: list[int] = []

    def number_of(self, adapter: LoraBuffers) -> int:
        if adapter not in self._numbers:
            self._numbers[adapter] = number = next(self._next_number)
            weakref.finalize(adapter, self._dropped.append, number).atexit = False
        return self._numbers[adapter]

    def has_changed(self, adapter: LoraBuffers) -> bool:
        """Whether the weights are not those that the members have: torch counts the changes of a tensor in place."""
        return self._sent.get(adapter) != adapter.weights_P._version

    def note_sent(self, adapter: LoraBuffers) -> None:
        self._sent[adapter] = adapter.weights_P._version

    def take_dropped(self) -> list[int]:
        """Return the numbers of adapters that have left this process, each once."""
        dropped = self._dropped.copy()
        del self._dropped[: len(dropped)]
        return dropped


class GangDecoder(GeneralDecoder):
    """The general decoder, in step with the members. They hold their parts of the weights, and decode nothing."""

    def __init__(self, gang: Gang, model_number: int, base: ShardedModel) -> None:
        super().__init__(base.model)
        self._gang, self._model_number, self._base = gang, model_number, base

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        with self._together(len(chunks)):
            return self._base.run(partial(super().prefill, chunks))

    def step(self, cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        with self._together(1):
            return self._base.run(partial(super().step, cache, rows))

    def logits(self, hidden_ND: Tensor, adapters: RowAdapters) -> Tensor:
        with self._together(0):
            return self._base.run(partial(super().logits, hidden_ND, adapters))

    @contextmanager
    def _together(self, passes: int) -> Iterator[None]:
        with self._gang.in_step("a step of sampling"):
            self._gang.processes.send(Frame({"op": "hidden", "model": self._model_number, "passes": passes}))
            yield


@contextmanager
def _meeting_folder() -> Iterator[Path]:
    """Yield a folder of this user's alone, where the processes find each other. It is deleted once they have.

    One that was left behind by a process that was killed at that moment is deleted too.
    """
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{FOLDER_PREFIX}*"):
        pid = left.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
