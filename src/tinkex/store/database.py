"""The database connection under the store: one at a time, every call a transaction, driver errors translated."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, Executable, Insert, Row, Select, Table, create_engine, event, func
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, QueuePool

from tinkex.clock import REAL
from tinkex.errors import ConfigError, MissingExtra
from tinkex.store.disk import Reserve
from tinkex.store.errors import DiskFull, Unavailable, translated
from tinkex.store.payloads import Payloads, StoredPayload

Durability = Literal["normal", "full"]
R = TypeVar("R")

LOCK_WAIT_S = 10.0
"""How long a write waits while another program (`tinkex key`, a backup) holds the SQLite file."""
CONNECT_S = 5
"""How long to wait for a new connection to PostgreSQL."""
STATEMENT_S = 8.0
"""How long PostgreSQL works on one statement, waiting for locks included. The call can be retried."""
IDLE_IN_TRANSACTION_S = 10.0
"""How long PostgreSQL keeps the locks of a transaction whose client says nothing: a frozen server holds them longer."""
RETRY_WAL_S = 0.01
"""How soon to retry the switch to WAL, whose lock SQLite itself does not wait for."""
MAX_INTEGER = 2**63 - 1
_WRITE = "BEGIN IMMEDIATE"


class Database:
    """The base class of the parts of the store: connections and transactions. Used by one thread at a time."""

    def __init__(self, engine: Engine, payloads: Payloads) -> None:
        self._engine = engine
        self._payloads = payloads
        is_file = engine.dialect.name == "sqlite"
        self._reserve = Reserve(Path(f"{engine.url.database}-reserve")) if is_file else None
        """Space for deletes when the disk is full. A PostgreSQL server looks after its own disk."""
        self._sqlite_connection: Connection | None = None
        self._inserts: dict[Table, Insert] = {}
        self._fence: Callable[[Connection], None] | None = None
        """Checks, at the start of every transaction that writes, that this program may write."""
        self._driver: Any = None
        """The last connection to PostgreSQL, for `interrupt`."""
        if engine.dialect.name != "sqlite":
            event.listen(engine, "connect", self._note_driver, insert=True)

    def close(self) -> None:
        if self._sqlite_connection is not None:
            self._sqlite_connection.close()
            self._sqlite_connection = None
        self._engine.dispose()
        self._payloads.close()

    def interrupt(self) -> None:
        """Break the call that another thread makes now, which then raises Unavailable: its connection is shut down.

        A database that is stopped, or a network that swallows packets, would keep it for ever. A SQLite file that is
        locked ends its wait by itself.
        """
        try:
            if self._driver is not None and not self._driver.closed:
                with socket.socket(fileno=os.dup(self._driver.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, self._engine.dialect.loaded_dbapi.Error):
            pass  # it is closed already

    def _note_driver(self, connection: Any, _record: object) -> None:
        self._driver = connection

    def _read(self) -> AbstractContextManager[Connection]:
        return self._transaction("BEGIN")

    def _write(self) -> AbstractContextManager[Connection]:
        """Begin a transaction that writes. On SQLite it locks at once, so that what it reads stays true."""
        return self._transaction(_WRITE)

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with translated():
            fence = self._fence if begin == _WRITE else None
            if self._engine.dialect.name != "sqlite":
                with self._engine.begin() as connection:
                    if fence is not None:
                        fence(connection)
                    yield connection
                return
            if self._sqlite_connection is None:
                self._sqlite_connection = self._engine.connect()
            # Kept open: a file cannot be lost as a network connection can, and the pool costs as much as a write.
            with self._sqlite_connection.begin():
                sqlite_connection(self._sqlite_connection).execute(begin)
                if fence is not None:
                    fence(self._sqlite_connection)
                yield self._sqlite_connection

    @contextmanager
    def _write_with_payload(
        self, content: bytes | StoredPayload | None
    ) -> Iterator[tuple[Connection, StoredPayload | None]]:
        """Store a payload and begin a transaction that writes. If that fails, the payload's file is deleted again."""
        with translated():
            payload = self._payloads.write(content) if isinstance(content, bytes) else content
        try:
            with self._write() as connection:
                yield connection, payload
        except Unavailable:
            # The commit may have succeeded although its confirmation was lost. If not, `sweep` deletes the file.
            raise
        except Exception:
            if payload is not None:
                self._payloads.remove([payload.file])
            raise

    def _first(self, kind: type[R], query: Executable, values: Mapping[str, Any] | None = None) -> R | None:
        with self._read() as connection:
            row = connection.execute(query, values).first()
        return None if row is None else as_record(kind, row)

    def _all(self, kind: type[R], query: Select[Any]) -> list[R]:
        with self._read() as connection:
            return [as_record(kind, row) for row in connection.execute(query)]

    def _count(self, query: Select[Any]) -> int:
        with self._read() as connection:
            return int(connection.scalar(query) or 0)

    def _page(self, kind: type[R], query: Select[Any], offset: int, limit: int) -> tuple[list[R], int]:
        """Return a page of a query's records, and how many there are in all."""
        with self._read() as connection:
            page = query.offset(bounded(offset)).limit(bounded(limit))
            records = [as_record(kind, row) for row in connection.execute(page)]
            total = connection.scalar(query.order_by(None).with_only_columns(func.count(), maintain_column_froms=True))
        return records, int(total or 0)

    def keep_reserve(self) -> None:
        """Reserve space for deletes on a full disk, unless it is reserved or there is none."""
        if self._reserve is not None:
            self._reserve.fill()

    def _use_reserve(self, call: Callable[[], R]) -> R:
        """Run a call that makes room. While the disk is too full even for that, give up some of the reserve."""
        while True:
            try:
                return call()
            except DiskFull:
                if self._reserve is None or not self._reserve.give_up():
                    raise

    def _run_write(self, statement: Executable, values: Mapping[str, Any] | None = None) -> None:
        """Run one statement that writes, in its own transaction."""
        with self._write() as connection:
            connection.execute(statement, values)

    def _insert_new(self, table: Table) -> Insert:
        """Return an insert that does nothing if the row exists already; its rowcount tells which happened."""
        if table not in self._inserts:
            dialect = sqlite if self._engine.dialect.name == "sqlite" else postgresql
            insert = dialect.insert(table).on_conflict_do_nothing()
            self._inserts[table] = insert.execution_options(preserve_rowcount=True)
        return self._inserts[table]


