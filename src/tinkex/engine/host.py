"""`LocalEngine`: the server's side of an engine in a child process; packets go over the child's stdin and stdout.

One task supervises the child: it starts one, reads its packets until it ends, fails the commands that waited for it,
and starts the next. No torch in here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tinkex.clock import REAL, Clock
from tinkex.engine.contract import (
    EngineDied,
    EngineFault,
    EngineState,
    ModelInfo,
    SampleEvent,
    SampleSpec,
    read_event,
    sample_frame,
)
from tinkex.engine.frames import HEADER, PREFIX, Frame, decode_parts, packet_parts

logger = logging.getLogger("tinkex.engine")

CHILD = ("-P", "-m", "tinkex.engine.process.main")
"""-P: a file called torch.py in the folder where the server was started is not our torch."""
READY_WITHIN_S = 600.0
CLOSE_WITHIN_S = 5.0
STEADY_AFTER_S = 30.0
"""A child that took commands for so long was sound: its death does not count towards the delay of the next start."""
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}


def restart_delay_s(deaths: int) -> float:
    """Return how long to wait before the next start, after so many deaths in a row soon after a start."""
    return 0.0 if deaths == 0 else min(0.5 * 2.0 ** min(deaths - 1, 16), 30.0)


class LocalEngine:
    """An engine on this machine. Implements `engine.contract.Engine`."""

    def __init__(
        self,
        models: Sequence[ModelInfo],
        *,
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        token_budget: int = 2048,
        max_rows: int = 64,
        max_cache_tokens: int = 131072,
        adapters_bytes: int = 1 << 30,
        decode_weights: str = "float32",
        clock: Clock = REAL,
    ) -> None:
        self._start_frame = Frame(
            {
                "op": "start",
                "models": [asdict(model) for model in models],
                "device": device,
                "dtype": dtype,
                "threads": threads,
                "token_budget": token_budget,
                "max_rows": max_rows,
                "max_cache_tokens": max_cache_tokens,
                "adapters_bytes": adapters_bytes,
                "decode_weights": decode_weights,
            }
        )
        self._clock = clock
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while it is certain whether commands are taken: the engine is ready, or has failed, or is closed."""
        self._is_ready = False
        self._ready_at_s: float | None = None
        self._generation = 1
        """Grows as soon as a child has ended: its adapters are lost before the next child is there."""
        self._reason = "not started"
        self._failure: str | None = None
        self._is_closed = False
        self._stats: dict[str, Any] = {}

    @property
    def state(self) -> EngineState:
        return EngineState(
            is_ready=self._is_ready,
            reason="" if self._is_ready else self._reason,
            generation=self._generation,
            pid=self._child.process.pid if self._child is not None else 0,
            rss_bytes=int(self._stats.get("rss_bytes", 0)),
            extras={name: value for name, value in self._stats.items() if name != "rss_bytes"},
        )

    async def start(self) -> None:
        if self._supervisor is None and not self._is_closed:
            self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        await self.ready()

    async def ready(self) -> None:
        while not self._is_ready:
            if self._is_closed:
                raise EngineDied("The engine is closed.")
            if self._failure is not None:
                raise EngineFault(self._failure, "server")
            await self._settled.wait()

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        """Raises EngineDied at once if no commands are taken: after a wait, the command's adapter would be lost."""
        child = self._child
        if child is None or not self._is_ready:
            raise EngineDied(f"The engine takes no commands now: {self._reason}.")
        number, replies = child.request(command, tenant)
        try:
            await child.drain()
            return _checked(await replies.get())
        finally:
            child.waiting.pop(number)

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        """Waits for the engine while it starts: a sample needs nothing that an earlier child had in memory."""
        await self.ready()
        child = self._child
        assert child is not None
        number, replies = child.request(sample_frame(spec), spec.tenant)
        is_over = False
        try:
            await child.drain()
            while not is_over:
                reply = await replies.get()
                is_over = isinstance(reply, EngineDied) or "ok" in reply.head
                yield read_event(_checked(reply))
        finally:
            child.waiting.pop(number)
            if not is_over:
                child.send(0, Frame({"op": "cancel", "number": number}))

    async def close(self) -> None:
        self._is_closed, self._is_ready, self._reason = True, False, "closed"
        self._settled.set()
        supervisor, child = self._supervisor, self._child
        if supervisor is None:
            return
        if child is None:
            supervisor.cancel()  # between two children
        else:
            child.end()
        if not (await asyncio.wait({supervisor}, timeout=CLOSE_WITHIN_S))[0] and child is not None:
            child.kill("did not end when its pipe was closed")
        await asyncio.wait({supervisor})

    async def _supervise(self) -> None:
        """Run one child after the other, until closed or until the first one cannot start."""
        deaths = 0
        was_ready = False
        while not self._is_closed:
            self._ready_at_s = None
            reason = await self._run_child()
            if self._is_closed:
                return
            if self._ready_at_s is not None:
                was_ready = True
                deaths = 0 if self._clock.now() - self._ready_at_s >= STEADY_AFTER_S else deaths
            if not was_ready:
                self._failure = f"The engine could not start: it {reason}."
                self._settled.set()
                return
            delay_s = restart_delay_s(deaths)
            deaths += 1
            self._reason = f"restarting: the last engine {reason}"
            logger.error("The engine %s; starting another, generation %d.", reason, self._generation)
            if delay_s:
                await self._clock.sleep(delay_s)

    async def _run_child(self) -> str:
        """Run one child from its start to its end. Return why it ended, as the end of a sentence."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *CHILD, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=1 << 22
            )
        except OSError as error:
            return f"could not be run ({error.strerror})"
        child = self._child = _Child(process)
        self._reason = "starting"
        logs = asyncio.create_task(child.forward_logs())
        watchdog = asyncio.create_task(self._kill_unless_ready(child))
        try:
            child.send(0, self._start_frame)
            await child.read(self._on_event)
        except (ValueError, LookupError, TypeError) as error:
            child.kill(f"sent what is not a packet ({error})")
        finally:
            watchdog.cancel()
            self._child, self._is_ready, self._stats = None, False, {}
            self._generation += 1
            if not self._is_closed:
                self._settled.clear()
                self._reason = "the last engine has just ended"
            reason = await child.wait_exit()
            child.fail(f"The engine {reason}. What it was doing is lost; another one is started.")
            await logs
        return reason

    async def _kill_unless_ready(self, child: _Child) -> None:
        await self._clock.sleep(READY_WITHIN_S)
        if not self._is_ready:
            child.kill(f"was not ready within {READY_WITHIN_S:.0f} s ({self._reason})")

    def _on_event(self, event: Mapping[str, Any]) -> None:
        """Handle a packet that belongs to no request (`engine.process.main` lists them)."""
        match event["news"]:
            case "loading":
                self._reason = f"loading {event['what']}"
            case "failed":
                assert self._child is not None
                self._child.exit_reason = f"failed while {self._reason}: {event['error'].rstrip('.')}"
            case "ready" if not self._is_closed:
                self._is_ready, self._ready_at_s = True, self._clock.now()
                self._settled.set()
            case "stats":
                self._stats = {name: value for name, value in event.items() if name != "news"}


_Reply = Frame | EngineDied


class _Child:
    """A child process, and the requests that wait for its replies."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.process = process
        self.exit_reason: str | None = None
        """Why it ended or was killed, where more is known than its exit code says."""
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Queue[_Reply]] = {}

    def request(self, command: Frame | bytes, tenant: str) -> tuple[int, asyncio.Queue[_Reply]]:
        """Send a command. Return its number, and the queue that its replies will come in."""
        number = next(self._numbers)
        self.send(number, command, tenant)  # first: a damaged frame raises, and nothing waits for a reply
        replies = self.waiting[number] = asyncio.Queue()
        return number, replies

    def send(self, number: int, frame: Frame | bytes, tenant: str = "") -> None:
        """Send a whole packet without waiting; callers that can wait `drain` afterwards."""
        packet = packet_parts(number, tenant, frame)
        if not self._stdin.is_closing():
            self._stdin.writelines(packet)

    async def drain(self) -> None:
        with suppress(ConnectionError):  # the child died: `fail` tells every waiting request
            await self._stdin.drain()

    async def read(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        """Hand out the child's packets until its pipe ends."""
        read = self._stdout.readexactly
        with suppress(asyncio.IncompleteReadError):
            while True:
                number, name_size = HEADER.unpack(await read(HEADER.size))
                await read(name_size)
                head_size, body_size = PREFIX.unpack(await read(PREFIX.size))
                frame = decode_parts(await read(head_size), await read(body_size))
                if number == 0:
                    on_event(frame.head)
                elif (replies := self.waiting.get(number)) is not None:
                    replies.put_nowait(frame)

    async def forward_logs(self) -> None:
        """Write the child's stderr to our log. Lines without a level (tracebacks, warnings) take the level before."""
        level = logging.INFO
        while True:
            try:
                line = await self._stderr.readline()
            except ValueError:  # longer than the reader's limit
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            word, _, rest = text.partition(" ")
            if word in _LEVELS:
                level, text = _LEVELS[word], rest
            logger.log(level, "%s", text)

    def end(self) -> None:
        """Close its stdin, at which it ends by itself."""
        self._stdin.close()

    def kill(self, reason: str) -> None:
        self.exit_reason = reason
        if self.process.returncode is None:
            self.process.kill()

    async def wait_exit(self) -> str:
        """Wait until the process has ended, killing it if it takes too long. Return the reason."""
        self.end()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                code = await self.process.wait()
        except TimeoutError:
            self.kill("did not end after it had closed its pipe")
            code = await self.process.wait()
        return self.exit_reason or describe_exit(code)

    def fail(self, reason: str) -> None:
        """Fail every request that still waits."""
        for replies in self.waiting.values():
            replies.put_nowait(EngineDied(reason))


def describe_exit(code: int) -> str:
    """Return what a process's exit code means."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (often: the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"


def _checked(reply: _Reply) -> Frame:
    """Return a successful reply without the pipe's own fields, or raise."""
    if isinstance(reply, EngineDied):
        raise reply
    head = reply.head
    if head.pop("ok", True):
        head.pop("event", None)
        return reply
    raise EngineFault(head["error"], head["category"])
