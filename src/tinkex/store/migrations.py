"""Upgrades the database of an older release when it is opened.

A migration only adds: tables, columns that may be empty or have a default, indexes. Every change of `tables.py` or
`records.py` is a new migration; its number is the version of the database once it has run. A migration needs
`tables.py` and nothing else: what is missing is derived from it. That is why there is no migration library (Alembic)
here: its revisions would repeat `tables.py`, and it would be one more dependency of the server. A change that is more
than an addition would be a reason to think again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection, MetaData, case, func, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from tinkex.errors import ConfigError
from tinkex.rules.metrics import step_loss
from tinkex.rules.run_names import name_in, printable_name, tags_in
from tinkex.store.tables import metadata, operations, runs, schema_version, sessions

logger = logging.getLogger("tinkex.store")

Migration = Callable[[Connection], None]
_LOCK_ID = 0x74696E6B6578
"""The id ("tinkex" in ASCII) of the lock that keeps two programs from migrating one PostgreSQL database at once."""


def add_missing(connection: Connection, schema: MetaData = metadata) -> None:
    """Add every table, column and index of the schema that is missing. Existing ones stay as they are."""
    inspector = inspect(connection)
    existing = set(inspector.get_table_names())
    schema.create_all(
        connection, [table for name, table in schema.tables.items() if name not in existing], checkfirst=False
    )
    quote = connection.dialect.identifier_preparer.quote
    for name in existing & set(schema.tables):
        table = schema.tables[name]
        columns = {column["name"] for column in inspector.get_columns(name)}
        for column in table.columns:
            if column.name not in columns:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {quote(name)} ADD COLUMN {definition}"))
        indexes = {index["name"] for index in inspector.get_indexes(name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)


def separate_tokens_from_cost(connection: Connection) -> None:
    """Add `operations.tokens`, and fill it for operations of older releases.

    Until version 2 a row had the scheduler's cost alone: three times the tokens of a forward_backward, the tokens of a
    forward, nothing for other kinds.
    """
    add_missing(connection)
    cost, kind = operations.c.cost_tokens, operations.c.kind
    tokens = case((kind == "forward_backward", cost // 3), (kind == "forward", cost), else_=0)
    connection.execute(update(operations).where(cost > 0).values(tokens=tokens))


def name_runs(connection: Connection) -> None:
    """Add name, tags, steps and loss of runs, and fill them in from what older releases stored."""
    add_missing(connection)
    done = (operations.c.run_id == runs.c.id, operations.c.kind == "optim_step", operations.c.state == "done")
    steps = select(func.count()).select_from(operations).where(*done).scalar_subquery()
    connection.execute(update(runs).values(steps=steps))
    columns = (runs.c.id, runs.c.user_metadata, sessions.c.display_name)
    rows = connection.execute(select(*columns).join(sessions, sessions.c.id == runs.c.session_id, isouter=True)).all()
    for row in rows:
        name = name_in(row.user_metadata) or printable_name(row.display_name)
        values = {"name": name, "tags": tags_in(row.user_metadata), "loss": _last_loss(connection, row.id)}
        connection.execute(update(runs).where(runs.c.id == row.id).values(values))


def _last_loss(connection: Connection, run_id: str) -> float | None:
    """Return the loss of a run's last step, from the metrics of its passes."""
    of_run = (operations.c.run_id == run_id, operations.c.state == "done")
    numbers = select(operations.c.seq_id).where(*of_run, operations.c.kind == "optim_step")
    last, before = (*connection.scalars(numbers.order_by(operations.c.seq_id.desc()).limit(2)), -1, -1)[:2]
    passes = (operations.c.kind == "forward_backward", operations.c.seq_id > before, operations.c.seq_id < last)
    found = connection.scalars(select(operations.c.metrics).where(*of_run, *passes).order_by(operations.c.seq_id))
    return step_loss(metrics or {} for metrics in found)


MIGRATIONS: tuple[Migration, ...] = (
    add_missing,
    add_missing,
    separate_tokens_from_cost,
    *4 * (add_missing,),
    name_runs,
    *3 * (add_missing,),
)
"""Migration n is at index n - 1. One that only adds is `add_missing` again; one that also fills in values calls it."""


def migrate(
    connection: Connection, migrations: Sequence[Migration] = MIGRATIONS, *, check: Migration | None = None
) -> None:
    """Upgrade the database to this release, in the caller's transaction. Raises ConfigError if it is newer.

    `check` is called before anything changes, and may raise; not for a new database, nor one that is up to date.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))  # an index of a large table takes its time
        connection.execute(select(text(f"pg_advisory_xact_lock({_LOCK_ID})")))
    schema_version.create(connection, checkfirst=True)
    version = connection.scalar(select(schema_version.c.version))
    if version is None:
        connection.execute(schema_version.insert().values(version=0))
        version = 0
    if version > len(migrations):
        raise ConfigError(
            f"The database was written by a newer release of tinkex (its version is {version}, this release knows "
            f"{len(migrations)}). Install the newer release, or start with another database."
        )
    if check is not None and 0 < version < len(migrations):
        check(connection)
    for number, migration in enumerate(migrations[version:], version + 1):
        migration(connection)
        connection.execute(schema_version.update().values(version=number))
        logger.info("database upgraded to version %d", number)
