"""What a tenant may store about its sessions, how many it may have, and that a search holds up nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from sqlalchemy import text

from tests.unit.server.conftest import Served
from tinkex.server.routes import sampling, sessions
from tinkex.server.sampling.sample_queue import SampleTarget

LONG = "x" * 5000


@pytest.mark.parametrize(
    "body",
    [
        {"display_name": LONG},
        {"project_id": LONG},
        {"sdk_version": LONG},
        {"tags": ["a", LONG]},
        {"tags": ["tag"] * 2000},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_session_with_texts_of_megabytes_is_rejected(served: Served, body: dict[str, Any]) -> None:
    """Before: 16 requests of a few KB made a database of 871 MB."""
    answer = served.ask("POST", "create_session", body)
    assert (answer.status, answer.json["code"]) == (400, "text_too_long"), answer
    assert "--max-text-characters" in answer.json["detail"]
    assert served.ask("GET", "sessions").json["sessions"] == []


def test_a_session_may_have_texts_of_a_usual_length(served: Served) -> None:
    body = {
        "display_name": "A name",
        "project_id": "p",
        "sdk_version": "0.36.0",
        "tags": [f"tag-{n}" for n in range(100)],
    }
    assert served.ask("POST", "create_session", body).status == 200


def test_a_project_and_a_search_with_a_long_text_are_rejected(served: Served) -> None:
    session = served.ask("POST", "create_session", {}).json["session_id"]
    for method, path, body in (
        ("PUT", f"sessions/{session}/project", {"project_id": LONG}),
        ("POST", "sessions/search", {"display_name": LONG}),
    ):
        answer = served.ask(method, path, body)
        assert (answer.status, answer.json["code"]) == (400, "text_too_long"), (path, answer)
    answer = served.ask("POST", "sessions/search", {"statuses": [{"type": "active"}] * 1000})
    assert (answer.status, answer.json["code"]) == (400, "too_many")


def test_a_long_report_of_how_a_session_ended_is_cut_and_the_session_ends(served: Served) -> None:
    session = served.ask("POST", "create_session", {}).json["session_id"]
    report = {"reason": {"type": "errored"}, "detail": "y" * 1_000_000}
    assert served.ask("POST", f"sessions/{session}/finish", report).status == 200
    stored = served.run(served.service.db(served.store.get_session, session))
    assert stored is not None and stored.finished is not None
    assert len(stored.finished["detail"]) == served.config.max_text_characters


def test_a_tenant_has_only_so_many_open_sessions(serve: Callable[..., Served]) -> None:
    served = serve(max_sessions=2)
    key = {"x-idempotency-key": "first"}
    first = served.ask("POST", "create_session", {}, headers=key).json
    assert served.ask("POST", "create_session", {}).status == 200
    answer = served.ask("POST", "create_session", {})
    assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (429, "too_many_sessions", "1")
    assert "--max-sessions" in answer.json["detail"]
    assert served.ask("POST", "create_session", {}, headers=key).json == first, "a retry is no new session"
    served.ask("POST", f"sessions/{first['session_id']}/finish", {})
    assert served.ask("POST", "create_session", {}).status == 200
    assert served.ask("POST", "create_session", {}).status == 429
    served.clock.advance(served.config.idle_session_s + 1)
    assert served.ask("POST", "create_session", {}).status == 200, "idle sessions do not count"


class _AnyModel:
    """The part of `Sampling` that finds what to sample from."""

    async def open(self, tenant: str, **named: object) -> SampleTarget:
        return SampleTarget(cast(Any, type("Info", (), {"name": "tinkex/tiny"})))


def test_a_tenant_makes_only_so_many_sampling_sessions_within_an_hour(serve: Callable[..., Served]) -> None:
    served = serve(max_samplers=2)
    served.service.sampling = cast(Any, _AnyModel())
    session = served.ask("POST", "create_session", {}).json["session_id"]

    def create(number: int) -> int:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
        return served.ask("POST", "create_sampling_session", body).status

    assert [create(0), create(1), create(2)] == [200, 200, 400], "not 429: clients would repeat it for an hour"
    assert create(1) == 200, "a retry is no new one"
    served.clock.advance(sampling.SAMPLERS_COUNT_S + 1)
    assert create(2) == 200, "a loop that makes one per step goes on"


def test_a_search_reads_a_few_sessions_at_a_time_and_lets_others_in_between(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: one search read all sessions of a tenant in one call; others waited 3.9 s for the store."""
    monkeypatch.setattr(sessions, "SEARCHED_AT_ONCE", 10)
    for number in range(35):
        served.session(f"s{number:02}", display_name="even" if number % 2 == 0 else "odd", created_at=float(number))
    calls: list[int] = []
    search = served.store.search_sessions

    def counted(*args: Any, **named: Any) -> Any:
        page = search(*args, **named)
        calls.append(len(page.sessions))
        return page

    served.store.search_sessions = counted  # type: ignore[method-assign]
    answer = served.ask("POST", "sessions/search", {"display_name": "even", "limit": 12}).json
    assert [row["session_id"] for row in answer["sessions"]] == [f"s{n:02}" for n in range(34, 10, -2)]
    assert calls == [5, 5, 3]
    cursor = answer["next_cursor"]
    rest = served.ask("POST", "sessions/search", {"display_name": "even", "limit": 12, "cursor": cursor}).json
    assert [row["session_id"] for row in rest["sessions"]] == [f"s{n:02}" for n in range(10, -1, -2)]
    assert rest["next_cursor"] is None
    assert served.ask("POST", "sessions/search", {"display_name": "nothing"}).json["sessions"] == []


def test_counting_what_a_tenant_has_reads_only_what_counts(served: Served) -> None:
    store, plans = served.store, []
    queries = (
        "SELECT count(*) FROM sessions WHERE tenant = 'a' AND finished IS NULL AND seen_at >= 5",
        "SELECT count(*) FROM samplers WHERE tenant = 'a' AND created_at >= 5",
    )

    def explain() -> None:
        with store._read() as connection:
            plans.extend(str(connection.execute(text(f"EXPLAIN QUERY PLAN {query}")).all()) for query in queries)

    served.run(served.service.db(explain))
    assert "INDEX sessions_open" in plans[0] and "INDEX samplers_by_tenant" in plans[1], plans
