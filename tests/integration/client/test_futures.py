"""One future serves every waiter, always ends, and says what it waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.client._calls import chunks, poll
from tinkex.client._runtime.loop import loop_thread
from tinkex.testing import Answer, Delay, FailFuture, Pending, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
ONE_TOKEN = tinkex.SamplingParams(max_tokens=1)


def polls(service: ScriptedService) -> int:
    """Polls for anything but the creation of models."""
    polled = service.requests_to("retrieve_future")
    return sum(request.headers["x-tinker-request-type"] != "CreateModel" for request in polled)


def wait_for_polls(service: ScriptedService, count: int = 1) -> None:
    others = len(service.requests_to("create_model"))
    service.wait_for_requests("retrieve_future", count + others)


def settled(client: tinkex.TrainingClient) -> None:
    """Everything that was posted to the SDK's loop before this call has run."""
    client.get_info()


# -- one result for every waiter ---------------------------------------------------------------------------------------


def test_many_waiters_on_threads_and_loops_get_one_result_that_was_polled_once(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=Work(0.3))
    future = training.optim_step(step())
    found: list[object] = []

    def block() -> None:
        found.append(future.result(20))

    def run_loop() -> None:
        async def gather() -> None:
            found.extend(await asyncio.gather(*(future.result_async() for _ in range(10)), one(), wrapped()))

        async def one() -> object:
            return await future

        async def wrapped() -> object:
            return await asyncio.wrap_future(future)

        asyncio.run(gather())

    threads = [threading.Thread(target=target) for target in [block, run_loop] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4 * (1 + 12)
    assert all(value is found[0] for value in found)
    before = polls(service)
    assert before == 1
    assert future.result() is found[0]  # asked again later: kept, not polled again
    assert polls(service) == before


def test_the_future_is_a_concurrent_future_for_everybody_elses_tools(training: tinkex.TrainingClient) -> None:
    futures = [training.optim_step(step()) for _ in range(3)]
    assert all(isinstance(future, concurrent.futures.Future) for future in futures)
    done, open_ = concurrent.futures.wait(futures, timeout=20)
    assert len(done) == 3
    assert not open_
    assert set(concurrent.futures.as_completed(futures)) == set(futures)

    async def wrapped() -> object:
        return await asyncio.wrap_future(futures[0])

    assert asyncio.run(wrapped()) is futures[0].result()


@pytest.mark.slow
def test_the_second_result_of_a_custom_loss_future_equals_the_first(training: tinkex.TrainingClient) -> None:
    future = training.forward_backward_custom([datum()], lambda data, logprobs: (-logprobs[0].sum(), {"mine": 1.0}))
    first = future.result(60)
    kept = dict(first.metrics)
    second = future.result(1)
    assert "surrogate_loss:sum" in kept
    assert second is first
    assert second.metrics == kept
    assert asyncio.run(future.result_async()).metrics == kept


# -- no caller hangs ---------------------------------------------------------------------------------------------------


def test_a_crash_inside_the_sdk_fails_its_future_and_not_the_next(
    training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(outputs: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patched:
        patched.setattr(chunks, "join", crash)
        with pytest.raises(ZeroDivisionError, match="a bug of ours"):
            training.forward_backward([datum()], "cross_entropy").result(20)
    assert training.forward_backward([datum()], "cross_entropy").result(20).loss_fn_outputs


def test_an_accepted_answer_that_cannot_be_read_fails_the_future(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=Answer("<html>hello</html>", content_type="text/html"))
    with pytest.raises(tinkex.APIResponseValidationError):
        training.optim_step(step()).result(20)
    training.optim_step(step()).result(20)


@pytest.mark.timing
def test_an_operation_ends_at_its_deadline_and_says_what_it_waited_for(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service, deadline_s=0.5).create_lora_training_client(MODEL)
    proto_service.script.on("forward_backward", do=Pending("paused_capacity", "no room", times=1000))
    started = time.monotonic()
    with pytest.raises(tinkex.DeadlineExceeded, match=r'forward_backward seq 1: queue paused_capacity \("no room"\)'):
        training.forward_backward([datum()], "cross_entropy").result(20)
    assert time.monotonic() - started < 2


def test_result_on_the_sdks_own_loop_thread_raises_at_once(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", do=Work(0.3))
    first, slow = training.optim_step(step()), training.optim_step(step())
    caught: list[BaseException] = []
    ready = threading.Event()

    def callback(done: object) -> None:
        for blocking in (slow.result, slow.exception, training.get_info):
            try:
                blocking()
            except tinkex.WrongThread as problem:
                caught.append(problem)
        ready.set()

    first.add_done_callback(callback)
    assert ready.wait(20)
    assert len(caught) == 3
    assert "optim_step seq 2" in str(caught[0])
    assert slow.result(20) is not None


@pytest.mark.timing
def test_save_weights_and_get_sampling_client_async_does_not_block_the_callers_loop(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("save_weights_for_sampler", do=Work(0.6))

    async def main() -> float:
        stalls: list[float] = []

        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                stalls.append(time.monotonic() - before)

        watcher = asyncio.create_task(watch())
        sampler = await training.save_weights_and_get_sampling_client_async()
        watcher.cancel()
        assert isinstance(sampler, tinkex.SamplingClient)
        assert len(stalls) > 3
        return max(stalls)

    assert asyncio.run(main()) < 0.4


# -- waiters come and go, the work stays -------------------------------------------------------------------------------


def test_cancelling_the_task_that_awaits_leaves_the_work_going(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=Work(0.3))
    future = training.optim_step(step())

    async def impatient() -> object:
        return await future

    async def main() -> None:
        task = asyncio.create_task(impatient())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not future.cancelled()
    assert future.result(20) is not None


def test_a_timeout_says_what_is_waited_for_and_that_the_work_goes_on(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", do=Work(0.4))
    future = training.optim_step(step())
    for wait in (future.result, future.exception, lambda timeout: asyncio.run(future.result_async(timeout))):
        with pytest.raises(TimeoutError, match=r"Not done within 0.01 s: waiting 0 s for optim_step.*The work goes on"):
            wait(0.01)
    assert future.result(20) is not None


def test_using_a_future_as_its_value_says_that_it_is_a_future(training: tinkex.TrainingClient) -> None:
    future = training.optim_step(step())
    with pytest.raises(AttributeError, match=r"no attribute 'metrics': it is a future.*result\(\)"):
        _ = future.metrics  # type: ignore[attr-defined]
    assert not hasattr(future, "metrics")
    assert future.result(20) is not None


def test_a_vanished_caller_leaves_no_noise_and_no_leak(
    service: ScriptedService, sampler: tinkex.SamplingClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.script.on("asample", do=Work(0.2))
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def leave_early() -> weakref.ref[tinkex.APIFuture[tinkex.SampleResponse]]:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        future = sampler.sample(prompt(), 1, ONE_TOKEN)
        with pytest.raises(TimeoutError):
            await future.result_async(0.05)
        return weakref.ref(future)

    with caplog.at_level(logging.DEBUG):
        left = asyncio.run(leave_early())  # its loop is closed before the sample is there
        done = threading.Event()
        sampler.sample(prompt(), 1, ONE_TOKEN).add_done_callback(lambda _: done.set())
        assert done.wait(20)
        deadline = time.monotonic() + 10
        while (left() is not None or loops[0]() is not None) and time.monotonic() < deadline:
            time.sleep(0.02)
            gc.collect()
    assert left() is None
    assert loops[0]() is None
    assert len(service.sampled) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_cancelling_what_the_service_has_says_that_it_runs_to_completion(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=Work(0.2))
    future = training.optim_step(step())
    wait_for_polls(service)
    assert future.cancel() is True
    assert future.cancelled()
    assert future.done()
    assert future.status().state == "cancelled"
    assert "runs it to completion" in future.status().note
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(1)

    async def awaited() -> None:
        with pytest.raises(concurrent.futures.CancelledError):
            await future

    asyncio.run(awaited())
    training.optim_step(step()).result(20)
    assert [op for _, _, op in service.executed] == ["optim_step", "optim_step"]


def test_cancelling_what_is_done_changes_nothing(training: tinkex.TrainingClient) -> None:
    future = training.optim_step(step())
    value = future.result(20)
    assert future.cancel() is False
    assert future.result() is value
    assert future.status().state == "done"


def test_a_cancelled_sample_is_stopped_on_the_service_where_it_offers_that(connect: Connect) -> None:
    with (
        ScriptedService(base_models=[MODEL], dynamic_config={"sample_cancel_enabled": True}) as service,
        connect(service) as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        service.script.on("asample", nth=1, do=Work(5.0))
        future = sampler.sample(prompt(), 1, ONE_TOKEN)
        service.wait_for_requests("retrieve_future")
        request_id = future.status().request_id
        assert future.cancel() is True
        service.wait_for_requests("cancel_future")
        assert sampler.sample(prompt(), 1, ONE_TOKEN).result(20).sequences
        assert service.cancelled == [request_id]


@pytest.mark.slow
def test_cancelling_a_custom_loss_while_it_runs_sends_no_second_pass_and_gives_the_turn_on(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def loss(data: object, logprobs: list[object]) -> object:
        entered.set()
        leave.wait(20)
        return -logprobs[0].sum(), {}  # type: ignore[attr-defined]

    future = training.forward_backward_custom([datum()], loss)  # type: ignore[arg-type]
    after = training.optim_step(step())
    assert entered.wait(60)
    assert future.cancel() is True
    assert after.result(20) is not None  # although the function is still running
    leave.set()
    settled(training)
    assert [op for _, _, op in service.executed] == ["forward", "optim_step"]


def test_cancelling_a_submission_that_gets_no_answer_gives_the_turn_on(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", nth=1, do=Status(503, headers={"retry-after": "15"}))
    stuck = training.optim_step(step())
    after = training.forward_backward([datum()], "cross_entropy")
    proto_service.wait_for_requests("optim_step")
    assert stuck.cancel() is True
    assert after.result(10).loss_fn_outputs
    assert "while it was being sent" in stuck.status().note


# -- status, callbacks ------------------------------------------------------------------------------------------------


def test_status_tells_the_life_of_an_operation(service: ScriptedService, training: tinkex.TrainingClient) -> None:
    service.script.on("optim_step", nth=1, do=[Pending("paused_capacity", "no room"), Work(0.6)])
    service.script.on("forward_backward", nth=1, do=Delay(0.1))  # else it may be accepted before anybody looks
    first, queued = training.optim_step(step()), training.forward_backward([datum()], "cross_entropy")
    assert queued.status().state in ("queued", "submitting")
    wait_for_polls(service, 3)  # one of them is the queued operation's
    accepted = first.status()
    assert (accepted.state, accepted.operation, accepted.seq_id) == ("accepted", "optim_step", 1)
    assert accepted.request_id
    assert accepted.polls >= 2
    assert accepted.attempts == 1
    assert (accepted.queue_state, accepted.queue_reason) == ("paused_capacity", "no room")
    assert accepted.waited_s > 0
    first.result(20)
    queued.result(20)
    assert first.status().state == "done"
    assert first.status().last_error is None
    assert "optim_step seq 1: done" in repr(first)


def test_status_of_a_failure_keeps_its_reason(service: ScriptedService, training: tinkex.TrainingClient) -> None:
    service.script.on("optim_step", nth=1, do=FailFuture("out of memory", "server"))
    future = training.optim_step(step())
    assert isinstance(future.exception(20), tinkex.RequestFailedError)
    assert future.status().state == "failed"
    assert "out of memory" in (future.status().last_error or "")


def test_callbacks_run_once_each_and_one_that_raises_hurts_nobody(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=Work(0.1))
    future = training.optim_step(step())
    called: list[str] = []
    last = threading.Event()

    def broken(done: object) -> None:
        raise ValueError("a callback of the user's")

    future.add_done_callback(lambda done: called.append("first" if done is future else "?"))
    future.add_done_callback(broken)
    future.add_done_callback(lambda _: (called.append("last"), last.set()))
    assert future.result(20) is not None
    assert last.wait(20)
    future.add_done_callback(lambda _: called.append("late"))
    assert called == ["first", "last", "late"]
    assert training.optim_step(step()).result(20) is not None


# -- errors from polls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, tinkex.BadRequestError),
        (401, tinkex.AuthenticationError),
        (402, tinkex.BillingError),
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (410, tinkex.ResultExpired),
        (422, tinkex.UnprocessableEntityError),
    ],
)
def test_errors_from_polls_keep_their_type(
    service: ScriptedService,
    training: tinkex.TrainingClient,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    error: type[tinkex.TinkexError],
) -> None:
    monkeypatch.setattr(poll, "NOT_YET_VISIBLE_S", 0.0)
    service.script.on("retrieve_future", nth=1, do=Status(status, "the reason"))
    with pytest.raises(error) as caught:
        training.optim_step(step()).result(20)
    if isinstance(caught.value, tinkex.APIStatusError):
        assert caught.value.status_code == status
        assert "the reason" in str(caught.value)
    assert training.optim_step(step()).result(20) is not None


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_answers_to_a_poll_are_not_fatal(
    service: ScriptedService, training: tinkex.TrainingClient, status: int
) -> None:
    service.script.on("retrieve_future", times=2, do=Status(status, headers={"retry-after-ms": "10"}))
    training.optim_step(step()).result(20)
    assert polls(service) == 3
    assert [op for _, _, op in service.executed] == ["optim_step"]


def test_a_404_right_after_acceptance_is_asked_again(service: ScriptedService, training: tinkex.TrainingClient) -> None:
    service.script.on("retrieve_future", nth=1, do=Status(404, headers={"retry-after-ms": "10"}))
    training.optim_step(step()).result(20)
    assert polls(service) == 2


@pytest.mark.parametrize("body", ["<html>welcome</html>", "", "[1, 2]", '{"loss_fn_outputs": 3}', b"\xff\xfe\x00"])
def test_a_200_that_is_not_an_answer_is_a_response_validation_error(
    service: ScriptedService, training: tinkex.TrainingClient, body: object
) -> None:
    service.script.on("retrieve_future", nth=1, do=Answer(body))
    with pytest.raises(tinkex.APIResponseValidationError):
        training.forward_backward([datum()], "cross_entropy").result(20)
    assert training.optim_step(step()).result(20) is not None


def test_a_failed_operation_carries_its_category_and_request_id(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    service.script.on("optim_step", nth=1, do=FailFuture("bad learning rate", "user"))
    future = training.optim_step(step())
    with pytest.raises(tinkex.RequestFailedError, match="bad learning rate") as caught:
        future.result(20)
    assert caught.value.category == "user"
    assert caught.value.request_id == future.status().request_id


# -- what is said while waiting ---------------------------------------------------------------------------------------


def test_a_failure_nobody_looked_at_is_reported_at_the_next_call(
    service: ScriptedService, training: tinkex.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.script.on("optim_step", times=2, do=[FailFuture("out of memory", "server"), Pending()])
    unseen, seen = training.optim_step(step()), training.optim_step(step())
    assert seen.exception(20) is not None
    settled(training)
    assert not [record for record in caplog.records if record.name == "tinkex.training"]
    training.optim_step(step()).result(20)
    said = [record.getMessage() for record in caplog.records if record.name == "tinkex.training"]
    assert said == ["optim_step seq 1 failed and nobody has looked at its future: out of memory"]
    training.optim_step(step()).result(20)
    assert len([record for record in caplog.records if record.name == "tinkex.training"]) == 1
    assert unseen.done()


def test_queue_states_reach_the_observers_of_the_client_and_of_the_call(
    service: ScriptedService, training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [Pending("paused_capacity", "no room"), Pending("paused_capacity", "no room"), Pending("active")]
    # Accepted a little late, so that who listens to the call is there before it is polled for.
    service.script.on(["optim_step", "forward_backward"], do=[Delay(0.5), *waits])
    by_client: list[tuple[str, str | None]] = []
    by_call: list[tuple[str, str | None]] = []
    by_method: list[str] = []
    stop = training.on_queue_state(lambda state, reason: by_client.append((state, reason)))
    training.optim_step(step()).result(20)
    training.forward_backward([datum()], "cross_entropy").on_queue_state(
        lambda state, reason: by_call.append((state, reason))
    ).result(20)
    changes = [("paused_capacity", "no room"), ("active", None)]  # a change each, not an answer each
    assert by_call == changes
    assert by_client == changes * 2
    stop()
    service.script.clear()
    service.script.on("optim_step", do=Pending("paused_capacity"))
    monkeypatch.setattr(
        tinkex.TrainingClient, "on_queue_state_change", lambda self, state, reason: by_method.append(state)
    )
    training.optim_step(step()).result(20)
    assert by_method == ["paused_capacity"]
    assert by_client == changes * 2


def test_a_samplers_observer_hears_about_samples(service: ScriptedService, sampler: tinkex.SamplingClient) -> None:
    service.script.on("asample", nth=1, do=Pending("paused_rate_limit", "slow down"))
    heard: list[tuple[str, str | None]] = []
    sampler.on_queue_state(lambda state, reason: heard.append((state, reason)))
    sampler.sample(prompt(), 1, ONE_TOKEN).result(20)
    assert heard == [("paused_rate_limit", "slow down")]


def test_an_observer_that_raises_does_not_fail_the_operation(
    service: ScriptedService, training: tinkex.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.script.on("optim_step", nth=1, do=Pending("paused_capacity", "no room"))

    def broken(state: str, reason: str | None) -> None:
        raise KeyError("an observer of the user's")

    training.on_queue_state(broken)
    assert training.optim_step(step()).result(20) is not None
    assert "observer" in caplog.text


@pytest.mark.slow
def test_waiting_long_is_said_in_one_line_with_the_reason(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    training = connect(proto_service, wait_line_s=0.3).create_lora_training_client(MODEL)
    for _ in range(3):
        training.optim_step(step()).result(20)
    proto_service.script.on("forward_backward", do=[Pending("paused_capacity", "no room", times=2), Work(0.8)])
    slow = [training.forward_backward([datum()], "cross_entropy") for _ in range(2)]
    for future in slow:
        future.result(20)
    lines = [record.getMessage() for record in caplog.records if record.name == "tinkex.wait"]
    expected = (
        r'waiting \d+ s for forward_backward seq 4: queue paused_capacity \("no room"\), \d polls, session alive'
        r" \(and 1 more\)"
    )
    assert re.fullmatch(expected, lines[0]), lines
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "tinkex.wait")
    assert len(lines) <= 8  # one line each interval, not one each operation or poll


def test_an_operation_that_waits_its_turn_says_so(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    training = connect(proto_service, wait_line_s=0.2).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", nth=1, do=Status(503, "busy", headers={"retry-after-ms": "700"}))
    first = training.optim_step(step())
    second = training.forward_backward([datum()], "cross_entropy")
    first.result(20)
    second.result(20)
    lines = "\n".join(record.getMessage() for record in caplog.records if record.name == "tinkex.wait")
    assert re.search(r"optim_step seq 1: being submitted, attempt 1, 0 polls, session alive, last error: .*busy", lines)
    assert "forward_backward seq 2: not sent yet, waiting its turn, 0 polls, session alive" in lines


# -- callbacks and listeners that misbehave ---------------------------------------------------------------------------


def _leave(*_: Any) -> Any:
    sys.exit(3)


def test_a_callback_that_calls_exit_stops_no_other_operation(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    future = sampler.sample(prompt(), 1, ONE_TOKEN)
    future.add_done_callback(_leave)
    assert future.result(10).sequences
    assert sampler.sample(prompt(), 1, ONE_TOKEN).result(10).sequences


@pytest.mark.parametrize("event", ["request", "step"])
def test_a_listener_that_calls_exit_fails_nothing(proto_service: ScriptedService, connect: Connect, event: str) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    stop = tinkex.on(event, _leave)
    try:
        assert training.forward_backward([datum()], "cross_entropy").result(10).loss_fn_outputs
    finally:
        stop()


def test_concurrent_futures_wait_sees_a_cancelled_future(proto_service: ScriptedService, connect: Connect) -> None:
    proto_service.script.on("asample", do=Delay(1.0))
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    before = sampler.sample(prompt(), 1, ONE_TOKEN)
    assert before.cancel() and before.cancel()
    assert before in concurrent.futures.wait([before], timeout=5).done
    during = sampler.sample(prompt(), 1, ONE_TOKEN)
    threading.Timer(0.1, during.cancel).start()
    assert during in concurrent.futures.wait([during], timeout=5).done


def test_cancelling_in_the_moment_of_the_start_leaves_no_unawaited_work(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    loop, made, done = loop_thread(), [], threading.Event()

    def submit() -> None:
        made.append(sampler.sample(prompt(), 1, ONE_TOKEN))
        loop.post(lambda: made[0].cancel())  # delivered after the start, before the first step of what was started
        loop.post(lambda: loop.loop.call_later(0.05, done.set))

    with warnings.catch_warnings(record=True) as noise:
        warnings.simplefilter("always")
        loop.post(submit)
        assert done.wait(5)
        assert made.pop().cancelled()
        gc.collect()
    assert [str(entry.message) for entry in noise if "never awaited" in str(entry.message)] == []
    assert not sampler._session.link().in_flight
