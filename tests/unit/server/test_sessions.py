"""Endpoints for sessions, runs and the service itself, over HTTP and through the SDK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tinkex
from tests.unit.server.conftest import Served
from tinkex.engine.contract import EngineState
from tinkex.server.routes import sessions
from tinkex.wire import endpoints

OPEN = {"tags": ["a"], "user_metadata": {"name": "x", "step": 5}, "sdk_version": "0.36.0"}


@pytest.fixture
def rest(served: Served) -> tinkex.RestClient:
    return tinkex.RestClient(base_url=served.base_url, api_key="tml-anything")


def test_health_is_503_with_the_reason_until_the_engine_can_work(served: Served) -> None:
    served.engine.state = EngineState(is_ready=False, reason="the engine loads tinkex/tiny")
    answer = served.ask("GET", "healthz")
    assert (answer.status, answer.json["detail"]) == (503, "the engine loads tinkex/tiny")
    served.engine.state = EngineState(is_ready=True)
    assert served.ask("GET", "healthz").json == {"status": "ok"}
    served.worker.pause("disk", "the disk is full")
    answer = served.ask("GET", "healthz")
    assert (answer.status, answer.json["detail"]) == (503, "the disk is full")


def test_capabilities_name_every_model_and_alias(served: Served) -> None:
    models = served.ask("GET", "get_server_capabilities").json["supported_models"]
    assert [model["model_name"] for model in models] == ["tinkex/tiny", "tiny"]
    assert {model["max_context_length"] for model in models} == {2048}


def test_clients_are_told_to_send_chunks_in_order_and_no_losses(served: Served) -> None:
    told = served.ask("POST", "client/config", {"sdk_version": "0.36.0"}).json
    assert (told["parallel_fwdbwd_chunks"], told["custom_loss_server_side"]) == (False, False)
    assert told["tinkex"]["stream"] is True
    assert served.ask("POST", "client/dynamic_config", {}).json["sample_cancel_enabled"] is True


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "create_custom_loss", "forward_backward_custom"),
        ("GET", "billing/usage/events", "no billing"),
        ("POST", "auth/token", "no tokens"),
    ],
)
def test_unsupported_endpoints_are_rejected_with_the_reason(
    served: Served, method: str, path: str, reason: str
) -> None:
    answer = served.ask(method, path, {} if method == "POST" else None)
    assert (answer.status, answer.json["category"]) == (400, "user")
    assert reason in answer.json["detail"]


def test_a_repeated_create_session_with_one_idempotency_key_is_one_session(served: Served) -> None:
    key = {"x-idempotency-key": "stainless-python-retry-1"}
    first, again = (served.ask("POST", "create_session", OPEN, headers=key).json for _ in range(2))
    other = served.ask("POST", "create_session", OPEN, headers={"x-idempotency-key": "another"}).json
    assert first == again
    assert other["session_id"] != first["session_id"]
    assert len(served.ask("GET", "sessions").json["sessions"]) == 2


def test_a_session_opened_by_hand_needs_no_fields(served: Served) -> None:
    assert served.ask("POST", "create_session", {}).status == 200


def test_metadata_comes_back_as_text_because_official_clients_read_nothing_else(served: Served) -> None:
    session = served.ask("POST", "create_session", OPEN).json["session_id"]
    assert served.ask("GET", f"sessions/{session}").json["user_metadata"] == {"name": "x", "step": "5"}


def test_metadata_that_is_too_large_is_rejected(served: Served) -> None:
    answer = served.ask("POST", "create_session", {**OPEN, "user_metadata": {"x": "y" * 100_000}})
    assert (answer.status, answer.json["code"]) == (400, "bad_metadata")


def test_a_heartbeat_keeps_a_session_alive_until_it_is_finished(served: Served) -> None:
    session = served.ask("POST", "create_session", OPEN).json["session_id"]
    served.clock.advance(60)
    assert served.ask("POST", "session_heartbeat", {"session_id": session}).status == 200
    kept = served.run(served.service.db(served.store.get_session, session))
    assert kept is not None
    assert kept.seen_at == served.clock.wall()
    done = {"reason": {"type": "errored"}, "detail": "oh"}
    assert served.ask("POST", f"sessions/{session}/finish", done).status == 200
    assert served.ask("POST", "session_heartbeat", {"session_id": session}).status == 410


def test_the_first_report_of_how_a_session_ended_counts(served: Served, rest: tinkex.RestClient) -> None:
    session = served.ask("POST", "create_session", OPEN).json["session_id"]
    for kind in ("interrupted", "success"):
        assert (
            served.ask("POST", f"sessions/{session}/finish", {"reason": {"type": kind}, "detail": None}).status == 200
        )
    found = rest.search_sessions(tinkex.types.SessionSearchRequest(session_id=session)).result().sessions
    status = found[0].status
    assert isinstance(status, tinkex.types.ClientSessionFinished)
    assert status.reason.type == "interrupted"


def test_an_unknown_session_and_a_wrong_reason_are_rejected(served: Served) -> None:
    session = served.ask("POST", "create_session", OPEN).json["session_id"]
    assert served.ask("POST", "session_heartbeat", {"session_id": "nobody"}).status == 404
    assert served.ask("POST", "session_heartbeat", {"session_id": 5}).status == 400
    assert served.ask("POST", f"sessions/{session}/finish", {"reason": {"type": "bored"}}).status == 400


def test_a_session_lists_its_runs(served: Served, rest: tinkex.RestClient) -> None:
    served.session("s", user_metadata={"k": "v"}, display_name="mine")
    served.training_run("s:train:0")
    found = rest.get_session("s").result()
    assert (found.training_run_ids, found.display_name, found.user_metadata) == (["s:train:0"], "mine", {"k": "v"})


def test_a_trace_export_fails_with_an_explanation(served: Served, rest: tinkex.RestClient) -> None:
    served.session("s")
    with pytest.raises(tinkex.RequestFailedError, match="keeps no trace"):
        rest.export_session_trace("s").result()


def search(served: Served, **wanted: Any) -> tuple[list[str], Any]:
    answer = served.ask("POST", "sessions/search", wanted)
    assert answer.status == 200, answer.content
    return [found["session_id"] for found in answer.json["sessions"]], answer.json["next_cursor"]


def test_a_search_supports_every_filter(served: Served) -> None:
    served.session("one", display_name="Blue Whale", user_metadata={"k": "v"}, project_id="p")
    served.clock.advance(1)
    served.session("two", finished={"reason": {"type": "success"}, "detail": None})
    served.clock.advance(1)
    served.session("old", seen_at=served.clock.wall() - 3600)
    served.session("other", tenant="somebody")
    assert search(served) == (["old", "two", "one"], None)
    assert search(served, user_metadata={"k": "v"})[0] == ["one"]
    assert search(served, display_name="whale BLUE")[0] == ["one"]
    assert search(served, display_name="whale", session_id="two")[0] == ["two", "one"]
    assert search(served, project_ids=["p"])[0] == ["one"]
    assert search(served, project_ids=["default"])[0] == ["old", "two"]
    assert search(served, statuses=[{"type": "active"}])[0] == ["one"]
    assert search(served, statuses=[{"type": "client_finished", "reasons": ["success"]}])[0] == ["two"]
    assert search(served, statuses=[{"type": "client_finished", "reasons": ["errored"]}, {"type": "failed"}])[0] == []
    assert search(served, owner={"type": "user", "owner_urns": ["tml:user:local"]})[0] == ["old", "two", "one"]
    assert search(served, owner={"type": "user", "owner_urns": ["tml:user:somebody"]})[0] == []
    assert served.ask("POST", "sessions/search", {"limit": 0}).status == 400


def test_pages_of_a_search_leave_nothing_out(served: Served) -> None:
    for number in range(7):
        served.session(f"s{number}", project_id="p" if number % 2 else None)
        served.clock.advance(0.25)
    seen, cursor = search(served, limit=2, project_ids=["default"])
    while cursor:
        page, cursor = search(served, limit=2, project_ids=["default"], cursor=cursor)
        seen += page
    assert seen == ["s6", "s4", "s2", "s0"]


def test_a_search_reports_the_checkpoints_of_sessions(served: Served) -> None:
    served.session("s")
    served.checkpoint(served.training_run("s:train:0"))
    found = served.ask("POST", "sessions/search", {}).json["sessions"][0]
    assert (found["checkpoints_count"], found["checkpoint_storage_bytes"] > 8000) == (1, True)


def test_runs_show_their_newest_checkpoints(served: Served, rest: tinkex.RestClient) -> None:
    run = served.training_run(user_metadata={"n": 5})
    for name in ("first", "second"):
        served.checkpoint(run, name)
        served.checkpoint(run, name, "sampler_weights")
        served.clock.advance(1)
    found = rest.get_training_run(run.id).result()
    assert found.last_checkpoint is not None
    assert found.last_sampler_checkpoint is not None
    assert found.last_checkpoint.tinker_path == f"tinker://{run.id}/weights/second"
    assert found.last_sampler_checkpoint.checkpoint_id == "sampler_weights/second"
    assert found.user_metadata == {"n": "5"}
    assert (found.base_model, found.lora_rank, found.model_owner) == ("tinkex/tiny", 8, "tml:user:local")


def test_runs_are_listed_in_pages_and_by_project(served: Served, rest: tinkex.RestClient) -> None:
    served.session("s")
    served.session("t", project_id="p")
    for name in ("s:train:0", "s:train:1", "t:train:0"):
        served.training_run(name)
        served.clock.advance(1)
    page = rest.list_training_runs(limit=1, offset=1).result()
    assert [run.training_run_id for run in page.training_runs] == ["s:train:1"]
    assert page.cursor.total_count == 3
    inside = rest.list_training_runs(project_id="p").result()
    assert [run.training_run_id for run in inside.training_runs] == ["t:train:0"]
    rest.assign_session_project("s", "p").result()
    assert rest.list_training_runs(project_id="p").result().cursor.total_count == 3
    assert served.ask("GET", "training_runs?limit=many").status == 400


def test_get_info_describes_a_model_even_if_its_base_is_no_longer_served(served: Served) -> None:
    run = served.training_run(base_model="tiny")
    old = served.training_run("s:train:9", base_model="gone/model")
    info = served.ask("POST", "get_info", {"model_id": run.id}).json
    assert info["model_data"] == {"arch": "llama", "model_name": "tiny", "tokenizer_id": "tinkex/tiny"}
    assert served.ask("POST", "get_info", {"model_id": old.id}).json["model_name"] == "gone/model"


def test_telemetry_is_accepted_and_kept_without_keys(served: Served) -> None:
    body = {"session_id": "s", "events": [{"traceback": "api_key='tml-0123456789abcdef' x"}], "colour": "blue"}
    assert served.ask("POST", "telemetry", body, key="caller-key-1").json == {"status": "accepted"}
    assert served.ask("POST", "telemetry", {"events": "caller-key-1"}, key="caller-key-1").status == 200
    log = served.config.data_dir / sessions.TELEMETRY_FILE
    text = log.read_text()
    assert "<key>" in text
    assert not any(word in text for word in ("tml-0123456789abcdef", "caller-key-1", "blue"))
    assert log.stat().st_mode & 0o077 == 0


def test_the_telemetry_log_stays_small(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TELEMETRY_BYTES", 1000)
    for number in range(30):
        served.ask("POST", "telemetry", {"session_id": f"s{number}", "events": ["x" * 100]})
    served.ask("POST", "telemetry", {"events": ["x" * 300_000]})
    logs = sorted(served.config.data_dir.glob(f"{sessions.TELEMETRY_FILE}*"))
    assert len(logs) == 2
    assert all(log.stat().st_size <= 1000 for log in logs)


def test_every_endpoint_returns_404_for_unknown_ids(served: Served) -> None:
    named = [row for row in endpoints.ALL if "{" in row.path]
    parts = {"run_id": "r", "checkpoint_id": "weights/x", "session_id": "s", "sampler_id": "x", "tokenizer": "a/b"}
    parts["base_model"] = "a/b"
    for row in named:
        path = row.path.format(**parts, file="tokenizer.json")
        answer = served.ask(row.method, path, {} if row.method in ("POST", "PUT") else None)
        assert answer.status == 404, (row.name, answer)
        assert "is not known" in answer.json["detail"]
        assert "content-length" in answer.headers


def test_a_sampler_is_described(served: Served) -> None:
    from tinkex.store.records import SamplerRecord

    sampler = SamplerRecord(
        id="s:sample:0", tenant="local", session_id="s", base_model="tinkex/tiny", created_at=served.clock.wall()
    )
    served.run(served.service.db(served.store.add_sampler, sampler))
    other = replace(sampler, id="o:sample:0", tenant="other")
    served.run(served.service.db(served.store.add_sampler, other))
    wanted = {"sampler_id": "s:sample:0", "base_model": "tinkex/tiny", "model_path": None}
    assert served.ask("GET", "samplers/s:sample:0").json == wanted
    assert served.ask("GET", "samplers/o:sample:0").status == 404
