"""Bad names, paths, samples, polls and bodies, sent without an SDK. After each case the runs of both tenants work."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard

from tests.integration.service.raw import (
    INF,
    NAN,
    TOKENS,
    Raw,
    Run,
    batch,
    check_refused,
    check_told,
    check_unharmed,
    message,
    post_message,
    tensor,
    text,
)
from tinkex.wire import endpoints


@pytest.fixture(scope="module")
def run(alice: Raw) -> Run:
    return alice.run()


@pytest.fixture(scope="module")
def bobs(bob: Raw) -> Run:
    return bob.run()


@pytest.fixture(autouse=True)
def unharmed(run: Run, bobs: Run) -> Iterator[None]:
    if run.first_loss is None:
        check_unharmed(run, bobs)
    yield
    check_unharmed(run, bobs)


# ── Checkpoints

NAMES = [
    "",
    "a/b",
    "../x",
    "..",
    ".",
    ".hidden",
    "a\\b",
    "a b",
    "a\0b",
    "a\nb",
    "naïve",
    "日本",
    "x" * 300,
    "%2e%2e",
    "a?b",
]


@pytest.mark.parametrize("call", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
def test_a_checkpoint_name_that_is_not_a_path_segment_is_rejected(alice: Raw, run: Run, call: str) -> None:
    for name in (*NAMES, None, 5, [], {"a": 1}, True):
        check_refused(alice, alice.post(call, run.named(path=name)), r"checkpoint.*name")


@pytest.mark.parametrize("ttl", [0, -1, 1.5, "1", "soon", 1e99, NAN, INF, True, [], {}, 2**70], ids=str)
def test_an_invalid_time_to_live_is_rejected_when_saving(alice: Raw, run: Run, ttl: object) -> None:
    check_refused(alice, alice.post("save_weights", run.named(path="x", ttl_seconds=ttl)), r"ttl_seconds")
    path = "training_runs/nobody/checkpoints/weights/x/ttl"
    assert alice.ask("PUT", path, {"ttl_seconds": ttl}).status == 404


def test_an_invalid_time_to_live_is_rejected_for_a_saved_checkpoint(alice: Raw, run: Run) -> None:
    saved = run.saved("save_weights", "kept")
    path = f"training_runs/{run.id}/checkpoints/weights/kept/ttl"
    for ttl in (0, -1, 1.5, "soon", 1e99, NAN, True, []):
        check_refused(alice, alice.ask("PUT", path, {"ttl_seconds": ttl}), r"ttl_seconds")
    check_refused(alice, alice.post("copy_weights", {"source_path": saved, "ttl_seconds": 0}), r"ttl_seconds")


def test_a_name_is_not_reused_without_overwrite(alice: Raw, run: Run) -> None:
    run.saved("save_weights", "twice")
    again = run.named(path="twice", overwrite=False)
    check_refused(alice, alice.post("save_weights", again), r"twice exists already.*overwrite")


@pytest.mark.parametrize("metadata", [[1], "x", 5, {"a": "x" * 100_000}], ids=["list", "text", "number", "huge"])
def test_metadata_that_is_no_object_or_too_large_is_rejected(alice: Raw, run: Run, metadata: object) -> None:
    for call in ("save_weights", "save_weights_for_sampler"):
        check_refused(alice, alice.post(call, run.named(path="x", user_metadata=metadata)), r"user_metadata")
    check_refused(alice, alice.post("create_session", {"user_metadata": metadata}), r"user_metadata")


def test_encryption_is_rejected_by_name(alice: Raw, run: Run) -> None:
    body = run.named(path="x", age_encryption_recipients=["age1x"])
    check_refused(alice, alice.post("save_weights_external", body), r"age encryption is not offered")


PATHS = [
    "",
    "x",
    "tinker://",
    "tinker://a",
    "tinker://a/weights",
    "tinker://a/weights/",
    "tinker:///weights/x",
    "tinker://a/other/x",
    "tinker://a/weights/x/y",
    "http://a/weights/x",
    "/etc/passwd",
    "file:///etc/passwd",
    "tinker://../../etc",
    5,
    None,
    [],
    {},
]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_an_invalid_checkpoint_path_is_rejected(alice: Raw, run: Run, path: object) -> None:
    says = r"path|tinker://"
    check_refused(alice, alice.post("load_weights", run.named(path=path, optimizer=False)), says)
    check_refused(alice, alice.post("weights_info", {"tinker_path": path}), says)
    check_refused(alice, alice.post("copy_weights", {"source_path": path}), says)
    born = {"session_id": alice.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    check_refused(alice, alice.post("load_weights", born), says)


def test_unknown_weights_are_not_loaded(alice: Raw, run: Run, bobs: Run) -> None:
    theirs = bobs.saved("save_weights", "theirs")
    for path in ("tinker://nobody/weights/x", f"tinker://{run.id}/weights/never", "tinker://../weights/..", theirs):
        says = r"checkpoint .* is not known"
        check_refused(alice, alice.post("load_weights", run.named(path=path, optimizer=False)), says)
        check_refused(alice, alice.post("weights_info", {"tinker_path": path}), says)
        check_refused(alice, alice.post("copy_weights", {"source_path": path}), says)


def test_sampler_weights_have_no_optimizer_to_load(alice: Raw, run: Run) -> None:
    path = run.saved("save_weights_for_sampler", "lean")
    body = run.named(path=path, optimizer=True)
    check_refused(alice, alice.post("load_weights", body), r"lean has no optimizer state")


def test_weights_of_another_shape_are_not_loaded(alice: Raw, run: Run) -> None:
    path = alice.run(rank=8).saved("save_weights", "wide")
    check_refused(alice, alice.post("load_weights", run.named(path=path, optimizer=False)), r"rank.*8|8.*rank")


def test_a_copy_needs_a_valid_destination(alice: Raw, bob: Raw, run: Run) -> None:
    source = run.saved("save_weights", "source")
    for place in ({"session_id": 5}, {"session_id": "s", "model_seq_id": "0"}, {"session_id": "s", "model_seq_id": -1}):
        check_refused(alice, alice.post("copy_weights", {"source_path": source, **place}), r"session_id|model_seq_id")
    for session in ("nobody", bob.session()):
        place = {"session_id": session, "model_seq_id": 0}
        check_refused(alice, alice.post("copy_weights", {"source_path": source, **place}), r"session .* is not known")


ODD_PARTS = [
    "..",
    "%2e%2e%2fx",
    "%00",
    "%ff%fe",
    "%zz",
    "%",
    "a%2fb",
    "x" * 5000,
    "'; DROP TABLE runs;--".replace(" ", "+"),
]


@pytest.mark.parametrize("part", ODD_PARTS, ids=lambda part: part[:12])
def test_odd_ids_in_a_url_are_just_not_found(alice: Raw, run: Run, part: str) -> None:
    for row in endpoints.ALL:
        if "{" not in row.path:
            continue
        fill = dict.fromkeys(("session_id", "sampler_id", "checkpoint_id", "tokenizer", "file", "base_model"), part)
        for run_id in {part, run.id if "{checkpoint_id}" in row.path else part}:
            answer = alice.ask(row.method, row.path.format(run_id=run_id, **fill), b"{}")
            check_refused(alice, answer, r"not known|no (GET|POST|PUT|PATCH|DELETE)|does not support|Only the owner")


# ── Sampling

GOOD: dict[str, Any] = {"prompt": text(TOKENS), "num_samples": 1, "sampling_params": {"max_tokens": 2, "seed": 1}}


def sampling(**params: object) -> dict[str, object]:
    return {"sampling_params": {"max_tokens": 2, **params}}


SAMPLES: dict[str, tuple[dict[str, object], str]] = {
    **{
        f"temperature {value}": (sampling(temperature=value), r"temperature")
        for value in (-1, NAN, INF, "hot", [], True)
    },
    **{f"top_p {value}": (sampling(top_p=value), r"top_p") for value in (0, 2, -0.5, NAN, "x", {})},
    **{f"top_k {value}": (sampling(top_k=value), r"top_k") for value in (0, -5, 1.5, "x", True)},
    **{
        f"max_tokens {value}": (sampling(max_tokens=value), r"max_tokens")
        for value in (0, -1, 10**9, 2**70, 1.5, "many", [], True)
    },
    **{f"seed {value}": (sampling(seed=value), r"seed") for value in ("x", 1.5, [], NAN)},
    **{f"min_p {value}": (sampling(min_p=value), r"min_p") for value in (-1, 2, NAN, "x")},
    **{f"repetition_penalty {v}": (sampling(repetition_penalty=v), r"repetition_penalty") for v in (0, -1, NAN, "x")},
    **{f"presence_penalty {value}": (sampling(presence_penalty=value), r"presence_penalty") for value in (INF, "x")},
    **{f"frequency_penalty {value}": (sampling(frequency_penalty=value), r"frequency_penalty") for value in (NAN, [])},
    **{
        f"stop {value}": (sampling(stop=value), r"stop")
        for value in ("", [""], ["a", ""], [-1], [99_999], [1.5], [None], [True], {"a": 1}, 5, [["a"]], ["a", 5])
    },
    **{
        f"num_samples {value}": ({"num_samples": value}, r"num_samples")
        for value in (0, -1, 10**6, 1.5, "two", None, [], 2**70, True)
    },
    **{
        f"{name} {value}": ({name: value}, name)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        for value in (-1, 10**6, 1.5, "x", 2**70)
    },
    **{
        f"last {value}": ({"prompt_logprobs": True, "prompt_logprobs_last_n": value}, r"prompt_logprobs_last_n")
        for value in (0, -1, 1.5, "x")
    },
    "last of too many digits": ({"prompt_logprobs": True, "prompt_logprobs_last_n": "9" * 5000}, r"last_n"),
    "last without logprobs": ({"prompt_logprobs_last_n": 1}, r"prompt_logprobs_last_n"),
    "logprobs text": ({"prompt_logprobs": "maybe"}, r"prompt_logprobs"),
    "stability info": ({"record_stability_info": True}, r"record_stability_info"),
    **{
        f"targets {name}": ({"target_prompt_logprobs": value}, r"target_prompt_logprobs")
        for name, value in {
            "flat": tensor([1, 2]),
            "of too many rows": tensor([1, 2, 3], shape=[3, 1]),
            "of too few rows": tensor([1], shape=[1, 1]),
            "as floats": tensor([1.0, 2.0], "float32", shape=[2, 1]),
            "out of range": tensor([1, 99_999], shape=[2, 1]),
            "negative": tensor([1, -1], shape=[2, 1]),
            "sparse and broken": tensor([1], shape=[2, 1], sparse_crow_indices=[0, 2, 1], sparse_col_indices=[0]),
            "text": "x",
            "a list": [1, 2],
        }.items()
    },
    **{
        f"prompt {name}": ({"prompt": value}, says)
        for name, value, says in (
            ("null", None, r"prompt"),
            ("text", "hello", r"prompt"),
            ("a list", TOKENS, r"prompt"),
            ("empty", {"chunks": []}, r"prompt.*empty"),
            ("of no tokens", text([]), r"prompt.*empty"),
            ("negative", text([-1]), r"token.*-1"),
            ("out of range", text([99_999]), r"prompt.*99999"),
            ("of floats", text([1.5]), r"token.*1\.5"),
            ("beyond the context", text([1] * 9000), r"prompt.*9000"),
            ("image", {"chunks": [{"data": "aGk=", "format": "png"}]}, r"ImageChunk.*text model"),
            ("pointer", {"chunks": [{"location": "/etc/passwd", "format": "png"}]}, r"AssetPointer.*text model"),
            ("audio", {"chunks": [{"dmel": "aGk="}]}, r"DmelChunk.*text model"),
        )
    },
    "params a list": ({"sampling_params": [1]}, r"sampling_params"),
    "params text": ({"sampling_params": "x"}, r"sampling_params"),
    "seq_id text": ({"seq_id": "x"}, r"seq_id"),
    **{
        f"sampler {value!r:.20}": ({"sampling_session_id": value}, r"sampling.session")
        for value in ("nobody", "", 5, [], "a\0b", "../x", "x" * 5000)
    },
}


@pytest.fixture(scope="module")
def sampler(alice: Raw) -> str:
    return alice.sampler()


@pytest.mark.parametrize("case", SAMPLES)
def test_an_invalid_sample_is_rejected_by_field(alice: Raw, sampler: str, case: str) -> None:
    changes, says = SAMPLES[case]
    body = {**GOOD, "sampling_session_id": sampler, **changes}
    check_refused(alice, alice.post("asample", body), says)
    check_refused(alice, alice.post("sample_stream", body), says)


def test_a_sample_without_a_model_is_rejected(alice: Raw, bobs: Run) -> None:
    theirs = bobs.saved("save_weights_for_sampler", "shown")
    for source, says in (
        ({}, r"base_model or a model_path"),
        ({"base_model": "/etc"}, r"base model '/etc' is not served"),
        ({"base_model": 5}, r"base.model"),
        ({"model_path": "/etc"}, r"model_path"),
        ({"model_path": f"tinker://{bobs.id}/weights/x"}, r"training checkpoint"),
        ({"model_path": "tinker://a/sampler_weights/b"}, r"checkpoint .* is not known"),
        ({"model_path": theirs}, r"checkpoint .* is not known"),
    ):
        check_refused(alice, alice.post("asample", {**GOOD, **source}), says)
        opening = {"session_id": alice.session(), "sampling_session_seq_id": 0, **source}
        check_refused(alice, alice.post("create_sampling_session", opening), says)


@pytest.mark.parametrize("number", [-1, "0", 1.5, None, True, 2**40, []], ids=str)
def test_a_sampler_with_an_invalid_number_is_not_created(alice: Raw, run: Run, number: object) -> None:
    body = {"session_id": alice.session(), "sampling_session_seq_id": number, "base_model": "tinkex/tiny"}
    check_refused(alice, alice.post("create_sampling_session", body), r"sampling_session_seq_id")
    ephemeral = run.named(sampling_session_seq_id=number)
    check_refused(alice, alice.post("save_weights_for_sampler", ephemeral), r"sampling_session_seq_id|name")


def test_sampling_from_a_deleted_checkpoint_is_rejected(alice: Raw, run: Run) -> None:
    path = run.saved("save_weights_for_sampler", "brief")
    fresh, looked_at, used = (alice.sampler(model_path=path) for _ in range(3))
    alice.done("asample", {**GOOD, "sampling_session_id": used})
    assert alice.post("join_sampling_session", {"sampling_session_id": looked_at}).status == 200
    assert alice.ask("DELETE", f"training_runs/{run.id}/checkpoints/sampler_weights/brief").status == 200
    check_refused(alice, alice.post("asample", {**GOOD, "sampling_session_id": fresh}), r"checkpoint .* is not known")
    # Looked up a moment ago, so it is still believed in: the engine may have the weights, or finds them gone.
    for sampler in (looked_at, used):
        answer = alice.post("asample", {**GOOD, "seq_id": 9, "sampling_session_id": sampler})
        if answer.status == 200 and "sequences" in (result := alice.poll(answer.json["request_id"])).json:
            assert result.json["sequences"]
        else:
            check_refused(alice, answer, r"checkpoint")


# ── Polls


@pytest.mark.parametrize("name", [None, 5, "", [], {}, True], ids=str)
def test_a_poll_without_a_request_id_is_rejected(alice: Raw, name: object) -> None:
    check_refused(alice, alice.post("retrieve_future", {"request_id": name}), r"request_id")
    check_refused(alice, alice.post("retrieve_future", {}), r"request_id")


@pytest.mark.parametrize("name", ["op-0", "nobody", "a\0b", "x" * 10_000, "../x", "'"])
def test_a_poll_for_an_unknown_request_says_so(alice: Raw, name: str) -> None:
    check_refused(alice, alice.post("retrieve_future", {"request_id": name}), r"request .* is not known")


def test_a_poll_for_a_lost_sample_is_410(alice: Raw) -> None:
    answer = alice.post("retrieve_future", {"request_id": "sample-0"})
    assert (answer.status, answer.json["category"]) == (410, "server")
    check_told(answer, r"sample-0 .* request it again")


def test_a_poll_for_many_needs_a_sampler(alice: Raw, sampler: str) -> None:
    for target in (None, 5, [], {}, {"sampling_session_id": None}, {"sampling_session_id": "nobody"}):
        check_refused(alice, alice.post("retrieve_futures", {"target": target}), r"sampling session")
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    for cursor in ("x", 1.5, [1], True):
        check_refused(alice, alice.post("retrieve_futures", {"target": target, "prev_cursor": cursor}), r"prev_cursor")


def test_cancelling_what_is_not_there_does_nothing(alice: Raw) -> None:
    for name in (None, 5, "op-0", "sample-0"):
        assert alice.post("cancel_future", {"request_id": name}).json == {}


# ── Sessions, lists and files

SESSIONS: dict[str, tuple[str, str, object, str]] = {
    "heartbeat of nothing": ("POST", "session_heartbeat", {}, r"session_id"),
    "heartbeat of a number": ("POST", "session_heartbeat", {"session_id": 5}, r"session_id"),
    "heartbeat of nobody": ("POST", "session_heartbeat", {"session_id": "x"}, r"session 'x' is not known"),
    "tags text": ("POST", "create_session", {"tags": "x"}, r"tags"),
    "tags of numbers": ("POST", "create_session", {"tags": [1]}, r"tags"),
    "version a number": ("POST", "create_session", {"sdk_version": 5}, r"sdk_version"),
    "name a list": ("POST", "create_session", {"display_name": []}, r"display_name"),
    "search for a number": ("POST", "sessions/search", {"limit": "x"}, r"limit"),
    "search with a broken cursor": ("POST", "sessions/search", {"cursor": {"last_created_at": "x"}}, r"last_|cursor"),
    "offset text": ("GET", "training_runs?offset=x", None, r"offset"),
    "offset negative": ("GET", "checkpoints?offset=-1", None, r"offset"),
    "limit text": ("GET", "sessions?limit=1e3", None, r"limit"),
    "limit negative": ("GET", "training_runs?limit=-5", None, r"limit"),
    "a day that is none": ("GET", "audit?day=yesterday", None, r"day.*yesterday"),
    "info of nothing": ("POST", "get_info", {}, r"model_id"),
    "info of nobody": ("POST", "get_info", {"model_id": "x"}, r"model 'x' is not known"),
    "a loss of one's own": ("POST", "create_custom_loss", {"graph": {}}, r"forward_backward_custom"),
    "billing": ("GET", "billing/usage/events", None, r"no billing"),
    "a forged link": ("GET", "files/x.y/adapter_config.json", None, r"link"),
    "a link of noise": ("GET", "files/%ff%00/x", None, r"link"),
    "a tokenizer elsewhere": ("GET", "tokenizers/tinkex/tiny/model.safetensors", None, r"not known"),
    "a tokenizer above": ("GET", "tokenizers/tinkex/tiny/..%2f..%2fetc%2fpasswd", None, r"not known"),
    "an adapter for nothing": ("POST", "import_weights?name=x", b"x", r"base model"),
    "an adapter without a name": ("POST", "import_weights?base_model=tinkex/tiny", b"x", r"name"),
    "an adapter with a bad name": ("POST", "import_weights?base_model=tinkex/tiny&name=a%2fb", b"x", r"name"),
    "an adapter that is none": ("POST", "import_weights?base_model=tinkex/tiny&name=x", b"x" * 2000, r"tar|archive"),
    "an adapter of nothing": ("POST", "import_weights?base_model=tinkex/tiny&name=x", b"", r"tar|archive|empty"),
}


@pytest.mark.parametrize("case", SESSIONS)
def test_invalid_account_requests_are_rejected(alice: Raw, case: str) -> None:
    method, path, body, says = SESSIONS[case]
    check_refused(alice, alice.ask(method, path, body), says)


@pytest.mark.parametrize("path", ["training_runs", "checkpoints", "sessions"])
def test_a_page_far_beyond_the_end_is_empty(alice: Raw, path: str) -> None:
    answer = alice.get(f"{path}?offset={2**80}&limit={2**80}")
    assert (answer.status, answer.json[path]) == (200, [])


# ── Bodies and HTTP

DEEP = b"[" * 90_000 + b"]" * 90_000
BODIES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"model_id=5", r"not JSON"),
    "cut off": (b'{"model_id": "x', r"not JSON"),
    "not UTF-8": (b'{"model_id": "\xff\xfe"}', r"not JSON"),
    "a list": (b"[1, 2]", r"object"),
    "a text": (b'"x"', r"object"),
    "a number": (b"5", r"object"),
    "null": (b"null", r"object"),
    "NaN alone": (b"NaN", r"object"),
    "deep": (DEEP, r"JSON"),
    "deep with a NaN": (b'{"a": NaN, "b": ' + DEEP + b"}", r"nested too deep"),
    "half a surrogate": (b'{"a": NaN, "model_id": "\\ud800"}', r"not JSON.*UTF-8"),
    "a number without end": (b'{"a": NaN, "model_id": ' + b"9" * 10_000 + b"}", r"not JSON"),
    "a number beyond 64 bits": (b'{"a": NaN, "seq_id": ' + b"9" * 400 + b"}", r"not JSON.*64-bit"),
    "a float without end": (b'{"model_id": 1e400}', r"JSON|model_id"),
    "zeros": (bytes(1000), r"not JSON"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_be_decoded_is_rejected(alice: Raw, case: str) -> None:
    content, says = BODIES[case]
    for call in ("forward_backward", "optim_step", "asample", "create_session", "retrieve_future", "telemetry"):
        check_refused(alice, alice.post(call, content), says)


def test_an_optimizer_step_with_huge_numbers_is_rejected(alice: Raw, run: Run) -> None:
    head = json.dumps(run.named())[:-1].encode()
    body = head + b', "adam_params": {"eps": NaN, "learning_rate": ' + b"9" * 400 + b"}}"
    check_refused(alice, alice.post("optim_step", body), r"not JSON.*64-bit")
    run.upcoming -= 1  # the body could not be read, so its number was not either


ENCODED: dict[str, tuple[bytes, str, str]] = {
    "no zstd": (b"{}", "zstd", r"zstd"),
    "zstd cut off": (zstandard.ZstdCompressor().compress(b"{}" * 1000)[:-3], "zstd", r"zstd"),
    "no gzip": (b"{}", "gzip", r"gzip"),
    "gzip cut off": (gzip.compress(b"{}" * 1000)[:-8], "gzip", r"gzip"),
    "unknown": (b"{}", "br", r"'br'.*zstd, gzip"),
    "two at once": (b"{}", "gzip, zstd", r"'gzip, zstd'"),
    "a gzip bomb": (gzip.compress(bytes(50_000_000)), "gzip", r"1,000,000 bytes"),
    "a zstd bomb": (zstandard.ZstdCompressor().compress(bytes(50_000_000)), "zstd", r"1,000,000 bytes"),
}


@pytest.mark.parametrize("case", ENCODED)
def test_a_body_that_cannot_be_decompressed_is_rejected(alice: Raw, run: Run, case: str) -> None:
    content, encoding, says = ENCODED[case]
    for call in ("forward_backward", "optim_step", "create_session"):
        check_refused(alice, alice.post(call, content, headers={"content-encoding": encoding}), says)
    check_refused(alice, post_message(alice, content, **{"content-encoding": encoding}), says)


def test_compressed_bodies_are_read(alice: Raw, run: Run) -> None:
    request = message(run, run.take(), forward_only=True).SerializeToString()
    compressed = zstandard.ZstdCompressor().compress(request)
    answer = post_message(alice, compressed, **{"content-encoding": "zstd"})
    assert alice.poll(answer.json["request_id"]).json["metrics"]["loss:sum"] == run.first_loss
    body = gzip.compress(json.dumps(run.named(forward_input=batch())).encode())
    answer = alice.post("forward", body, headers={"content-encoding": "gzip"})
    assert alice.poll(answer.json["request_id"]).json["metrics"]["loss:sum"] == run.first_loss


def test_a_body_that_is_too_large_is_rejected_before_it_is_read(alice: Raw) -> None:
    for call in ("forward_backward", "create_session", "asample"):
        answer = check_refused(alice, alice.post(call, b" " * 1_000_001), r"limit is 1000000 \(--max-body-bytes\)")
        assert answer.status == 413


def wire(alice: Raw, sent: bytes, *, then_close: bool = True) -> bytes:
    """What comes back for bytes of our own; what the server sends until it hangs up or falls silent."""
    with socket.create_connection(("127.0.0.1", alice.server.port), timeout=10) as sock:
        try:
            sock.sendall(sent)
            if then_close:
                sock.shutdown(socket.SHUT_WR)
            found = b""
            while piece := sock.recv(65536):
                found += piece
                if b"\r\n\r\n" in found and b"}" in found:
                    break
            return found
        except (ConnectionResetError, BrokenPipeError):
            return found if "found" in locals() else b""


def test_a_chunked_body_is_limited_too(alice: Raw) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: {alice.key}\r\n"
    found = wire(alice, head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunk * 20 + b"0\r\n\r\n")
    assert b" 413 " in found.splitlines()[0] and b"body_too_large" in found


BROKEN_HTTP = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "a method of nobody": b"BREW /api/v1/healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "a length that is none": b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
    "a negative length": b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "a space in a header": b"GET / HTTP/1.1\r\nho st: x\r\n\r\n",
    "an address with a space": b"GET /api/v1/a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "broken chunks": b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "half a request": b"GET /api/v1/heal",
    "nothing": b"",
}


@pytest.mark.parametrize("case", BROKEN_HTTP)
def test_non_http_bytes_are_rejected(alice: Raw, case: str) -> None:
    found = wire(alice, BROKEN_HTTP[case])
    assert found == b"" or b" 40" in found.splitlines()[0], found[:200]
    assert b"Traceback" not in found


@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_huge_headers_do_no_harm(alice: Raw, size: int) -> None:
    head = f"GET /api/v1/sessions HTTP/1.1\r\nhost: x\r\nx-api-key: {alice.key}\r\nx-noise: {'n' * size}\r\n\r\n"
    found = wire(alice, head.encode(), then_close=False)
    status = found.split(b" ", 2)[1:2]
    assert status in ([b"200"], [b"400"], [b"431"]) if size < 50_000 else status in ([b"400"], [b"431"], [])


def test_an_unknown_path_is_404_and_a_wrong_method_405(alice: Raw) -> None:
    for method, path in (
        ("GET", "nothing"),
        ("POST", "nothing"),
        ("GET", "/api/v2/x"),
        ("POST", "/nothing"),
        ("GET", ""),
    ):
        assert check_refused(alice, alice.ask(method, path), r"There is no").status == 404
    for method, path in (("GET", "asample"), ("DELETE", "create_model"), ("POST", "healthz"), ("PATCH", "sessions")):
        assert check_refused(alice, alice.ask(method, path), r"does not support").status == 405


def test_no_endpoint_fails_on_an_empty_object(alice: Raw, run: Run) -> None:
    """Whatever it makes of it: never a 5xx, never a 409."""
    parts = dict.fromkeys(("session_id", "sampler_id", "run_id", "tokenizer", "file", "base_model"), "x")
    for row in endpoints.ALL:
        if row is endpoints.REVOKE_KEY:
            continue
        for body in (b"{}", b"", b'{"type": 5, "unknown": [null]}'):
            answer = alice.ask(row.method, row.path.format(checkpoint_id="weights/x", **parts), body)
            assert answer.status < 500 and answer.status != 409, (row.name, answer)
            assert "content-length" in answer.headers
