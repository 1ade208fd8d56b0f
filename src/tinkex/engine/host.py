"""`LocalEngine`: the server's side of an engine in a child process, in frames over the child's stdin and stdout.

One task keeps a child alive: it starts one, reads what it says until it ends, tells everyone who waited for it why, and
starts the next. Nothing here knows torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tinkex.clock import REAL, Clock
from tinkex.engine.contract import EngineDied, EngineFault, EngineState, ModelInfo, SampleEvent, SampleSpec
from tinkex.engine.frames import HEADER, PREFIX, Frame, Packet, decode_parts, packet_parts
from tinkex.engine.messages import read_event, sample_frame

logger = logging.getLogger("tinkex.engine")

CHILD = ("-P", "-m", "tinkex.engine.process.main")
"""-P: a file called torch.py in the folder where somebody started the server is not our torch."""
READY_WITHIN_S = 600.0
CLOSE_WITHIN_S = 5.0
STEADY_AFTER_S = 30.0
"""A child that took commands for so long was sound: its death is not another sign of a trouble that lasts."""
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}


def restart_delay_s(deaths: int) -> float:
    """How long to wait before the next start, after so many deaths in a row that came soon after a start."""
    return 0.0 if deaths == 0 else min(0.5 * 2.0 ** min(deaths - 1, 16), 30.0)


class LocalEngine:
    """An engine on this machine. Implements `engine.base.Engine`."""

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
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while it is known how things are: commands are taken, or never will be."""
        self._is_ready = False
        self._ready_at_s: float | None = None
        self._generation = 1
        """Grows as soon as a child has ended: nobody shall count on its adapters while the next one starts."""
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
        if self._keeper is None and not self._is_closed:
            self._keeper = asyncio.create_task(self._keep(), name="engine keeper")
        await self.ready()

    async def ready(self) -> None:
        while not self._is_ready:
            if self._is_closed:
                raise EngineDied("The engine is closed.")
            if self._failure is not None:
                raise EngineFault(self._failure, "server")
            await self._settled.wait()

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        """Raises EngineDied at once if no commands are taken: after a wait, the command's adapter would be gone."""
        child = self._child
        if child is None or not self._is_ready:
            raise EngineDied(f"The engine takes no commands now: {self._reason}.")
        number, answers = child.ask(command, tenant)
        try:
            await child.drain()
            return _checked(await answers.get())
        finally:
            child.forget(number)

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        """Waits for the engine if it is just being started: a sample needs nothing that an earlier child held."""
        await self.ready()
        child = self._child
        assert child is not None
        number, answers = child.ask(sample_frame(spec), spec.tenant)
        is_over = False
        try:
            await child.drain()
            while not is_over:
                answer = await answers.get()
                is_over = isinstance(answer, EngineDied) or "ok" in answer.head
                yield read_event(_checked(answer))
        finally:
            child.forget(number)
            if not is_over:
                child.send(0, Frame({"op": "cancel", "number": number}))

    async def close(self) -> None:
        self._is_closed, self._is_ready, self._reason = True, False, "closed"
        self._settled.set()
        keeper, child = self._keeper, self._child
        if keeper is None:
            return
        if child is None:
            keeper.cancel()  # between two children
        else:
            child.end()
        if not (await asyncio.wait({keeper}, timeout=CLOSE_WITHIN_S))[0] and child is not None:
            child.kill("did not end when told to")
        await asyncio.wait({keeper})

    async def _keep(self) -> None:
        """Start children, one after the other, until closed or until the first one cannot start."""
        deaths = 0
        was_ready = False
        while not self._is_closed:
            self._ready_at_s = None
            reason = await self._live()
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

    async def _live(self) -> str:
        """One child from its start to its end. Returns why it ended, as the end of a sentence."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *CHILD, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=1 << 22
            )
        except OSError as error:
            return f"could not be run ({error.strerror})"
        child = self._child = _Child(process)
        self._reason = "starting"
        logs = asyncio.create_task(child.forward_logs())
        watchdog = asyncio.create_task(self._watch(child))
        try:
            child.send(0, self._start_frame)
            await child.read(self._hear)
        except (ValueError, LookupError, TypeError) as error:
            child.kill(f"sent what is not a frame ({error})")
        finally:
            watchdog.cancel()
            self._child, self._is_ready, self._stats = None, False, {}
            self._generation += 1
            if not self._is_closed:
                self._settled.clear()
                self._reason = "the last engine has just ended"
            reason = await child.buried()
            child.fail(f"The engine {reason}. What it was doing is lost; another one is started.")
            await logs
        return reason

    async def _watch(self, child: _Child) -> None:
        await self._clock.sleep(READY_WITHIN_S)
        if not self._is_ready:
            child.kill(f"was not ready within {READY_WITHIN_S:.0f} s ({self._reason})")

    def _hear(self, news: Mapping[str, Any]) -> None:
        """What the child says unasked."""
        match news["news"]:
            case "loading":
                self._reason = f"loading {news['what']}"
            case "failed":
                assert self._child is not None
                self._child.last_words = f"failed while {self._reason}: {news['error'].rstrip('.')}"
            case "ready" if not self._is_closed:
                self._is_ready, self._ready_at_s = True, self._clock.now()
                self._settled.set()
            case "stats":
                self._stats = {name: value for name, value in news.items() if name != "news"}


Answer = Frame | EngineDied


class _Child:
    """A process and the conversations with it."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.process = process
        self.last_words = ""
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Answer]] = {}

    def ask(self, command: Frame | bytes, tenant: str) -> tuple[int, asyncio.Queue[Answer]]:
        number = next(self._numbers)
        answers = self._waiting[number] = asyncio.Queue()
        self.send(number, command, tenant)
        return number, answers

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def send(self, number: int, frame: Frame | bytes, tenant: str = "") -> None:
        """Never waits, and a packet is never torn apart by another; `drain` is for those who can wait."""
        if not self._stdin.is_closing():
            self._stdin.writelines(packet_parts(number, tenant, frame))

    async def drain(self) -> None:
        try:
            await self._stdin.drain()
        except ConnectionError:
            pass  # it has died, and says so to everyone who waits for an answer

    async def read(self, hear: Callable[[Mapping[str, Any]], None]) -> None:
        """Hand out what the child says until it says no more."""
        while (packet := await self._next()) is not None:
            if packet.number == 0:
                hear(packet.frame.head)
            elif (answers := self._waiting.get(packet.number)) is not None:
                answers.put_nowait(packet.frame)

    async def _next(self) -> Packet | None:
        read = self._stdout.readexactly
        try:
            number, name_size = HEADER.unpack(await read(HEADER.size))
            tenant = (await read(name_size)).decode()
            head_size, body_size = PREFIX.unpack(await read(PREFIX.size))
            return Packet(number, tenant, decode_parts(await read(head_size), await read(body_size)))
        except asyncio.IncompleteReadError:
            return None

    async def forward_logs(self) -> None:
        """Its stderr goes to our log. Lines without a level (tracebacks, warnings) belong to the line before them."""
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
        self._stdin.close()

    def kill(self, reason: str) -> None:
        self.last_words = reason
        if self.process.returncode is None:
            self.process.kill()

    async def buried(self) -> str:
        """Wait for the end of the process, help it if need be, and say how it came."""
        self.end()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                code = await self.process.wait()
        except TimeoutError:
            self.kill("did not end after it had closed its pipe")
            code = await self.process.wait()
        return self.last_words or how_it_ended(code)

    def fail(self, reason: str) -> None:
        for answers in self._waiting.values():
            answers.put_nowait(EngineDied(reason))


def how_it_ended(code: int) -> str:
    """A process's exit code, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (often: the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"


def _checked(answer: Answer) -> Frame:
    if isinstance(answer, EngineDied):
        raise answer
    head = answer.head
    if head.pop("ok", True):
        head.pop("event", None)
        return answer
    raise EngineFault(head["error"], head["category"])
