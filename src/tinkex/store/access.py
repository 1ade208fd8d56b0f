"""The store of API keys, of the audit log, of offered base models, and of remembered responses.

Only hashes of keys are stored.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, delete, exists, insert, select, update

from tinkex.errors import ValidationError
from tinkex.store.database import Database, as_record, bounded, values_of
from tinkex.store.records import AuditEntry, KeyRecord
from tinkex.store.tables import audit, keys, offered_models, remembered_responses

PREFIX = "tml-"
"""Official clients reject a key without this prefix."""


class AccessStore(Database):
    def add_key(self, key: KeyRecord) -> None:
        """Add a key. Raises ValidationError if the same key exists already, revoked or not."""
        with self._write() as connection:
            if not connection.execute(self._insert_new(keys), values_of(key)).rowcount:
                raise ValidationError(f"The key {key.hint} is already known. Choose another one.")

    def get_key_by_hash(self, sha256: str) -> KeyRecord | None:
        """Return the key with this hash. A revoked one is returned too, with `revoked_at` set."""
        return self._first(KeyRecord, select(keys).where(keys.c.sha256 == sha256))

    def get_keys_by_hash(self, hashes: Collection[str]) -> list[KeyRecord]:
        """Return the keys with these hashes, of at most some thousands. Revoked ones are returned too."""
        return self._all(KeyRecord, select(keys).where(keys.c.sha256.in_(hashes)))

    def list_keys(self) -> list[KeyRecord]:
        """Return all keys, oldest first, revoked ones included."""
        return self._all(KeyRecord, select(keys).order_by(keys.c.created_at, keys.c.id))

    def revoke_key(self, id_or_hint: str, at: float) -> KeyRecord | None:
        """Revoke a key and return it, or None if no live key has this id or hint.

        Raises ValidationError if several live keys have this hint.
        """
        is_live = keys.c.revoked_at.is_(None)
        with self._write() as connection:
            for column in (keys.c.id, keys.c.hint):
                rows = connection.execute(select(keys).where(is_live, column == id_or_hint).with_for_update()).all()
                if rows:
                    break
            if not rows:
                return None
            if len(rows) > 1:
                raise ValidationError(f"{len(rows)} keys look like {id_or_hint}. Name the one you mean by its id.")
            revoked = update(keys).where(keys.c.id == rows[0].id).values(revoked_at=at).returning(keys)
            return as_record(KeyRecord, connection.execute(revoked).one())

    def has_keys(self) -> bool:
        with self._read() as connection:
            return bool(connection.scalar(select(exists().where(keys.c.revoked_at.is_(None)))))

    def add_audit(self, entry: AuditEntry) -> None:
        self._run_write(insert(audit), values_of(entry))

    def list_audit(self, tenant: str, *, limit: int, before: float | None = None) -> list[AuditEntry]:
        """Return a tenant's entries, newest first; only those earlier than `before`, if given."""
        query = select(audit).where(audit.c.tenant == tenant)
        if before is not None:
            query = query.where(audit.c.at < before)
        return self._all(AuditEntry, query.order_by(audit.c.at.desc(), audit.c.id.desc()).limit(bounded(limit)))

    def offer_model(self, name: str, source: str, at: float) -> None:
        """Remember that a base model is offered, and where it is."""
        with self._write() as connection:
            connection.execute(delete(offered_models).where(offered_models.c.name == name))
            connection.execute(insert(offered_models), {"name": name, "source": source, "at": at})

    def withdraw_model(self, name: str) -> None:
        self._run_write(delete(offered_models).where(offered_models.c.name == name), {})

    def offered_models(self) -> list[tuple[str, str]]:
        """Return the names and the sources of the base models that were offered, the oldest first."""
        with self._read() as connection:
            query = select(offered_models.c.name, offered_models.c.source).order_by(offered_models.c.at)
            return [(name, source) for name, source in connection.execute(query)]

    def remember(self, tenant: str, key: str, response: bytes, at: float) -> bytes:
        """Store a response under an idempotency key unless there is one, and return the stored one."""
        with self._write() as connection:
            values = {"tenant": tenant, "key": key, "answer": response, "at": at}
            if connection.execute(self._insert_new(remembered_responses), values).rowcount:
                return response
            return bytes(connection.execute(_remembered(tenant, key)).scalar_one())

    def recall(self, tenant: str, key: str) -> bytes | None:
        with self._read() as connection:
            response = connection.scalar(_remembered(tenant, key))
        return None if response is None else bytes(response)


def _remembered(tenant: str, key: str) -> Select[Any]:
    table = remembered_responses
    return select(table.c.answer).where(table.c.tenant == tenant, table.c.key == key)


def new_key() -> str:
    """Return a new key of 256 random bits that is safe in a URL and in a shell."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash that is stored. Not a slow one: our keys cannot be guessed, and every request computes it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def hint(key: str) -> str:
    """Return how a key begins and ends, so that a person recognizes it. Of a short key almost nothing is shown."""
    if len(key) >= 24:
        return f"{key[:8]}…{key[-4:]}"
    return f"{PREFIX}…" if key.startswith(PREFIX) else "…"
