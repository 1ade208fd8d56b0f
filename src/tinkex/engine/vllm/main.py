"""Starts a process that samples with vLLM: `python -m tinkex.engine.vllm.main`, which `vllm.launch` runs.

It speaks as `engine.process.main` does, and knows the commands `sample`, `cancel` and `ping`. vLLM has processes of its
own under it. When one of them dies, this one ends too, and `LocalEngine` starts another: what was being sampled is
asked for again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tinkex.clock import REAL
from tinkex.engine.contract import EngineFault, ProofMissing, event_frame, first_line, model_info, read_sample
from tinkex.engine.frames import Frame
from tinkex.engine.process import main as process
from tinkex.engine.process.loop import Inbox, Send
from tinkex.engine.proofs import probe_tokens
from tinkex.engine.vllm.adapters import Adapters, is_dead, make_home
from tinkex.engine.vllm.sampler import VllmSampler
from tinkex.errors import MissingExtra

logger = logging.getLogger("tinkex.engine")

STATS_EVERY_S = 1.0
END_WITHIN_S = 3.0
"""Less than the server waits before it kills the group."""


def main() -> None:
    _preload_openmp()
    commands, replies = process.claim_pipes()
    process.die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    faulthandler.enable()
    send = process.make_sender(replies)
    inbox: Inbox = queue.Queue()
    threading.Thread(target=_read, args=(commands, inbox), daemon=True, name="inbox").start()
    start = inbox.get()[1].head
    if "lifeline" in start:
        process.end_group_with_server(start["lifeline"])
    asyncio.run(_serve(start, send, inbox))


def _read(commands: BinaryIO, inbox: Inbox) -> None:
    """Read until the server closes the pipe. vLLM then has a moment to remove what it has in shared memory."""
    try:
        while (packet := process.read_packet(commands)) is not None:
            inbox.put(packet)
        inbox.put((0, Frame({"op": "end"})))
        REAL.pause(END_WITHIN_S)
    finally:
        _end()


def _end() -> None:
    """End this process and all that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _preload_openmp() -> None:
    """Begin again with Intel's OpenMP, if it is installed: vLLM's kernels for CPUs want it before any other."""
    library = Path(sys.prefix, "lib", "libiomp5.so")
    environ = os.environ  # border: the loader of shared libraries reads it, and nothing else
    if library.exists() and "LD_PRELOAD" not in environ:
        os.execve(sys.executable, sys.orig_argv, {**environ, "LD_PRELOAD": str(library)})


