"""The loop of the engine's process: takes commands, gives turns, sends replies. All of it on one thread, but for saves:
`training.saver` writes adapters beside it.

An engine that wakes from idle waits briefly for company: if it has several adapters and a pass arrives, or a sample,
it looks for a moment whether more arrive, so that requests which were sent together run together. A moment is a tenth
of the time it takes to read the model's weights once (`moment_s`); running apart would cost at least one such reading.
Runs whose passes were there together last time get a few moments more to be together again: such runs go in step.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinkex.clock import REAL
from tinkex.engine.contract import (
    EngineFault,
    OutOfMemory,
    Sampled,
    SampleEvent,
    Tokens,
    event_frame,
    first_line,
    is_out_of_memory,
    read_sample,
)
from tinkex.engine.frames import Frame
from tinkex.engine.process.turns import EngineTurn, Turns

if TYPE_CHECKING:
    from tinkex.engine.process.loaded_models import LoadedModels
    from tinkex.engine.sampling.sampler import Sampler
    from tinkex.engine.training.trainer import Trainer

logger = logging.getLogger("tinkex.engine")

STATS_EVERY_S = 1.0
MOMENTS = 8
"""How often it looks again at most, unless more came together last time: a steady flow of commands delays no work."""
PATIENCE = 4
"""Moments to wait for the next of the passes that came together last time."""
_LONGEST_MOMENT_S = 0.02
_READ_PER_S = {"cpu": 20e9}
"""Bytes per second; a terabyte on other devices."""

Packet = tuple[int, Frame]
"""A request's number and its command, with the tenant in its head."""
_SAVED: Packet = (0, Frame({}))
"""Wakes the loop: an adapter has been written."""
Inbox = queue.Queue[Packet]
"""Not a SimpleQueue: in CPython its `get` may take a short timeout that has just run out for none, and block until the
next packet comes. A sample then waited for the command after it, for minutes (`docs/LOG.md`)."""
Send = Callable[[int, Frame], None]
"""Sends a reply to the request of that number; 0 is for packets without a request."""


def moment_s(weights_bytes: int, device: str) -> float:
    """Return how long an idle engine waits for company, for a model of that size."""
    return min(0.1 * weights_bytes / _READ_PER_S.get(device, 1e12), _LONGEST_MOMENT_S)


