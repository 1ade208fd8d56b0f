"""The program of every process of a gang but the first: `python -m tinkex.engine.gang.member`, started by `processes`.

Commands come as frames on stdin, a socket; replies go back over it.

    start   index size device dtype threads                           → {} when it has imported torch
    join    folder wait_s                                             → {} when it has met the others
    load    model (the fields of a `ModelInfo`)                       → {"nbytes"} of its part
    pass    model phases adapters dropped items + buffers             → the results of its items + buffers
    hidden  model passes     takes part in so many passes             (no reply)
    gather  model name       takes part in gathering a weight         (no reply)

It has copies of the weights of adapters, for as long as the first process has the adapters, and no other state. It ends
when its socket does, or with the process that started it.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tinkex.engine.contract import EngineFault, LoraSpec, ModelInfo, first_line
from tinkex.engine.frames import Frame, read_frame
from tinkex.engine.process.main import die_with_parent, pick_device, settle_threads_and_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tinkex.engine.adapters.adapter import LoraBuffers
    from tinkex.engine.gang.runner import ShardedRunner
    from tinkex.engine.gang.sharding import ShardedModel

logger = logging.getLogger("tinkex.engine")


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as replies, replies.makefile("rb") as commands:
        die_with_parent()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        faulthandler.enable()
        gc.disable()  # as in the engine's own process: imports create no garbage
        try:
            serve(commands, replies)
        except Exception:  # the others cannot go on without this process: all of them are started again
            logger.exception("A process of the engine cannot go on.")
            os._exit(1)


def serve(commands: BinaryIO, replies: socket.socket) -> None:
    """Do as the commands say until there are no more. What fails before the first pass is reported."""
    member: GangMember | None = None
    while (command := read_frame(commands)) is not None:
        try:
            if command.head["op"] == "start":
                member = GangMember(command.head)
                reply: Frame | None = Frame({})
            else:
                assert member is not None
                reply = member.run(command)
        except Exception as error:
            if command.head["op"] not in ("start", "join", "load"):
                raise
            logger.debug("A process of the engine cannot start.", exc_info=True)
            text = str(error) if isinstance(error, EngineFault) else f"{type(error).__name__}: {first_line(error, 300)}"
            reply = Frame({"error": text})
        if reply is not None:
            replies.sendall(b"".join(reply.parts()))


class GangMember:
    """What a member of a gang has: its parts of the base models, and copies of adapters. Imports torch."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        settle_threads_and_memory()
        import torch
        from transformers.utils import logging as transformers_logging

        from tinkex.engine.gang.sharding import device_of

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(start["threads"])
        torch.set_num_interop_threads(1)
        torch.backends.cudnn.deterministic = True
        self._device = device_of(pick_device(start["device"]), start["index"], start["size"])
        self._dtype = getattr(torch, start["dtype"])
        self._index, self._size = start["index"], start["size"]
        self._mesh: DeviceMesh | None = None
        self._bases: list[ShardedModel] = []
        self._runners: list[ShardedRunner] = []
        self._adapters: dict[int, LoraBuffers] = {}

    def run(self, command: Frame) -> Frame | None:
        head = command.head
        match head["op"]:
            case "join":
                return self._join(head)
            case "load":
                return self._load(head)
            case "pass":
                return self._pass(command)
            case "hidden":
                self._bases[head["model"]].take_part(head["passes"])
            case "gather":
                self._bases[head["model"]].gather(head["name"])
            case op:
                raise ValueError(f"A member of a gang knows no command {op!r}.")
        return None

    def _join(self, head: Mapping[str, Any]) -> Frame:
        from tinkex.engine.gang.sharding import join

        self._mesh = join(self._index, self._size, Path(head["folder"]), self._device, head["wait_s"])
        return Frame({})

    def _load(self, head: Mapping[str, Any]) -> Frame:
        import torch

        from tinkex.engine.gang.runner import ShardedRunner
        from tinkex.engine.gang.sharding import ShardedModel
        from tinkex.engine.models import loaded_model

        assert self._mesh is not None
        model = loaded_model.load(ModelInfo(**head["model"]), torch.device("cpu"), self._dtype)
        base = ShardedModel(model, self._mesh, self._device)
        self._bases.append(base)
        self._runners.append(ShardedRunner(base))
        return Frame({"nbytes": base.nbytes})

    def _pass(self, command: Frame) -> Frame:
        import torch.distributed as dist

        from tinkex.engine.adapters.adapter import LoraBuffers
        from tinkex.engine.gang.passes import read_member_items, result_frame

        head = command.head
        for number in head["dropped"]:
            self._adapters.pop(number, None)
        trained = []
        for entry in head["adapters"]:
            if entry["number"] not in self._adapters:
                spec = LoraSpec(**entry["spec"])
                self._adapters[entry["number"]] = LoraBuffers(self._bases[head["model"]].model, spec)
            adapter = self._adapters[entry["number"]]
            if entry["has_changed"]:
                dist.broadcast(adapter.weights_P, 0)
            if entry["is_trained"]:
                adapter.clear_gradient()
                trained.append(adapter)
        items = read_member_items(command, self._adapters)
        self._runners[head["model"]].run_share(items, head["phases"])
        for adapter in trained:
            dist.reduce(adapter.gradient_P, 0)
        return result_frame(items)


if __name__ == "__main__":
    main()
