"""Sessions, samplers, checkpoints and files of the scripted service; how it dies, pauses and comes back."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tinkex.testing import Drop, FailFuture, FakeClock, ScriptedService, Work
from tinkex.wire import sse

from .http_client import BASE, Client, optim_body, sample_body, training_body


def test_a_killed_service_is_dead_until_it_is_started_again(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.kill()
    with pytest.raises(ConnectionError):
        client.post("optim_step", optim_body(model, 1))
    with pytest.raises(ConnectionRefusedError):
        Client(service).get("healthz")
    service.start()
    Client(service).result("optim_step", optim_body(model, 1))
    assert service.executed == [(model, 1, "optim_step")], "it remembers what it knew, at the same address"


def test_a_stopped_service_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())  # not their number: those of other tests may be ending just now
    with ScriptedService() as service:
        Client(service).session()
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["tinkex-testing"]
    assert set(threading.enumerate()) <= before
    service.stop()


def test_a_stopped_service_says_that_it_cannot_start_again() -> None:
    service = ScriptedService()
    service.stop()
    with pytest.raises(RuntimeError, match="make a new one"):
        service.start()


def test_a_forked_child_keeps_no_connection_open(client: Client, service: ScriptedService) -> None:
    client.get("healthz")
    service.script.on("healthz", do=Drop(when="after_accept"))
    waiting, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(waiting, 1)
        os._exit(0)
    try:
        with pytest.raises(ConnectionResetError):
            client.get("healthz")
        service.kill()
        with pytest.raises(ConnectionRefusedError):
            Client(service).get("healthz")
    finally:
        os.close(release)
        os.waitpid(child, 0)
        os.close(waiting)


def test_a_paused_service_answers_nothing_until_it_goes_on(client: Client, service: ScriptedService) -> None:
    service.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.session)
        service.wait_for_requests("create_session")
        assert not waiting.done() and not service.sessions
        service.resume()
        assert waiting.result(timeout=5) in service.sessions


def test_waiting_for_requests_that_never_come_ends(service: ScriptedService) -> None:
    with pytest.raises(TimeoutError, match="'asample'"):
        service.wait_for_requests("asample", timeout_s=0.01)


def test_only_the_right_key_is_let_in() -> None:
    with ScriptedService(api_key="tml-right") as service:
        client = Client(service)
        assert client.post("create_session", **{"X-API-Key": "tml-wrong"}).status == 401
        assert client.post("create_session", **{"X-API-Key": "tml-right"}).status == 200
        token = client.post("auth/token", **{"X-API-Key": "tml-right"}).json["jwt"]
        assert client.get("training_runs", **{"X-API-Key": token}).status == 200


def test_an_endpoint_may_be_missing() -> None:
    with ScriptedService(missing={"weights_info"}) as service:
        assert Client(service).post("weights_info", {"tinker_path": "x"}).json["code"] == "not_found"


def test_unknown_things_are_refused_by_name(client: Client) -> None:
    session = client.session()
    model = {"session_id": session, "model_seq_id": 0, "base_model": "no/such", "lora_config": {}}
    refused = client.post("create_model", model)
    assert refused.status == 400 and "'no/such' is not offered" in refused.json["detail"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": "tinker://x/weights/y"}
    assert "save_weights_for_sampler" in client.post("create_sampling_session", sampler).json["detail"]
    assert client.poll("nobody").status == 404


def test_one_idempotency_key_makes_one_session(client: Client, service: ScriptedService) -> None:
    service.script.on("create_session", nth=1, do=Drop(when="after_accept"))
    key = {"X-Idempotency-Key": "k-1"}
    with pytest.raises(ConnectionResetError):
        client.post("create_session", {}, **key)
    assert client.post("create_session", {}, **key).json["session_id"] in service.sessions
    assert len(service.sessions) == 1


def test_a_repeated_create_model_makes_one_model(client: Client, service: ScriptedService) -> None:
    body = {"session_id": client.session(), "model_seq_id": 4, "base_model": BASE, "lora_config": {"rank": 4}}
    first, again = client.result("create_model", body), client.result("create_model", body)
    assert first == again == {"type": "create_model", "model_id": f"{body['session_id']}:train:4"}
    assert list(service.models) == [first["model_id"]]


def test_a_finished_session_takes_no_heartbeat(client: Client, service: ScriptedService) -> None:
    session = client.session()
    assert client.post("session_heartbeat", {"session_id": session}).status == 200
    client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert client.post("session_heartbeat", {"session_id": session}).status == 410
    assert service.sessions[session].heartbeats == 1
    assert service.sessions[session].finished == {"reason": {"type": "success"}, "detail": None}


def test_clients_that_join_a_sampler_count_apart(client: Client) -> None:
    sampler = client.sampler()
    joined = [client.post("join_sampling_session", {"sampling_session_id": sampler}).json for _ in range(2)]
    assert joined == [{"client_counter": 1}, {"client_counter": 2}]


def test_many_results_are_awaited_in_one_poll(client: Client, service: ScriptedService) -> None:
    sampler = client.sampler()
    service.script.on("asample", nth=1, do=FailFuture())
    service.script.on("asample", nth=3, do=Work(0.02))
    ids = [client.post("asample", sample_body(sampler, number)).json["request_id"] for number in range(3)]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": None}
    first = client.post("retrieve_futures", {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}).json
    second = client.post("retrieve_futures", {"target": target, "prev_cursor": first["cursor"]}).json
    states = [(entry["request_id"], entry["state"]) for entry in first["completions"] + second["completions"]]
    assert states == [(ids[0], "failed"), (ids[1], "finished"), (ids[2], "finished")] and second["cursor"] == 3


def test_a_cancelled_sample_ends_at_once_and_training_goes_on(client: Client, service: ScriptedService) -> None:
    service.script.on("asample", do=Work(60.0))  # only the cancellation ends it in time
    service.script.on("optim_step", do=Work(0.03))
    sampler, model = client.sampler(), client.model()
    sample = client.post("asample", sample_body(sampler)).json["request_id"]
    step = client.post("optim_step", optim_body(model, 1)).json["request_id"]
    for request_id in (sample, step):
        client.post("cancel_future", {"request_id": request_id})
    assert client.poll(sample).json == {"error": "cancelled by the client", "category": "user"}
    assert "metrics" in client.wait(step).json and service.cancelled == [sample, step]


def test_a_stream_brings_every_token_and_then_the_whole(client: Client) -> None:
    body = sample_body(client.sampler(), num_samples=2)
    got = client.post("sample_stream", body)
    assert got.headers["content-type"] == "text/event-stream" and got.body.startswith(b":")
    *tokens, done = sse.SSEDecoder().feed(got.body)
    assert {event.event for event in tokens} == {"token"} and done.event == "done"
    whole = json.loads(done.data)["sequences"]
    for index, sequence in enumerate(whole):
        mine = [event for event in map(json.loads, (event.data for event in tokens)) if event["index"] == index]
        assert [token for event in mine for token in event["tokens"]] == sequence["tokens"]
        assert [lp for event in mine for lp in event["logprobs"]] == sequence["logprobs"]


def test_a_stream_can_fail_and_can_break_off(client: Client, service: ScriptedService) -> None:
    sampler = client.sampler()
    service.script.on("sample_stream", nth=1, do=FailFuture("no luck", "server"))
    service.script.on("sample_stream", nth=2, do=Drop(when="mid_answer"))
    events = sse.SSEDecoder().feed(client.post("sample_stream", sample_body(sampler)).body)
    assert [(event.event, json.loads(event.data)["error"]) for event in events] == [("error", "no luck")]
    client.connection.request("POST", "/api/v1/sample_stream", json.dumps(sample_body(sampler)))
    answer = client.connection.getresponse()
    received = b""
    with pytest.raises(Exception, match="IncompleteRead"):
        while piece := answer.read1():
            received += piece
    assert b"event: token" in received and b"event: done" not in received


def test_runs_and_checkpoints_are_listed_changed_and_deleted(client: Client) -> None:
    model = client.model()
    for seq_id, (op, name) in enumerate([("save_weights", "a"), ("save_weights_for_sampler", "b")], start=1):
        client.result(op, {"model_id": model, "path": name, "seq_id": seq_id, "ttl_seconds": 7200})
    listed = client.get(f"training_runs/{model}/checkpoints").json["checkpoints"]
    assert [c["checkpoint_id"] for c in listed] == ["weights/a", "sampler_weights/b"]
    assert [c["checkpoint_type"] for c in listed] == ["training", "sampler"] and listed[0]["expires_at"]
    run = client.get(f"training_runs/{model}").json
    assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (8, f"tinker://{model}/weights/a")
    assert client.get("training_runs?limit=1").json["cursor"] == {"offset": 0, "limit": 1, "total_count": 1}

    base = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert client.ask("POST", f"{base}/publish").status == 200
    client.ask("PUT", f"{base}/ttl", b'{"ttl_seconds": null}')
    changed = client.get("checkpoints").json["checkpoints"][0]
    assert changed["public"] is True and changed["expires_at"] is None
    client.ask("DELETE", f"{base}/publish")
    assert client.get("checkpoints").json["checkpoints"][0]["public"] is False
    info = client.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}).json
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (BASE, 8, True)
    assert client.ask("DELETE", base).status == 200
    assert client.ask("DELETE", base).status == 404


def test_a_name_is_not_overwritten_unless_asked(client: Client) -> None:
    model = client.model()
    answers = [
        client.result("save_weights", {"model_id": model, "path": "a", "seq_id": seq_id, "overwrite": overwrite})
        for seq_id, overwrite in ((1, False), (2, False), (3, True))
    ]
    assert "path" in answers[0] and "exists" in answers[1]["error"] and "path" in answers[2]


def test_a_checkpoint_expires() -> None:
    clock = FakeClock()
    with ScriptedService(clock=clock) as service:
        client = Client(service)
        model = client.model()
        client.result("save_weights", {"model_id": model, "path": "a", "seq_id": 1, "ttl_seconds": 3600})
        assert len(client.get("checkpoints").json["checkpoints"]) == 1
        clock.advance(3601)
        assert client.get("checkpoints").json["checkpoints"] == []
        assert client.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}).status == 404


def saved(client: Client, op: str = "save_weights_external") -> str:
    """The URL of a fresh checkpoint, below /api/v1/."""
    model = client.model()
    path = client.result(op, {"model_id": model, "path": "w", "seq_id": 1})["path"]
    run, checkpoint_id = path.removeprefix("tinker://").split("/", 1)
    return f"training_runs/{run}/checkpoints/{checkpoint_id}"


def test_files_are_checked_and_resumed(client: Client) -> None:
    links = client.get(f"{saved(client)}/external_weights_urls").json
    assert links["urls"].keys() == {"adapter_model.safetensors", "adapter_config.json"} and links["expires"]
    path = urlsplit(links["urls"]["adapter_model.safetensors"]).path
    whole = client.ask("GET", path)
    digest = hashlib.sha256(whole.body).hexdigest()
    assert whole.headers["etag"] == f'"{digest}"' and whole.headers["x-checksum-sha256"] == digest
    size = len(whole.body)
    rest = client.ask("GET", path, headers={"Range": "bytes=1000-", "If-Range": f'"{digest}"'})
    assert rest.status == 206 and rest.body == whole.body[1000:]
    assert rest.headers["content-range"] == f"bytes 1000-{size - 1}/{size}"
    assert client.ask("GET", path, headers={"Range": "bytes=0-9"}).body == whole.body[:10]
    assert client.ask("GET", path, headers={"Range": "bytes=-10"}).body == whole.body[-10:]
    assert client.ask("GET", path, headers={"Range": f"bytes={size}-"}).status == 416
    changed = client.ask("GET", path, headers={"Range": "bytes=1000-", "If-Range": '"other"'})
    assert changed.status == 200 and changed.body == whole.body
    head = client.ask("HEAD", path)
    assert (head.body, head.headers["content-length"]) == (b"", str(size))


def test_an_archive_is_a_redirect_to_a_tar_file(client: Client, service: ScriptedService) -> None:
    link = client.get(f"{saved(client, 'save_weights_for_sampler')}/archive")
    assert link.status == 302 and link.headers["expires"].endswith(" GMT")
    archive = client.ask("GET", urlsplit(link.headers["location"]).path)
    with tarfile.open(fileobj=io.BytesIO(archive.body)) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
    service.script.on("file", nth=1, do=Drop(when="mid_answer"))
    with pytest.raises(Exception, match="IncompleteRead"):
        client.ask("GET", urlsplit(link.headers["location"]).path)


def test_tokenizer_files_are_handed_out() -> None:
    with ScriptedService(tokenizers={"org/name": {"tokenizer.json": b"{}"}}) as service:
        client = Client(service)
        assert client.get("tokenizers/org/name/tokenizer.json").body == b"{}"
        assert client.get("tokenizers/org/name/other.json").status == 404
        assert client.post("client/config").json["tinkex"]["tokenizers"] is True


def test_a_model_can_be_made_from_a_checkpoint_in_one_call(client: Client, service: ScriptedService) -> None:
    model = client.model()
    client.post("forward_backward", training_body(model, 1))
    client.post("optim_step", optim_body(model, 2, learning_rate=0.1))
    path = client.result("save_weights", {"model_id": model, "path": "a", "seq_id": 3})["path"]
    body = {"session_id": model.split(":")[0], "model_seq_id": 1, "path": path, "optimizer": True}
    made = client.result("load_weights", body)["model_id"]
    assert service.models[made].weights == service.models[model].weights
    assert service.models[made].lora["rank"] == 8


def test_weights_are_copied_once_per_idempotency_key(client: Client, service: ScriptedService) -> None:
    model = client.model()
    path = client.result("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]
    copies = {
        client.post("copy_weights", {"source_path": path}, **{"X-Idempotency-Key": "k"}).json["tinker_path"]
        for _ in range(2)
    }
    assert len(copies) == 1 and copies | {path} == set(service.checkpoints)


def test_the_account_answers(client: Client) -> None:
    session = client.session()
    assert client.get("sessions").json == {"sessions": [session]}
    assert client.get(f"sessions/{session}").json["training_run_ids"] == []
    client.ask("PUT", f"/api/v1/sessions/{session}/project", b'{"project_id": "p"}')
    found = client.post("sessions/search", {"session_id": session}).json["sessions"][0]
    assert (found["project_id"], found["status"]) == ("p", {"type": "active"})
    assert client.get("auth/apikey/me").json["user_urn"] and client.get("audit?day=2026-01-01").json == {"entries": []}
    assert client.get("billing/usage/checkpoints/current").json["data"][0]["checkpoint_count"] == 0
    sampler = client.sampler()
    assert client.get(f"samplers/{sampler}").json["base_model"] == BASE
