"""API keys: which requests are accepted, for which tenant, and how soon a revoked key stops working."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

import tinkex
from tests.unit.server.conftest import Served
from tinkex.server.http.access import CACHE_S, AccessControl, api_key_in, is_guarded, route_path
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.rejected_keys import LINE_S
from tinkex.server.upkeep.janitor import Janitor
from tinkex.settings import KEYLESS
from tinkex.store.access import hash_key, hint, new_key
from tinkex.store.errors import Unavailable
from tinkex.store.records import KeyRecord

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"


def add_key(served: Served, tenant: str) -> str:
    key = new_key()
    row = KeyRecord(
        id=uuid4().hex, sha256=hash_key(key), tenant=tenant, name=tenant, hint=hint(key), created_at=served.clock.wall()
    )
    served.run(served.service.db(served.store.add_key, row))
    return key


def who(served: Served, key: str | None) -> str:
    answer = served.ask("GET", "auth/apikey/me", key=key)
    return str(answer.json["user_urn"]).removeprefix("tml:user:") if answer.status == 200 else str(answer.status)


def test_without_keys_all_clients_are_the_local_tenant(served: Served) -> None:
    assert {who(served, key) for key in (None, "tml-x", "anything")} == {"local"}


def test_a_server_on_a_public_address_always_needs_a_key(serve: Callable[..., Served]) -> None:
    assert who(serve(host="0.0.0.0"), "tml-x") == "401"


def test_each_configured_key_is_a_tenant_of_its_own_that_survives_restarts(serve: Callable[..., Served]) -> None:
    first, second = serve(api_keys=(ALICE, BOB)), serve(api_keys=(BOB, ALICE))
    assert who(first, ALICE) == who(second, ALICE) != who(first, BOB)
    assert ALICE[4:9] not in who(first, ALICE).removeprefix("key-")


@pytest.mark.parametrize("key", [None, "", "tml-wrong", "tml-alice-012345678", "x" * 5000])
def test_a_wrong_key_is_401_with_a_sentence(serve: Callable[..., Served], key: str | None) -> None:
    answer = serve(api_keys=(ALICE,)).ask("POST", "create_session", {}, key=key)
    assert (answer.status, answer.json["code"]) == (401, "unauthorised")
    assert "API key" in answer.json["detail"]


def test_wrong_keys_are_logged_once_a_minute_with_their_number_and_address(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """Before: no metric and no line; somebody could guess keys for weeks."""
    served = serve(api_keys=(ALICE,))

    def lines() -> list[str]:
        return [row.getMessage() for row in caplog.records if "API key" in row.getMessage()]

    assert who(served, ALICE) != "401" and who(served, None) == "401"
    assert lines() == []
    for number in range(4):
        assert who(served, f"tml-a-wrong-key-{number}") == "401"
    first = "rejected 1 request with an API key that is unknown or was revoked; the last came from 127.0.0.1"
    assert lines() == [first]
    served.clock.advance(LINE_S - 1)
    assert served.ask("GET", "/v1/models", headers={"authorization": "Bearer tml-a-wrong-key"}).status == 401
    assert served.ask("GET", "/metrics", key="tml-a-wrong-key").status == 401
    assert lines() == [first]
    served.clock.advance(1)
    served.run(Janitor(served.service)._report_rejected_keys())
    served.run(Janitor(served.service)._report_rejected_keys())
    assert lines() == [first, first.replace("1 request ", "5 requests ")]
    assert "wrong-key" not in caplog.text and ALICE not in caplog.text


def test_an_address_that_a_proxy_names_cannot_write_into_the_log(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(api_keys=(ALICE,))
    headers = {"x-forwarded-for": "somebody; tinkex: all is well"}
    assert served.ask("GET", "sessions", headers=headers, key="tml-a-wrong-key").status == 401
    assert "the last came from an address that cannot be read" in caplog.text and "all is well" not in caplog.text
    served.clock.advance(LINE_S)
    assert served.ask("GET", "sessions", headers={"x-forwarded-for": "203.0.113.7"}, key="tml-x-wrong").status == 401
    assert "the last came from 203.0.113.7" in caplog.text


def test_a_bearer_token_counts_as_key_and_x_api_key_comes_first(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB))
    assert served.ask("GET", "sessions", headers={"authorization": f"Bearer {ALICE}"}).status == 200
    assert served.ask("GET", "sessions", headers={"authorization": f"Basic {ALICE}"}).status == 401
    assert api_key_in([(b"authorization", b"bearer b"), (b"X-API-Key", b"a")]) == "a"


def test_health_needs_no_key_and_every_other_call_does(serve: Callable[..., Served]) -> None:
    from tinkex.wire import endpoints

    served = serve(api_keys=(ALICE,))
    parts = dict.fromkeys(("run_id", "session_id", "sampler_id", "tokenizer", "file", "base_model"), "x")
    open_calls = [
        row.name
        for row in endpoints.ALL
        if served.ask(row.method, row.path.format(**parts, checkpoint_id="weights/x")).status != 401
    ]
    assert open_calls == ["healthz"]
    for path in ("/v1/models", "/oai/api/v1/models", "/api/v1/import_weights"):
        assert is_guarded(path)


def test_a_proxy_prefix_does_not_bypass_the_key() -> None:
    assert is_guarded(route_path({"path": "/tinkex/api/v1/sessions", "root_path": "/tinkex"}))
    assert route_path({"path": "/tinkexapi/v1/x", "root_path": "/tinkex"}) == "/tinkexapi/v1/x"


def test_a_stored_key_works_and_stops_working_soon_after_it_is_revoked(served: Served) -> None:
    assert who(served, None) == "local"
    key = add_key(served, "alice")
    served.clock.advance(CACHE_S)
    assert (who(served, key), who(served, None)) == ("alice", "401")
    row = served.run(served.service.db(served.store.list_keys))[0]
    served.run(served.service.db(served.store.revoke_key, row.id, served.clock.wall()))
    served.clock.advance(CACHE_S)
    assert who(served, key) == "401"
    assert who(served, None) == "401", "revoking the last key must not open the service"


def test_revoking_the_last_key_keeps_a_restarted_service_closed(serve: Callable[..., Served]) -> None:
    first = serve()
    key = add_key(first, "alice")
    assert first.ask("DELETE", "auth/apikey/me", key=key).status == 200
    assert who(serve(data_dir=first.config.data_dir), None) == "401"


def test_a_client_can_revoke_its_own_key_at_once_and_no_configured_one(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE,))
    key = add_key(served, "bob")
    assert who(served, key) == "bob"
    assert served.ask("DELETE", "auth/apikey/me", key=key).status == 200
    assert who(served, key) == "401"
    answer = served.ask("DELETE", "auth/apikey/me", key=ALICE)
    assert (answer.status, answer.json["code"]) == (400, "key_not_stored")
    assert who(served, ALICE).startswith("key-")


def test_two_keys_of_one_tenant_share_and_two_tenants_do_not(served: Served) -> None:
    first, second, other = add_key(served, "lab"), add_key(served, "lab"), add_key(served, "else")
    session = served.ask("POST", "create_session", {}, key=first).json["session_id"]
    assert served.ask("GET", f"sessions/{session}", key=second).status == 200
    assert served.ask("GET", f"sessions/{session}", key=other).status == 404
    assert served.ask("POST", "session_heartbeat", {"session_id": session}, key=other).status == 404
    assert served.ask("POST", f"sessions/{session}/finish", {}, key=other).status == 404
    assert served.ask("GET", "sessions", key=other).json == {"sessions": []}


def test_guessing_keys_does_not_fill_the_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkex.server.http import access

    monkeypatch.setattr(access, "_MAX_CACHED_KEYS", 5)
    key = add_key(served, "alice")
    for number in range(12):
        who(served, f"tml-guess-{number}")
    assert len(served.service.access._cache) <= 5
    assert who(served, key) == "alice"


def test_no_key_is_logged(serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    served = serve(api_keys=(ALICE,))
    with caplog.at_level(logging.DEBUG):
        who(served, ALICE), who(served, "tml-a-wrong-key-of-somebody")
    assert not any(word in caplog.text for word in (ALICE, "tml-a-wrong-key-of-somebody"))
    assert ALICE not in repr(served.config)


def test_whoami_serves_our_client_and_the_official_login(served: Served) -> None:
    key = add_key(served, "alice")
    me = tinkex.RestClient(base_url=served.base_url, api_key=key).whoami().result()
    assert me.user_urn == "tml:user:alice"
    raw = served.ask("GET", "auth/apikey/me", key=key).json
    assert isinstance(raw["key_id"], int)
    assert raw["details"]["user_details"]["email"] == "alice"
    assert key not in str(raw)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "rebound.example:8000"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "http://localhost:3000", "host": "127.0.0.1"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "https://127.0.0.1", "host": "127.0.0.1:8642"}, 403),
        ({"origin": "http://localhost:99999", "host": "localhost:8642"}, 403),
        ({"origin": "http://localhost:8642", "host": "localhost:8642"}, 200),
        ({"origin": "http://localhost", "host": "localhost:80"}, 200),
        ({"host": "[::1]:8000"}, 200),
    ],
)
def test_without_keys_requests_from_foreign_web_pages_are_rejected(
    served: Served, headers: dict[str, str], status: int
) -> None:
    answer = served.ask("GET", "sessions", headers=headers)
    assert answer.status == status, answer.content
    if status == 403:
        assert "tinkex key create" in answer.json["detail"]


def test_the_public_host_is_allowed_without_keys_and_any_host_with_keys(serve: Callable[..., Served]) -> None:
    named = serve(public_url="https://tinker.example/here")
    assert named.ask("GET", "sessions", headers={"host": "tinker.example"}).status == 200
    page = {"origin": "https://tinker.example"}
    assert named.ask("GET", "sessions", headers=page).status == 200, "a proxy may set Host to our own address"
    keyed = serve(api_keys=(ALICE,))
    assert keyed.ask("GET", "sessions", key=ALICE, headers={"host": "anything.example"}).status == 200


def test_a_flood_of_wrong_keys_occupies_the_store_with_one_query_at_a_time(served: Served) -> None:
    """Before: each key that was not cached was one more call in the queue of the store's only thread."""
    key = add_key(served, "alice")
    assert who(served, key) == "alice"
    db, calls, may_go = served.service.db, [], threading.Event()

    async def counted(call: Callable[..., Any], *args: Any) -> Any:
        calls.append(call)
        return await db(call, *args)

    served.service.access._db = counted  # type: ignore[assignment]
    blocked = asyncio.run_coroutine_threadsafe(db(may_go.wait, 20), served.loop)
    try:
        guesses = [
            asyncio.run_coroutine_threadsafe(served.service.access.tenant(f"tml-guess-{n}"), served.loop)
            for n in range(300)
        ]
        served.clock.advance(CACHE_S)
        honest = asyncio.run_coroutine_threadsafe(served.service.access.tenant(key), served.loop)
        served.run(asyncio.sleep(0))
        assert len(calls) == 1
    finally:
        may_go.set()
    assert blocked.result(20)
    assert honest.result(20) == "alice"
    assert all(isinstance(guess.exception(20), RequestRejected) for guess in guesses)
    assert len(calls) <= 3


