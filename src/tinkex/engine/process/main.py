"""The engine's own process: `python -m tinkex.engine.process.main`, started by `LocalEngine` and spoken to in frames.

stdin brings commands, stdout takes replies; whatever else prints to stdout ends up on stderr. A thread reads, the main
thread computes: training micro-batches and decode steps take turns (`schedule`). When stdin ends, so does the process,
at once: the server keeps everything that must survive.

The first frame names models and settings. What the child says unasked has the number 0:

    {"n": 0, "news": "loading", "what"} · "ready", "threads", "device" · "failed", "error" · "stats", …

A command has a number `n`, and so has its reply: {"n", "ok": true, …} or {"n", "ok": false, "error", "category"}.
A sample's tokens come before its reply as {"n", "event": true, …}.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

from tinkex.engine.contract import EngineFault, ModelInfo
from tinkex.engine.frames import PREFIX, Frame, decode_parts
from tinkex.engine.process.loop import Loop, Send, moment_s
from tinkex.errors import MissingExtra

logger = logging.getLogger("tinkex.engine")

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def main() -> None:
    commands, replies = _claim_pipes()
    _outlive_nobody()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    faulthandler.enable()
    send = _sender(replies)
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, inbox), daemon=True, name="inbox").start()
    gc.disable()  # nothing that an import makes is garbage: looking for it takes a sixth of the start
    try:
        loop = load(inbox.get().head, send)
    except Exception as error:
        if not isinstance(error, EngineFault):  # that one is a sentence for the user already
            logger.exception("The engine cannot start.")
        send(Frame({"n": 0, "news": "failed", "error": _why_not(error)}))
        os._exit(1)
    gc.freeze()  # nor will it ever be
    gc.enable()
    try:
        loop.serve(inbox)
    except Exception:
        logger.exception("The engine cannot go on.")
        os._exit(1)  # an ordinary exit would wait for a lock that the reader holds


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for frames alone: from here on fd 0 is empty and fd 1 is stderr, for Python and for C."""
    commands, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, replies


def _sender(replies: BinaryIO) -> Send:
    def send(frame: Frame) -> None:
        content = memoryview(frame.encode())
        try:
            while content:
                content = content[replies.write(content) :]
        except OSError:  # the server is gone: nobody is left to work for
            os._exit(0)

    return send


def _outlive_nobody() -> None:
    """Ends with the server, and not before it: Ctrl-C, and SIGTERM to the whole group, are the server's to act upon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # EOF on stdin says the same, but only to a thread that runs: a long call into C may hold the interpreter.
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(stdin: BinaryIO, inbox: queue.SimpleQueue[Frame]) -> None:
    status = 1
    try:
        while (frame := read_frame(stdin)) is not None:
            inbox.put(frame)
        status = 0
    finally:
        os._exit(status)


def read_frame(stream: BinaryIO) -> Frame | None:
    """The next frame, or None at the end. Its buffers are writable views, as torch likes them."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    head_size, body_size = PREFIX.unpack(prefix)
    head, body = stream.read(head_size), memoryview(bytearray(body_size))
    at = 0
    while at < body_size:
        count = stream.readinto(body[at:])  # type: ignore[attr-defined]
        if not count:
            return None
        at += count
    return decode_parts(head, body) if len(head) == head_size else None


def load(start: Mapping[str, Any], send: Send) -> Loop:
    """Import torch, load the models; slow. Says what it is at."""
    send(Frame({"n": 0, "news": "loading", "what": "PyTorch"}))
    _settle_threads_and_memory()
    import torch
    from transformers.utils import logging as transformers_logging

    from tinkex.engine.models import loaded_model
    from tinkex.engine.runner_choice import choose_decoder, choose_runner
    from tinkex.engine.sampling.sampler import Sampler
    from tinkex.engine.training.trainer import Trainer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = start["threads"] or usable_cores()
    torch.set_num_threads(threads)  # fixed: the order of a sum depends on it, and with it the last bits
    torch.set_num_interop_threads(1)
    torch.backends.cudnn.deterministic = True
    device = pick_device(start["device"])
    dtype = getattr(torch, start["dtype"])
    models: dict[str, loaded_model.Model] = {}
    for fields in start["models"]:
        fields["aliases"], fields["end_tokens"] = tuple(fields["aliases"]), tuple(fields["end_tokens"])
        info = ModelInfo(**fields)
        send(Frame({"n": 0, "news": "loading", "what": info.aliases[0] if info.aliases else info.name}))
        loaded = loaded_model.load(info, device, dtype)
        models.update(dict.fromkeys(info.names, loaded))
    trainer = Trainer(models, choose_runner=choose_runner, token_budget=start["token_budget"])
    sampler = Sampler(
        models,
        choose_decoder=partial(choose_decoder, weight_format=start["decode_weights"]),
        max_rows=start["max_rows"],
        max_cache_tokens=start["max_cache_tokens"],
        adapters_bytes=start["adapters_bytes"],
    )
    send(Frame({"n": 0, "news": "ready", "threads": threads, "device": str(device)}))
    largest = max(sum(part.nbytes for part in one.module.parameters()) for one in models.values())
    return Loop(trainer, sampler, send, moment_s(largest, device.type))


def _settle_threads_and_memory() -> None:
    """Before torch is loaded: how its threads wait for each other, and what becomes of memory that it gives back."""
    # Threads that spin take the cores from the server, from clients and from each other; threads that sleep at once
    # have to be woken for every small product. A pass of 8×32 tokens of eight adapters took 2.3 s asleep, 1.2 s with a
    # little spinning; a decode step 49 ms with 2,000 rounds of it, 43 with 6,000 or 15,000. Three engines at once on
    # two cores lose by it, the more the longer they spin (medians, `docs/LOG.md`).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # border: OpenMP reads it when torch loads it, and nothing else
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # border: the same
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc: a pass asks for the same large pieces again and again
            libc.mallopt(_M_MMAP_MAX, 0)
            # What a pass took stays: eight short passes took 1.13 s where the memory of a long one before them had been
            # given back, and 1.05 s where it had not.
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def pick_device(name: str) -> Any:
    """The torch device of that name; `auto` is the fastest there is."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    if not there.get(name.partition(":")[0], True):
        usable = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise EngineFault(
            f"--device {name}: this machine, or the installed PyTorch, has no such device. Usable: {usable}.", "server"
        )
    return torch.device(name)


def usable_cores() -> int:
    """Those that this process may run on: a container or a batch system may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _why_not(error: Exception) -> str:
    if isinstance(error, EngineFault):
        return str(error)
    if isinstance(error, ImportError) and error.name:
        return str(MissingExtra(f"The engine (module {error.name})", "local"))
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else "no message"


if __name__ == "__main__":
    main()
