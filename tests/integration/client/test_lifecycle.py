"""A client ends what it starts; a dead service or a dropped client leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.client._calls import retry
from tinkex.client._calls.limits import limiter_for
from tinkex.client._runtime import session
from tinkex.testing import Delay, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
ONE_TOKEN = tinkex.SamplingParams(max_tokens=1)


def beats(service: ScriptedService) -> int:
    return len(service.requests_to("session_heartbeat"))


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.03)


def assert_no_more_beats(service: ScriptedService) -> None:
    time.sleep(0.1)  # one may be under way
    before = beats(service)
    time.sleep(0.3)  # ten periods
    assert beats(service) == before


# -- sessions and heartbeats ------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.usefixtures("quick_heartbeats")
def test_dropping_all_clients_stops_the_heartbeats(service: ScriptedService) -> None:
    client = tinkex.ServiceClient(base_url=service.url, api_key="tml-drop", telemetry=False)
    training = client.create_lora_training_client(MODEL)
    del client
    gc.collect()
    seen = beats(service)
    service.wait_for_requests("session_heartbeat", seen + 3)  # one client is left: the session lives
    del training
    gc.collect()
    assert_no_more_beats(service)


@pytest.mark.timing
@pytest.mark.usefixtures("quick_heartbeats")
def test_a_client_collected_on_the_sdks_own_loop_thread_does_not_deadlock(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    client = tinkex.ServiceClient(base_url=service.url, api_key="tml-collected", telemetry=False)
    held = [client, client.create_lora_training_client(MODEL)]
    del client
    collected_on: list[str] = []

    def collect(done: object) -> None:
        held.clear()
        gc.collect()
        collected_on.append(threading.current_thread().name)

    service.script.on("optim_step", nth=1, do=Work(0.1))
    future = training.optim_step(step())
    future.add_done_callback(collect)
    future.result(20)
    assert training.optim_step(step()).result(20) is not None  # the loop goes on
    assert collected_on == ["tinkex-loop"]
    training._session.close().result(10)
    assert_no_more_beats(service)


@pytest.mark.timing
@pytest.mark.usefixtures("quick_heartbeats")
def test_a_heartbeat_answered_410_is_the_last(
    service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    service.script.on("session_heartbeat", nth=2, do=Status(410))
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    service.wait_for_requests("session_heartbeat", 2)
    assert_no_more_beats(service)
    assert beats(service) == 2
    assert "ended session" in caplog.text
    assert "Make a new ServiceClient" in caplog.text
    assert training.optim_step(step()).result(20) is not None  # what the service still takes, it gets


@pytest.mark.usefixtures("quick_heartbeats")
def test_a_heartbeat_that_meets_the_end_of_its_own_session_is_no_warning(
    service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    service.script.on("session_heartbeat", nth=1, do=(Delay(0.2), Status(410)))
    service.script.on("finish_session", do=Delay(0.5))
    client = connect(service)
    client.create_sampling_client(base_model=MODEL)
    service.wait_for_requests("session_heartbeat", 1)
    client.close().result(10)
    assert "ended session" not in caplog.text


@pytest.mark.usefixtures("quick_heartbeats")
def test_heartbeats_outlive_faults_and_silence_is_reported_once(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "WARN_AFTER_S", 0.1)
    service.script.on("session_heartbeat", times=8, do=Status(503))
    client = connect(service)
    client.create_sampling_client(base_model=MODEL)
    service.wait_for_requests("session_heartbeat", 10)
    said = [record.getMessage() for record in caplog.records if record.name == "tinkex.session"]
    assert len(said) == 1
    assert "no heartbeat answered for" in said[0]
    assert "HTTP 503" in said[0]


@pytest.mark.timing
@pytest.mark.usefixtures("quick_heartbeats")
def test_close_ends_the_session_once_and_its_heartbeats(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    client.create_sampling_client(base_model=MODEL)
    client.close().result(10)
    client.close("errored", "too late to say").result(10)
    client.close().result(10)
    assert_no_more_beats(service)
    assert [session.finished for session in service.sessions.values()] == [
        {"reason": {"type": "success"}, "detail": None}
    ]
    assert len(service.requests_to("finish_session")) == 1


def test_a_closed_client_refuses_further_work_and_says_why(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    sampler = client.create_sampling_client(base_model=MODEL)
    client.close().result(10)
    for call in (
        lambda: training.optim_step(step()),
        lambda: sampler.sample(prompt(), 1, ONE_TOKEN),
        lambda: client.create_sampling_client(base_model=MODEL),
    ):
        with pytest.raises(tinkex.ClosedError, match="closed"):
            call()


def test_close_before_anything_was_opened_makes_no_request(service: ScriptedService) -> None:
    client = tinkex.ServiceClient(base_url=service.url, api_key="tml-unused")
    client.close().result(10)
    with tinkex.ServiceClient(base_url=service.url, api_key="tml-unused"):
        pass
    assert service.requests == []


def test_a_service_without_the_finish_call_can_be_closed(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], missing=["finish_session"]) as service:
        client = connect(service)
        client.create_sampling_client(base_model=MODEL)
        assert client.close().result(10) is None
        assert [request.status for request in service.requests_to("finish_session")] == [404]


def test_a_program_does_not_fail_at_its_end_because_the_service_is_away(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "fault_delay", lambda *given: 0.01)
    with ScriptedService(base_models=[MODEL]) as service:
        client = connect(service)
        client.create_sampling_client(base_model=MODEL)
    with client:  # the service has been stopped
        pass
    assert "the service was not told" in caplog.text


def test_with_tells_the_service_how_it_ended(service: ScriptedService, connect: Connect) -> None:
    def ended() -> list[tuple[str, str | None]]:
        return [
            (session.finished["reason"]["type"], session.finished["detail"])
            for session in service.sessions.values()
            if session.finished
        ]

    with connect(service) as client:
        client.create_sampling_client(base_model=MODEL)
    assert ended() == [("success", None)]
    for problem, told in (
        (ZeroDivisionError("inside"), "errored"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "interrupted"),
    ):
        with pytest.raises(type(problem)), connect(service) as client:
            client.create_sampling_client(base_model=MODEL)
            raise problem
        assert ended()[-1] == (told, type(problem).__name__)

    async def main() -> None:
        async with connect(service) as client:
            await client.create_sampling_client_async(base_model=MODEL)
        assert ended()[-1] == ("success", None)
        with pytest.raises(ZeroDivisionError):
            async with connect(service) as client:
                await client.create_sampling_client_async(base_model=MODEL)
                raise ZeroDivisionError
        assert ended()[-1] == ("errored", "ZeroDivisionError")

    asyncio.run(main())
    assert len(ended()) == 6


def test_a_goodbye_that_fails_does_not_hide_the_error_inside(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FINISH_S", 0.3)
    with pytest.raises(ZeroDivisionError), connect(service) as client:
        client.create_sampling_client(base_model=MODEL)
        service.pause()
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_fail_inside(connect(service), service))
    service.resume()


async def _fail_inside(client: tinkex.ServiceClient, service: ScriptedService) -> None:
    service.resume()
    async with client:
        await client.create_sampling_client_async(base_model=MODEL)
        service.pause()
        raise ZeroDivisionError


@pytest.mark.timing
def test_closing_towards_a_service_that_does_not_answer_is_bounded(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FINISH_S", 0.3)
    client = connect(service)
    client.create_sampling_client(base_model=MODEL)
    service.pause()
    started = time.monotonic()
    with pytest.raises(tinkex.DeadlineExceeded, match="close"):
        client.close().result(10)
    assert time.monotonic() - started < 2
    service.resume()
    with pytest.raises(tinkex.ClosedError):  # closed all the same
        client.create_sampling_client(base_model=MODEL)


def test_the_sdk_keeps_its_own_kind_of_loop_whatever_the_program_has_set(proto_service: ScriptedService) -> None:
    code = (
        "import asyncio\n"
        "class Policy(asyncio.DefaultEventLoopPolicy):\n"
        "    def new_event_loop(self):\n"
        "        raise SystemExit('asked for a loop of the policy')\n"
        "asyncio.set_event_loop_policy(Policy())\n"
        "import tinkex\n"
        f"service = tinkex.ServiceClient(base_url={proto_service.url!r}, telemetry=False)\n"
        "print(len(service.get_server_capabilities().supported_models))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "1", done.stderr


def test_an_unused_client_starts_nothing_and_leaves_nothing() -> None:
    code = (
        "import gc, threading, tinkex\n"
        "client = tinkex.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-x')\n"
        "del client; gc.collect()\n"
        "print([thread.name for thread in threading.enumerate()])"
    )
    assert run(code).stdout == "['MainThread']\n"


# -- work in flight, shared state -------------------------------------------------------------------------------------


def test_work_in_flight_outlives_its_client_object(service: ScriptedService) -> None:
    service.script.on(["asample", "optim_step"], do=Work(0.2))
    client = tinkex.ServiceClient(base_url=service.url, api_key="tml-gone", telemetry=False)
    training, sampler = client.create_lora_training_client(MODEL), client.create_sampling_client(base_model=MODEL)
    futures: list[tinkex.APIFuture[Any]] = [
        training.optim_step(step()),
        training.optim_step(step()),
        sampler.sample(prompt(), 1, ONE_TOKEN),
    ]
    del client, training, sampler
    gc.collect()
    assert all(future.result(20) is not None for future in futures)


def test_work_in_flight_finishes_when_its_client_is_closed(service: ScriptedService, connect: Connect) -> None:
    service.script.on(["asample", "optim_step"], do=Work(0.2))
    client = connect(service)
    training, sampler = client.create_lora_training_client(MODEL), client.create_sampling_client(base_model=MODEL)
    futures: list[tinkex.APIFuture[Any]] = [
        training.optim_step(step()),
        training.optim_step(step()),
        sampler.sample(prompt(), 1, ONE_TOKEN),
    ]
    client.close().result(10)
    assert all(future.result(20) is not None for future in futures)


def test_limits_are_shared_by_service_and_key_and_by_nothing_else() -> None:
    with ScriptedService(base_models=[MODEL]) as one, ScriptedService(base_models=[MODEL]) as other:

        def limiter(url: str, key: str, **options: Any) -> object:
            with tinkex.ServiceClient(base_url=url, api_key=key, telemetry=False, **options) as client:
                return client.create_sampling_client(base_model=MODEL)._session.link().limiter

        first = limiter(one.url, "tml-a")
        assert limiter(one.url, "tml-a") is first
        assert limiter(one.url + "/", "tml-a", timeout_s=7.0) is first
        assert limiter_for(one.url, "tml-a") is first  # it outlived the clients that made it
        assert limiter(one.url, "tml-b") is not first
        assert limiter(other.url, "tml-a") is not first


@pytest.mark.timing
def test_a_429_slows_down_the_samplers_of_the_same_key_only(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL]) as service:
        first, second = (
            tinkex.ServiceClient(base_url=service.url, api_key=key, telemetry=False) for key in ("tml-c", "tml-d")
        )
        with first, second:
            limited, free = (client.create_sampling_client(base_model=MODEL) for client in (first, second))
            service.script.on("asample", nth=1, do=Status(429, headers={"retry-after-ms": "600"}))
            slow = limited.sample(prompt(), 1, ONE_TOKEN)
            service.wait_for_requests("asample")
            started = time.monotonic()
            free.sample(prompt(), 1, ONE_TOKEN).result(20)
            assert time.monotonic() - started < 0.5
            assert not slow.done()
            slow.result(20)


# -- the service goes dead --------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_service_gone_dead_fails_every_future_within_its_deadline_with_the_cause(
    proto_service: ScriptedService, connect: Connect, how: str
) -> None:
    service = proto_service
    client = connect(service, unreachable_s=1.0, deadline_s=4.0 if how == "silent" else 60.0, timeout_s=0.5)
    training, sampler = client.create_lora_training_client(MODEL), client.create_sampling_client(base_model=MODEL)
    service.script.on(["asample", "forward_backward"], do=Work(30.0))
    futures: list[tinkex.APIFuture[Any]] = [training.forward_backward([datum()], "cross_entropy")]
    futures += [sampler.sample(prompt(), 1, ONE_TOKEN) for _ in range(20)]
    service.wait_for_requests("asample", 20)
    service.wait_for_requests("retrieve_future", 22)
    if how == "killed":
        service.kill()
    else:
        service.pause()
    died = time.monotonic()
    futures += [training.optim_step(step()) for _ in range(20)]
    futures += [sampler.sample(prompt(), 1, ONE_TOKEN) for _ in range(20)]
    for future in futures:
        with pytest.raises((tinkex.APIConnectionError, tinkex.DeadlineExceeded)) as caught:
            future.result(20)
        assert future.done(), "the error is the operation's, not the waiter's timeout"
        if how == "killed":
            assert "Connection error" in str(caught.value)
        else:
            assert "No response in time" in str(caught.value) or "waiting 4 s for" in str(caught.value)
    # Twenty queued steps do not each try for unreachable_s: what the first found out holds for all.
    assert time.monotonic() - died < 5
    assert [op for _, _, op in service.executed] == ["forward_backward"]


@pytest.mark.slow
def test_a_service_that_comes_back_in_time_loses_nothing(proto_service: ScriptedService, connect: Connect) -> None:
    service = proto_service
    training = connect(service).create_lora_training_client(MODEL)
    service.script.on("optim_step", do=Work(0.3))
    futures = [training.optim_step(step()) for _ in range(3)]
    service.wait_for_requests("optim_step")
    service.kill()
    futures += [training.optim_step(step()) for _ in range(2)]
    threading.Timer(0.5, service.start).start()
    for future in futures:
        future.result(30)
    assert [seq_id for _, seq_id, _ in service.executed] == [1, 2, 3, 4, 5]


# -- the interpreter's end --------------------------------------------------------------------------------------------

PRELUDE = f"""
import sys, time, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-exit", unreachable_s=60)
prompt, params = tinkex.ModelInput.from_ints([1, 2]), tinkex.SamplingParams(max_tokens=1)
datum = tinkex.Datum(model_input=prompt, loss_fn_inputs={{"target_tokens": [1, 2], "weights": [1.0, 1.0]}})
sampler = service.create_sampling_client(base_model={MODEL!r})
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
    )


