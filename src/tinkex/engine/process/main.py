"""Starts the engine's process: `python -m tinkex.engine.process.main`, which `LocalEngine` runs.

Commands come in packets on stdin, replies go out on stdout; other output to stdout ends up on stderr. A thread reads,
the main thread computes: training micro-batches and decode steps take turns (`turns`). When stdin ends, the process
ends at once: the server keeps everything that must survive.

The first packet names models, settings and the lifeline (`end_group_with_server`). Packets without a request have the
number 0:

    {"news": "loading", "what"} · "ready", "threads", "device", "lora_sizes" · "failed", "error" · "stats", … · "beat"

A command has a number, and so has its reply: {"ok": true, …} or {"ok": false, "error", "category"}.
A sample's tokens come before its reply as {"event": true, …}.
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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from tinkex.clock import REAL
from tinkex.engine.contract import EngineFault, model_info
from tinkex.engine.frames import HEADER, Frame, packet_parts, read_frame
from tinkex.engine.process.loaded_models import LoadedModels, ModelBackend
from tinkex.engine.process.loop import Inbox, Loop, Packet, Send
from tinkex.errors import MissingExtra

if TYPE_CHECKING:
    from tinkex.engine.gang.processes import Processes

logger = logging.getLogger("tinkex.engine")

BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def main() -> None:
    commands, replies = claim_pipes()
    die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    faulthandler.enable()
    send = make_sender(replies)
    inbox: Inbox = queue.Queue()
    threading.Thread(target=read_packets, args=(commands, inbox), daemon=True, name="inbox").start()
    # Imports create no garbage: looking for it would take a sixth of the start. What they made is frozen afterwards.
    gc.disable()
    try:
        start = inbox.get()[1].head
        if "lifeline" in start:
            end_group_with_server(start["lifeline"])
        loop = load(start, send)
    except Exception as error:
        if not isinstance(error, EngineFault):  # an EngineFault is a message for the user already
            logger.exception("The engine cannot start.")
        send(0, Frame({"news": "failed", "error": _start_error(error)}))
        os._exit(1)
    gc.freeze()
    gc.enable()
    threading.Thread(target=beat, args=(send,), daemon=True, name="beat").start()
    try:
        loop.serve(inbox)
    except Exception:
        logger.exception("The engine cannot go on.")
        os._exit(1)  # an ordinary exit would wait for a lock that the reading thread has


def beat(send: Send) -> None:
    """Show once a second that this process runs, however long a micro-batch takes on the main thread."""
    while True:
        REAL.pause(BEAT_S)
        send(0, Frame({"news": "beat"}))


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the pipes for packets alone: from here on fd 0 is empty and fd 1 is stderr, for Python and for C."""
    commands, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, replies


def make_sender(replies: BinaryIO) -> Send:
    is_free = threading.Lock()

    def send(number: int, frame: Frame) -> None:
        content = memoryview(b"".join(packet_parts(number, "", frame)))
        try:
            with is_free:  # a beat must not come into the middle of a reply
                while content:
                    content = content[replies.write(content) :]
        except OSError:  # the server is gone, and with it every client
            os._exit(0)

    return send


def die_with_parent() -> None:
    """End with the server, not before it: SIGINT and SIGTERM to all of a service's processes are for the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # EOF on stdin says the same, but only to a thread that runs: a long call into C may block the interpreter.
    _set_parent_death_signal(signal.SIGKILL)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_group_with_server(lifeline: int) -> None:
    """Have the kernel send SIGKILL to this process and all it starts when the server has ended, even by kill -9.

    `lifeline` is a pipe. The server alone has its other end and never writes to it, so that the first event on it is
    the server's end. Two kinds of processes live on, and nothing here can reach them: those that left the group
    (setsid), and those of an engine that was killed a moment before its server: the signal is gone with the engine's
    descriptor, and the server was killed before it could kill the group. On systems without such signals (macOS) the
    group ends when this process reads the end of stdin (`read_packets`), which needs it to be alive and to run Python.
    """
    if sys.platform == "linux" and _leads_its_group():
        import fcntl

        with suppress(OSError):  # a kernel that only looks like Linux: the rest of this module does what it can
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
            # That signal would come first at times, and end this process alone, and the lifeline with it: it is sent
            # when the server's main thread has ended, and the pipe closes with its last one. With 30 threads, 26 of 120
            # kills left a process behind; without the signal, none of 60.
            _set_parent_death_signal(0)


def _leads_its_group() -> bool:
    """Return whether the others of its process group, if any, were started by this process."""
    return os.getpgrp() == os.getpid()


def read_packets(stdin: BinaryIO, inbox: Inbox) -> None:
    status = 1
    try:
        while (packet := read_packet(stdin)) is not None:
            inbox.put(packet)
        status = 0  # the server has closed the pipe, or is dead and cannot end what this process has started
        if sys.platform != "win32" and _leads_its_group():
            os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(status)


def read_packet(stream: BinaryIO) -> Packet | None:
    """Read the next packet, or None at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, name_size = HEADER.unpack(header)
    tenant = stream.read(name_size)
    frame = read_frame(stream)
    if frame is None:
        return None
    frame.head["tenant"] = tenant.decode()  # for passes and samples alike: nothing behind this line knows the pipe
    return number, frame


