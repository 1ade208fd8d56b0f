"""One server writes a store. The lease says which one; every write of a server checks that it still has it (the fence).

A lock shows that the holder lives, and goes with its process, however that ends: a session-level advisory lock on its
own connection (PostgreSQL), a locked file beside the database (SQLite). The row `lease` has the holder's address and a
random id, its `node`. A holder that was frozen, or cut off from the database, can lose the lock without noticing; its
next write finds another node in the row and is rolled back. Times are those of the database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    Connection,
    Double,
    Engine,
    Row,
    bindparam,
    cast,
    delete,
    extract,
    func,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError

from tinkex.clock import REAL
from tinkex.errors import ConfigError
from tinkex.home.lock import FileLock, Locked
from tinkex.store.errors import LeaseLost
from tinkex.store.tables import homes, lease, nodes

logger = logging.getLogger("tinkex.store")

LEASE_S = 15.0
"""A holder that did not renew for so long may be replaced although its lock is still there: it is frozen."""
RENEW_S = 5.0
NOTICED_WITHIN_S = 1.0
"""How long PostgreSQL may take to notice that a server was killed."""
NOTICED_PAUSE_S = 0.05
TAKE_OVER_S = 20.0
"""How long a new holder waits for a transaction of the former one. PostgreSQL ends an idle one after 10 s."""
_NAME = "store"
_LOCKS = 0x74696E6B
"""The class ("tink" in ASCII) of our advisory locks; the other half of the key is the schema, which has the tables."""
_KEY = f"{_LOCKS}, hashtext(current_schema())"
NOW = cast(extract("epoch", func.clock_timestamp()), Double)
_FENCE = select(lease.c.node).where(lease.c.name == _NAME)
# "key share": a renewal does not wait for it; a new holder does, until the write is committed or rolled back.
_FENCE_AND_LOCK = _FENCE.with_for_update(read=True, key_share=True)
_RENEW = update(lease).where(lease.c.name == _NAME, lease.c.node == bindparam("own")).values(until=NOW + LEASE_S)
_HOLDER = text(
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND classid = {_LOCKS} AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295)"
)


class Lease:
    """The right to write a store. `acquire` raises ConfigError, with the address of the holder, if there is one."""

    def __init__(self, address: str, data_dir: Path, lock: FileLock | AdvisoryLock) -> None:
        self.node = uuid4().hex
        self._address, self._data_dir, self._lock = address, str(data_dir), lock
        self._on_lost: Callable[[], None] | None = None
        self._is_lost = threading.Event()

    def acquire(self, connection: Connection) -> str | None:
        """Take the lease, in a transaction whose write is not checked: before it, the lease is not ours.

        Returns the data folder of the former holder, or None if there was none.
        """
        if isinstance(self._lock, AdvisoryLock):
            connection.execute(text(f"SET LOCAL statement_timeout = {TAKE_OVER_S * 1000:.0f}"))
            self._lock.acquire(self.node, self.lose)
        else:
            _lock_file(self._lock, connection)
        former = _row(connection, for_update=True)
        is_postgresql = isinstance(self._lock, AdvisoryLock)
        if is_postgresql:
            _end_cluster(connection)
        values = {
            "node": self.node,
            "epoch": 1 if former is None else former.epoch + 1,
            "address": self._address,
            "data_dir": self._data_dir,
            "until": NOW + LEASE_S if is_postgresql else None,  # a file lock ends with its process, however it ends
        }
        if former is None:
            connection.execute(lease.insert().values(name=_NAME, **values))
            return None
        connection.execute(update(lease).where(lease.c.name == _NAME).values(**values))
        return str(former.data_dir)

    def keep(self) -> None:
        """Renew the lease until `release`. Called once it is committed."""
        if isinstance(self._lock, AdvisoryLock):
            self._lock.keep_renewing()

    def check(self, connection: Connection) -> None:
        """Raise LeaseLost, which rolls the transaction back, if another server has taken the lease (the fence)."""
        if isinstance(self._lock, AdvisoryLock):
            node = connection.scalar(_FENCE_AND_LOCK)
        else:
            # Past SQLAlchemy, which takes ten times as long: this runs in every transaction that writes.
            driver: Any = connection.connection.driver_connection
            row = driver.execute("SELECT node FROM lease WHERE name = 'store'").fetchone()
            node = None if row is None else row[0]
        if node != self.node:
            self.lose()
            raise LeaseLost

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have this called once, on any thread, when the lease is lost."""
        self._on_lost = call
        if self._is_lost.is_set():
            call()

    @property
    def is_lost(self) -> bool:
        return self._is_lost.is_set()

    def lose(self) -> None:
        if not self._is_lost.is_set():
            self._is_lost.set()
            if self._on_lost is not None:
                self._on_lost()

    def release(self) -> None:
        self._lock.release()