def test_a_store_that_fails_is_reported_to_every_request_that_waits_for_its_key(served: Served) -> None:
    key = add_key(served, "alice")
    assert who(served, key) == "alice"
    served.clock.advance(CACHE_S)

    async def fail(*_: Any) -> Any:
        raise Unavailable("the database is away")

    db, served.service.access._db = served.service.access._db, fail  # type: ignore[assignment]
    assert (who(served, key), who(served, "tml-unknown-key")) == ("503", "503")
    served.service.access._db = db
    assert who(served, key) == "alice"


@pytest.mark.parametrize("path", ["/api/v1/sessions", "/v1/models", "/metrics"])
def test_a_key_that_sends_too_many_requests_waits_and_another_does_not(serve: Callable[..., Served], path: str) -> None:
    """Before: there was no limit on the rate of a key."""
    served = serve(api_keys=(ALICE, BOB), max_requests_per_s=1)
    assert [served.ask("GET", path, key=BOB).status for _ in range(6)] == [200] * 5 + [429]
    answer = served.ask("GET", path, key=BOB)
    assert answer.headers["retry-after"] == "1"
    if path.startswith("/v1"):
        assert answer.json["error"]["type"] == "rate_limit_error"
        assert "--max-requests-per-s" in answer.json["error"]["message"]
    else:
        assert (answer.json["code"], answer.json["category"]) == ("too_many_requests", "server")
    assert served.ask("GET", path, key=ALICE).status == 200
    served.clock.advance(1)
    assert served.ask("GET", path, key=BOB).status == 200