class Loop:
    """Takes commands and gives turns. No error of a command ends it."""

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        send: Send,
        moment_s: float = 0.0,
        models: LoadedModels | None = None,
    ) -> None:
        """`models`: what loads and unloads base models; without it those of trainer and sampler stay."""
        self._moment_s, self._models = moment_s, models
        self._trainer = trainer
        self._sampler = sampler
        self._send = send
        self._turns = Turns()
        self._commands: dict[int, Frame] = {}
        """Commands that the trainer has."""
        self._samples: set[int] = set()
        self._most_passes = self._former_passes = 0
        """The most passes at once since it last waited for company, and in the period before that."""
        self._adapters: set[str] = set()
        self._tokens_trained = 0
        self._tokens_sampled = 0
        self._stats_due_s = 0.0
        self._has_news = True

    def serve(self, inbox: Inbox) -> None:
        """Work for ever: the thread that reads the pipe ends the process."""
        saver = self._trainer.saver
        saver.on_done = lambda: inbox.put(_SAVED)
        while True:
            turn = self._turns.choose(can_train=self._trainer.has_work, can_decode=self._sampler.has_work)
            if turn is not None:
                began = REAL.now()
                saver.is_engine_busy = True
                self._train() if turn is EngineTurn.TRAIN else self._decode()
                self._turns.charge(turn, REAL.now() - began)
            self._report_stats()
            has_work = self._trainer.has_work or self._sampler.has_work
            saver.is_engine_busy = has_work
            self._take(inbox, wait=not has_work)

    def _take(self, inbox: Inbox, wait: bool) -> None:
        """Take all packets that have arrived; with `wait`, block for the first one until statistics are due."""
        try:
            if wait:
                due_s = max(self._stats_due_s - REAL.now(), 0.001) if self._has_news else None
                self._accept(inbox.get(timeout=due_s))
                self._wait_for_company(inbox)
            while True:
                self._accept(inbox.get_nowait())
        except queue.Empty:
            return

    def _wait_for_company(self, inbox: Inbox) -> None:
        if self._trainer.passes:
            self._former_passes, self._most_passes = self._most_passes, self._trainer.passes
        looks = max(MOMENTS, self._former_passes) if self._moment_s else 0
        while looks and self._gains_from_company():
            looks -= 1
            is_early = 0 < self._trainer.passes < self._former_passes
            self._accept(inbox.get(timeout=self._moment_s * (PATIENCE if is_early else 1)))

    def _gains_from_company(self) -> bool:
        """Whether the work at hand would run better together with more of its kind."""
        is_pass = self._trainer.passes > 0 and len(self._adapters) > 1
        return is_pass or self._sampler.has_work

    def _accept(self, packet: Packet) -> None:
        number, frame = packet
        op = frame.head.get("op")
        self._has_news = True
        if packet is _SAVED:
            return
        if op == "sample":
            try:
                self._sampler.add(number, read_sample(frame))
                self._samples.add(number)
            except Exception as error:
                self._fail(number, "sample", error)
        elif op == "cancel":
            self._samples.discard(frame.head["number"])
            self._sampler.cancel(frame.head["number"])
        elif op in ("load_model", "unload_model"):
            self._change_models(number, frame)
        elif op == "ping":
            self._send(number, Frame({"ok": True, **self._stats()}))
        else:
            self._commands[number] = frame
            self._trainer.add(number, frame)
            self._most_passes = max(self._most_passes, self._trainer.passes)

    def _change_models(self, number: int, frame: Frame) -> None:
        op = str(frame.head["op"])
        try:
            if self._models is None:
                raise EngineFault("This engine keeps the base models of its start.", "server")
            reply = self._models.run(frame.head)
            self._moment_s = self._models.moment_s
        except Exception as error:
            self._fail(number, op, error)
        else:
            self._reply(number, op, reply)

    def _train(self) -> None:
        for number, reply in self._trainer.step():
            command = self._commands.pop(number)
            op = str(command.head.get("op"))
            if isinstance(reply, Exception):
                self._fail(number, op, reply)
            else:
                self._count(command)
                self._reply(number, op, reply)

    def _decode(self) -> None:
        try:
            events = self._sampler.step()
        except Exception as error:
            # Which sample was the cause is not known: all of them fail, and the sampler is empty again.
            for number in self._samples:
                self._sampler.cancel(number)
                self._fail(number, "sample", error)
            self._samples.clear()
            if self._sampler.has_work:
                raise  # it is not empty: only another process will help
            return
        for number, event in events:
            if number in self._samples:
                self._send_event(number, event)

    def _send_event(self, number: int, event: SampleEvent | EngineFault) -> None:
        if isinstance(event, Tokens):
            self._send(number, Frame({"event": True, **event_frame(event).head}))
            return
        self._samples.discard(number)
        if isinstance(event, Sampled):
            self._reply(number, "sample", event_frame(event))
            self._tokens_sampled += sum(row.length for row in event.sequences)
        else:
            self._fail(number, "sample", event)

    def _reply(self, number: int, op: str, reply: Frame) -> None:
        try:
            self._send(number, Frame({"ok": True, **reply.head}, reply.buffers))
        except Exception as error:  # it cannot be encoded
            self._fail(number, op, error)

    def _fail(self, number: int, op: str, error: Exception) -> None:
        if isinstance(error, EngineFault):
            text, category = str(error), error.category
        elif is_out_of_memory(error):
            logger.warning("%s: %s", op, first_line(error, 200))  # it is not a bug: no trace
            text, category = _public_message(op, error), "server"
        else:
            logger.error("%s failed.", op, exc_info=error)
            text, category = _public_message(op, error), "server"
        head = {"ok": False, "error": text, "category": category}
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            head["is_out_of_memory"] = True  # the server evicts adapters and sends the command again
        self._send(number, Frame(head))

    def _count(self, command: Frame) -> None:
        match command.head["op"]:
            case "create" | "restore":
                self._adapters.add(command.head["adapter"])
            case "drop":
                self._adapters.discard(command.head["adapter"])
            case "forward_backward":
                rows = [memoryview(command.buffers[row["tokens"]]) for row in command.head["data"]]
                self._tokens_trained += sum(row.nbytes for row in rows) // 4

    def _report_stats(self) -> None:
        """Send statistics, at most once a second, and none while nothing happens."""
        if self._has_news and REAL.now() >= self._stats_due_s:
            self._stats_due_s = REAL.now() + STATS_EVERY_S
            self._has_news = bool(self._commands) or self._sampler.has_work
            self._send(0, Frame({"news": "stats", **self._stats()}))

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


def _public_message(op: str, error: Exception) -> str:
    """Return what a client may read about an unexpected error: its text may have paths and secrets in it."""
    if is_out_of_memory(error):
        return f"The engine ran out of memory in {op}. Send less at once, or serve with a smaller --max-batch-tokens."
    return f"The engine failed in {op} ({type(error).__name__}). Nothing was changed; the server's log says more."


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: only the peak is known
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