def _settle_environment(start: Mapping[str, Any], *, is_cpu: bool) -> None:
    """Set what vLLM reads from the environment when it is imported. What is set already stays."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Its own choice of cores leaves one of two hyperthreads, and ours share them with the trainer anyway.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Without a number it takes most of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(start["vllm"]["cache_gb"]))),
    }
    if is_cpu:
        values["OMP_NUM_THREADS"] = str(start["threads"] or process.usable_cores())
    for name, value in values.items():
        os.environ.setdefault(name, value)  # border: vLLM reads it, and nothing else


async def _serve(start: Mapping[str, Any], send: Send, inbox: Inbox) -> None:
    try:
        child = await _load(start, send)
    except Exception as error:
        if not isinstance(error, (EngineFault, ImportError)):
            logger.exception("vLLM cannot start.")
        send(0, Frame({"news": "failed", "error": _start_error(error)}))
        os._exit(1)
    send(0, Frame({"news": "ready", "threads": start["threads"], "device": start["device"]}))
    threading.Thread(target=process.beat, args=(send,), daemon=True, name="beat").start()
    tasks = [asyncio.create_task(child.report())]
    loop = asyncio.get_running_loop()
    threading.Thread(target=_forward, args=(inbox, loop, child), daemon=True, name="forward").start()
    await asyncio.gather(*tasks)


def _forward(inbox: Inbox, loop: asyncio.AbstractEventLoop, child: VllmCommands) -> None:
    while True:
        number, frame = inbox.get()
        loop.call_soon_threadsafe(child.accept, number, frame)


async def _load(start: Mapping[str, Any], send: Send) -> VllmCommands:
    [fields] = start["models"]
    model = model_info(fields)
    send(0, Frame({"news": "loading", "what": f"{model.name} in vLLM"}))
    is_cpu = _is_cpu(start["device"])
    _settle_environment(start, is_cpu=is_cpu)
    sampler = VllmSampler(start, model, is_cpu=is_cpu)
    options = start["vllm"]
    home = make_home(Path(options["links"]))
    if is_cpu:
        await sampler.add_null_adapter(home)
    # Some models load and cannot run, such as one with heads of 16 on a CPU: better known now than with a sample.
    await sampler.logprobs(None, probe_tokens(model.vocab_size))
    return VllmCommands(
        sampler, Adapters(sampler, home, options["adapters"], is_exact=start["dtype"] == "float32"), send
    )


def _is_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _start_error(error: Exception) -> str:
    if isinstance(error, ImportError) and error.name and error.name.partition(".")[0] == "vllm":
        return str(MissingExtra("Sampling with vLLM", "vllm"))
    if is_dead(error):
        return "vLLM has loaded the model and cannot run it; what it logged before this line says why"
    return f"vLLM: {type(error).__name__}: {first_line(error, 500)}"


class VllmCommands:
    """Takes commands, on the event loop."""

    def __init__(self, sampler: VllmSampler, adapters: Adapters, send: Send) -> None:
        self._sampler, self._adapters, self._send = sampler, adapters, send
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def accept(self, number: int, frame: Frame) -> None:
        match frame.head.get("op"):
            case "sample":
                task = self._tasks[number] = asyncio.create_task(self._sample(number, frame))
                task.add_done_callback(partial(self._ended, number))
            case "cancel":
                if (running := self._tasks.get(frame.head["number"])) is not None:
                    running.cancel()
            case "end":
                self._sampler.shutdown()
                _end()
            case "ping":
                self._send(number, Frame({"ok": True, **self._stats()}))
            case op:
                self._fail(number, EngineFault(f"This engine only samples, and knows no operation {op!r}.", "server"))

    async def report(self) -> None:
        """Send statistics once a second, if they have changed."""
        sent: dict[str, Any] = {}
        while True:
            if (stats := self._stats()) != sent:
                sent = stats
                self._send(0, Frame({"news": "stats", **stats}))
            await REAL.sleep(STATS_EVERY_S)

    async def _sample(self, number: int, frame: Frame) -> None:
        def on_tokens(event: Any) -> None:
            self._send(number, Frame({"event": True, **event_frame(event).head}))

        try:
            reply = event_frame(await self._sampler.sample(number, read_sample(frame), self._adapters, on_tokens))
            self._send(number, Frame({"ok": True, **reply.head}, reply.buffers))
        except Exception as error:
            if is_dead(error):
                logger.error("vLLM's engine has ended: %s", first_line(error, 300))
                os._exit(1)
            self._fail(number, error)

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Not in the task itself: one that is cancelled before its first step runs none of its code."""
        del self._tasks[number]

    def _fail(self, number: int, error: Exception) -> None:
        if isinstance(error, EngineFault):
            head: dict[str, Any] = {"ok": False, "error": str(error), "category": error.category}
            if isinstance(error, ProofMissing):
                head["needs_proof"] = True
        else:
            logger.error("sample failed.", exc_info=error)
            text = f"The sampler failed ({type(error).__name__}); the server's log says more."
            head = {"ok": False, "error": text, "category": "server"}
        self._send(number, Frame(head))

    def _stats(self) -> dict[str, Any]:
        adapters = self._adapters
        return {
            "samples_running": len(self._tasks),
            "tokens_sampled": self._sampler.tokens_sampled,
            "adapters": len(adapters),
            "proofs_passed": adapters.proved,
            "proofs_failed": adapters.rejected,
            "logprob_difference": adapters.last_difference,
            "largest_logprob_difference": adapters.largest_difference,
        }


if __name__ == "__main__":
    main()
