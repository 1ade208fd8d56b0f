"""Steps from an older database to this release's, run when it is opened.

Steps only add: tables, columns that may be empty or have a default, indexes. A change of `rows.py` is a new step; its
number is the database's version once it has run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection, MetaData, case, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from tinkex.errors import ConfigError
from tinkex.store.rows import metadata, operations, schema_version

logger = logging.getLogger("tinkex.store")

Step = Callable[[Connection], None]
_LOCK_ID = 0x74696E6B6578
"""Names the lock that keeps two programs from migrating one PostgreSQL database together: "tinkex"."""


def complete(connection: Connection, wanted: MetaData = metadata) -> None:
    """Add every table, column and index that is missing. What is there stays as it is."""
    found = inspect(connection)
    there = set(found.get_table_names())
    wanted.create_all(
        connection, [table for name, table in wanted.tables.items() if name not in there], checkfirst=False
    )
    quoted = connection.dialect.identifier_preparer.quote
    for name in there & set(wanted.tables):
        table = wanted.tables[name]
        columns = {column["name"] for column in found.get_columns(name)}
        for column in table.columns:
            if column.name not in columns:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"))
        indexes = {index["name"] for index in found.get_indexes(name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)


def separate_tokens_from_cost(connection: Connection) -> None:
    """Add `operations.tokens`, and fill it for operations of older releases.

    Until version 2 a row had the scheduler's cost alone: three times the tokens of a forward_backward, the tokens of a
    forward, nothing for other kinds.
    """
    complete(connection)
    cost, kind = operations.c.cost_tokens, operations.c.kind
    tokens = case((kind == "forward_backward", cost // 3), (kind == "forward", cost), else_=0)
    connection.execute(update(operations).where(cost > 0).values(tokens=tokens))


STEPS: tuple[Step, ...] = (complete, complete, separate_tokens_from_cost)
"""Step n is at place n - 1. A later step that only adds is `complete` again; one that also fills calls it first."""


def migrate(connection: Connection, steps: Sequence[Step] = STEPS) -> None:
    """Bring the database up to this release, in the caller's transaction. One of a newer release is refused."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(text(f"pg_advisory_xact_lock({_LOCK_ID})")))
    schema_version.create(connection, checkfirst=True)
    version = connection.scalar(select(schema_version.c.version))
    if version is None:
        connection.execute(schema_version.insert().values(version=0))
        version = 0
    if version > len(steps):
        raise ConfigError(
            f"The database was written by a newer release of tinkex (its version is {version}, this release knows "
            f"{len(steps)}). Install the newer release, or start with another database."
        )
    for number, step in enumerate(steps[version:], version + 1):
        step(connection)
        connection.execute(schema_version.update().values(version=number))
        logger.info("database brought to version %d", number)
