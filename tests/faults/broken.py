"""Takes one protection away at a time, to show that the checker notices. Nothing in `src` knows of it.

Each row of `PROTECTIONS` replaces a function of the running server, engine or client. Undisturbed programs still give
the right results with most of them: it needs the fault that the protection is for. `python -m tests.faults --without
NAME` runs schedules that have such a fault until the checker reports a violation.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from tests.faults.checker import Promise

LATE_S = 0.3
"""How long after its confirmation a write reaches the disk, where the protection is that it comes before."""


@dataclass(frozen=True, kw_only=True)
class Protection:
    what: str
    """The protection, as the rest of the sentence "The service does without …"."""
    side: Literal["server", "client"]
    """Whose process is patched; engines are forked from their server."""
    remove: Callable[[], None]
    faults: frozenset[str]
    """Kinds of faults that the protection is for; schedules without one of them are skipped. Empty: any schedule."""
    promises: frozenset[Promise]
    """What the checker should report, one of them at least."""
    is_of_cluster: bool = False
    """Whether only several servers need it."""
    cluster_faults: frozenset[str] = frozenset()
    """As `faults`, for the schedules of a cluster; empty: they do not show it."""


def names() -> list[str]:
    """Return the protections of a server that is alone."""
    return [name for name, protection in PROTECTIONS.items() if not protection.is_of_cluster]


def names_for_cluster() -> list[str]:
    """Return the protections that the schedules of a cluster show."""
    return [name for name, protection in PROTECTIONS.items() if protection.cluster_faults]


def take_away(name: str, side: Literal["server", "client"]) -> None:
    """Remove a protection from this process, if it is one of this side. Cannot be undone."""
    if name and PROTECTIONS[name].side == side:
        PROTECTIONS[name].remove()


def _replace(owner: Any, name: str, new: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more: tests/faults/broken.py patches it"
    if callable(new) and (reason := misfit_reason(getattr(owner, name), new)):
        raise AssertionError(f"{owner}.{name}: {reason}; tests/faults/broken.py patches it")
    setattr(owner, name, new)


def misfit_reason(old: Callable[..., Any], new: Callable[..., Any]) -> str | None:
    """Return why a replacement cannot be called as the function is, or None.

    A patch that only raises TypeError breaks promises too, and proves nothing.
    """
    parameters = inspect.signature(old).parameters.values()
    by_position = [entry for entry in parameters if entry.kind in _POSITIONAL]
    by_name = {entry.name: 0 for entry in parameters if entry.kind is inspect.Parameter.KEYWORD_ONLY}
    required = [entry for entry in by_position if entry.default is inspect.Parameter.empty]
    optional = {entry.name: 0 for entry in by_position if entry.default is not inspect.Parameter.empty}
    try:
        inspect.signature(new).bind(*by_position, **by_name)
        inspect.signature(new).bind(*required, **optional, **by_name)
    except TypeError as error:
        return f"the patch has another signature: {error}"
    return None


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# ── The journal


def _journal_after_response() -> None:
    """Confirm an operation first and write its row a moment later, or when somebody asks for it."""
    from tinkex.store.errors import Duplicate
    from tinkex.store.journal import Journal

    add, lock = Journal.add_operation, threading.RLock()
    late: list[tuple[Any, ...]] = []

    def flush() -> None:
        with lock:
            rows, late[:] = list(late), []
            for row in rows:
                try:
                    add(*row)
                except Duplicate:
                    pass

    def add_later(self: Any, operation: Any, command: Any, home: Any = None) -> None:
        with lock:
            late.append((self, operation, command, home))
        timer = threading.Timer(LATE_S, flush)
        timer.daemon = True
        timer.start()

    def after_flush(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            flush()
            return function(*args, **options)

        return run

    _replace(Journal, "add_operation", add_later)
    readers = ("get_operation", "operations_of", "recent_operations", "command", "last_seq", "failures")
    for name in ("finish", "fail", "set_snapshot", *readers):
        _replace(Journal, name, after_flush(getattr(Journal, name)))


def _no_duplicate_detection() -> None:
    """Take a number that came in before for new work."""
    from tinkex.server.training.intake import Intake

    submit = Intake.submit

    async def submit_always(self: Any, queue: Any, seq_id: Any, *rest: Any, **options: Any) -> str:
        is_repeated = seq_id in queue.taken or (queue.run.id, seq_id) in self._arriving
        return await submit(self, queue, None if is_repeated else seq_id, *rest, **options)

    _replace(Intake, "submit", submit_always)


def _no_order() -> None:
    """Run what arrived last first: a stack instead of a queue."""
    from tinkex.server.training.run_queue import RunQueue

    def head(self: Any, now: float, gap_s: float) -> tuple[Any, float | None]:
        if self.is_busy or not self.waiting:
            return None, None
        return self.waiting[max(self.waiting)], None

    _replace(RunQueue, "head", head)


# ── Rebuilding a run


def _no_replay() -> None:
    """Rebuild a run from its snapshot, or from its seed, and forget what the journal has after it."""
    from tinkex.server.training import residency

    _replace(residency, "REPLAYED", frozenset())


def _wrong_replay_position() -> None:
    """Write down a snapshot as one operation older than it is: a replay runs that operation twice."""
    from tinkex.store.journal import Journal

    set_snapshot = Journal.set_snapshot

    def set_older(self: Any, run_id: str, folder: str, seq_id: int, home: Any = None) -> str | None:
        return set_snapshot(self, run_id, folder, seq_id - 1, home)

    _replace(Journal, "set_snapshot", set_older)


# ── Tenants


def _no_tenant_check() -> None:
    """Give every tenant the run, session or sampler whose id it knows."""
    from tinkex.server.http.errors import not_found
    from tinkex.server.http.requests import ApiRequest

    async def any_tenants(self: Any, noun: str, name: str, get: Any) -> Any:
        record = await self.service.db(get, name)
        if record is None:
            raise not_found(noun, name)
        return record

    _replace(ApiRequest, "_own", any_tenants)


# ── The client


def _new_number_for_a_retry() -> None:
    """Give every attempt of a training request the next number instead of its own."""
    from tinkex.client._calls import attempts
    from tinkex.client._calls import submit as submitting
    from tinkex.client._runtime import operation_queue
    from tinkex.errors import APIError

    submit, call = submitting.submit, attempts.call
    shifts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    once: set[int] = set()

    async def call_once(*args: Any, operation: Any, **options: Any) -> Any:
        if operation.number in once:
            options["max_attempts"] = 1
        return await call(*args, operation=operation, **options)

    async def submit_shifted(
        link: Any, operation: Any, endpoint: Any, seq_id: int, encode: Any, *rest: Any, **options: Any
    ) -> Any:
        session = operation.session
        once.add(operation.number)
        for attempt in range(20):
            try:
                number = seq_id + shifts.get(session, 0)
                return await submit(link, operation, endpoint, number, encode, *rest, **options)
            except APIError as error:
                if not error.retryable or attempt == 19:
                    raise
                shifts[session] = shifts.get(session, 0) + 1
            await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    _replace(submitting, "call", call_once)
    _replace(operation_queue, "submit", submit_shifted)


# ── Files


def _row_before_files() -> None:
    """Confirm a checkpoint whose files reach their folder a moment later."""
    from tinkex.engine.adapters import checkpoint
    from tinkex.engine.sampling import adapter_cache

    save, load, read = checkpoint.save, checkpoint.load, checkpoint.read_weights
    late: dict[Path, Path] = {}
    lock = threading.Lock()

    def finish() -> None:
        with lock:
            for folder, staging in late.items():
                os.rename(staging, folder)
            late.clear()

    def save_later(adapter: Any, folder: Path, **options: Any) -> Any:
        files = save(adapter, folder, **options)
        with lock:
            late[folder] = folder.with_name(folder.name + ".late")
            os.rename(folder, late[folder])
        timer = threading.Timer(LATE_S, finish)
        timer.daemon = True
        timer.start()
        return files

    def load_after(*args: Any, **options: Any) -> None:
        finish()
        load(*args, **options)

    def read_after(*args: Any, **options: Any) -> Any:
        finish()
        return read(*args, **options)

    _replace(checkpoint, "save", save_later)
    _replace(checkpoint, "load", load_after)
    _replace(checkpoint, "read_weights", read_after)
    _replace(adapter_cache, "read_weights", read_after)


def _sweep_at_once() -> None:
    """Delete folders without a row by the time of day alone, as before seed 106 was mended; on a slow disk."""
    from tinkex.engine.adapters import checkpoint
    from tinkex.server.upkeep import janitor

    save = checkpoint.save

    def save_slowly(adapter: Any, folder: Path, **options: Any) -> Any:
        files = save(adapter, folder, **options)
        threading.Event().wait(LATE_S)
        return files

    _replace(janitor, "MIN_ORPHAN_SEEN_S", 0.0)
    _replace(checkpoint, "save", save_slowly)


# ── Several servers


def _no_fence() -> None:
    """Let a node write about a run that is at home elsewhere by now."""
    from tinkex.store.journal import Journal

    def unchecked(self: Any, connection: Any, run_id: str, home: Any) -> None: ...

    _replace(Journal, "_check_home", unchecked)


def _no_end_of_leases() -> None:
    """Let a node that was given up renew its lease, and go on as if it had not been."""
    from sqlalchemy import update

    from tinkex.store.cluster.cluster_store import ClusterStore
    from tinkex.store.lease import NOW
    from tinkex.store.tables import nodes

    renew = ClusterStore.renew

    def renew_always(self: Any, node_id: str, lease_s: float, facts: Any) -> bool | None:
        with self._write() as connection:
            connection.execute(update(nodes).where(nodes.c.id == node_id).values(until=NOW + lease_s))
        return renew(self, node_id, lease_s, facts)

    _replace(ClusterStore, "renew", renew_always)


_KILLS = frozenset({"kill server", "kill both"})
_DEATHS = _KILLS | {"kill engine", "restart server"}
_LOST_RESPONSES = frozenset({"drop after", "cut response", "reset"})
_REPEATS = frozenset({"repeat at once", "repeat later"})
_WRONG: frozenset[Promise] = frozenset({"answered", "succeeded", "once and in order", "exact results", "exact weights"})

PROTECTIONS: dict[str, Protection] = {
    "journal-first": Protection(
        what="writing an operation to the journal before it is confirmed",
        side="server",
        remove=_journal_after_response,
        faults=_KILLS,
        promises=frozenset({"succeeded", "answered", "once and in order"}),
        cluster_faults=frozenset({"kill node"}),
    ),
    "duplicates": Protection(
        what="recognising a sequence number that came in before",
        side="server",
        remove=_no_duplicate_detection,
        faults=_REPEATS | _LOST_RESPONSES,
        promises=frozenset({"once and in order", "exact results", "exact weights"}),
    ),
    "order": Protection(
        what="running the operations of a run in the order of their numbers",
        side="server",
        remove=_no_order,
        faults=frozenset(),
        promises=frozenset({"once and in order", "exact results", "exact weights"}),
    ),
    "replay": Protection(
        what="replaying the journal after the engine has died",
        side="server",
        remove=_no_replay,
        faults=_DEATHS,
        promises=frozenset({"exact results", "exact weights"}),
    ),
    "replay-position": Protection(
        what="the exact position of a snapshot in the journal",
        side="server",
        remove=_wrong_replay_position,
        faults=_DEATHS,
        promises=frozenset({"exact results", "exact weights"}),
    ),
    "tenants": Protection(
        what="comparing the owner of a run with the tenant of the request",
        side="server",
        remove=_no_tenant_check,
        faults=frozenset(),
        promises=frozenset({"isolated"}),
    ),
    "same-bytes": Protection(
        what="retrying with the same sequence number and the same bytes",
        side="client",
        remove=_new_number_for_a_retry,
        faults=_LOST_RESPONSES | _KILLS,
        promises=frozenset({"once and in order", "exact results", "exact weights"}),
    ),
    "files-first": Protection(
        what="completing a checkpoint's files before its row is written",
        side="server",
        remove=_row_before_files,
        faults=frozenset({"kill engine", "kill both", "kill server"}),
        promises=frozenset({"readable", "succeeded"}),
    ),
    "sweep": Protection(
        what="waiting, by a clock that does not jump, before a folder without a row is deleted",
        side="server",
        remove=_sweep_at_once,
        faults=frozenset({"jump clock", "expire sessions"}),
        promises=frozenset({"readable", "succeeded"}),
    ),
    "fence": Protection(
        what="refusing what a node writes about a run that is at home elsewhere by now",
        side="server",
        remove=_no_fence,
        faults=frozenset(),
        promises=_WRONG,
        is_of_cluster=True,
        cluster_faults=frozenset({"silence with work in hand, then lose its heir"}),
    ),
    "renewal": Protection(
        what="telling a node that renews its lease that it was given up",
        side="server",
        remove=_no_end_of_leases,
        faults=frozenset(),
        promises=frozenset({"answered", "succeeded", "goes on"}),
        is_of_cluster=True,
        cluster_faults=frozenset({"freeze idle node, then lose its heir"}),
    ),
}