def exit_of(code: str, url: str) -> float:
    """Runs the program, whose last line of output is the time; says how long its end took after that."""
    done = run(PRELUDE + code + "\nprint(time.monotonic(), flush=True)", url)
    ended = time.monotonic()
    assert done.stderr == ""
    assert done.returncode == 0
    return ended - float(done.stdout.split()[-1])


@pytest.mark.timing
@pytest.mark.slow
def test_exit_with_samples_in_flight_is_quick_and_clean(proto_service: ScriptedService) -> None:
    proto_service.script.on("asample", do=Work(30.0))
    code = "futures = [sampler.sample(prompt, 1, params) for _ in range(50)]\ntime.sleep({pause})"
    took = [exit_of(code.format(pause=pause), proto_service.url) for pause in (0.0, 0.02, 0.1, 0.3, 0.3)]
    assert max(took) < 2, took
    told = [event["event"] for body in proto_service.telemetry for event in body["events"]]
    assert told.count("SESSION_END") == 5, "the goodbye was not said"


@pytest.mark.timing
@pytest.mark.slow
def test_exit_with_training_in_flight_and_a_loop_that_awaits_it_is_quick_and_clean(
    proto_service: ScriptedService,
) -> None:
    proto_service.script.on(["forward_backward", "asample"], do=Work(30.0))
    code = """
import asyncio
training = service.create_lora_training_client("tinkex/tiny")
futures = [training.forward_backward([datum], "cross_entropy") for _ in range(5)]
async def main():
    try:
        async with asyncio.timeout(0.2):
            await asyncio.gather(sampler.sample_async(prompt, 1, params), *(one.result_async() for one in futures))
    except TimeoutError:
        pass
asyncio.run(main())
"""
    assert exit_of(code, proto_service.url) < 2


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_exit_is_quick_when_the_service_is_dead(proto_service: ScriptedService, how: str) -> None:
    proto_service.script.on("asample", do=Work(30.0))
    code = "futures = [sampler.sample(prompt, 1, params) for _ in range(20)]\nsys.stdin.readline()\n"
    program = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code + "print(time.monotonic(), flush=True)", proto_service.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        proto_service.wait_for_requests("asample", 20, timeout_s=30)
        getattr(proto_service, how)()
        printed, errors = program.communicate("\n", timeout=30)
    finally:
        program.kill()
    assert time.monotonic() - float(printed) < 2
    assert errors == ""
    assert program.returncode == 0


@pytest.mark.timing
@pytest.mark.slow
def test_a_custom_loss_that_still_runs_does_not_hold_up_exit(proto_service: ScriptedService) -> None:
    code = """
import threading
entered = threading.Event()
def loss(data, logprobs):
    entered.set()
    time.sleep(60)
training = service.create_lora_training_client("tinkex/tiny")
future = training.forward_backward_custom([datum], loss)
assert entered.wait(40)
"""
    assert exit_of(code, proto_service.url) < 2


@pytest.mark.slow
def test_a_failure_nobody_looked_at_is_said_at_exit(proto_service: ScriptedService) -> None:
    proto_service.script.on("optim_step", do=Status(400, "no such learning rate"))
    code = """
training = service.create_lora_training_client("tinkex/tiny")
future = training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
while not future.done():
    time.sleep(0.01)
training.get_info()
"""
    done = run(PRELUDE + code, proto_service.url)
    assert done.returncode == 0
    assert "optim_step seq 1 failed and nobody has looked at its future" in done.stderr
    assert "no such learning rate" in done.stderr


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
