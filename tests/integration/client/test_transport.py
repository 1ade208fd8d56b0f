"""The HTTP transport: separate pools, connections that are reused or lost, and every framing of a response."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zstandard

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tests.integration.client.wires import Front, Raw, can_bind, read_head
from tinkex.client._runtime import session
from tinkex.testing import Answer, Delay, Drop, Hang, Request, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=2, seed=1)


def connections(requests: list[Request]) -> set[int]:
    return {request.connection for request in requests}


# -- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize(
    ("fault", "busy"),
    [(Hang(), "asample"), (Work(60.0), "retrieve_future")],
    ids=["submissions hold every connection", "polls hold every connection"],
)
def test_a_burst_of_samples_delays_neither_a_heartbeat_nor_an_optim_step(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, fault: Hang | Work, busy: str
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.05)
    pools = {"sample": 2, "retrieve": 2, "retrieve_samples": 2}
    with ScriptedService(base_models=[MODEL], hold_s=30.0) as service, connect(service, pools=pools) as client:
        training = client.create_lora_training_client(MODEL)
        sampler = client.create_sampling_client(base_model=MODEL)
        service.script.on("asample", do=fault)
        before = len(service.requests_to(busy))
        burst = [sampler.sample(prompt(), 1, PARAMS) for _ in range(40)]
        service.wait_for_requests(busy, before + 2)
        beats = len(service.requests_to("session_heartbeat"))
        started = time.monotonic()
        assert all(training.optim_step(step()).result(5) for _ in range(3))
        service.wait_for_requests("session_heartbeat", beats + 3, 5)
        assert time.monotonic() - started < 3
        assert not any(future.done() for future in burst)
        for future in burst:
            future.cancel()


def test_each_kind_of_traffic_has_connections_of_its_own_as_many_as_are_allowed(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service, pools={"session": 1, "train": 1, "sample": 3, "retrieve": 2, "retrieve_samples": 5})
    training = client.create_lora_training_client(MODEL)
    sampler = client.create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", do=[Delay(0.01), Work(0.05)])
    proto_service.script.on("optim_step", do=Work(0.02))
    samples = [sampler.sample(prompt(), 1, PARAMS) for _ in range(40)]
    steps = [training.optim_step(step()) for _ in range(10)]
    assert all(future.result(20) for future in samples)
    assert all(future.result(20) for future in steps)
    of_samples = {future.status().request_id for future in samples}
    polls = proto_service.requests_to("retrieve_future")
    kinds = {
        "session": connections(proto_service.requests_to("create_session")),
        "train": connections(proto_service.requests_to("optim_step")),
        "sample": connections(proto_service.requests_to("asample")),
        "retrieve": connections([poll for poll in polls if poll.json["request_id"] not in of_samples]),
        "retrieve_samples": connections([poll for poll in polls if poll.json["request_id"] in of_samples]),
    }
    sizes = {kind: len(numbers) for kind, numbers in kinds.items()}
    assert sizes == {"session": 1, "train": 1, "sample": 3, "retrieve": 2, "retrieve_samples": 5}
    together = [number for numbers in kinds.values() for number in numbers]
    assert len(together) == len(set(together)), kinds


def test_a_request_that_waits_for_a_free_connection_is_not_taken_for_an_unanswered_one(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service, pools={"sample": 1}, timeout_s=0.3)
    sampler = client.create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", do=Delay(0.06))
    assert all(future.result(20) for future in [sampler.sample(prompt(), 1, PARAMS) for _ in range(10)])
    assert len(proto_service.requests_to("asample")) == 10
    assert client.stats()["retries"] == 0


# -- connections used again, and lost -------------------------------------------------------------------------------


def test_connections_are_used_again(proto_service: ScriptedService, connect: Connect) -> None:
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    for _ in range(30):
        training.optim_step(step()).result(20)
    assert len(connections(proto_service.requests_to("optim_step"))) == 1
    assert proto_service.accepted_connections <= 4  # session, train, retrieve, and one more for the model's making


def close_idle(service: ScriptedService) -> None:
    """As a service or a gateway does with connections that have been idle for too long."""
    done = threading.Event()

    def close() -> None:
        busy = {request.connection for request in service.requests if request.status is None}
        for connection in list(service._connections):
            if connection.number not in busy:
                connection.writer.close()
        service._loop.call_soon(done.set)

    service._loop.call_soon_threadsafe(close)
    assert done.wait(5)


def test_a_connection_that_the_service_closed_while_idle_costs_nothing(
    service: ScriptedService, connect: Connect
) -> None:
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    sampler = client.create_sampling_client(base_model=MODEL)
    for _ in range(10):
        training.optim_step(step()).result(20)
        sampler.sample(prompt(), 1, PARAMS).result(20)
        close_idle(service)
    assert [seq_id for _, seq_id, _ in service.executed] == list(range(1, 11))
    assert len(service.sampled) == 10
    assert client.stats()["retries"] == 0


def test_connections_closed_at_the_moment_they_are_used_lose_and_double_nothing(
    service: ScriptedService, connect: Connect
) -> None:
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    sampler = client.create_sampling_client(base_model=MODEL)
    chance = random.Random(5)
    futures: list[Any] = []
    for _ in range(60):
        futures += [training.optim_step(step()), sampler.sample(prompt(), 1, PARAMS)]
        time.sleep(chance.random() * 0.004)  # no event marks the race: the two sides shall meet at random
        close_idle(service)
    assert all(future.result(30) for future in futures)
    assert [seq_id for _, seq_id, _ in service.executed] == list(range(1, 61))
    assert len(service.sampled) == len(set(service.sampled)) == 60


@pytest.mark.parametrize("when", ["before", "after_accept", "mid_answer"])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["new connection", "used connection"])
def test_a_connection_that_breaks_neither_loses_nor_doubles_an_operation(
    service: ScriptedService, connect: Connect, when: Any, is_fresh: bool
) -> None:
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    if is_fresh:
        close_idle(service)
    else:
        training.optim_step(step()).result(20)
    done = len(service.executed)
    service.script.on("optim_step", nth=1, do=Drop(when=when))
    assert training.optim_step(step()).result(20) is not None
    assert len(service.executed) == done + 1
    sent = service.requests_to("optim_step")[done:]
    assert len(sent) == 2
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 1
    assert len({request.body for request in sent if request.body}) == 1  # one that is reset at its head has none
    # A used connection may have been stale: where no answer began, that is mended at once and is no retry.
    assert client.stats()["retries"] == int(is_fresh or when == "mid_answer")


def test_a_poll_whose_connection_breaks_is_asked_again(service: ScriptedService, connect: Connect) -> None:
    training = connect(service).create_lora_training_client(MODEL)
    service.script.on("retrieve_future", times=1, do=Drop("mid_answer"))
    assert training.optim_step(step()).result(20) is not None
    assert len(service.executed) == 1


# -- framings, encodings, sizes -------------------------------------------------------------------------------------

CAPABILITIES = json.dumps({"supported_models": [{"model_name": MODEL, "max_context_length": 4096}]}).encode()
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
FRAMINGS = {
    "length": OK + b"content-length: %d\r\n\r\n" % len(CAPABILITIES) + CAPABILITIES,
    "chunks with extensions and a trailer": OK
    + b"Transfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n"
    + b"".join(b"%x;part=1\r\n%b\r\n" % (len(p), p) for p in (CAPABILITIES[:7], CAPABILITIES[7:]))
    + b"0\r\nx-sum: 1\r\n\r\n",
    "until the end of the connection": OK + b"connection: close\r\n\r\n" + CAPABILITIES,
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + CAPABILITIES,
    "length, then closed": OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(CAPABILITIES) + CAPABILITIES,
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    + OK
    + b"content-length: %d\r\n\r\n" % len(CAPABILITIES)
    + CAPABILITIES,
}
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(answer: bytes, pieces: int = 1) -> Handle:
    """A service that knows one answer, and hands it out in so many pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await read_head(reader)
            await reader.readexactly(int(head.get("content-length", 0)))
            if "get_server_capabilities" not in head[""]:
                writer.write(NOT_FOUND)
                continue
            size = -(-len(answer) // pieces)
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            if b"content-length" not in answer.lower() and b"chunked" not in answer:
                return

    return handle


@pytest.mark.parametrize("pieces", [1, 400], ids=["at once", "in crumbs"])
@pytest.mark.parametrize("framing", FRAMINGS)
def test_every_framing_of_an_answer_is_read(connect: Connect, framing: str, pieces: int) -> None:
    with Raw(answering(FRAMINGS[framing], pieces)) as server:
        client = connect(server, max_retries=1)
        for _ in range(3):
            assert client.get_server_capabilities().supported_models[0].model_name == MODEL


@pytest.mark.timing
@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}",
        b"",
        b"HTTP/1.1 two hundred\r\n\r\n",
    ],
    ids=["another protocol", "too short", "nothing", "garbage"],
)
def test_what_is_no_answer_is_a_connection_error_at_once(connect: Connect, answer: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        writer.write(
            answer
            if "get_server_capabilities" in head[""]
            else NOT_FOUND.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        )
        writer.close()

    with Raw(handle) as server:
        client = connect(server, max_retries=1)
        started = time.monotonic()
        with pytest.raises(tinkex.APIConnectionError):
            client.get_server_capabilities()
        assert time.monotonic() - started < 5


ANSWERS = {
    "create_session": {"session_id": "s"},
    "create_model": {"request_id": "r"},
    "retrieve_future": {"model_id": "m"},
}
TOO_LARGE = b'HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 26\r\n\r\n{"detail": "at most 1 MB"}'


def test_an_answer_that_comes_before_the_body_was_read_is_heard(connect: Connect) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while "forward" not in (head := await read_head(reader))[""]:
            await reader.readexactly(int(head.get("content-length", 0)))
            known = next((value for name, value in ANSWERS.items() if name in head[""]), None)
            answer = json.dumps(known).encode()
            length = b"content-length: %d\r\n\r\n" % len(answer)
            writer.write(NOT_FOUND if known is None else OK + length + answer)
        writer.write(TOO_LARGE)
        writer.write_eof()
        while await reader.read(1 << 16):
            pass

    with Raw(handle) as server, connect(server, max_retries=1) as client:
        training = client.create_lora_training_client(MODEL)
        with pytest.raises(tinkex.APIStatusError, match="at most 1 MB") as caught:
            training.forward_backward([datum(100_000) for _ in range(8)], "cross_entropy").result(20)
        assert caught.value.status_code == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity"])
def test_answers_that_a_gateway_compressed_are_read(
    proto_service: ScriptedService, connect: Connect, encoding: str
) -> None:
    packed = {
        "gzip": gzip.compress(CAPABILITIES),
        "zstd": zstandard.ZstdCompressor().compress(CAPABILITIES),
        "identity": CAPABILITIES,
    }
    answer = Answer(packed[encoding], headers={"content-encoding": encoding})
    proto_service.script.on("get_server_capabilities", do=answer)
    found = connect(proto_service).get_server_capabilities()
    assert found.supported_models[0].model_name == MODEL


@pytest.mark.parametrize(
    ("encoding", "content"),
    [("br", CAPABILITIES), ("gzip", CAPABILITIES), ("gzip", gzip.compress(CAPABILITIES)[:-9])],
    ids=["unknown", "not what it says", "cut short"],
)
def test_an_answer_that_cannot_be_unpacked_is_the_services_fault(
    proto_service: ScriptedService, connect: Connect, encoding: str, content: bytes
) -> None:
    client = connect(proto_service, max_retries=1)
    proto_service.script.on("get_server_capabilities", do=Answer(content, headers={"content-encoding": encoding}))
    with pytest.raises(tinkex.APIResponseValidationError, match=encoding):
        client.get_server_capabilities()


# -- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/services/tinker-prod", "/a/b/"])
def test_a_base_url_may_have_a_path(service: ScriptedService, connect: Connect, prefix: str) -> None:
    class Behind:
        url = service.url + prefix

    client = connect(Behind())
    training = client.create_lora_training_client(MODEL)
    training.optim_step(step()).result(20)
    assert {request.path for request in service.requests_to("optim_step")} == {
        prefix.rstrip("/") + "/api/v1/optim_step"
    }


@pytest.mark.parametrize("host", [host for host in ("127.0.0.1", "::1") if can_bind(host)])
def test_loopback_addresses_of_both_families_work(proto_service: ScriptedService, connect: Connect, host: str) -> None:
    with Front(proto_service, host=host) as front, connect(front) as client:
        training = client.create_lora_training_client(MODEL)
        assert training.optim_step(step()).result(20) is not None
        assert front.versions == {"1.1"}


def test_a_redirect_within_the_service_is_followed_and_one_to_another_host_is_not(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service, max_retries=1)
    moved = {"location": f"{proto_service.url}/moved/api/v1/get_server_capabilities"}
    proto_service.script.on("get_server_capabilities", nth=1, do=Status(307, headers=moved))
    assert client.get_server_capabilities().supported_models
    with ScriptedService() as stranger:
        away = {"location": f"{stranger.url}/api/v1/get_server_capabilities"}
        proto_service.script.on("get_server_capabilities", do=Status(307, headers=away))
        with pytest.raises(tinkex.APIError, match="redirects to another host"):
            client.get_server_capabilities()
        assert stranger.requests == []


@pytest.mark.timing
def test_a_date_in_retry_after_slows_samples_down_too(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    # A date has whole seconds: two ahead is at least one away.
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    proto_service.script.on("asample", nth=1, do=Status(429, headers={"retry-after": date}))
    started = time.monotonic()
    assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences
    assert 0.9 <= time.monotonic() - started < 4


# -- what could never be sent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "http://host:99999"},
        {"base_url": "http://[::1"},
        {"base_url": "http://a..b"},
        {"api_key": "tml-“quoted”"},
        {"api_key": "tml-two\nlines"},
        {"proxy": "http://proxy:99999"},
    ],
    ids=lambda given: " ".join(given),
)
def test_settings_that_could_never_be_sent_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(tinkex.ConfigError) as caught:
        tinkex.ServiceClient(**{"base_url": "http://127.0.0.1:9", "api_key": "tml-x", **settings})
    assert "quoted" not in str(caught.value) and "lines" not in str(caught.value)


SURPLUS = (
    b'HTTP/1.1 200 OK\r\ncontent-length: 24\r\n\r\n{"supported_models": []}'
    b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n"
)


def test_bytes_beyond_an_answer_are_never_taken_for_the_next_one(connect: Connect) -> None:
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            head = await read_head(reader)
            await reader.readexactly(int(head.get("content-length", 0)))
            if "get_server_capabilities" in head[""]:
                writer.write(SURPLUS)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}")

    with Raw(handle) as server:
        client = connect(server, max_retries=1)
        for _ in range(4):
            assert client.get_server_capabilities().supported_models == []
    assert connections >= 4
