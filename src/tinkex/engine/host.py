"""`LocalEngine`: the server's side of an engine in a child process; packets go over the child's stdin and stdout.

One task supervises the child: it starts one, reads its packets until it ends, fails the commands that waited for it,
and starts the next. A child may have children of its own: they die with it, and none of them can delay that by holding
its pipes. No torch in here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from tinkex.clock import REAL, Clock
from tinkex.engine.contract import (
    EngineDied,
    EngineFault,
    EngineState,
    EngineUnusable,
    ModelInfo,
    OutOfMemory,
    ProofMissing,
    SampleEvent,
    SampleSpec,
    model_info,
    read_event,
    sample_frame,
)
from tinkex.engine.frames import HEADER, PREFIX, Frame, decode_parts, packet_parts
from tinkex.types.packed import Buffer

logger = logging.getLogger("tinkex.engine")

PROGRAM = (sys.executable, "-P", "-m", "tinkex.engine.process.main")
"""-P: a file called torch.py in the folder where the server was started is not our torch."""
READY_WITHIN_S = 600.0
CLOSE_WITHIN_S = 5.0
KILLED_WITHIN_S = 10.0
"""SIGKILL takes milliseconds, unless the system itself has the process in a call to a disk or driver that hangs."""
LEFT_OVER_WITHIN_S = 1.0
"""How long the output of a child that has ended is read, if another process holds its pipes so that they do not end.
What the child had written (64 KB at most) is read in milliseconds."""
READ_AHEAD_BYTES = 1 << 22
STEADY_AFTER_S = 30.0
"""A child that took commands for so long was sound: its death does not count towards the delay of the next start."""
PIECE_BYTES = 1 << 20
MOST_FIRST_STARTS = 3
"""How often the first engine is started, if it is killed every time."""
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
        devices: int = 1,
        gang_wait_s: float = 120.0,
        program: Sequence[str] = PROGRAM,
        options: Mapping[str, Any] | None = None,
        clock: Clock = REAL,
    ) -> None:
        """`program`: what is run as the child. It does as `engine.process.main` says. `options`: what else it is told
        at its start.

        `devices`: over how many it spreads each model, with a process for each (`engine.gang`). `gang_wait_s`: how long
        one of these processes waits for another.
        """
        self._models = {model.name: model for model in models}
        """Base models of the engine, and of the next one if it dies."""
        self._model_bytes: dict[str, int] = {}
        self._keeps_models = devices > 1
        self._start_frame = Frame(
            {
                "op": "start",
                "device": device,
                "dtype": dtype,
                "threads": threads,
                "token_budget": token_budget,
                "max_rows": max_rows,
                "max_cache_tokens": max_cache_tokens,
                "adapters_bytes": adapters_bytes,
                "decode_weights": decode_weights,
                "devices": devices,
                "gang_wait_s": gang_wait_s,
                **(options or {}),
            }
        )
        self._program = tuple(program)
        self._clock = clock
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while it is certain whether commands are taken: the engine is ready, or has failed, or is closed."""
        self._is_ready = self._was_ready = False
        self._ready_at_s: float | None = None
        self._generation = 1
        """Grows as soon as a child has ended: its adapters are lost before the next child is there."""
        self._reason = "not started"
        self._failure: str | None = None
        self._is_closed = False
        self._stats: dict[str, Any] = {}
        self._lora_sizes: dict[str, dict[str, int]] = {}

    @property
    def state(self) -> EngineState:
        return EngineState(
            is_ready=self._is_ready,
            reason="" if self._is_ready else self._reason,
            generation=self._generation,
            pid=self._child.pid if self._child is not None else 0,
            rss_bytes=int(self._stats.get("rss_bytes", 0)),
            lora_sizes=self._lora_sizes,
            models=None if self._keeps_models else {name: self._model_bytes.get(name, 0) for name in self._models},
            silent_s=self._clock.now() - self._child.heard_s if self._child is not None and self._is_ready else 0.0,
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
                raise EngineUnusable(self._failure, "server")
            await self._settled.wait()

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        """Raises EngineDied at once if no commands are taken: after a wait, the command's adapter would be lost."""
        child = self._child
        if child is None or not self._is_ready:
            raise EngineDied(f"The engine takes no commands now: {self._reason}.")
        number, replies = child.request(command, tenant)
        try:
            await child.drain()
            reply = _checked(await replies.get())
        finally:
            child.waiting.pop(number)
        if isinstance(command, Frame):
            self._note_models(command.head, reply.head)
        return reply

    def _note_models(self, command: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Remember what `load_model` and `unload_model` have done: after a crash the next engine loads the same."""
        if command.get("op") == "load_model":
            model = model_info(command["model"])
            self._models[model.name], self._model_bytes[model.name] = model, reply["size_bytes"]
            self._lora_sizes = {**self._lora_sizes, model.name: reply["lora_sizes"]}
        elif command.get("op") == "unload_model":
            self._models.pop(command["base"], None)

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
            supervisor.cancel()  # between two children: it waits for the next start, and has nothing to release
        else:
            child.end()
        if not (await asyncio.wait({supervisor}, timeout=CLOSE_WITHIN_S))[0] and child is not None:
            child.kill("did not end when its pipe was closed")
        await asyncio.wait({supervisor})

    async def _supervise(self) -> None:
        """Run one child after the other, until closed or until the first one cannot start.

        A first child that was killed from outside is no reason to give up: an administrator, or the machine when it is
        short of memory, may have taken it for another. Not for ever: a model that is too large is killed every time.
        """
        deaths = first_starts = 0
        while not self._is_closed:
            self._ready_at_s = None
            reason, was_killed = await self._run_child()
            if self._is_closed:
                return
            if self._ready_at_s is not None:
                self._was_ready = True
                deaths = 0 if self._clock.now() - self._ready_at_s >= STEADY_AFTER_S else deaths
            first_starts += 1
            if not self._was_ready and (not was_killed or first_starts == MOST_FIRST_STARTS):
                self._failure = f"The engine could not start: it {reason}."
                self._settled.set()
                return
            delay_s = restart_delay_s(deaths)
            deaths += 1
            self._reason = f"restarting: the last engine {reason}"
            logger.error("The engine %s; starting another, generation %d.", reason, self._generation)
            if delay_s:
                await self._clock.sleep(delay_s)

    async def _run_child(self) -> tuple[str, bool]:
        """Run one child to its end. Return why it ended, as the end of a sentence, and whether others killed it."""
        try:
            child = self._child = await start_child(self._program, self._clock)
        except OSError as error:
            return f"could not be run ({error.strerror})", False
        self._reason = "starting"
        logs = asyncio.create_task(child.forward_logs())
        watchdog = asyncio.create_task(self._kill_unless_ready(child))
        try:
            models = {"models": [asdict(model) for model in self._models.values()], "is_restart": self._was_ready}
            child.send(0, Frame({**self._start_frame.head, **models, "lifeline": child.lifeline}))
            await child.read(self._on_event)
        except Exception as error:  # an edge: no bytes of a child may end the supervisor, which all others wait for
            child.kill(f"sent what is not a packet ({str(error) or type(error).__name__})")
        finally:
            watchdog.cancel()
            self._is_ready, self._stats = False, {}
            self._generation += 1
            if not self._is_closed:
                self._settled.clear()
                self._reason = "the last engine has just ended"
            reason = await child.wait_exit()
            child.fail(f"The engine {reason}. What it was doing is lost; another one is started.")
            await logs
            child.close_pipes()
            self._child = None  # not before: while there is a child, `close` ends it and waits for all of the above
        return reason, child.exit_reason is None and child.exit_code < 0

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
                self._lora_sizes = {**self._lora_sizes, **event.get("lora_sizes", {})}
                if "models" in event:  # after a crash some may be gone
                    self._model_bytes = event["models"]
                    self._models = {name: model for name, model in self._models.items() if name in event["models"]}
                self._settled.set()
            case "stats":
                self._stats = {name: value for name, value in event.items() if name != "news"}


_Reply = Frame | EngineDied


class _Pipes(SubprocessStreamProtocol):
    """The pipes of a child, and its exit. `Process.wait` of asyncio also waits for the end of the pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=READ_AHEAD_BYTES, loop=loop)
        self.exited: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set_result(None)


async def start_child(program: Sequence[str], clock: Clock) -> _Child:
    """Run a program as the leader of a session, and so of a process group, that everything it starts belongs to.

    In a session of its own it has no terminal either: Ctrl-C is for the server to handle.
    """
    loop = asyncio.get_running_loop()
    lifeline, own_end = os.pipe()
    options: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    if sys.platform != "win32":
        options |= {"start_new_session": True, "pass_fds": (lifeline,)}
    try:
        transport, pipes = await loop.subprocess_exec(partial(_Pipes, loop), *program, **options)
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(lifeline)
    return _Child(transport, pipes, lifeline, own_end, clock)


class _Child:
    """A child process, and the requests that wait for its replies.

    Its end is its exit. Its pipes may stay open after that, for as long as a process that it started holds them.
    """

    def __init__(
        self, transport: asyncio.SubprocessTransport, pipes: _Pipes, lifeline: int, own_end: int, clock: Clock
    ) -> None:
        assert pipes.stdin is not None and pipes.stdout is not None and pipes.stderr is not None
        self.pid = transport.get_pid()
        self.exit_reason: str | None = None
        """Why it ended or was killed, where more is known than its exit code says."""
        self.lifeline = lifeline
        """The child's number of a pipe that ends with this process (`process.main.end_group_with_server`)."""
        self._own_end: int | None = own_end
        self._transport = transport
        self._exited = pipes.exited
        self._exited.add_done_callback(self._on_exit)
        self._stdin, self._stdout, self._stderr = pipes.stdin, pipes.stdout, pipes.stderr
        self._clock = clock
        self.heard_s = clock.now()
        """When its last packet came."""
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
        """Hand out the child's packets until its pipe ends or, soon after its exit, is closed."""
        read = self._stdout.readexactly
        with suppress(asyncio.IncompleteReadError):
            while True:
                number, name_size = HEADER.unpack(await read(HEADER.size))
                await read(name_size)
                head_size, body_size = PREFIX.unpack(await read(PREFIX.size))
                frame = decode_parts(await read(head_size), await self._read_body(body_size))
                self.heard_s = self._clock.now()
                if number == 0:
                    on_event(frame.head)
                elif (replies := self.waiting.get(number)) is not None:
                    replies.put_nowait(frame)

    async def _read_body(self, size: int) -> Buffer:
        """Read the buffers of a frame, a large one in pieces: a copy of 64 MB at once would stop the loop for 50 ms."""
        if size <= PIECE_BYTES:
            return await self._stdout.readexactly(size)
        body = memoryview(bytearray(size))
        for at in range(0, size, PIECE_BYTES):
            piece = await self._stdout.readexactly(min(PIECE_BYTES, size - at))
            body[at : at + len(piece)] = piece
        return body

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
        if not self._exited.done():
            self._kill_group()
            asyncio.get_running_loop().call_later(KILLED_WITHIN_S, self.close_pipes)

    def _kill_group(self) -> None:
        # What left the group (setsid) is not reached: only the program itself could tell us of it. A group of zombies
        # is a PermissionError on macOS.
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._transport.kill()
            else:
                os.killpg(self.pid, signal.SIGKILL)

    def _on_exit(self, _: object) -> None:
        # A group with members keeps its number. Without any, a new group could have the number by now, milliseconds
        # after the exit, if all other process ids of the system had been given out meanwhile.
        self._kill_group()
        asyncio.get_running_loop().call_later(LEFT_OVER_WITHIN_S, self.close_pipes)

    def close_pipes(self) -> None:
        """Read and write nothing more: a wait for either ends. Harmless after the ordinary end of the pipes."""
        if self._stdin.transport.get_write_buffer_size():
            self._stdin.transport.abort()  # `close` would wait until all of it has been written
        self._transport.close()
        if self._own_end is not None:
            os.close(self._own_end)
            self._own_end = None

    async def wait_exit(self) -> str:
        """Wait until the process has ended, killing it if it takes too long. Return the reason."""
        self.end()
        if not (await asyncio.wait({self._exited}, timeout=CLOSE_WITHIN_S))[0]:
            self.kill("did not end after it had closed its pipe")
            await asyncio.wait({self._exited}, timeout=KILLED_WITHIN_S)
        return self.exit_reason or describe_exit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """Negative: the signal that ended it. One that could not be killed counts as killed."""
        code = self._transport.get_returncode()
        return -9 if code is None else code

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
    kind = OutOfMemory if head.get("is_out_of_memory") else ProofMissing if head.get("needs_proof") else EngineFault
    raise kind(head["error"], head["category"])
