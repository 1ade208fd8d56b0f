"""Two keys, two worlds: what is one tenant's is to the other as if it had never been, unless it was published."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from starlette.routing import Route

from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import CACHE, LiveServer, free_port
from tests.integration.service.raw import Answer, Raw, Run, check_told, check_unharmed
from tests.integration.service.tenant_calls import (
    PROMPT,
    World,
    all_calls,
    changes,
    lists,
    named,
    reads,
    route_names,
    service_routes,
    without_ids,
    without_key,
)


@pytest.fixture(scope="module")
def bobs_run(bob: Raw) -> Run:
    return bob.run()


@pytest.fixture(scope="module")
def bobs(bob: Raw, bobs_run: Run) -> World:
    run = bobs_run
    run.saved("save_weights", "state")
    run.saved("save_weights_for_sampler", "lean")
    run.saved("save_weights_external", "external")
    operation = run.submit_forward()
    session = run.id.split(":")[0]
    sampler = bob.sampler(session, model_path=f"tinker://{run.id}/sampler_weights/lean")
    sample = bob.post("asample", {**PROMPT, "sampling_session_id": sampler}).json["request_id"]
    assert bob.poll(operation).status == bob.poll(sample).status == 200
    return World(session, run.id, sampler, operation, sample)


@pytest.fixture(scope="module")
def bobs_tenant(bob: Raw) -> str:
    return str(bob.get("service_state").json["tenant"])


@pytest.fixture(scope="module")
def nobodys() -> World:
    """Ids of the same form that never were."""
    session = str(uuid4())
    return World(session, f"{session}:train:0", f"{session}:sample:0", f"op-{uuid4().hex}", f"sample-{uuid4().hex}")


@pytest.fixture(scope="module")
def alices_run(alice: Raw) -> Run:
    return alice.run()


@pytest.fixture(scope="module")
def alices_path(alices_run: Run) -> str:
    return alices_run.saved("save_weights", "own")


def anonymous(answer: Answer, world: World) -> tuple[int, str]:
    """What was answered, with the ids that were asked for taken out."""
    said = answer.content.decode()
    for name in (world.operation, world.sample, world.session):
        said = said.replace(name, "…")
    return answer.status, said


NOBODY = World("", "", "", "", "")
SILENT = "POST /api/v1/cancel_future"
"""Answers the same whatever it is asked; that it does nothing is checked below."""


def test_every_route_is_in_the_table() -> None:
    rows = all_calls(NOBODY)
    routes = route_names(service_routes())
    assert routes - rows.keys() == set(), "say in tenant_calls.py how another tenant would call these"
    assert rows.keys() - routes == set(), "these routes are gone"
    assert not [route for route, calls in rows.items() if not calls]


def test_a_new_route_without_a_row_is_noticed() -> None:
    async def leak(request: object) -> None: ...

    routes = [*service_routes(), Route("/api/v1/leak/{name:path}", leak)]
    assert route_names(routes) - all_calls(NOBODY).keys() == {"GET /api/v1/leak/{name}"}


@pytest.mark.parametrize("route", named(NOBODY, ""))
def test_what_is_anothers_is_unknown_in_the_same_words(
    alice: Raw, bobs: World, nobodys: World, alices_path: str, route: str
) -> None:
    for theirs, unknown in zip(named(bobs, alices_path)[route], named(nobodys, alices_path)[route], strict=True):
        said, expected = anonymous(alice.ask(*theirs), bobs), anonymous(alice.ask(*unknown), nobodys)
        assert said == expected
        is_sample = isinstance(theirs[2], dict) and theirs[2].get("request_id") == bobs.sample
        assert said[0] == (200 if route == SILENT else 410 if is_sample else 404), said
        assert "is not known" in said[1] or is_sample or route == SILENT


@pytest.mark.parametrize("route", lists(NOBODY))
def test_a_list_shows_what_is_the_tenants_own(
    alice: Raw, bob: Raw, bobs: World, bobs_tenant: str, alices_path: str, route: str
) -> None:
    for call in lists(bobs)[route]:
        answer = alice.ask(*call)
        assert answer.status == 200
        said = answer.content.decode()
        assert bobs.session not in said and bobs_tenant not in said


@pytest.mark.parametrize("route", without_ids())
def test_other_calls_tell_nothing_of_other_tenants(alice: Raw, bobs: World, bobs_tenant: str, route: str) -> None:
    for call in without_ids()[route]:
        answer = alice.ask(*call)
        assert answer.status < 500
        assert bobs.session.encode() not in answer.content and bobs_tenant.encode() not in answer.content


@pytest.mark.parametrize("route", all_calls(NOBODY))
def test_without_a_key_every_route_is_401_but_those_that_are_open(keyed: LiveServer, bobs: World, route: str) -> None:
    stranger = Raw(keyed)
    for call in all_calls(bobs)[route]:
        answer = stranger.ask(*call)
        if route in without_key():
            assert answer.status in (200, 307, 403, 404)
            assert bobs.session.encode() not in answer.content
        else:
            assert answer.status == 401
            assert b"API key" in answer.content


def test_weights_of_another_are_as_unknown_to_a_run(alice: Raw, bobs: World, nobodys: World, alices_run: Run) -> None:
    said = []
    for world in (bobs, nobodys):
        body = alices_run.named(path=world.path(world.state), optimizer=True)
        said.append(anonymous(alice.poll(alice.post("load_weights", body).json["request_id"]), world))
    assert said[0] == said[1] and '"category":"user"' in said[0][1]


def test_a_tenant_finds_its_own_in_its_lists(alice: Raw, bobs: World, alices_path: str) -> None:
    assert alices_path in alice.get("checkpoints").content.decode()
    assert alices_path.split("/")[2] in alice.get("training_runs").content.decode()
    assert alice.post("sessions/search", {"session_id": bobs.session}).json["sessions"] == []


def test_nothing_that_another_tried_left_a_trace(alice: Raw, bob: Raw, bobs: World, bobs_run: Run) -> None:
    before = bob.post("get_info", {"model_id": bobs.run}).json["last_seq_id"]
    for route, calls in named(bobs, bobs.path(bobs.state)).items():
        for call in calls:
            assert alice.ask(*call).status in (404, 410) or route == SILENT
    assert alice.post("cancel_future", {"request_id": bobs.sample}).status == 200
    check_unharmed(bobs_run)
    assert bob.post("get_info", {"model_id": bobs.run}).json["last_seq_id"] == before + 1
    assert bob.post("session_heartbeat", {"session_id": bobs.session}).status == 200
    assert bob.get(f"sessions/{bobs.session}").json["training_run_ids"] == [bobs.run]
    kept = {
        entry["checkpoint_id"]: entry for entry in bob.get(f"training_runs/{bobs.run}/checkpoints").json["checkpoints"]
    }
    assert kept.keys() == {bobs.state, bobs.lean, bobs.external}
    assert not any(entry["public"] or entry.get("expires_at") for entry in kept.values())
    assert "sequences" in bob.poll(bobs.sample).json and "error" not in bob.poll(bobs.operation).json


def test_idempotency_keys_are_each_tenants_own(alice: Raw, bob: Raw) -> None:
    headers = {"x-idempotency-key": "the-same"}
    ids = [client.post("create_session", {}, headers=headers).json["session_id"] for client in (alice, bob, alice)]
    assert ids[0] == ids[2] != ids[1]


def test_what_is_published_can_be_read_and_not_changed(
    alice: Raw, bob: Raw, bobs: World, bobs_run: Run, alices_run: Run
) -> None:
    for kind, name in (("save_weights", "open"), ("save_weights_for_sampler", "open")):
        bobs_run.saved(kind, name)
    state, lean = "weights/open", "sampler_weights/open"
    for checkpoint in (state, lean):
        assert bob.post(f"training_runs/{bobs.run}/checkpoints/{checkpoint}/publish").status == 200
        for word, call in reads(bobs, checkpoint).items():
            assert alice.ask(*call).status in (200, 302), word
        assert alice.post("weights_info", {"tinker_path": bobs.path(checkpoint)}).status == 200
        assert alice.post("copy_weights", {"source_path": bobs.path(checkpoint)}).status == 200
        for word, call in changes(bobs, checkpoint).items():
            assert alice.ask(*call).status == 404, word
    assert alices_run.done("load_weights", path=bobs.path(state), optimizer=True)["path"] == bobs.path(state)
    sampler = alice.sampler(model_path=bobs.path(lean))
    assert len(alice.done("asample", {**PROMPT, "sampling_session_id": sampler})["sequences"]) == 1
    assert alice.get(f"training_runs/{bobs.run}").status == 404
    assert bobs.session not in alice.get("checkpoints").content.decode()
    assert bob.ask("DELETE", f"training_runs/{bobs.run}/checkpoints/{lean}/publish").status == 200
    assert alice.post("weights_info", {"tinker_path": bobs.path(lean)}).status == 404
    time.sleep(1.1)  # a sampler is believed in for a second
    assert alice.post("asample", {**PROMPT, "seq_id": 2, "sampling_session_id": sampler}).status == 404


def test_a_link_to_a_file_opens_that_checkpoint_and_no_other(keyed: LiveServer, bob: Raw, bobs: World) -> None:
    stranger = Raw(keyed)
    answer = bob.get(f"training_runs/{bobs.run}/checkpoints/{bobs.lean}/archive")
    link = answer.headers["location"].removeprefix(keyed.url)
    assert stranger.get(link).status == 200
    token = link.split("/")[-2]
    for forged in (f"/api/v1/files/{token[:-2]}AA/archive.tar", f"/api/v1/files/{token}/..%2fx", link + "/../../x"):
        assert stranger.get(forged).status in (401, 403, 404)


# ── Keys


@pytest.mark.parametrize("key", [None, "", "tml-wrong-0123456789", ALICE[:-1], ALICE + "x", BOB.upper(), "ü" * 9])
def test_a_wrong_key_is_refused_with_a_sentence_that_does_not_repeat_it(keyed: LiveServer, key: str | None) -> None:
    stranger = Raw(keyed)
    headers = {} if key is None else {"x-api-key": key.encode().decode("latin-1")}
    for method, path in (("POST", "create_session"), ("GET", "checkpoints"), ("POST", "asample"), ("GET", "nothing")):
        answer = stranger.ask(method, path, b"{}", headers=headers)
        assert (answer.status, answer.json["code"], answer.json["category"]) == (401, "unauthorised", "user")
        check_told(answer, "API key")
        assert not key or key not in answer.text
    answer = stranger.post("/v1/completions", b"{}", headers=headers)
    assert answer.status == 401 and "API key" in answer.json["error"]["message"]
    assert stranger.get("healthz").status == 200


def key_command(server: LiveServer, *words: str) -> Any:
    made = subprocess.run(
        [sys.executable, "-m", "tinkex", "key", *words, "--data-dir", str(server.data_dir), "-o", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(made.stdout)


@pytest.mark.timing
def test_a_key_made_while_the_server_runs_works_and_a_revoked_one_stops_within_seconds(keyed: LiveServer) -> None:
    made = key_command(keyed, "create", "carol")
    carol = Raw(keyed, made["key"])
    session = carol.session()
    key_command(keyed, "revoke", made["id"])
    end = time.monotonic() + 8
    while (answer := carol.get(f"sessions/{session}")).status == 200:
        assert time.monotonic() < end, "a revoked key still works"
        time.sleep(0.1)
    assert answer.status == 401 and "revoked" in answer.text


def test_a_client_revokes_its_own_key_at_once(keyed: LiveServer) -> None:
    dave = Raw(keyed, key_command(keyed, "create", "dave")["key"])
    assert dave.get("sessions").status == 200
    assert dave.ask("DELETE", "auth/apikey/me").status == 200
    assert dave.get("sessions").status == 401


def test_no_key_is_in_any_answer_any_log_or_any_file(keyed: LiveServer, alice: Raw) -> None:
    noise = {"events": [{"traceback": f"api_key={ALICE}"}], "session_id": ALICE, "platform": "x", "sdk_version": "x"}
    assert alice.post("telemetry", noise).json == {"status": "accepted"}
    for path in ("auth/apikey/me", "audit", "/metrics", "/", "client/config", "training_runs"):
        assert ALICE not in alice.get(path).content.decode(), path
    assert ALICE not in alice.post("retrieve_future", {"request_id": "x"}, headers={"x-noise": ALICE}).text
    for key in (ALICE, BOB):
        assert key not in keyed.log()
        for file in Path(keyed.data_dir).rglob("*"):
            if file.is_file() and file.stat().st_size < 20_000_000:
                assert key.encode() not in file.read_bytes(), file.name


def test_a_server_that_others_can_reach_does_not_start_without_keys(tmp_path: Path) -> None:
    words = ["--host", "0.0.0.0", "--port", str(free_port()), "--data-dir", str(tmp_path), "--cache-dir", str(CACHE)]
    ended = subprocess.run(
        [sys.executable, "-m", "tinkex", "serve", "--base-model", "tinkex/tiny", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "0.0.0.0" in ended.stderr and "tinkex key create" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout == ""
