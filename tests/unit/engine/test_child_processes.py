"""An engine's process that has started others: they die with it, and cannot delay its end by holding its pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.engine import scripted_child
from tests.unit.engine.test_host import collect, is_alive, ping, scripted, until
from tinkex.engine import host
from tinkex.engine.contract import EngineDied, EngineUnusable, ModelInfo, SampleSpec
from tinkex.engine.frames import Frame
from tinkex.engine.host import LocalEngine

RESTARTED_WITHIN_S = 10.0
SLEEPS = Frame({"op": "steps", "count": 10**6})
ENDLESS = SampleSpec(base="any", max_tokens=10**9, is_streamed=True)


class Grandchildren:
    """The processes that the scripted children have started: each holds all the pipes of the one that started it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.file.read_text().splitlines()]

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]


@pytest.fixture
def grandchildren(tmp_path: Path) -> Iterator[Grandchildren]:
    born = Grandchildren(tmp_path / "grandchildren")
    yield born
    for pid in born.alive:
        os.kill(pid, signal.SIGKILL)


def with_grandchildren(
    born: Grandchildren, test: Callable[[LocalEngine], Awaitable[None]], *arguments: str, rounds: int = 1
) -> None:
    """Run a test on started engines, one after the other, whose child has started a process. Close each in time."""

    async def run() -> None:
        for _ in range(rounds):
            engine = scripted("model", str(born.file), *arguments)
            try:
                async with asyncio.timeout(20):
                    await engine.start()
                    await test(engine)
            finally:
                async with asyncio.timeout(host.CLOSE_WITHIN_S):
                    await engine.close()

    asyncio.run(run())


async def check_kill(engine: LocalEngine) -> None:
    """Kill the engine's process and see another take its place within ten seconds."""
    pid = engine.state.pid
    running = [asyncio.create_task(engine.run(SLEEPS)), asyncio.create_task(collect(engine, ENDLESS))]
    await ping(engine)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(RESTARTED_WITHIN_S):
        for task in running:
            with pytest.raises(EngineDied, match="killed by signal 9"):
                await task
        await engine.ready()
        assert (await engine.run(Frame({"op": "echo"}))).head["heard"]["op"] == "echo"
    assert engine.state.pid != pid and engine.state.generation == 2


def check_kills(born: Grandchildren, rounds: int) -> None:
    async def test(engine: LocalEngine) -> None:
        await check_kill(engine)
        _, second = born.pids[-2:]
        await until(lambda: born.alive == [second], "only the living child has a grandchild")

    with_grandchildren(born, test, rounds=rounds)
    assert len(born.pids) == 2 * rounds
    assert born.alive == []


@pytest.mark.slow
def test_a_killed_child_is_replaced_though_its_own_child_holds_the_pipes(grandchildren: Grandchildren) -> None:
    """vLLM's workers do: the server waited for the end of the pipe for ever, and so did its clients."""
    check_kills(grandchildren, 3)


@pytest.mark.full
def test_fifty_killed_children_are_replaced_and_leave_no_process(grandchildren: Grandchildren) -> None:
    check_kills(grandchildren, 50)


@pytest.mark.slow
def test_a_killed_child_is_replaced_though_a_process_outside_its_group_holds_the_pipes(
    grandchildren: Grandchildren,
) -> None:
    async def test(engine: LocalEngine) -> None:
        before = len(os.listdir("/dev/fd"))
        await check_kill(engine)
        assert len(os.listdir("/dev/fd")) == before, "the pipes of the dead child are closed"

    with_grandchildren(grandchildren, test, "leave", rounds=2)
    assert len(grandchildren.alive) == 4, "they have left the group: nothing but their pipes is known of them"


@pytest.mark.slow
def test_what_a_dead_child_had_written_is_read_though_others_hold_its_pipes(grandchildren: Grandchildren) -> None:
    async def test(engine: LocalEngine) -> None:
        echo = Frame({"op": "echo"}, [bytes(3_000_000)])
        *written, lost = [asyncio.create_task(engine.run(frame)) for frame in (echo, echo, Frame({"op": "die"}))]
        for reply in await asyncio.gather(*written):
            assert len(bytes(reply.buffers[0])) == 3_000_000
        with pytest.raises(EngineDied, match="killed by signal 9"):
            await lost

    with_grandchildren(grandchildren, test, "leave")


@pytest.mark.slow
def test_a_command_that_a_dead_child_has_not_read_fails_though_others_hold_its_pipes(
    grandchildren: Grandchildren,
) -> None:
    """Its pipe is neither read nor closed: what is left to write is dropped."""

    async def test(engine: LocalEngine) -> None:
        pid = engine.state.pid
        os.kill(pid, signal.SIGSTOP)
        writing = asyncio.create_task(engine.run(Frame({"op": "echo"}, [bytes(8_000_000)])))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="killed by signal 9"):
            await writing
        await engine.ready()

    with_grandchildren(grandchildren, test, "leave")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("leave",)])
def test_closing_ends_though_others_hold_the_pipes(grandchildren: Grandchildren, arguments: tuple[str, ...]) -> None:
    async def test(engine: LocalEngine) -> None:
        await ping(engine)

    with_grandchildren(grandchildren, test, *arguments)
    assert len(grandchildren.pids) == 1
    assert grandchildren.alive == (grandchildren.pids if arguments else [])


