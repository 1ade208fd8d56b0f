"""What ends a gang: kill -9 of any of its processes, or of the server; a process that hangs; a start that cannot work.

The run goes on where it was, to the bit, and no process and no file is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.gang_work import create, running, train
from tests.integration.service import test_crashes
from tests.integration.service.live import LiveServer
from tests.prepare import CACHE
from tinkex.engine.contract import EngineDied, EngineUnusable, ModelInfo
from tinkex.engine.gang.lead import FOLDER_PREFIX
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import registry

pytestmark = pytest.mark.full

FLAGS = ("--devices-per-engine", "2", "--threads", "1", "--device", "cpu")
VICTIMS = ("member", "lead", "server")
GONE_WITHIN_S = 10.0


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int]) -> None:
    end = time.monotonic() + GONE_WITHIN_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, f"left behind: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.05)


class GangKiller(test_crashes.Killer):
    """Kills a process of the gang, or the server, at three steps that are given; remembers all processes it saw."""

    def __init__(self, server: LiveServer, victims: dict[int, str]) -> None:
        super().__init__(server, 0)
        self._victims_at = victims
        self.seen: set[int] = set()

    def tell(self, step: int) -> None:
        if step in self._victims_at:
            self.victims.append(self._victims_at[step])
            self.wait()
            self._threads.append(threading.Thread(target=self._strike, args=(self._victims_at[step], 0.01)))
            self._threads[-1].start()

    def _strike(self, victim: str, delay_s: float) -> None:
        # The engine that was killed before must be there again, and its gang complete.
        self._server.wait_until_ready()
        lead = self._server.engine_pid()
        assert lead is not None
        gang = {lead, *children(lead)}
        self.seen |= gang
        assert len(gang) == 2
        time.sleep(delay_s)
        if victim == "server":
            self._server.kill()
            self._server.start(wait_s=0)
        else:
            os.kill(lead if victim == "lead" else (gang - {lead}).pop(), signal.SIGKILL)
        wait_until_gone(gang)


def meeting_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def test_a_run_goes_on_whichever_process_is_killed(tmp_path: Path) -> None:
    before = meeting_folders()
    with LiveServer(tmp_path / "calm", *FLAGS) as server:
        undisturbed = test_crashes.train(server, None)
    with LiveServer(tmp_path / "killed", *FLAGS) as server:
        killer = GangKiller(server, dict(zip((5, 15, 25), VICTIMS, strict=True)))
        disturbed = test_crashes.train(server, killer)
        lead = server.engine_pid()
        assert lead is not None
        last = {lead, *children(lead)}
        log = server.log()
    assert killer.victims == list(VICTIMS)
    assert len(killer.seen) == 6
    assert disturbed == undisturbed
    assert "process 1 of the engine's 2 was killed by signal 9" in log
    wait_until_gone(killer.seen | last)
    assert meeting_folders() <= before


@pytest.fixture
def tiny() -> ModelInfo:
    return registry.resolve("tinkex/tiny", CACHE)


def test_a_process_that_hangs_ends_the_gang_with_a_reason(
    tiny: ModelInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex.engine")

    async def run() -> None:
        async with running(tiny, 2, gang_wait_s=3.0) as engine:
            lead = engine.state.pid
            (member,) = children(lead)
            await create(engine, tiny, ("ann",))
            await train(engine, tiny, range(1), tmp_path / "before", ("ann",))
            os.kill(member, signal.SIGSTOP)
            with pytest.raises(EngineDied):
                await train(engine, tiny, range(1, 2), tmp_path / "stopped", ("ann",))
            await engine.ready()
            assert not is_alive(member)
            assert engine.state.pid != lead
            await create(engine, tiny, ("ann",))
            await train(engine, tiny, range(1), tmp_path / "after", ("ann",))

    asyncio.run(run())
    assert "The engine cannot go on: a micro-batch failed in process 0 of 2" in caplog.text


def test_an_idle_gang_ends_as_soon_as_a_process_does(tiny: ModelInfo) -> None:
    async def run() -> None:
        async with running(tiny, 2) as engine:
            lead, generation = engine.state.pid, engine.state.generation
            os.kill(children(lead)[0], signal.SIGKILL)
            end = time.monotonic() + GONE_WITHIN_S
            while engine.state.generation == generation:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert not is_alive(lead)
            await engine.ready()

    asyncio.run(run())


def test_what_cannot_start_says_why(tiny: ModelInfo) -> None:
    async def start(device: str, **wrong: str) -> None:
        model = ModelInfo(name="test/wrong", folder=wrong["folder"]) if wrong else tiny
        engine = LocalEngine([model], device=device, devices=2)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineUnusable, match=r"has no such device|has 0 of its kind"):
        asyncio.run(start("cuda"))
    with pytest.raises(EngineUnusable, match="cannot be loaded"):
        asyncio.run(start("cpu", folder="/nonexistent"))
