"""Endpoints for sessions: create, keep alive, finish, search; and for the telemetry of clients."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from functools import partial
from pathlib import Path
from uuid import uuid4

import orjson
from starlette.responses import Response

from tinkex.server.http import views
from tinkex.server.http.access import api_key_in
from tinkex.server.http.errors import RequestRejected, bad_request, json_response
from tinkex.server.http.fields import parse_as, parse_metadata, require_text
from tinkex.server.http.requests import ApiRequest
from tinkex.server.service import Service
from tinkex.store.records import SessionRecord
from tinkex.types.session import (
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    CreateSessionRequest,
    SessionSearchRequest,
    UserSearchOwner,
)

logger = logging.getLogger("tinkex.server")

TELEMETRY_FILE = "telemetry.jsonl"
MAX_TELEMETRY_BYTES = 8_000_000
"""Limit for each of two files: the current one, and the one before it."""
_MAX_LINE_BYTES = 256_000
SEARCHED_AT_ONCE = 200
"""Sessions that a search looks at in one call of the store: some 5 ms."""
MAX_FILTERS = 100
_TELEMETRY_FIELDS = ("session_id", "process_uuid", "platform", "sdk_version", "events")


async def create_session(request: ApiRequest) -> Response:
    service, tenant, body = request.service, request.tenant, await request.read_json()
    metadata = views.metadata(parse_metadata(body)) or {}
    # A request written by hand may lack these, which the SDKs always send.
    create_request = parse_as(CreateSessionRequest, {"tags": [], "sdk_version": "", **body, "user_metadata": metadata})
    for name in ("sdk_version", "project_id", "display_name", "tags"):
        request.check_text(name, getattr(create_request, name))
    now = service.clock.wall()
    session = SessionRecord(
        id=str(uuid4()),
        tenant=tenant,
        created_at=now,
        seen_at=now,
        tags=create_request.tags,
        user_metadata=metadata,
        sdk_version=create_request.sdk_version,
        project_id=create_request.project_id,
        display_name=create_request.display_name,
    )

    key = idempotency_key(request, "create_session")

    def create() -> bytes:
        """Create it once per idempotency key: on the store's thread nothing runs between the lookup and the write."""
        if key and (known := service.store.recall(tenant, key)) is not None:
            return known
        open_sessions = service.store.count_open_sessions(tenant, now - service.config.idle_session_s)
        service.ledger.check("max_sessions", open_sessions + 1, f"This key has {open_sessions} open sessions")
        service.store.add_session(session)
        content = orjson.dumps({"type": "create_session", "session_id": session.id})
        return service.store.remember(tenant, key, content, now) if key else content

    return Response(await service.db(create), media_type="application/json")


def idempotency_key(request: ApiRequest, operation: str) -> str:
    """Return the key under which the response is remembered, or "" if the client sent none."""
    header = request.headers.get("x-idempotency-key", "")
    return f"{operation} {hashlib.sha256(header.encode()).hexdigest()}" if header else ""


async def session_heartbeat(request: ApiRequest) -> Response:
    service = request.service
    session = await request.find_session(require_text(await request.read_json(), "session_id"))
    if session.finished is not None:
        raise RequestRejected(
            410, f"Session {session.id} is finished. Create a new one to continue.", "session_finished"
        )
    await service.db(service.store.touch_session, session.id, service.clock.wall())
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: ApiRequest) -> Response:
    """Finish a session. The janitor then evicts its adapters to disk and deletes its ephemeral samplers."""
    service = request.service
    session = await request.find_session(request.path_params["session_id"])
    report = parse_as(ClientSessionFinished, {"reason": {"type": "success"}, **await request.read_json()})
    if session.finished is None:  # the first report counts: a retry repeats it, a second client is too late
        # Cut, not rejected: it may be a traceback, and the session has to end all the same.
        detail = report.detail and report.detail[: service.config.max_text_characters]
        finished = {"reason": report.reason.model_dump(), "detail": detail}
        await service.db(service.store.finish_session, session.id, finished)
    return json_response({})


async def list_sessions(request: ApiRequest) -> Response:
    service = request.service
    offset, limit = request.parse_page(20)
    return json_response({"sessions": await service.db(service.store.list_session_ids, request.tenant, offset, limit)})


async def get_session(request: ApiRequest) -> Response:
    service = request.service
    session = await request.find_session(request.path_params["session_id"])
    runs = await service.db(service.store.runs_of_session, session.id)
    samplers = await service.db(service.store.samplers_of_session, session.id)
    return json_response(
        {
            "training_run_ids": runs,
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": views.metadata(session.user_metadata),
            "display_name": session.display_name,
        }
    )


async def set_session_project(request: ApiRequest) -> Response:
    service = request.service
    session = await request.find_session(request.path_params["session_id"])
    project_id = require_text(await request.read_json(), "project_id")
    request.check_text("project_id", project_id)
    await service.db(service.store.set_session_project, session.id, project_id)
    return json_response(None)


