"""What a hostile reading of the client found: interrupted threads, rude callbacks, odd answers, shrunken windows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tests.integration.client.wires import Raw, read_head
from tests.unit.client.test_pool import REQUEST, Network
from tinkex.client._calls.limits import Gate
from tinkex.client._http.dial import Origin
from tinkex.client._http.exchange import Exchange, HTTPRequest
from tinkex.client._http.http2 import Http2
from tinkex.client._http.pool import ConnectionPool
from tinkex.client._runtime.loop import Mailbox, loop_thread
from tinkex.clock import REAL
from tinkex.testing import Answer, Delay, ScriptedService

PARAMS = tinkex.SamplingParams(max_tokens=2)
Connect = Callable[..., tinkex.ServiceClient]


# -- callbacks and threads ------------------------------------------------------------------------------------------


def _leave(*_: Any) -> Any:
    sys.exit(3)


def _run_dry(*_: Any) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("loss", [_leave, _run_dry], ids=["SystemExit", "StopIteration"])
def test_a_custom_loss_that_exits_or_runs_dry_fails_its_own_future_and_nothing_else(
    proto_service: ScriptedService, connect: Connect, loss: Any
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    future = training.forward_backward_custom([datum()], loss)
    with pytest.raises(tinkex.TinkexError, match=r"SystemExit|StopIteration"):
        future.result(10)
    training.optim_step(step()).result(10)


def test_a_callback_that_calls_exit_stops_no_other_operation(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    future = sampler.sample(prompt(), 1, PARAMS)
    future.add_done_callback(_leave)
    assert future.result(10).sequences
    assert sampler.sample(prompt(), 1, PARAMS).result(10).sequences


@pytest.mark.parametrize("event", ["request", "step"])
def test_a_listener_that_calls_exit_fails_nothing(proto_service: ScriptedService, connect: Connect, event: str) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    stop = tinkex.on(event, _leave)
    try:
        assert training.forward_backward([datum()], "cross_entropy").result(10).loss_fn_outputs
    finally:
        stop()


def test_a_letter_interrupted_by_ctrl_c_does_not_silence_the_next_ones() -> None:
    class Loop:
        """One that is interrupted at the first wake-up."""

        woken = 0

        def call_soon_threadsafe(self, deliver: Callable[[], None]) -> None:
            self.woken += 1
            if self.woken == 1:
                raise KeyboardInterrupt
            deliver()

    loop = Loop()
    got: list[object] = []
    mailbox = Mailbox(loop)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        mailbox.post(got.append, 1)
    mailbox.post(got.append, 2)
    assert got == [1, 2]


def test_concurrent_futures_wait_sees_a_cancelled_future(proto_service: ScriptedService, connect: Connect) -> None:
    proto_service.script.on("asample", do=Delay(1.0))
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    before = sampler.sample(prompt(), 1, PARAMS)
    assert before.cancel() and before.cancel()
    assert before in concurrent.futures.wait([before], timeout=5).done
    during = sampler.sample(prompt(), 1, PARAMS)
    threading.Timer(0.1, during.cancel).start()
    assert during in concurrent.futures.wait([during], timeout=5).done


def test_cancelling_in_the_moment_of_the_start_leaves_no_unawaited_work(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    loop, made, done = loop_thread(), [], threading.Event()

    def submit() -> None:
        made.append(sampler.sample(prompt(), 1, PARAMS))
        loop.post(lambda: made[0].cancel())  # delivered after the start, before the first step of what was started
        loop.post(lambda: loop.loop.call_later(0.05, done.set))

    with warnings.catch_warnings(record=True) as noise:
        warnings.simplefilter("always")
        loop.post(submit)
        assert done.wait(5)
        assert made.pop().cancelled()
        gc.collect()
    assert [str(entry.message) for entry in noise if "never awaited" in str(entry.message)] == []
    assert not sampler._session.link().operations.in_flight


def test_a_client_closed_while_its_session_opens_says_so_without_noise(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    proto_service.script.on("client_config", do=Delay(0.3))
    client = connect(proto_service)
    with caplog.at_level(logging.ERROR):
        future = client.create_sampling_client_async(base_model=MODEL)
        thread = threading.Thread(target=lambda: outcome.append(_outcome_of(future)))
        outcome: list[Any] = []
        thread.start()
        proto_service.wait_for_requests("client_config")
        client.close().result(10)
        thread.join(10)
    assert isinstance(outcome[0], tinkex.ClosedError)
    assert [record.message for record in caplog.records] == []


def _outcome_of(work: Any) -> Any:
    async def main() -> Any:
        return await work

    try:
        return asyncio.run(main())
    except tinkex.TinkexError as problem:
        return problem


LATE = """
import atexit, sys
late = []
atexit.register(lambda: late[0]())  # registered before tinkex's own: it runs after
import tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-late", telemetry=False)
sampler = service.create_sampling_client(base_model="tinkex/tiny")
def work():
    try:
        sampler.sample(tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams(max_tokens=1)).result()
    except tinkex.ClosedError as problem:
        print(problem)