def load(start: Mapping[str, Any], send: Send) -> Loop:
    """Import torch and load the models, which is slow. Sends what it is loading."""
    send(0, Frame({"news": "loading", "what": "PyTorch"}))
    settle_threads_and_memory()
    processes = _start_gang(start)
    import torch
    from transformers.utils import logging as transformers_logging

    from tinkex.engine.sampling.sampler import Sampler
    from tinkex.engine.training.trainer import Trainer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = start["threads"] or max(usable_cores() // (1 if processes is None else processes.size), 1)
    torch.set_num_threads(threads)  # fixed: the order of a sum depends on it, and with it the last bits
    torch.set_num_interop_threads(1)
    torch.backends.cudnn.deterministic = True
    device = pick_device(start["device"])
    loader = _one_process(start, device) if processes is None else _gang(processes, start, device, threads)
    trainer = Trainer({}, choose_runner=loader.choose_runner, token_budget=start["token_budget"])
    sampler = Sampler(
        {},
        choose_decoder=partial(loader.choose_decoder, weight_format=start["decode_weights"]),
        max_rows=start["max_rows"],
        max_cache_tokens=start["max_cache_tokens"],
        adapters_bytes=start["adapters_bytes"],
    )
    models = LoadedModels(loader.load, trainer, sampler, device.type, start["decode_weights"])
    _load_first(models, start, send)
    sizes = {"lora_sizes": models.lora_sizes, "models": models.sizes}
    send(0, Frame({"news": "ready", "threads": threads, "device": str(device), **sizes}))
    return Loop(trainer, sampler, send, models.moment_s, models)


def _load_first(models: LoadedModels, start: Mapping[str, Any], send: Send) -> None:
    """Load the models that the start names. After a crash, one that cannot be loaded any more keeps no other away."""
    for fields in start["models"]:
        info = model_info(fields)
        send(0, Frame({"news": "loading", "what": info.aliases[0] if info.aliases else info.name}))
        try:
            models.load(info)
        except EngineFault as fault:
            if not start.get("is_restart") or start.get("devices", 1) > 1:
                raise
            logger.error("%s", fault)


def _one_process(start: Mapping[str, Any], device: Any) -> ModelBackend:
    import torch

    from tinkex.engine.models import loaded_model
    from tinkex.engine.runner_choice import choose_decoder, choose_runner

    dtype = getattr(torch, start["dtype"])
    return ModelBackend(partial(loaded_model.load, device=device, dtype=dtype), choose_runner, choose_decoder)


def _start_gang(start: Mapping[str, Any]) -> Processes | None:
    """Start the other processes of a gang before torch is imported: they import it at the same time."""
    if start.get("devices", 1) == 1:
        return None
    from tinkex.engine.gang.processes import Processes

    return Processes(start["devices"], start["gang_wait_s"])


def _gang(processes: Processes, start: Mapping[str, Any], device: Any, threads: int) -> ModelBackend:
    from tinkex.engine.gang.lead import Gang

    gang = Gang(processes, start, device, threads)
    return ModelBackend(gang.load, gang.choose_runner, gang.choose_decoder)


def settle_threads_and_memory() -> None:
    """Set how torch's threads wait for each other, and that freed memory stays with the process. Before torch loads."""
    # Threads that spin take the cores from the server, from clients and from each other; threads that sleep at once
    # must be woken for every small product. A pass of 8×32 tokens of eight adapters took 2.3 s asleep, 1.2 s with a
    # little spinning; a decode step 49 ms with 2,000 rounds of it, 43 with 6,000 or 15,000. Three engines at once on
    # two cores are slower with it, the more the longer they spin (medians, `docs/LOG.md`).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # border: OpenMP reads it when torch loads it, and nothing else
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # border: the same
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc: a pass allocates the same large blocks again and again
            libc.mallopt(_M_MMAP_MAX, 0)
            # Freed memory stays with the process: eight short passes took 1.13 s where the memory of a long one before
            # them had been returned to the system, and 1.05 s where it had not.
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def pick_device(name: str) -> Any:
    """Return the torch device of that name; `auto` is the fastest one there is."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, is_available in available.items() if is_available))
    if not available.get(name.partition(":")[0], True):
        usable = ", ".join(kind for kind, is_available in available.items() if is_available)
        raise EngineFault(
            f"--device {name}: this machine, or the installed PyTorch, has no such device. Usable: {usable}.", "server"
        )
    return torch.device(name)


def usable_cores() -> int:
    """Return how many cores this process may run on: a container or a batch system may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_error(error: Exception) -> str:
    if isinstance(error, EngineFault):
        return str(error)
    if isinstance(error, ImportError) and error.name:
        return str(MissingExtra(f"The engine (module {error.name})", "local"))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500] if lines else 'no message'}"


if __name__ == "__main__":
    main()