async def session_trace_export(request: ApiRequest) -> Response:
    session = await request.find_session(request.path_params["session_id"])
    reason = f"This service keeps no trace of session {session.id}. See its log and /metrics instead."
    return json_response({"status": "failed", "url": None, "error": reason})


# -- search ----------------------------------------------------------------------------------------------------------


async def search_sessions(request: ApiRequest) -> Response:
    service, tenant = request.service, request.tenant
    search = parse_as(SessionSearchRequest, await request.read_json())
    request.check_text("display_name", search.display_name)
    if max(len(search.project_ids or ()), len(search.statuses or ())) > MAX_FILTERS:
        raise bad_request(f"A search takes at most {MAX_FILTERS} project_ids and statuses.", "too_many")
    now = service.clock.wall()
    alive_since = now - service.config.idle_session_s
    matches = await _search(service, tenant, search, alive_since)
    page, has_more = matches[: search.limit], len(matches) > search.limit
    summaries = [
        views.session_summary(session, alive_since, *await service.db(service.store.session_usage, session.id, now))
        for session in page
    ]
    last = page[-1] if has_more else None
    cursor = last and {"last_created_at": views.time_text(last.created_at), "last_session_id": last.id}
    return json_response({"sessions": summaries, "next_cursor": cursor})


async def _search(
    service: Service, tenant: str, search: SessionSearchRequest, alive_since: float
) -> list[SessionRecord]:
    """Return the matching sessions, newest first, and one more than the limit if there are more."""
    if isinstance(search.owner, UserSearchOwner) and views.owner(tenant) not in search.owner.owner_urns:
        return []
    before = None
    if (cursor := search.cursor) is not None:
        before = (cursor.last_created_at.timestamp(), cursor.last_session_id)
    matches: list[SessionRecord] = []
    while True:
        look_up = partial(
            service.store.search_sessions,
            tenant,
            session_id=search.session_id,
            user_metadata=search.user_metadata,
            display_name=search.display_name,
            limit=search.limit + 1 - len(matches),
            before=before,
            matches=lambda session: _matches(session, search, alive_since),
            max_rows=SEARCHED_AT_ONCE,
        )
        page = await service.db(look_up)  # other requests use the store between the pages
        matches += page.sessions
        before = page.resume
        if before is None or len(matches) > search.limit:
            return matches


def _matches(session: SessionRecord, search: SessionSearchRequest, alive_since: float) -> bool:
    if search.project_ids is not None and (session.project_id or views.NO_PROJECT) not in search.project_ids:
        return False
    return search.statuses is None or any(_has_status(session, query, alive_since) for query in search.statuses)


def _has_status(session: SessionRecord, query: object, alive_since: float) -> bool:
    status = views.session_status(session, alive_since) or {}
    if isinstance(query, ActiveSessionStatusQuery):
        return status.get("type") == "active"
    if isinstance(query, ClientFinishedSessionStatusQuery) and status.get("type") == "client_finished":
        return query.reasons is None or status["reason"]["type"] in query.reasons
    return False  # sessions cannot be cancelled here, and do not fail as a whole


# -- telemetry -------------------------------------------------------------------------------------------------------


async def telemetry(request: ApiRequest) -> Response:
    """Append telemetry to a file on this machine; it is sent nowhere. Official clients retry forever if this fails."""
    service, body = request.service, await request.read_json()
    origin = {"at": views.time_text(service.clock.wall()), "tenant": request.tenant}
    line = orjson.dumps({**origin, **{name: body[name] for name in _TELEMETRY_FIELDS if name in body}})
    if len(line) > _MAX_LINE_BYTES:
        line = orjson.dumps({**origin, "left_out_bytes": len(line)})
    line = redact_keys(line, api_key_in(request.headers.raw))
    try:
        await asyncio.to_thread(append_line, service.config.data_dir / TELEMETRY_FILE, line, MAX_TELEMETRY_BYTES)
    except OSError as error:
        logger.warning("telemetry could not be written: %s", error.strerror)
    return json_response({"status": "accepted"})


def redact_keys(line: bytes, key: str | None) -> bytes:
    """Replace anything that looks like an API key, and the caller's own: tracebacks may contain one."""
    if key:
        line = line.replace(key.encode(), b"<key>")
    return re.sub(rb"\btml-[\w-]{8,}", b"<key>", line)


def append_line(file: Path, line: bytes, max_bytes: int) -> None:
    """Append a line. A full file is renamed to `….1` first, replacing the former one."""
    if file.exists() and file.stat().st_size + len(line) > max_bytes:
        file.replace(file.with_name(file.name + ".1"))
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "ab") as log:
        log.write(line + b"\n")
