"""Runs one schedule: starts everything, runs the programs, breaks things, heals them, and checks what is left."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from tests.faults import broken, hooks
from tests.faults.checker import Expectation, Expected, Violation, check, expected_of
from tests.faults.databases import AnyDatabase, BreakablePostgres, PostgresSchema, SqliteFile
from tests.faults.history import FaultRecord, History, Recorder, Stall, timeline
from tests.faults.program import PROGRAMS, program_of
from tests.faults.proxy import Proxy
from tests.faults.schedule import NAMES, Schedule, schedule_of, undisturbed
from tests.faults.supervisor import Disk, Supervisor
from tests.faults.tenant import Board, Tenant, final_run, key_of
from tinkex import clock

PROGRAM_WITHIN_S = 150.0
CLOSED_WITHIN_S = 3.0
PATIENCE = 0.25
"""The client's pauses between attempts, as a share of what they are. A schedule would be pauses mostly."""
KNOWN_THREADS = ("MainThread", "proxy", "tinkex-loop", "asyncio_")
"""The last are the client loop's own, for large bodies: it keeps them for the next client of this process."""


class AnySchedule(Protocol):
    """What a bench needs to know of a schedule, whatever is in it."""

    @property
    def seed(self) -> int: ...
    @property
    def programs(self) -> dict[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    schedule: AnySchedule
    history: History
    violations: list[Violation]
    seconds: float
    timeline: str
    log: str
    without: str = ""
    """The protection that was taken away."""
    program: str = "tests.faults"

    def report(self) -> str:
        """Return the violations, and how to see them again."""
        if not self.violations:
            return f"seed {self.schedule.seed}: kept every promise ({self.seconds:.1f} s)"
        lines = [f"seed {self.schedule.seed}: {len(self.violations)} violations ({self.seconds:.1f} s)"]
        lines += [f"  {violation}" for violation in self.violations]
        without = f" --without {self.without}" if self.without else ""
        lines += [f"  to see it again: python -m {self.program} --seed {self.schedule.seed}{without}"]
        return "\n".join(lines)


class Bench:
    """What schedules of one process share: the warm process, one PostgreSQL, the hooks of this process."""

    program = "tests.faults"
    """The command that runs a schedule again."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Of every server."""
    hurries = True
    """Whether clients wait for a part of the time only that they should."""

    def __init__(self, warmth: str) -> None:
        self._warmth = warmth
        self._postgres: BreakablePostgres | None = None
        self._stalls: list[dict[str, object]] = []
        self._without = ""
        if self.hurries:
            _hurry()
        hooks.watch_loops(self._stalls.append)

    def close(self) -> None:
        if self._postgres is not None:
            self._postgres.stop()

    def run(self, schedule: AnySchedule, expected: Mapping[int, Expected] | None = None, without: str = "") -> Outcome:
        """Run a schedule, with a protection taken away where `without` names one.

        Without an expectation nothing is compared with the undisturbed run. A protection of the client stays away for
        the rest of this process.
        """
        if without != self._without:
            assert not self._without, f"{self._without} was taken away in this process already"
            self._without = without
            broken.take_away(without, "client")
        recorder = Recorder()
        self._stalls.clear()
        # A client has not the objects of hundreds of schedules: the collector would look through them on its loop.
        gc.collect()
        gc.freeze()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinkex-faults-")))
            log = self._perform(schedule, stack, folder, recorder, without)
        self._add_stalls(recorder)
        # A process of higher niceness waits for its core longer beside others: each step is worth 1.25 times.
        recorder.history.load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1) * 1.25 ** os.nice(0)
        by_tenant = {} if expected is None else {name: expected[number] for name, number in schedule.programs.items()}
        violations = check(recorder.history, Expectation(by_tenant=by_tenant))
        return Outcome(
            schedule=schedule,
            history=recorder.history,
            violations=violations,
            seconds=recorder.now(),
            timeline=timeline(recorder.lines),
            log=log,
            without=without,
            program=self.program,
        )

    def _perform(self, schedule: AnySchedule, stack: ExitStack, folder: Path, recorder: Recorder, without: str) -> str:
        """Start servers in a folder, play the schedule, and return the logs. `stack` puts everything away."""
        assert isinstance(schedule, Schedule)
        disk = Disk(folder / "data")
        stack.callback(disk.close)
        database = self._database(schedule, disk)
        stack.callback(database.close)
        flags = ["--snapshot-every-s", str(schedule.snapshot_every_s)]
        flags += [word for name in schedule.programs for word in ("--api-key", key_of(name))]
        # A cold server is a plain one, which has every protection.
        warmth = None if schedule.is_cold and not without else self._warmth
        servers = [
            Supervisor(
                folder,
                database,
                disk,
                recorder,
                flags=flags,
                warmth=warmth,
                without=without,
                name=_name(number),
                environment=self.environment,
            )
            for number in range(schedule.servers)
        ]
        for server in servers:
            stack.callback(server.kill_all)
        _play(schedule, servers, recorder)
        return "\n".join(server.log() for server in servers)

    def expectations(self, wanted: Collection[int] | None = None) -> dict[int, Expected]:
        """Run every program once, undisturbed, a few tenants at a time; only groups with one that is wanted."""
        expected: dict[int, Expected] = {}
        for programs in self._groups():
            if wanted is not None and not set(wanted) & set(programs.values()):
                continue
            outcome = self.run(undisturbed(programs))
            assert not outcome.violations, f"undisturbed:\n{outcome.report()}\n{outcome.timeline}"
            expected |= {number: expected_of(outcome.history, name) for name, number in programs.items()}
        return expected

    def _groups(self) -> list[dict[str, int]]:
        """Return every program, as many at a time as a schedule has tenants."""
        firsts = range(0, PROGRAMS, len(NAMES))
        return [dict(zip(NAMES, range(first, min(first + len(NAMES), PROGRAMS)), strict=False)) for first in firsts]

    def _database(self, schedule: Schedule, disk: Disk) -> AnyDatabase:
        if schedule.database == "sqlite":
            return SqliteFile(disk.folder)
        return PostgresSchema(self._shared_postgres(), f"seed_{schedule.seed}")

    def _shared_postgres(self) -> BreakablePostgres:
        if self._postgres is None:
            self._postgres = BreakablePostgres()
        return self._postgres

    def _add_stalls(self, recorder: Recorder) -> None:
        for row in list(self._stalls):
            if str(row["thread"]).startswith("tinkex"):
                began_s = float(str(row["began"])) - recorder.began
                seconds, cpu_s = float(str(row["seconds"])), float(str(row["cpu_s"]))
                stall = Stall(loop="the client", began_s=began_s, seconds=seconds, cpu_s=cpu_s, what=str(row["what"]))
                recorder.history.stalls.append(stall)


