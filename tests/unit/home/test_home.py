"""The files that programs of a user find in a data folder: the service that runs there, its users, its owner's key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import done, new_run, running, scenario, step
from tinkex.clock import Clock
from tinkex.home.lock import FileLock, holder_pid
from tinkex.home.owner_key import KEY_FILE, read_key
from tinkex.home.running import SERVICE_FILE, RunningService, remove_service, running_service, write_service
from tinkex.home.users import USERS, UserLock, user_pids
from tinkex.server.main import _used_at
from tinkex.server.upkeep.home import SharedHome
from tinkex.settings import ServeConfig

HOLD = """
import sys
from pathlib import Path
from tinkex.home.users import UserLock
user = UserLock(Path(sys.argv[1]))
print("in", flush=True)
sys.stdin.read()
"""


def service(**fields: object) -> RunningService:
    known = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "version": "1", "models": (), "started_at": 0.0}
    return RunningService(**{**known, **fields})  # type: ignore[arg-type]


def test_a_service_is_found_while_its_process_holds_the_lock_and_no_longer(tmp_path: Path) -> None:
    lock = FileLock(tmp_path)
    lock.acquire()
    write_service(tmp_path, service(models=("tinkex/tiny",), settings={"threads": 1}))
    assert (tmp_path / SERVICE_FILE).stat().st_mode & 0o077 == 0
    found = running_service(tmp_path)
    assert found is not None and found.settings == {"threads": 1}
    lock.release()
    assert running_service(tmp_path) is None, "what kill -9 left behind"
    with lock:
        write_service(tmp_path, service(pid=1))
        assert running_service(tmp_path) is None, "another process has the lock now, and is not ready"
        remove_service(tmp_path)
        assert running_service(tmp_path) is None


def test_a_file_of_another_version_is_read_and_half_a_file_is_no_service(tmp_path: Path) -> None:
    with FileLock(tmp_path):
        write_service(tmp_path, service())
        text = (tmp_path / SERVICE_FILE).read_text()
        (tmp_path / SERVICE_FILE).write_text(text.replace("{", '{"new": 1,', 1))
        assert running_service(tmp_path) is not None
        (tmp_path / SERVICE_FILE).write_text(text[:20])
        assert running_service(tmp_path) is None


def test_looking_for_a_service_never_keeps_one_from_starting(tmp_path: Path) -> None:
    looker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from tinkex.home.lock import holder_pid\n"
            "print('in', flush=True)\nwhile True: holder_pid(Path(sys.argv[1]))",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert looker.stdout is not None and looker.stdout.readline()
        for _ in range(200):
            with FileLock(tmp_path):
                pass
    finally:
        looker.kill()
        looker.communicate()


def test_a_user_that_was_killed_is_no_user(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        own = UserLock(tmp_path)
        assert sorted(user_pids(tmp_path)) == sorted([other.pid, os.getpid()])
        other.kill()
    assert user_pids(tmp_path) == [os.getpid()]
    own.release()
    own.release()
    assert user_pids(tmp_path) == [] == list((tmp_path / USERS).iterdir())


class QuickClock(Clock):
    """Waits for nothing: a sleep moves the time."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


def test_an_unused_service_ends_and_one_that_is_asked_does_not(tmp_path: Path) -> None:
    clock = QuickClock()
    with FileLock(tmp_path):
        home = SharedHome(ServeConfig(data_dir=tmp_path), "http://127.0.0.1:1", clock, detached_s=10.0)
        home.announce(needs_key=False)
        found = running_service(tmp_path)
        assert found is not None and found.needs_key and found.ends_unused
        asyncio.run(home.until_unused(lambda: min(clock.now(), 100.0)))
        assert 110 <= clock.now() < 112, "ten seconds after the last request"
        assert not (tmp_path / SERVICE_FILE).exists(), "no program joins it any more"


def test_a_program_that_joins_while_the_service_ends_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = QuickClock()
    with FileLock(tmp_path):
        home = SharedHome(ServeConfig(data_dir=tmp_path), "http://127.0.0.1:1", clock, detached_s=10.0)
        home.announce(needs_key=False)
        joined: list[UserLock] = []
        retract = home.retract

        def joins_just_before() -> None:
            if not joined:
                joined.append(UserLock(tmp_path))
                assert running_service(tmp_path) is not None, "so the program uses it"
            retract()

        monkeypatch.setattr(home, "retract", joins_just_before)

        async def use() -> None:
            ending = asyncio.create_task(home.until_unused(lambda: 0.0))
            while clock.now() < 50:
                await asyncio.sleep(0)
            assert not ending.done() and running_service(tmp_path) is not None
            joined[0].release()
            await ending

        asyncio.run(use())


def test_the_key_of_the_owner_stays_the_same(tmp_path: Path) -> None:
    config = ServeConfig(data_dir=tmp_path)
    with FileLock(tmp_path):
        key = SharedHome(config, "http://127.0.0.1:1", QuickClock()).key
        assert SharedHome(config, "http://127.0.0.1:1", QuickClock()).key == key == read_key(tmp_path)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    assert holder_pid(tmp_path) is None


@scenario
async def test_a_service_is_used_while_it_works_for_a_program_that_has_gone(tmp_path: Path) -> None:
    """Twenty seconds after its last user it ended, and what that had sent ahead waited for the next start."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as served:
        queue = await new_run(served)
        assert _used_at(served) == served.access.last_request_at
        engine.gate.clear()
        waiting = await step(served, queue, 1, 0.5)
        assert _used_at(served) > served.access.last_request_at
        engine.gate.set()
        await done(served, waiting)
        assert _used_at(served) == served.access.last_request_at
