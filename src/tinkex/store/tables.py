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
    DamagedJson,
    KeyRecord,
    OperationRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
)

metadata = MetaData()


def safe_text(text: str) -> str:
    """Return a text as the databases can store it (`SafeText`)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


class SafeText(TypeDecorator[str]):
    """Text that may come from a client. PostgreSQL cannot store a zero character, and neither database half a surrogate
    pair: without the replacement, a lookup of such a text would fail instead of finding nothing."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else safe_text(value)


class Json(TypeDecorator[Any]):
    """A value as JSON text; None is NULL. Not a JSON column: text comes back unchanged, key order included."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        try:
            return None if value is None else orjson.loads(value)
        except orjson.JSONDecodeError:
            return DamagedJson()


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

lease = Table(
    "lease",
    metadata,
    Column("name", SafeText, primary_key=True),  # "store": there is one row
    Column("node", SafeText, nullable=False),  # a random id for each start of a server
    Column("epoch", BigInteger, nullable=False),  # how often the lease was taken
    Column("address", SafeText, nullable=False),
    Column("data_dir", SafeText, nullable=False),
    Column("until", Double),  # by the database's clock; NULL: as long as the file beside a SQLite database is locked
)
"""Which server writes this store (`store.lease`). Version 4 added it."""

nodes = Table(
    "nodes",
    metadata,
    Column("id", SafeText, primary_key=True),  # random: a new one for each start, and whenever the lease was lost
    Column("url", SafeText, nullable=False),  # where other nodes reach it
    Column("kind", SafeText, nullable=False),  # "train": trains and samples
    Column("models", Json, nullable=False),  # every name of its base models
    Column("load", BigInteger, nullable=False),  # operations that are not finished, when it renewed last
    Column("version", SafeText, nullable=False),
    Column("is_draining", Boolean, nullable=False),  # takes no more runs
    Column("until", Double, nullable=False),  # by the database's clock
    Column("facts", Json),  # what else it says of itself (`NodeFacts`); version 7 added it
)
"""The servers that share this store, and until when each lives (`store.cluster`). Version 5 added it."""

homes = Table(
    "homes",
    metadata,
    Column("run_id", SafeText, primary_key=True),
    Column("node", SafeText, nullable=False),  # "": at home nowhere
    Column("epoch", BigInteger, nullable=False),  # how often it was claimed; it never goes back
    Column("target", SafeText),  # the node that is to have it next (`tinkex cluster move`). Version 7 added it
)
"""The one node that works on a run. Rows stay, so that an epoch is never used twice. Version 5 added it."""
Index("homes_by_node", homes.c.node)

sessions = _table("sessions", SessionRecord)
Index("sessions_by_tenant", sessions.c.tenant, sessions.c.created_at, sessions.c.id)
_partial_index("sessions_unfinished", sessions.c.seen_at, where=sessions.c.finished.is_(None))
_partial_index("sessions_open", sessions.c.tenant, sessions.c.seen_at, where=sessions.c.finished.is_(None))

runs = _table(
    "runs",
    RunRecord,
    session_id={"index": True},
    seed={"type_": WideInteger},
    tags={"server_default": "[]"},  # this, and the four columns around it: `migrations.name_runs` added them
    steps={"server_default": "0"},
)
Index("runs_by_tenant", runs.c.tenant, runs.c.created_at, runs.c.id)
Index("runs_by_archive", runs.c.tenant, runs.c.archived_at, runs.c.created_at, runs.c.id)
Index("runs_by_name", runs.c.tenant, runs.c.name, runs.c.created_at, runs.c.id)

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
# Version 10 added it: without it, counting the steps of a long run reads all of its operations.
_partial_index("operations_steps", operations.c.run_id, operations.c.seq_id, where=operations.c.kind == "optim_step")

run_metrics = Table(
    "run_metrics",
    metadata,
    Column("run_id", SafeText, nullable=False),
    Column("number", BigInteger, nullable=False),  # counts the entries of the run, from 1
    Column("step", BigInteger),
    Column("seq_id", BigInteger),
    Column("at", Double, nullable=False),
    Column("metrics", Json, nullable=False),
    Column("bytes_so_far", BigInteger, nullable=False),  # of this and all entries before it
    PrimaryKeyConstraint("run_id", "number"),
)
"""Numbers that the user's program logged, gone with their run. Version 9 added it."""

run_samples = Table(
    "run_samples",
    metadata,
    Column("run_id", SafeText, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("at", Double, nullable=False),
    Column("sample", Json, nullable=False),  # prompt, text, reward, metadata
    Column("bytes_so_far", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "number"),
)
"""Samples that the user's program logged. Version 9 added it."""

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
Index("samplers_by_tenant", samplers.c.tenant, samplers.c.created_at)

checkpoints = _table("checkpoints", CheckpointRecord, key="path", expires_at={"index": True})
Index("checkpoints_by_tenant", checkpoints.c.tenant, checkpoints.c.created_at, checkpoints.c.path)
Index("checkpoints_by_run", checkpoints.c.run_id, checkpoints.c.created_at, checkpoints.c.path)  # version 4 added it

keys = _table("keys", KeyRecord, sha256={"unique": True})

audit = _table("audit", AuditEntry)
Index("audit_by_tenant", audit.c.tenant, audit.c.at, audit.c.id)

secrets = Table(
    "secrets",
    metadata,
    Column("name", SafeText, primary_key=True),  # "links"
    Column("content", SafeText, nullable=False),
)
"""What all servers of a cluster have to know and nobody else. Version 6 added it."""

offered_models = Table(
    "offered_models",
    metadata,
    Column("name", SafeText, primary_key=True),
    Column("source", SafeText, nullable=False),  # a name as for --base-model, or the path of a folder
    Column("at", Double, nullable=False),
)
"""Base models that the owner offered while the service ran. Version 11 added it."""

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