def _name(number: int) -> str:
    """Return the name of a server, which is in messages and in the names of its files."""
    return "server" if number == 0 else f"server {number + 1}"


def _play(schedule: Schedule, servers: list[Supervisor], recorder: Recorder) -> None:
    """Run the programs while things break, then look at what is left."""
    board = Board()
    proxy = Proxy([server.port for server in servers], schedule.network, recorder, spy(board))
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        recorder.say("ready")
        tenants = [Tenant(name, program_of(number), proxy.url, recorder, board)
                   for name, number in schedule.programs.items()]  # fmt: skip
        run_programs(tenants, partial(_break_things, schedule, servers, proxy, recorder), PROGRAM_WITHIN_S, 30)
        wait_closed(proxy, recorder)
        requests = proxy.requests
        for server in servers:
            server.check_alive()
        look(servers, tenants, recorder)
        if proxy.requests > requests:
            recorder.history.left_over.append(f"Clients sent {proxy.requests - requests} requests after close().")
        for server in servers:
            server.stop()
            recorder.history.stalls += server.stalls()
        recorder.say("stopped")
    except Exception as error:
        recorder.history.crashes.append(f"The schedule broke off: {type(error).__name__}: {error}")
    finally:
        proxy.close()


def run_programs(
    tenants: list[Tenant], break_things: Callable[[threading.Event], None], within_s: float, mended_within_s: float
) -> None:
    """Run the programs of all tenants to their ends, while a thread breaks things until its event is set."""
    for tenant in tenants:
        tenant.thread.start()
    is_over = threading.Event()
    breaker = threading.Thread(target=break_things, args=(is_over,), name="breaker", daemon=True)
    breaker.start()
    end = time.monotonic() + within_s
    for tenant in tenants:
        tenant.thread.join(max(end - time.monotonic(), 0.1))
    is_over.set()
    breaker.join(mended_within_s)