def test_polls_and_heartbeats_are_never_rejected_for_their_rate(serve: Callable[..., Served]) -> None:
    """Before: they were 429, after which tinker 0.4.1 gives a result up for good. Now they are served, but later."""
    served = serve(max_requests_per_s=1)
    served.session()
    assert [served.ask("GET", "sessions").status for _ in range(6)][-1] == 429
    for path in ("retrieve_future", "retrieve_futures", "session_heartbeat"):
        assert served.ask("POST", path, b"[]").status == 400, "it was read: its body is no object"
    for _ in range(47):
        assert served.ask("POST", "session_heartbeat", {"session_id": "s"}).status == 200
    with ThreadPoolExecutor() as pool:
        late = pool.submit(served.ask, "POST", "session_heartbeat", {"session_id": "s"})
        served.clock.wait_for_sleepers(1)
        assert not late.done()
        served.clock.advance(1)
        assert late.result(10).status == 200


def test_the_owners_key_is_the_tenant_of_a_service_without_keys_and_the_only_one_of_a_private_service(
    serve: Callable[..., Served],
) -> None:
    owner = "tml-the-owner-of-the-folder"
    shared, private = serve(api_keys=(ALICE,)), serve()
    for served, is_private in ((shared, False), (private, True)):
        service = served.service
        service.access = AccessControl(
            served.config, served.store, service.db, served.clock, owner_key=owner, is_private=is_private
        )
    # The middleware keeps its own reference: asked directly.
    for served in (shared, private):
        assert served.run(served.service.access.tenant(owner)) == "local"
        with pytest.raises(RequestRejected, match="unknown or was revoked"):
            served.run(served.service.access.tenant("tml-a-stranger"))
        with pytest.raises(RequestRejected, match="No API key"):
            served.run(served.service.access.tenant(KEYLESS))
    assert private.run(private.service.access.uses_keys())
    assert served.run(shared.service.access.tenant(ALICE)).startswith("key-")