def lease_for(engine: Engine, lock_engine: Callable[[], Engine], address: str, data_dir: Path) -> Lease:
    """Return the lease of the database that `engine` leads to."""
    lock = _file_lock(engine, address) if engine.dialect.name == "sqlite" else AdvisoryLock(lock_engine())
    return Lease(address, data_dir, lock)


def check_not_served(connection: Connection) -> None:
    """Raise ConfigError if a server has the lease: its database is not upgraded while it runs."""
    if not inspect(connection).has_table(lease.name):  # older than leases
        return
    if connection.dialect.name == "sqlite":
        lock = _file_lock(connection.engine, "")
        try:
            lock.acquire()
        except Locked:
            raise _not_upgraded(connection) from None
        lock.release()
        return
    give_up_s = REAL.now() + NOTICED_WITHIN_S
    while connection.scalar(_HOLDER) is not None:
        if REAL.now() >= give_up_s:
            raise _not_upgraded(connection)
        REAL.pause(NOTICED_PAUSE_S)
    if inspect(connection).has_table(nodes.name) and (url := living_node(connection)) is not None:
        raise _not_upgraded(connection, url)


def _file_lock(engine: Engine, address: str) -> FileLock:
    # Its real name: two links to one file are one database.
    file = Path(str(engine.url.database)).resolve()
    return FileLock(file.parent, f"{file.name}.lock", address=address)


class AdvisoryLock:
    """A session-level advisory lock of PostgreSQL, and a thread that renews the lease on the same connection."""

    def __init__(self, engine: Engine, renew_s: float = RENEW_S) -> None:
        self._engine, self._renew_s = engine, renew_s
        self._connection: Connection | None = None
        self._is_locked = False
        """Whether the session of the connection has the lock."""
        self._node = ""
        self._lose: Callable[[], None] = lambda: None
        self._is_released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tinkex-lease", daemon=True)

    def acquire(self, node: str, lose: Callable[[], None]) -> None:
        self._node, self._lose = node, lose
        connection = self._connection = self._engine.connect()
        # A server that was killed a moment ago has it until PostgreSQL has noticed.
        give_up_s = REAL.now() + NOTICED_WITHIN_S
        while not (is_locked := _try_lock(connection)) and REAL.now() < give_up_s:
            REAL.pause(NOTICED_PAUSE_S)
        if not is_locked:
            former = _row(connection)
            is_alive = former is not None and former.until is not None and former.until > _now(connection)
            if is_alive or not _end_holder(connection) or not _try_lock(connection):
                self.release()
                raise _rejected(None if former is None else former.address, None if former is None else former.data_dir)
            logger.warning("the server at %s did not renew its lease; this one takes over", former and former.address)
        self._is_locked = True

    def keep_renewing(self) -> None:
        """Renew from now on: not before the row is committed, or it seems to be that of another server."""
        self._thread.start()

    def release(self) -> None:
        """Give the lock back. The connection is closed, which frees it whatever state it is in."""
        self._is_released.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._disconnect()
        self._engine.dispose()

    def _keep(self) -> None:
        is_away = False
        while not self._is_released.wait(self._renew_s):
            try:
                if not self._renew():
                    self._lose()
                    return
                if is_away:
                    logger.warning("the lease is renewed again")
                is_away = False
            except DBAPIError as error:
                if self._is_released.is_set():
                    return
                if not is_away:
                    logger.warning("the lease cannot be renewed; trying again: %s", str(error.orig).strip())
                is_away = True
                self._disconnect()

    def _renew(self) -> bool:
        """Renew the lease, on a new connection if the last one was lost. Return whether it is still ours."""
        if self._connection is None:
            self._connection = self._engine.connect()
        if not self._is_locked:
            # Not ours at once: the database may not have noticed yet that our last connection is gone. The row decides,
            # but without the lock another server would take over.
            self._is_locked = _try_lock(self._connection)
        return bool(self._connection.execute(_RENEW, {"own": self._node}).rowcount)

    def _disconnect(self) -> None:
        connection, self._connection, self._is_locked = self._connection, None, False
        if connection is not None:
            try:
                connection.invalidate()  # not back into a pool: the session ends, and its lock with it
                connection.close()
            except DBAPIError:
                pass  # it was lost already