def _break_things(
    schedule: Schedule, servers: list[Supervisor], proxy: Proxy, recorder: Recorder, is_over: threading.Event
) -> None:
    """Do the heavy faults one after the other, each when its request has passed."""
    for fault in schedule.heavy:
        if not proxy.wait_for_training_requests(fault.at, is_over.is_set):
            recorder.say(f"not reached: {fault}")
            continue
        threading.Event().wait(fault.delay_s)
        began_s = recorder.now()
        recorder.say(f"begins: {fault}")
        note = ""
        try:
            if fault.kind == "partition":
                proxy.partition(True)
                threading.Event().wait(fault.seconds)
                proxy.partition(False)
            else:
                note = servers[fault.server].commit(fault)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            recorder.history.crashes.append(f"The fault {fault} could not be done: {note}")
        record = FaultRecord(what=fault.kind, began_s=began_s, ended_s=recorder.now(), note=note)
        recorder.add(recorder.history.faults, record)
        recorder.say(f"ends: {fault.kind} {note}")
    for server in servers:
        server.heal()


def look(servers: Sequence[Supervisor], tenants: list[Tenant], recorder: Recorder) -> None:
    """Ask a server itself, past the proxy, for the final state: each tenant another server, if there are several."""
    for server in servers:
        server.check_alive()
    for server in servers:
        server.wait_until_ready()
    for number, tenant in enumerate(tenants):
        try:
            final = final_run(servers[number % len(servers)].url, tenant)
        except Exception as error:
            recorder.say(f"no final state of {tenant.name}: {type(error).__name__}: {error}")
            continue
        recorder.history.finals.append(final)
        recorder.say(f"final state of {tenant.name}: {final}")


def wait_closed(proxy: Proxy, recorder: Recorder) -> None:
    """Record what is still there a while after every client was closed."""
    end = time.monotonic() + CLOSED_WITHIN_S
    while (left := _left(proxy)) and time.monotonic() < end:
        threading.Event().wait(0.02)
    recorder.history.left_over += left


def _left(proxy: Proxy) -> list[str]:
    left = [f"The thread {thread.name} still runs after close()." for thread in threading.enumerate()
            if not thread.name.startswith(KNOWN_THREADS)]  # fmt: skip
    # Idle connections stay for a minute, for the next client of this process (client/_http/pool.py).
    if proxy.in_flight:
        left.append(f"{proxy.in_flight} requests are still in flight after close().")
    return left


def spy(board: Board, names: Sequence[str] = NAMES) -> Callable[[str, bytes], str | None]:
    """Return what finds another tenant's id in a response."""
    owners = {key_of(name): name for name in names}

    def owner_of(key: str, body: bytes) -> str | None:
        reader = owners.get(key)
        if b"is not known" in body:
            return None  # the failure of an intrusion, which repeats the path that was asked for
        for owner, run_id in list(board.runs.items()):
            if reader is not None and owner != reader and run_id.encode() in body:
                return owner
        return None

    return owner_of


def _hurry() -> None:
    """Shorten the client's pauses."""

    async def sleep(self: clock.Clock, seconds: float) -> None:
        await asyncio.sleep(seconds * PATIENCE)

    clock.Clock.sleep = sleep  # type: ignore[method-assign]


__all__ = ["Bench", "Outcome", "look", "schedule_of", "spy", "wait_closed"]