def test_closing_kills_the_whole_group_of_a_child_that_does_not_end(
    grandchildren: Grandchildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: LocalEngine) -> None:
        os.kill(engine.state.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(host, "CLOSE_WITHIN_S", 0.1)
            await engine.close()

    with_grandchildren(grandchildren, test)
    assert len(grandchildren.pids) == 1 and grandchildren.alive == []


def test_closing_ends_though_the_child_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have it in a call that hangs: SIGKILL comes after that."""
    monkeypatch.setattr(host, "CLOSE_WITHIN_S", 0.1)
    monkeypatch.setattr(host, "KILLED_WITHIN_S", 0.2)
    attempts: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: attempts.append(group))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: attempts.append(process.pid))

    async def run() -> None:
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        engine = LocalEngine([ModelInfo(name="model", folder="")], program=program)
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.state.pid != 0, "a start")
        pid = engine.state.pid
        try:
            async with asyncio.timeout(5):
                await engine.close()
            assert is_alive(pid) and set(attempts) == {pid}
            with pytest.raises(EngineDied, match="closed"):
                await starting
        finally:
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)  # for asyncio to see it

    asyncio.run(run())


CLOSES_ITS_PIPE = """
import os, subprocess, sys, time
from tinkex.engine.frames import Frame, packet_parts
sleeper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.write(1, b"".join(packet_parts(0, "", Frame({"news": "stats", "sleeper": sleeper.pid}))))
os.write(1, b"".join(packet_parts(0, "", Frame({"news": "ready"}))))
while b"a command" not in os.read(0, 4096):
    pass
os.close(1)
time.sleep(600)
"""


def test_closing_kills_a_child_that_has_closed_its_pipe_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `close` took it for gone, and left it, what it had started, and every request that waited for it."""
    monkeypatch.setattr(host, "CLOSE_WITHIN_S", 0.5)

    async def run() -> None:
        program = [sys.executable, "-c", CLOSES_ITS_PIPE]
        engine = LocalEngine([ModelInfo(name="model", folder="")], program=program)
        before = len(os.listdir("/dev/fd"))
        await engine.start()
        pids = [engine.state.pid, int(engine.state.extras["sleeper"])]
        try:
            assert all(map(is_alive, pids))
            waiting = asyncio.create_task(engine.run(Frame({"op": "a command"})))
            await until(lambda: not engine.state.is_ready, "the end of its pipe")
            assert is_alive(pids[0])
            async with asyncio.timeout(5):
                await engine.close()
                with pytest.raises(EngineDied, match="did not end"):
                    await waiting
            await until(lambda: not any(map(is_alive, pids)), "an end of both")
            await until(lambda: len(os.listdir("/dev/fd")) == before, "closed pipes")
        finally:
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)

    asyncio.run(run())


SENDS_A_SIZE = """
import os, sys, time
from tinkex.engine.frames import HEADER, PREFIX
os.write(1, HEADER.pack(0, 0) + PREFIX.pack(2, int(sys.argv[1])) + b"{}")
time.sleep(600)
"""


@pytest.mark.parametrize(("size", "reason"), [(1 << 62, "MemoryError"), ((1 << 64) - 1, "cannot fit")])
def test_a_child_that_sends_an_absurd_size_is_killed_for_it(size: int, reason: str) -> None:
    """Before: a MemoryError or an OverflowError ended the supervisor, and every wait for the engine was for ever."""

    async def run() -> None:
        program = [sys.executable, "-c", SENDS_A_SIZE, str(size)]
        engine = LocalEngine([ModelInfo(name="model", folder="")], program=program)
        try:
            async with asyncio.timeout(10):
                with pytest.raises(EngineUnusable, match=rf"could not start: it sent what is not a packet \({reason}"):
                    await engine.start()
        finally:
            await engine.close()

    asyncio.run(run())


def test_the_child_has_a_session_of_its_own_and_so_no_terminal() -> None:
    async def run() -> None:
        engine = scripted()
        try:
            await engine.start()
            assert os.getsid(engine.state.pid) == os.getpgid(engine.state.pid) == engine.state.pid
        finally:
            await engine.close()

    asyncio.run(run())


SERVER = """
import asyncio, sys, threading
from tinkex.engine.contract import ModelInfo
from tinkex.engine.host import LocalEngine

async def main():
    for _ in range(30):  # the first thread may end before the last one closes the lifeline
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    engine = LocalEngine([ModelInfo(name="model", folder="")], program=[sys.executable, *sys.argv[1:]])
    await engine.start()
    print(engine.state.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel does it: see end_group_with_server")
def test_kill_9_of_the_server_leaves_neither_child_nor_grandchild(grandchildren: Grandchildren) -> None:
    for _ in range(8):
        program = [str(scripted_child.__file__), str(grandchildren.file)]
        with subprocess.Popen([sys.executable, "-c", SERVER, *program], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            pid = int(server.stdout.readline())
            assert is_alive(pid) and grandchildren.alive == grandchildren.pids[-1:]
            os.kill(pid, signal.SIGSTOP)  # as if in a long call: it reads no end of stdin
            server.kill()
            server.wait()
        try:
            asyncio.run(until(lambda pid=pid: not is_alive(pid) and not grandchildren.alive, "an end"))  # type: ignore[misc]
        finally:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_child_without_a_lifeline_ends_its_group_when_its_stdin_ends(grandchildren: Grandchildren) -> None:
    """On macOS, for instance."""
    program = [sys.executable, str(scripted_child.__file__), str(grandchildren.file)]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as child:
        asyncio.run(until(lambda: len(grandchildren.pids) == 1, "a start"))
        assert child.stdin is not None
        child.stdin.close()
        child.wait(5)
    asyncio.run(until(lambda: not grandchildren.alive, "an end"))
