"""Streams of tokens: one operation, over the same way to the service as every other request."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, prompt
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.pump import Pump
from tinkex.testing import Answer, Delay, Drop, ScriptedService, Status

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=8, seed=3)
AT_ONCE = {"retry-after-ms": "5"}


@pytest.fixture
def sampler(proto_service: ScriptedService, connect: Connect) -> tinkex.SamplingClient:
    return connect(proto_service).create_sampling_client(base_model=MODEL)


@pytest.fixture
def heard() -> Iterator[dict[str, list[Any]]]:
    """The events of each name."""
    records: dict[str, list[Any]] = {name: [] for name in ("start", "request", "retry", "step")}
    stops = [tinkex.on(name, records[name].append) for name in records]
    yield records
    for stop in stops:
        stop()


def tokens_of(stream: tinkex.SampleStream) -> list[int]:
    return [token for chunk in stream for token in chunk.tokens]


def test_a_stream_yields_the_tokens_of_the_sample_as_they_are_made(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    stream = sampler.stream(prompt(), PARAMS)
    chunks = list(stream)
    assert len(chunks) > 2
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert stream.response is not None
    assert tokens == stream.response.sequences[0].tokens
    assert chunks[-1].stop_reason == stream.response.sequences[0].stop_reason


def test_a_stream_can_be_awaited_chunk_by_chunk(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)

    async def read() -> list[int]:
        return [token async for chunk in sampler.stream(prompt(), PARAMS) for token in chunk.tokens]

    assert asyncio.run(read()) == sampler.sample(prompt(), 1, PARAMS).result(20).sequences[0].tokens


def test_where_streaming_is_not_announced_one_final_chunk_comes(connect: Connect) -> None:
    with ScriptedService(dialect="json", base_models=[MODEL]) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        (chunk,) = list(sampler.stream(prompt(), PARAMS))
        assert chunk.tokens == sampler.sample(prompt(), 1, PARAMS).result(20).sequences[0].tokens
        assert not service.requests_to("sample_stream")


def test_numbers_as_text_and_missing_logprobs_are_read_in_a_stream_as_elsewhere(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    """Before: both were refused, in a stream alone."""
    token = b'event: token\ndata: {"index": "0", "tokens": ["5", 6], "logprobs": [null, -0.5]}\n\n'
    done = b'event: done\ndata: {"sequences": [{"stop_reason": "stop", "tokens": [5, 6]}]}\n\n'
    proto_service.script.on("sample_stream", do=Answer(token + done, "text/event-stream"))
    first, *_ = sampler.stream(prompt(), PARAMS)
    assert first == tinkex.StreamChunk(0, [5, 6], [None, -0.5])


def test_a_stream_is_read_once(proto_service: ScriptedService, connect: Connect) -> None:
    stream = connect(proto_service).create_sampling_client(base_model=MODEL).stream(prompt(), PARAMS)
    assert list(stream)
    with pytest.raises(tinkex.StreamAlreadyConsumed):
        list(stream)


def test_a_stream_that_breaks_off_is_an_error_not_a_short_sample(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    proto_service.script.on("sample_stream", do=Drop(when="mid_answer"))
    with pytest.raises(tinkex.APIError):
        list(sampler.stream(prompt(), tinkex.SamplingParams(max_tokens=50)))


def test_leaving_a_stream_early_closes_it(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    for _ in sampler.stream(prompt(), tinkex.SamplingParams(max_tokens=200)):
        break
    assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences


# -- the one way to the service --------------------------------------------------------------------------------------


def test_a_stream_renews_a_token_that_ran_out() -> None:
    with ScriptedService(base_models=[MODEL], client_config={"pjwt_auth_enabled": True}) as service:
        with tinkex.ServiceClient(base_url=service.url, api_key="tml-stream", telemetry=False) as client:
            sampler = client.create_sampling_client(base_model=MODEL)
            old = service.requests_to("create_sampling_session")[0].headers["x-api-key"]
            # From now on the service knows only tokens that it gives out later.
            service.script.on("auth_token", do=Answer({"jwt": "eyJ.new.token"}))
            service.script.on("*", do=Status(401, "expired"), where=lambda r: r.headers.get("x-api-key") == old)
            assert tokens_of(sampler.stream(prompt(), PARAMS))
        first, second = service.requests_to("sample_stream")
        assert (first.headers["x-api-key"], second.headers["x-api-key"]) == (old, "eyJ.new.token")
        assert len(service.requests_to("auth_token")) == 2


@pytest.mark.parametrize("fault", [Status(503, headers=AT_ONCE), Drop()], ids=["503", "connection lost"])
def test_a_stream_that_fails_before_its_first_byte_is_sent_again(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient, fault: Any
) -> None:
    proto_service.script.on("sample_stream", nth=1, do=fault, where=lambda request: True)  # once its body is read
    stream = sampler.stream(prompt(), PARAMS)
    tokens = tokens_of(stream)
    assert stream.response is not None
    assert tokens == stream.response.sequences[0].tokens
    bodies = [request.body for request in proto_service.requests_to("sample_stream")]
    keys = {request.headers["x-idempotency-key"] for request in proto_service.requests_to("sample_stream")}
    assert len(bodies) == 2 and bodies[0] == bodies[1] and len(keys) == 1


def test_a_stream_is_counted_and_its_events_are_emitted(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient, heard: dict[str, list[Any]]
) -> None:
    proto_service.script.on("sample_stream", nth=1, do=Status(503, headers=AT_ONCE))
    link = sampler._session.link()
    _wait_until(lambda: MODEL in link.context_lengths)  # asked for in the background: it must not be counted below
    heard["request"].clear()
    before = sampler.stats()
    tokens = tokens_of(sampler.stream(prompt(), PARAMS))
    after = sampler.stats()
    assert after["requests"] - before["requests"] == 2
    assert after["retries"] - before["retries"] == 1
    requests = [event for event in heard["request"] if event.endpoint == "sample_stream"]
    assert [(event.status, event.attempt) for event in requests] == [(503, 1), (200, 2)]
    assert requests[1].received_bytes > 10 * len(tokens)
    assert after["received_bytes"] - before["received_bytes"] == sum(event.received_bytes for event in requests)
    assert after["sent_bytes"] - before["sent_bytes"] == sum(event.sent_bytes for event in requests) > 0
    assert [event.endpoint for event in heard["retry"]] == ["sample_stream"]
    assert [(event.operation, event.ok) for event in heard["step"]] == [("stream", True)]
    assert [event.operation for event in heard["start"]] == ["stream"]


@pytest.mark.timing
def test_a_rate_limited_stream_slows_all_samplers_down_and_does_not_fail(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    proto_service.script.on("sample_stream", nth=1, do=Status(429, headers={"retry-after-ms": "300"}))
    started = time.monotonic()
    assert tokens_of(sampler.stream(prompt(), PARAMS))
    assert time.monotonic() - started >= 0.3
    assert sampler.stats()["rate_limited"] == 1
    limiter = sampler._session.link().limiter
    assert (limiter.dispatch.admitted, limiter.dispatch.admitted_bytes, limiter.samples.admitted) == (0, 0, 0)


def test_a_stream_the_service_rejects_is_not_sent_again(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    proto_service.script.on("sample_stream", do=Status(400, "no such thing"))
    with pytest.raises(tinkex.BadRequestError, match="no such thing"):
        tokens_of(sampler.stream(prompt(), PARAMS))
    assert len(proto_service.requests_to("sample_stream")) == 1


def test_a_stream_that_broke_off_after_its_first_byte_is_not_sent_again(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    proto_service.script.on("sample_stream", nth=1, do=Drop(when="mid_answer"))
    with pytest.raises(tinkex.APIError):
        tokens_of(sampler.stream(prompt(), tinkex.SamplingParams(max_tokens=50)))
    assert len(proto_service.requests_to("sample_stream")) == 1


# -- one operation, read from anywhere -------------------------------------------------------------------------------


def test_where_streaming_is_not_announced_the_stream_is_still_one_operation(
    connect: Connect, heard: dict[str, list[Any]]
) -> None:
    with ScriptedService(dialect="json", base_models=[MODEL]) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        heard["step"].clear()
        assert tokens_of(sampler.stream(prompt(), PARAMS))
    assert [event.operation for event in heard["step"]] == ["stream"]
    assert heard["step"][0].usage.sampled_tokens > 0


def test_an_abandoned_stream_is_cancelled_and_counts_as_done(
    sampler: tinkex.SamplingClient, heard: dict[str, list[Any]]
) -> None:
    """Its prompt was read and its tokens were made, so its cost stays: a failed operation would cost nothing."""
    chunks = iter(sampler.stream(prompt(), tinkex.SamplingParams(max_tokens=5000)))
    next(chunks)
    del chunks
    gc.collect()
    _wait_until(lambda: bool(heard["step"]))
    assert [(event.operation, event.ok, event.error) for event in heard["step"]] == [("stream", True, "")]
    link = sampler._session.link()
    assert not link.in_flight
    assert link.limiter.samples.admitted == 0


def test_a_reader_that_is_cancelled_ends_the_stream(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient, heard: dict[str, list[Any]]
) -> None:
    proto_service.script.on("sample_stream", do=Delay(30.0))

    async def main() -> None:
        async def read() -> None:
            async for _ in sampler.stream(prompt(), PARAMS):
                pass

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.2)

    asyncio.run(main())
    _wait_until(lambda: bool(heard["step"]))
    assert not sampler._session.link().in_flight


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals to threads")
@pytest.mark.timing
def test_ctrl_c_while_a_token_is_waited_for_ends_the_stream(
    proto_service: ScriptedService, sampler: tinkex.SamplingClient, heard: dict[str, list[Any]]
) -> None:
    proto_service.script.on("sample_stream", do=Delay(30.0))
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tokens_of(sampler.stream(prompt(), PARAMS))
    assert time.monotonic() - started < 5
    _wait_until(lambda: bool(heard["step"]))
    assert not sampler._session.link().in_flight


def test_many_streams_are_read_at_once_on_one_loop(sampler: tinkex.SamplingClient) -> None:
    async def read() -> list[int]:
        return [token async for chunk in sampler.stream(prompt(), PARAMS) for token in chunk.tokens]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read() for _ in range(20)))

    first, *others = asyncio.run(main())
    assert first and all(tokens == first for tokens in others)


def test_a_stream_cannot_be_read_on_the_sdks_own_loop(sampler: tinkex.SamplingClient) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def read() -> None:
        try:
            iter(sampler.stream(prompt(), PARAMS))
        except tinkex.WrongThread as error:
            errors.append(error)
        done.set()

    sampler._session.link().loop.post(read)
    assert done.wait(5)
    assert len(errors) == 1


@pytest.mark.parametrize(("pause_s", "writes_line"), [(0.05, False), (0.7, True)])
def test_only_a_stream_that_brings_nothing_for_long_writes_a_waiting_line(
    proto_service: ScriptedService,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    pause_s: float,
    writes_line: bool,
) -> None:
    link = connect(proto_service, wait_line_s=0.3)._session.link()

    async def receive(put: Callable[[int], None]) -> None:
        for number in range(round(0.7 / pause_s)):
            put(number)
            await asyncio.sleep(pause_s)

    with caplog.at_level(logging.WARNING, logger="tinkex.wait"):
        pump: Pump[int] = Pump(link, Operation("stream", link.clock.now()), receive)
        assert list(pump) == list(range(round(0.7 / pause_s)))
    assert ("s for stream" in caplog.text) == writes_line


def _wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
