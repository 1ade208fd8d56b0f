"""The store of sessions, and of the samplers that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, func, insert, or_, select, update

from tinkex.store.database import Database, as_record, bounded, values_of
from tinkex.store.records import SamplerRecord, SessionRecord
from tinkex.store.tables import samplers, sessions

_NEWEST_FIRST = (sessions.c.created_at.desc(), sessions.c.id.desc())
_TOUCH = update(sessions).where(sessions.c.id == bindparam("session_id")).values(seen_at=bindparam("at"))


_BATCH = 50
"""Sessions that are in memory at a time during a search: each may have 64 KB of tags and as much metadata."""


class SessionMatches(NamedTuple):
    """What a search found, and after which session to go on: None if it has seen all, or has found enough."""

    sessions: list[SessionRecord]
    resume: tuple[float, str] | None


class SessionStore(Database):
    def add_session(self, session: SessionRecord) -> None:
        with self._write() as connection:
            insert_session(connection, session)

    def get_session(self, session_id: str) -> SessionRecord | None:
        return self._first(SessionRecord, select(sessions).where(sessions.c.id == session_id))

    def touch_session(self, session_id: str, at: float) -> None:
        self._run_write(_TOUCH, {"session_id": session_id, "at": at})

    def finish_session(self, session_id: str, finished: dict[str, Any]) -> None:
        self._run_write(update(sessions).where(sessions.c.id == session_id).values(finished=finished))

    def set_session_project(self, session_id: str, project_id: str | None) -> None:
        self._run_write(update(sessions).where(sessions.c.id == session_id).values(project_id=project_id))

    def count_open_sessions(self, tenant: str, alive_since: float) -> int:
        """Return how many sessions of a tenant are not finished and were seen since a time."""
        is_open = and_(sessions.c.finished.is_(None), sessions.c.seen_at >= alive_since)
        return self._count(select(func.count()).where(sessions.c.tenant == tenant, is_open))

    def list_session_ids(self, tenant: str, offset: int, limit: int) -> list[str]:
        """Return a page of the ids of a tenant's sessions, newest first."""
        query = select(sessions.c.id).where(sessions.c.tenant == tenant).order_by(*_NEWEST_FIRST)
        with self._read() as connection:
            return list(connection.scalars(query.offset(bounded(offset)).limit(bounded(limit))))

    def search_sessions(
        self,
        tenant: str,
        *,
        session_id: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        display_name: str | None = None,
        limit: int = 50,
        before: tuple[float, str] | None = None,
        matches: Callable[[SessionRecord], bool] = lambda session: True,
        max_rows: int = 1_000_000_000,
    ) -> SessionMatches:
        """Return matching sessions, newest first, that come after `before` (a session's created_at and id).

        It looks at `max_rows` sessions and returns where to go on, so that a long search does not hold up other calls.
        A session matches if it has every pair of `user_metadata` and its name contains every word of `display_name`,
        ignoring case. The session with the id `session_id` matches whatever its name. `matches` is a further condition.
        """
        query = select(sessions).where(sessions.c.tenant == tenant).order_by(*_NEWEST_FIRST)
        if session_id is not None and display_name is None:
            query = query.where(sessions.c.id == session_id)
        if before is not None:
            at, last = round(before[0], 6), before[1]
            older = and_(sessions.c.created_at == at, sessions.c.id < last)
            query = query.where(or_(sessions.c.created_at < at, older))
        name_parts = set((display_name or "").casefold().split())
        found: list[SessionRecord] = []
        session, seen = None, 0
        # Metadata and names are compared here: the databases treat JSON and letter case differently.
        in_batches, page = {"yield_per": _BATCH}, query.limit(bounded(max_rows))
        with self._read() as connection, connection.execute(page, execution_options=in_batches) as rows:
            for seen, row in enumerate(rows, 1):  # noqa: B007
                session = as_record(SessionRecord, row)
                has_name = all(part in (session.display_name or "").casefold() for part in name_parts)
                has_pairs = all(session.user_metadata.get(name) == v for name, v in (user_metadata or {}).items())
                if has_pairs and (has_name or session.id == session_id) and matches(session):
                    found.append(session)
                if len(found) >= limit:
                    break
        is_whole = session is None or seen < max_rows
        return SessionMatches(found, None if is_whole or session is None else (session.created_at, session.id))

    def count_samplers(self, tenant: str, since: float) -> int:
        """Return how many samplers a tenant has made since a time."""
        return self._count(select(func.count()).where(samplers.c.tenant == tenant, samplers.c.created_at >= since))

    def add_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        """Add a sampler unless one with its id exists, and return the one that is stored."""
        with self._write() as connection:
            if connection.execute(self._insert_new(samplers), values_of(sampler)).rowcount:
                return sampler
            return as_record(
                SamplerRecord, connection.execute(select(samplers).where(samplers.c.id == sampler.id)).one()
            )

    def get_sampler(self, sampler_id: str) -> SamplerRecord | None:
        return self._first(SamplerRecord, select(samplers).where(samplers.c.id == sampler_id))

    def samplers_of_session(self, session_id: str) -> list[SamplerRecord]:
        """Return a session's samplers, oldest first."""
        query = select(samplers).where(samplers.c.session_id == session_id)
        return self._all(SamplerRecord, query.order_by(samplers.c.created_at, samplers.c.id))

    def samplers_with_files(self) -> list[SamplerRecord]:
        """Return the samplers that have their own folder, oldest first.

        These are ephemeral samplers, and samplers whose checkpoint was replaced.
        """
        query = select(samplers).where(samplers.c.folder.is_not(None))
        return self._all(SamplerRecord, query.order_by(samplers.c.created_at, samplers.c.id))

    def join_sampler(self, sampler_id: str) -> int:
        """Count a client that joins, and return its number; the creator has 0. Raises KeyError if unknown."""
        joined = (
            update(samplers)
            .where(samplers.c.id == sampler_id)
            .values(clients=samplers.c.clients + 1)
            .returning(samplers.c.clients - 1)
        )
        with self._write() as connection:
            number = connection.execute(joined).scalar()
        if number is None:
            raise KeyError(sampler_id)
        return int(number)

    def delete_sampler(self, sampler_id: str) -> None:
        self._use_reserve(lambda: self._run_write(samplers.delete().where(samplers.c.id == sampler_id)))


def insert_session(connection: Connection, session: SessionRecord) -> None:
    # Whole microseconds, as in a date on the wire: the cursor of a page must match its row again.
    connection.execute(insert(sessions), {**values_of(session), "created_at": round(session.created_at, 6)})