def living_node(connection: Connection) -> str | None:
    """Return the address of a server that shares this PostgreSQL with others and lives, if there is one."""
    return connection.scalar(select(nodes.c.url).where(nodes.c.until > NOW).limit(1))


def holder_address(connection: Connection) -> str | None:
    """Return the address of the server that has this PostgreSQL to itself, if there is one."""
    if connection.scalar(_HOLDER) is None:
        return None
    return connection.scalar(select(lease.c.address).where(lease.c.name == _NAME)) or "an unknown address"


def end_lease(connection: Connection) -> None:
    """Have a server that had this PostgreSQL to itself write nothing more. Its lock is gone, but it may live.

    Its connection was cut, or it was frozen: it would take its lock again and go on beside the nodes.
    """
    if _row(connection, for_update=True) is not None:  # waits for a transaction that has checked the lease
        connection.execute(update(lease).where(lease.c.name == _NAME).values(node=""))


def _end_cluster(connection: Connection) -> None:
    """Take the store from the nodes that shared it, if none of them lives: one that is frozen may come back.

    Called with the lock held. A node adds its row first and then looks for the lock, so one of the two is noticed.
    """
    if (url := living_node(connection)) is not None:
        raise ConfigError(
            f"The server at {url} shares this database with others (--node-url). Start this one with --node-url too, "
            "or stop those first; one that was killed counts for 15 s more."
        )
    connection.execute(delete(nodes))
    connection.execute(update(homes).where(homes.c.node != "").values(node="", epoch=homes.c.epoch + 1))


def _try_lock(connection: Connection) -> bool:
    return bool(connection.scalar(text(f"SELECT pg_try_advisory_lock({_KEY})")))


def _end_holder(connection: Connection) -> bool:
    """End the session of a holder that is frozen. Return False if this database user may not do so."""
    try:
        for pid in connection.scalars(_HOLDER).all():
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    except DBAPIError as error:
        logger.warning("the session of the former server cannot be ended: %s", str(error.orig).strip())
        return False
    return True


def _lock_file(lock: FileLock, connection: Connection) -> None:
    try:
        lock.acquire()
    except Locked:
        former = _row(connection)
        raise _rejected(former and former.address, former and former.data_dir) from None


def _row(connection: Connection, *, for_update: bool = False) -> Row[Any] | None:
    query = select(lease).where(lease.c.name == _NAME)
    return connection.execute(query.with_for_update() if for_update else query).first()


def _now(connection: Connection) -> float:
    return float(connection.scalar(select(NOW)) or 0.0)


def _rejected(address: str | None, data_dir: str | None) -> ConfigError:
    return ConfigError(
        f"Another server, {address or 'whose address is not known'}, writes this database (its data folder is "
        f"{data_dir or 'not known'}). Two would undo each other's work. Use that one, or stop it first, or give this "
        "one its own database with --database-url or --data-dir."
    )


def _not_upgraded(connection: Connection, address: str | None = None) -> ConfigError:
    address = address or connection.scalar(select(lease.c.address).where(lease.c.name == _NAME))
    return ConfigError(
        f"The server at {address or 'an unknown address'} writes this database with an older release of tinkex, and "
        "the database has to be upgraded for this one. Stop that server first, or run its release of tinkex."
    )