late.append(work)
"""


@pytest.mark.slow
def test_work_asked_for_after_the_loop_has_stopped_is_refused_and_does_not_hang(proto_service: ScriptedService) -> None:
    command = [sys.executable, "-c", LATE, proto_service.url]
    done = subprocess.run(command, timeout=20, capture_output=True, text=True, check=True)
    assert "the process is ending" in done.stdout


# -- settings -------------------------------------------------------------------------------------------------------


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


# -- the wire -------------------------------------------------------------------------------------------------------


class Sink:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def take(self) -> bytes:
        data, self.written = self.written, b""
        return data


def test_a_service_that_shrinks_its_window_still_gets_the_whole_body() -> None:
    async def main() -> None:
        loop, sink = asyncio.get_running_loop(), Sink()
        client = Http2(loop)
        client.connection_made(sink)  # type: ignore[arg-type]
        service = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        service.initiate_connection()
        got = b""

        def turn() -> None:
            nonlocal got
            for event in service.receive_data(sink.take()):
                if isinstance(event, h2.events.DataReceived):
                    got += event.data
            client.data_received(service.data_to_send())

        turn()
        body = bytes(range(256)) * 1000
        client.start(HTTPRequest("POST", "https", "host", "/", {}, body), Exchange(loop, False))
        turn()
        service.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100})
        turn()  # 65,535 bytes are on their way: the window is far below zero now
        turn()
        service.increment_flow_control_window(1 << 20)
        service.increment_flow_control_window(1 << 20, 1)
        turn()
        turn()
        assert got == body

    asyncio.run(main())


def test_a_header_that_cannot_be_sent_is_refused_on_either_version_of_http() -> None:
    for value in ("two\r\nlines", "日本"):
        with pytest.raises(tinkex.ValidationError, match="x-note"):
            HTTPRequest("GET", "https", "host", "/", {"x-note": value}, b"").check()


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


@pytest.mark.timing
def test_an_upload_that_ends_late_leaves_the_answer_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        network = Network()
        monkeypatch.setattr("tinkex.client._http.pool.dial", network.dial)
        pool = ConnectionPool(Origin("http", "service.example", 80), 1, None)
        unsent = 100
        monkeypatch.setattr("tests.unit.client.test_pool.Line.unsent_bytes", lambda *_: unsent)
        asked = asyncio.ensure_future(pool.exchange(REQUEST, 0.4))
        await asyncio.sleep(0.2)
        unsent = 50
        await asyncio.sleep(0.5)
        unsent = 0  # at 0.7 s: just before the second look
        await asyncio.sleep(0.3)
        network.lines[0].answer()
        assert (await asked).status == 200

    asyncio.run(main())


@pytest.mark.timing
def test_a_service_that_tells_the_size_again_and_again_is_asked_at_a_measured_pace(connect: Connect) -> None:
    config = {"inflight_response_bytes_semaphore_size": 100}
    with ScriptedService(base_models=[MODEL], client_config=config) as service:
        client = connect(service)
        sampler = client.create_sampling_client(base_model=MODEL)
        told = Answer({"status": "complete_metadata", "response_payload_size": 80})
        service.script.on("retrieve_future", times=4, do=told)
        started = time.monotonic()
        assert sampler.sample(prompt(), 1, PARAMS).result(10).sequences
        assert time.monotonic() - started > 0.1
        answers = client._session.link().limiter.results
        assert (answers.held, answers.held_bytes) == (0, 0)


def test_the_time_an_announced_answer_took_to_fetch_is_told_apart(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], metadata_over_bytes=1) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        service.script.on("retrieve_future", do=Delay(0.1))
        steps: list[Any] = []
        stop = tinkex.on("step", steps.append)
        sampler.sample(prompt(), 1, PARAMS).result(10)
        stop()
        assert [entry.fetch_s >= 0.1 for entry in steps if entry.operation == "sample"] == [True]


# -- limits ---------------------------------------------------------------------------------------------------------


def test_a_gate_with_no_places_still_admits_one_at_a_time() -> None:
    async def main() -> tuple[int, bool, int]:
        gate = Gate(REAL, 0)
        await asyncio.wait_for(gate.acquire(), 1)
        second = asyncio.ensure_future(gate.acquire())
        await asyncio.sleep(0)
        held, is_in = gate.held, second.done()
        gate.release()
        await asyncio.wait_for(second, 1)
        return held, is_in, gate.held

    assert asyncio.run(main()) == (1, False, 1)


def test_small_ones_go_on_when_the_large_one_before_them_is_cancelled() -> None:
    async def main() -> None:
        gate = Gate(REAL, 10, limit_bytes=100)
        await gate.acquire(50)
        large = asyncio.ensure_future(gate.acquire(80))
        small = asyncio.ensure_future(gate.acquire(10))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait_for(small, 1)
        assert (gate.held, gate.held_bytes) == (2, 60)

    asyncio.run(main())
