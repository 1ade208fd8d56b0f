"""The tables. A table of records has a column for each field of the record; the other tables are written out."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import orjson
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Dialect,
    Double,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from tinkex.store.records import (
    AuditEntry,
    CheckpointRecord,
    KeyRecord,
    OperationRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
)

metadata = MetaData()


class SafeText(TypeDecorator[str]):
    """Text that may come from a client. PostgreSQL cannot store a zero character, and neither database half a surrogate
    pair: without the replacement, a lookup of such a text would fail instead of finding nothing."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


class Json(TypeDecorator[Any]):
    """A value as JSON text; None is NULL. Not a JSON column: text comes back unchanged, key order included."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else orjson.loads(value)


class WideInteger(TypeDecorator[int]):
    """An integer of any size, as text: seeds are unsigned 64-bit, which no integer column holds."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


_COLUMN_TYPES = {
    str: SafeText,
    int: BigInteger,
    float: Double,
    bool: Boolean,
    Literal: SafeText,
    dict: Json,
    list: Json,
}


def _table(
    name: str, record: type, *constraints: UniqueConstraint, key: str = "id", **options: dict[str, Any]
) -> Table:
    """Return the table of a record. A field that may be None is a column that may be NULL; `options` are of columns."""
    hints = get_type_hints(record)
    columns = []
    for field in fields(record):
        hint = hints[field.name]
        is_optional = NoneType in get_args(hint)
        kind = get_args(hint)[0] if is_optional else hint
        given = {"type_": _COLUMN_TYPES[get_origin(kind) or kind], **options.get(field.name, {})}
        columns.append(Column(field.name, primary_key=field.name == key, nullable=is_optional, **given))
    return Table(name, metadata, *columns, *constraints)


def _partial_index(name: str, *columns: ColumnElement[Any], where: ColumnElement[bool]) -> None:
    Index(name, *columns, sqlite_where=where, postgresql_where=where)


schema_version = Table("schema_version", metadata, Column("version", BigInteger, nullable=False))

sessions = _table("sessions", SessionRecord)
Index("sessions_by_tenant", sessions.c.tenant, sessions.c.created_at, sessions.c.id)
_partial_index("sessions_unfinished", sessions.c.seen_at, where=sessions.c.finished.is_(None))

runs = _table("runs", RunRecord, session_id={"index": True}, seed={"type_": WideInteger})
Index("runs_by_tenant", runs.c.tenant, runs.c.created_at, runs.c.id)

operations = _table(
    "operations",
    OperationRecord,
    UniqueConstraint("run_id", "seq_id", name="operations_once"),
    key="request_id",
    tokens={"server_default": "0"},  # version 3 added it
)
_failed = operations.c.state.in_(("failed", "refused"))
_partial_index("operations_failed", operations.c.tenant, operations.c.finished_at, where=_failed)
_partial_index("operations_queued", operations.c.run_id, operations.c.seq_id, where=operations.c.state == "queued")

payloads = Table(
    "payloads",
    metadata,
    Column("request_id", SafeText, nullable=False),
    Column("part", SafeText, nullable=False),  # "command" or "result"
    Column("at", Double, nullable=False),  # when it was written; results expire by it
    Column("content", LargeBinary),  # the bytes, or
    Column("file", SafeText),  # the name of the file that holds them
    PrimaryKeyConstraint("request_id", "part"),
)
"""Apart from `operations`, so that lists never read bytes and finishing never rewrites them."""
_partial_index("payloads_results", payloads.c.at, where=payloads.c.part == "result")
_partial_index("payloads_files", payloads.c.file, where=payloads.c.file.is_not(None))

samplers = _table("samplers", SamplerRecord, session_id={"index": True})

checkpoints = _table("checkpoints", CheckpointRecord, key="path", run_id={"index": True}, expires_at={"index": True})
Index("checkpoints_by_tenant", checkpoints.c.tenant, checkpoints.c.created_at, checkpoints.c.path)

keys = _table("keys", KeyRecord, sha256={"unique": True})

audit = _table("audit", AuditEntry)
Index("audit_by_tenant", audit.c.tenant, audit.c.at, audit.c.id)

remembered_responses = Table(
    "answers",
    metadata,
    Column("tenant", SafeText, nullable=False),
    Column("key", SafeText, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("at", Double, nullable=False, index=True),
    PrimaryKeyConstraint("tenant", "key"),
)
"""The response to a request with an idempotency key, so that a repeated request gets the same response."""