def sqlite_connection(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def values_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def as_record(kind: type[R], row: Row[Any]) -> R:
    return kind(**row._mapping)


def bounded(number: int) -> int:
    """Clip an offset or limit to 64 bits. Beyond that the databases fail instead of finding nothing."""
    return min(max(number, 0), MAX_INTEGER)


def connect(url: str, durability: Durability) -> Engine:
    """Return the SQLAlchemy engine for a database address. It connects on first use."""
    address = _address(url)
    if address.get_backend_name() == "sqlite":
        return _sqlite(address, durability)
    if address.get_backend_name() == "postgresql":
        return _postgresql(address)
    raise ConfigError(
        f"A database of kind {address.get_backend_name()!r} is not supported. "
        "Use sqlite:///path or postgresql://user@host/name."
    )


def _address(url: str) -> URL:
    try:
        address = make_url(url.replace("postgres://", "postgresql://", 1) if url.startswith("postgres://") else url)
    except (ArgumentError, ValueError):
        # The address is not repeated: it may hold a password.
        raise ConfigError(
            "The database address cannot be read. Use sqlite:///path or postgresql://user@host/name."
        ) from None
    return address.set(drivername="postgresql+psycopg") if address.drivername == "postgresql" else address


def _sqlite(address: URL, durability: Durability) -> Engine:
    if not address.database or address.database == ":memory:":
        raise ConfigError("A database in memory would not survive a restart. Name a file: sqlite:///path.")
    file = Path(address.database)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # For its owner only, whatever the umask: SQLite gives its log beside it the same permissions. A file that exists is
    # left alone: closing it would drop the locks that this process has on it, and others would then write beside us.
    with suppress(OSError):  # it exists, or SQLite says why it cannot be opened
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    engine = create_engine(
        address,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        # Opened, used and closed by different threads, but never by two at once.
        connect_args={"check_same_thread": False, "timeout": LOCK_WAIT_S},
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # `_transaction` sends BEGIN; sqlite3 itself would not send it before DDL.
        connection.create_function("lower", 1, _lower, deterministic=True)  # its own knows ASCII alone
        _use_wal(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")

    return engine


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, with retries: while one program switches a new file, SQLite fails the second without waiting."""
    give_up_s = REAL.now() + LOCK_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if (error.sqlite_errorcode & 0xFF) != sqlite3.SQLITE_BUSY or REAL.now() >= give_up_s:
                raise
        REAL.pause(RETRY_WAL_S)


def _postgresql(address: URL, **pool: Any) -> Engine:
    # A peer that is gone without a word is noticed after some ten seconds, on this side as on the other.
    network = {"keepalives": 1, "keepalives_idle": 4, "keepalives_interval": 2, "keepalives_count": 3}
    wanted = {"connect_timeout": CONNECT_S, "application_name": "tinkex", **network, "tcp_user_timeout": 10_000}
    try:
        engine = create_engine(
            address,
            # What the address itself says has precedence.
            connect_args={name: value for name, value in wanted.items() if name not in address.query},
            hide_parameters=True,
            # The ping before each transaction replaces a connection that was lost meanwhile.
            **(pool or {"pool_size": 1, "max_overflow": 0, "pool_pre_ping": True}),
        )
    except ImportError:
        raise MissingExtra("PostgreSQL", "postgres") from None

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        is_autocommit = connection.autocommit
        connection.autocommit = True  # a setting inside a transaction would end with it
        connection.execute(
            f"SET statement_timeout = {STATEMENT_S * 1000:.0f}; "
            f"SET idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_S * 1000:.0f}; "
            "SET tcp_keepalives_idle = 4; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3"
        )
        connection.autocommit = is_autocommit

    return engine


def connect_alone(engine: Engine) -> Engine:
    """Return an engine for one more connection to the same PostgreSQL, where every statement is a transaction."""
    return _postgresql(engine.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
