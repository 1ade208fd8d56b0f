"""The tables. Columns are named after the fields of the records; columns without a field are commented."""

from __future__ import annotations

from typing import Any

import orjson
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
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


schema_version = Table("schema_version", metadata, Column("version", BigInteger, nullable=False))

sessions = Table(
    "sessions",
    metadata,
    Column("id", SafeText, primary_key=True),
    Column("tenant", SafeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("tags", Json, nullable=False),
    Column("user_metadata", Json, nullable=False),
    Column("sdk_version", SafeText, nullable=False),
    Column("project_id", SafeText),
    Column("display_name", SafeText),
    Column("finished", Json),
)
Index("sessions_by_tenant", sessions.c.tenant, sessions.c.created_at, sessions.c.id)
Index(
    "sessions_unfinished",
    sessions.c.seen_at,
    sqlite_where=sessions.c.finished.is_(None),
    postgresql_where=sessions.c.finished.is_(None),
)

runs = Table(
    "runs",
    metadata,
    Column("id", SafeText, primary_key=True),
    Column("tenant", SafeText, nullable=False),
    Column("session_id", SafeText, nullable=False, index=True),
    Column("base_model", SafeText, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("seed", WideInteger, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_request_at", Double, nullable=False),
    Column("user_metadata", Json),
    Column("is_unloaded", Boolean, nullable=False),
    Column("snapshot", SafeText),
    Column("snapshot_seq", BigInteger, nullable=False),
)
Index("runs_by_tenant", runs.c.tenant, runs.c.created_at, runs.c.id)

operations = Table(
    "operations",
    metadata,
    Column("request_id", SafeText, primary_key=True),
    Column("run_id", SafeText, nullable=False),
    Column("tenant", SafeText, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("kind", SafeText, nullable=False),
    Column("digest", SafeText, nullable=False),
    Column("state", SafeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("cost_tokens", BigInteger, nullable=False),
    Column("error", SafeText),
    Column("category", SafeText),
    Column("result_type", SafeText),
    Column("options", Json, nullable=False),
    Column("engine_s", Double),
    Column("tokens", BigInteger, nullable=False, server_default="0"),
    Column("metrics", Json),
    UniqueConstraint("run_id", "seq_id", name="operations_once"),
)
Index(
    "operations_failed",
    operations.c.tenant,
    operations.c.finished_at,
    sqlite_where=operations.c.state.in_(("failed", "refused")),
    postgresql_where=operations.c.state.in_(("failed", "refused")),
)
Index(
    "operations_queued",
    operations.c.run_id,
    operations.c.seq_id,
    sqlite_where=operations.c.state == "queued",
    postgresql_where=operations.c.state == "queued",
)

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
Index(
    "payloads_results",
    payloads.c.at,
    sqlite_where=payloads.c.part == "result",
    postgresql_where=payloads.c.part == "result",
)
Index(
    "payloads_files",
    payloads.c.file,
    sqlite_where=payloads.c.file.is_not(None),
    postgresql_where=payloads.c.file.is_not(None),
)

samplers = Table(
    "samplers",
    metadata,
    Column("id", SafeText, primary_key=True),
    Column("tenant", SafeText, nullable=False),
    Column("session_id", SafeText, nullable=False, index=True),
    Column("base_model", SafeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("model_path", SafeText),
    Column("folder", SafeText),
    Column("clients", BigInteger, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", SafeText, primary_key=True),
    Column("tenant", SafeText, nullable=False),
    Column("run_id", SafeText, nullable=False, index=True),
    Column("kind", SafeText, nullable=False),
    Column("name", SafeText, nullable=False),
    Column("folder", SafeText, nullable=False),
    Column("base_model", SafeText, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("files", Json, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("expires_at", Double, index=True),
    Column("is_public", Boolean, nullable=False),
    Column("user_metadata", Json),
)
Index("checkpoints_by_tenant", checkpoints.c.tenant, checkpoints.c.created_at, checkpoints.c.path)

keys = Table(
    "keys",
    metadata,
    Column("id", SafeText, primary_key=True),
    Column("sha256", SafeText, nullable=False, unique=True),
    Column("tenant", SafeText, nullable=False),
    Column("name", SafeText, nullable=False),
    Column("hint", SafeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

audit = Table(
    "audit",
    metadata,
    Column("id", SafeText, primary_key=True),
    Column("at", Double, nullable=False),
    Column("tenant", SafeText, nullable=False),
    Column("action", SafeText, nullable=False),
    Column("target", SafeText, nullable=False),
    Column("detail", Json, nullable=False),
)
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
