"""The engine's own process: `python -m tinkex.engine.child`, started by `LocalEngine` and spoken to in frames.

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
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO

from tinkex.clock import REAL
from tinkex.engine.base import EngineFault, ModelInfo, Sampled, SampleEvent, Tokens
from tinkex.engine.commands import event_frame, read_sample
from tinkex.engine.frames import PREFIX, Frame, decode_parts
from tinkex.engine.schedule import Turn, Turns
from tinkex.errors import MissingExtra

if TYPE_CHECKING:
    from tinkex.engine.sample import Sampler
    from tinkex.engine.train import Trainer

logger = logging.getLogger("tinkex.engine")

STATS_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

Send = Callable[[Frame], None]


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
        trainer, sampler = load(inbox.get().head, send)
    except Exception as error:
        if not isinstance(error, EngineFault):  # that one is a sentence for the user already
            logger.exception("The engine cannot start.")
        send(Frame({"n": 0, "news": "failed", "error": _why_not(error)}))
        os._exit(1)
    gc.freeze()  # nor will it ever be
    gc.enable()
    try:
        Loop(trainer, sampler, send).serve(inbox)
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


def load(start: Mapping[str, Any], send: Send) -> tuple[Trainer, Sampler]:
    """Import torch, load the models; slow. Says what it is at."""
    send(Frame({"n": 0, "news": "loading", "what": "PyTorch"}))
    _settle_threads_and_memory()
    import torch
    from transformers.utils import logging as transformers_logging

    from tinkex.engine import model
    from tinkex.engine.sample import Sampler
    from tinkex.engine.train import Trainer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = start["threads"] or usable_cores()
    torch.set_num_threads(threads)  # fixed: the order of a sum depends on it, and with it the last bits
    torch.set_num_interop_threads(1)
    torch.backends.cudnn.deterministic = True
    device = pick_device(start["device"])
    dtype = getattr(torch, start["dtype"])
    models: dict[str, model.Model] = {}
    for fields in start["models"]:
        fields["aliases"], fields["end_tokens"] = tuple(fields["aliases"]), tuple(fields["end_tokens"])
        info = ModelInfo(**fields)
        send(Frame({"n": 0, "news": "loading", "what": info.aliases[0] if info.aliases else info.name}))
        loaded = model.load(info, device, dtype)
        models.update(dict.fromkeys(info.names, loaded))
    trainer = Trainer(models, token_budget=start["token_budget"])
    sampler = Sampler(
        models,
        max_rows=start["max_rows"],
        max_cache_tokens=start["max_cache_tokens"],
        adapters_bytes=start["adapters_bytes"],
    )
    send(Frame({"n": 0, "news": "ready", "threads": threads, "device": str(device)}))
    return trainer, sampler


def _settle_threads_and_memory() -> None:
    """Before torch is loaded: how its threads wait for each other, and what becomes of memory that it gives back."""
    # Threads that spin take the cores from the server, from clients and from each other; threads that sleep at once
    # have to be woken for every small product. A pass of 8×32 tokens of eight adapters took 2.3 s asleep, 1.2 s with
    # this little spinning; three engines at once on two cores were 2 times slower so than asleep, 10 times with 10
    # times the spinning (medians, `docs/LOG.md`).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # border: OpenMP reads it when torch loads it, and nothing else
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # border: the same
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc: a pass asks for the same large pieces again and again
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 1 << 29)


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


class Loop:
    """Takes commands and gives turns. All of it on one thread; nothing that a command raises ends it."""

    def __init__(self, trainer: Trainer, sampler: Sampler, send: Send) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._send = send
        self._turns = Turns()
        self._commands: dict[int, Frame] = {}
        """Those that the trainer has."""
        self._samples: set[int] = set()
        self._adapters: set[str] = set()
        self._tokens_trained = 0
        self._tokens_sampled = 0
        self._stats_due_s = 0.0
        self._has_news = True

    def serve(self, inbox: queue.SimpleQueue[Frame]) -> None:
        """For good: the reader ends the process."""
        while True:
            turn = self._turns.choose(can_train=self._trainer.has_work, can_decode=self._sampler.has_work)
            if turn is not None:
                began = perf_counter()
                self._train() if turn is Turn.TRAIN else self._decode()
                self._turns.charge(turn, perf_counter() - began)
            self._report()
            self._take(inbox, wait=not self._trainer.has_work and not self._sampler.has_work)

    def _take(self, inbox: queue.SimpleQueue[Frame], wait: bool) -> None:
        """Everything that has arrived; if there is nothing else to do, wait for it until statistics are due."""
        try:
            if wait:
                due_s = max(self._stats_due_s - REAL.now(), 0.001) if self._has_news else None
                self._accept(inbox.get(timeout=due_s))
            while True:
                self._accept(inbox.get_nowait())
        except queue.Empty:
            return

    def _accept(self, frame: Frame) -> None:
        number, op = frame.head.pop("n"), frame.head.get("op")
        self._has_news = True
        if op == "sample":
            try:
                self._sampler.add(number, read_sample(frame))
                self._samples.add(number)
            except Exception as error:
                self._fail(number, "sample", error)
        elif op == "cancel":
            self._samples.discard(frame.head["number"])
            self._sampler.cancel(frame.head["number"])
        elif op == "ping":
            self._send(Frame({"n": number, "ok": True, **self._stats()}))
        else:
            self._commands[number] = frame
            self._trainer.add(number, frame)

    def _train(self) -> None:
        """A short command or two, or a part of a micro-batch."""
        for number, reply in self._trainer.step():
            command = self._commands.pop(number)
            op = str(command.head.get("op"))
            if isinstance(reply, Exception):
                self._fail(number, op, reply)
            else:
                self._answer(number, op, reply)
                self._count(command)

    def _decode(self) -> None:
        try:
            events = self._sampler.step()
        except Exception as error:
            # Which of them it was cannot be told: all of them fail, and the sampler is empty again.
            for number in self._samples:
                self._sampler.cancel(number)
                self._fail(number, "sample", error)
            self._samples.clear()
            if self._sampler.has_work:
                raise  # it is not: only another process will help
            return
        for number, event in events:
            if number in self._samples:
                self._tell(number, event)

    def _tell(self, number: int, event: SampleEvent | EngineFault) -> None:
        if isinstance(event, Tokens):
            self._send(Frame({"n": number, "event": True, **event_frame(event).head}))
            return
        self._samples.discard(number)
        if isinstance(event, Sampled):
            self._answer(number, "sample", event_frame(event))
            self._tokens_sampled += sum(len(row.tokens) for row in event.sequences)
        else:
            self._fail(number, "sample", event)

    def _answer(self, number: int, op: str, reply: Frame) -> None:
        try:
            self._send(Frame({"n": number, "ok": True, **reply.head}, reply.buffers))
        except Exception as error:  # it cannot be written down
            self._fail(number, op, error)

    def _fail(self, number: int, op: str, error: Exception) -> None:
        if isinstance(error, EngineFault):
            text, category = str(error), error.category
        else:
            logger.error("%s failed.", op, exc_info=error)
            text, category = _apology(op, error), "server"
        self._send(Frame({"n": number, "ok": False, "error": text, "category": category}))

    def _count(self, command: Frame) -> None:
        match command.head["op"]:
            case "create" | "restore":
                self._adapters.add(command.head["adapter"])
            case "drop":
                self._adapters.discard(command.head["adapter"])
            case "forward_backward":
                rows = [memoryview(command.buffers[row["tokens"]]) for row in command.head["data"]]
                self._tokens_trained += sum(row.nbytes for row in rows) // 4

    def _report(self) -> None:
        """Statistics, at most once a second, and none while nothing happens."""
        if self._has_news and REAL.now() >= self._stats_due_s:
            self._stats_due_s = REAL.now() + STATS_EVERY_S
            self._has_news = bool(self._commands) or self._sampler.has_work
            self._send(Frame({"n": 0, "news": "stats", **self._stats()}))

    def _stats(self) -> dict[str, Any]:
        return {
            "rss_bytes": _rss_bytes(),
            "commands_queued": len(self._commands),
            "samples_running": len(self._samples),
            "adapters": len(self._adapters),
            "cache_bytes": self._sampler.cache_bytes,
            "tokens_trained": self._tokens_trained,
            "tokens_sampled": self._tokens_sampled,
        }


def _apology(op: str, error: Exception) -> str:
    # torch has a class for a full GPU, and a plain RuntimeError for full memory.
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return f"The engine ran out of memory in {op}. Send less at once, or serve with a smaller --max-batch-tokens."
    return f"The engine failed in {op} ({type(error).__name__}). Nothing was changed; the server's log says more."


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak is all there is to know
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
