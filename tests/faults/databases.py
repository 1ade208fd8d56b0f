"""SQLite and PostgreSQL for a schedule, and how each becomes locked, slow or gone for a while.

SQLite lives in the data folder. A PostgreSQL is shared by the schedules of a process, each in a schema of its own: it
takes a second to make.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Literal

import psycopg

from tests.unit.store.postgres import PostgresServer

PULSE_S = 0.03
"""A slow database: stopped and released in turn, for so long each."""
LOCK_WITHIN_S = 5.0


class SqliteFile:
    """The file in a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self.url = f"sqlite:///{data_dir / 'tinkex.db'}"
        self._file = data_dir / "tinkex.db"

    def lock(self, seconds: float) -> None:
        """Hold the write lock from another process's point of view, as a backup or `tinkex key` does."""
        connection = sqlite3.connect(self._file, isolation_level=None, timeout=LOCK_WITHIN_S)
        try:
            connection.execute("BEGIN IMMEDIATE")
            threading.Event().wait(seconds)
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            pass  # the server itself holds it, or its disk is full: then it has trouble enough
        finally:
            connection.close()

    def slow(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds / PULSE_S / 2))):
            self.lock(PULSE_S)
            threading.Event().wait(PULSE_S)

    def lose(self, seconds: float) -> None:
        """A local file cannot go away while it is open: lock it against readers too, as far as SQLite can."""
        self.lock(seconds)

    def stop(self, seconds: float) -> None:
        """There is no process to stop: a writer that hangs with the lock in its hand is what comes closest."""
        self.lock(seconds)

    def restart(self, seconds: float) -> None:
        self.lock(seconds)

    def close(self) -> None:
        """Nothing to do: it goes with its folder."""


class BreakablePostgres(PostgresServer):
    """A PostgreSQL that can be stopped, killed and started again."""

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the server and all its children; a stopped parent alone would change nothing."""
        parent = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def end(self, mode: Literal["immediate", "fast"]) -> None:
        """End it: like a crash, or with an orderly goodbye to its clients."""
        self._run("pg_ctl", "-w", "-D", self._data, "-m", mode, "stop")

    def start_again(self) -> None:
        options = f"-c listen_addresses='' -k {self.folder} -F -c shared_buffers=16MB"
        self._run("pg_ctl", "-w", "-D", self._data, "-l", self.folder / "log", "-o", options, "start")


class PostgresSchema:
    """One schema of a shared PostgreSQL."""

    def __init__(self, postgres: BreakablePostgres, name: str) -> None:
        self._postgres, self._name = postgres, name
        self.url = postgres.url(name)
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
            connection.execute(f"CREATE SCHEMA {name}")

    def lock(self, seconds: float) -> None:
        """Hold every table, as a schema change or a full vacuum does."""
        with psycopg.connect(self._postgres.url(self._name), connect_timeout=5) as connection:
            connection.execute(f"SET lock_timeout = '{LOCK_WITHIN_S:.0f}s'")
            try:
                connection.execute("LOCK TABLE runs, operations, payloads, sessions IN ACCESS EXCLUSIVE MODE")
                threading.Event().wait(seconds)
            except psycopg.Error:
                pass
            connection.rollback()

    def slow(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds / PULSE_S / 2))):
            self._freeze(PULSE_S)
            threading.Event().wait(PULSE_S)

    def lose(self, seconds: float) -> None:
        """Kill it, and start it again after a while."""
        self._end("immediate", seconds)

    def restart(self, seconds: float) -> None:
        """End it as an administrator does, and start it again after a while."""
        self._end("fast", seconds)

    def stop(self, seconds: float) -> None:
        """Stop all its processes for a while: connections stay open, and nothing comes back."""
        self._freeze(seconds)

    def _end(self, mode: Literal["immediate", "fast"], seconds: float) -> None:
        self._postgres.end(mode)
        threading.Event().wait(seconds)
        self._postgres.start_again()

    def _freeze(self, seconds: float) -> None:
        self._postgres.signal_all(signal.SIGSTOP)
        try:
            threading.Event().wait(seconds)
        finally:
            self._postgres.signal_all(signal.SIGCONT)

    def close(self) -> None:
        with psycopg.connect(self._postgres.url(), autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {self._name} CASCADE")


AnyDatabase = SqliteFile | PostgresSchema
