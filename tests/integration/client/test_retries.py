"""One retry policy, bounded and visible, that obeys what the service says."""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections.abc import Callable

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.testing import Answer, Delay, Drop, FailFuture, Pending, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]


def attempts(service: ScriptedService, endpoint: str) -> int:
    return len(service.requests_to(endpoint))


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_transient_statuses_are_retried_with_the_same_idempotency_key(
    proto_service: ScriptedService, connect: Connect, status: int
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", times=2, do=Status(status, headers={"retry-after-ms": "10"}))
    training.optim_step(step()).result(20)
    sent = proto_service.requests_to("optim_step")
    assert len(sent) == 3
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, tinkex.BadRequestError),
        (401, tinkex.AuthenticationError),
        (402, tinkex.BillingError),
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (409, tinkex.ConflictError),
        (422, tinkex.UnprocessableEntityError),
    ],
)
def test_user_errors_are_typed_and_never_retried(
    proto_service: ScriptedService, connect: Connect, status: int, error: type[tinkex.APIStatusError]
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Status(status, "no"))
    with pytest.raises(error, match="no") as caught:
        training.optim_step(step()).result(20)
    assert caught.value.status_code == status
    assert attempts(proto_service, "optim_step") == 1


def test_x_should_retry_true_makes_a_409_transient_and_false_makes_a_500_final(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on(
        "optim_step", nth=1, do=Status(409, headers={"x-should-retry": "true", "retry-after-ms": "5"})
    )
    training.optim_step(step()).result(20)
    assert attempts(proto_service, "optim_step") == 2
    proto_service.script.on("save_weights", do=Status(500, headers={"x-should-retry": "false"}))
    with pytest.raises(tinkex.InternalServerError):
        training.save_state("x").result(20)
    assert attempts(proto_service, "save_weights") == 1


def test_attempts_are_bounded_and_the_error_says_how_many(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service, max_retries=4).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Status(500, "busy", headers={"retry-after-ms": "1"}))
    with pytest.raises(tinkex.InternalServerError, match=r"gave up after 4 attempts.*busy"):
        training.optim_step(step()).result(20)
    assert attempts(proto_service, "optim_step") == 4


FULL = "This key would hold 7 training operations that wait, and the limit is 6. Await some results."


def test_a_full_queue_is_waited_out_and_no_call_of_a_run_is_left_out(
    service: ScriptedService, connect: Connect
) -> None:
    """Before: the call failed after `max_retries` attempts, and the calls behind it trained something else."""
    training = connect(service, max_retries=2).create_lora_training_client(MODEL)
    names = ["forward_backward", "optim_step"]
    full = Status(429, FULL, headers={"retry-after-ms": "20"})
    service.script.on(names, nth=5, times=6, do=full)
    service.script.on(names, nth=17, times=6, do=full)
    pairs = [(training.forward_backward([datum()], "cross_entropy"), training.optim_step(step())) for _ in range(8)]
    for passed, stepped in pairs:
        assert passed.result(20).metrics and stepped.result(20) is not None
    assert [op for _, _, op in service.executed] == names * 8
    assert [seq_id for _, seq_id, _ in service.executed] == list(range(1, 17))
    sent = [request for name in names for request in service.requests_to(name)]
    assert len(sent) == 16 + 12
    put_off = {request.headers["x-idempotency-key"] for request in sent if request.status == 429}
    assert len(put_off) == 2
    for key in put_off:
        assert len({request.body for request in sent if request.headers["x-idempotency-key"] == key}) == 1
    assert training.stats()["rate_limited"] == 12


def test_waiting_for_a_full_queue_is_said_in_the_words_of_the_service(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    training = connect(proto_service, wait_line_s=0.2).create_lora_training_client(MODEL)
    full = proto_service.script.on(
        "optim_step", nth=2, times=10**6, do=Status(429, FULL, headers={"retry-after": "0.1"})
    )
    proto_service.script.on("optim_step", nth=1, do=Work(0.9))
    first, second = training.optim_step(step()), training.optim_step(step())
    proto_service.wait_for_requests("optim_step", 3)
    status = second.status()
    assert status.state == "submitting" and "429" in (status.last_error or "")
    first.result(20)
    lines = [record.getMessage() for record in caplog.records if record.name == "tinkex.wait"]
    expected = r'waiting \d+ s for optim_step seq 2: not accepted yet, attempt \d, the service says "(.*)", 0 polls, '
    said = [match[1] for line in lines if (match := re.match(expected, line))]
    assert said and set(said) == {FULL}, lines
    proto_service.script.rules.remove(full)
    second.result(20)
    assert second.status().last_error is None, "it was accepted: nothing of that is an error"


def test_a_queue_that_stays_full_ends_at_the_deadline_with_its_sentence(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service, deadline_s=0.7, max_retries=2).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Status(429, FULL, headers={"retry-after-ms": "50"}))
    with pytest.raises(tinkex.DeadlineExceeded, match=r"Gave up after 1 s.*limit is 6.*Raise deadline_s"):
        training.optim_step(step()).result(20)
    assert attempts(proto_service, "optim_step") > 2


@pytest.mark.slow
def test_a_service_that_cannot_be_reached_is_said_once_and_long_before_the_error(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = connect(proto_service, max_retries=4).create_sampling_client(base_model=MODEL)
    proto_service.kill()
    futures = [sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=1)) for _ in range(2)]
    for future in futures:
        with pytest.raises(tinkex.APIConnectionError):
            future.result(20)
    said = [record.getMessage() for record in caplog.records if record.name == "tinkex.wait"]
    assert len(said) == 1, "the next line comes after 10 s"
    assert said[0].startswith(f"No response from {proto_service.url} (")
    assert "tinkex doctor" in said[0]


@pytest.mark.timing
@pytest.mark.parametrize("form", ["ms", "seconds", "date"])
def test_retry_after_is_obeyed_in_all_three_forms(proto_service: ScriptedService, connect: Connect, form: str) -> None:
    headers = {
        "ms": {"retry-after-ms": "300"},
        "seconds": {"retry-after": "0.3"},
        # A date has whole seconds: two ahead is at least one away.
        "date": {"retry-after": email.utils.formatdate(time.time() + 2, usegmt=True)},
    }[form]
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", nth=1, do=Status(503, headers=headers))
    started = time.monotonic()
    training.optim_step(step()).result(20)
    least = 0.9 if form == "date" else 0.28
    assert least <= time.monotonic() - started < 5


@pytest.mark.timing
def test_a_retry_after_beyond_60_s_is_not_replaced_by_half_a_second(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service, unreachable_s=30.0).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Status(503, "maintenance", headers={"retry-after": "90"}))
    started = time.monotonic()
    # It would outlast unreachable_s: said at once, instead of knocking on the door every half second.
    with pytest.raises(tinkex.InternalServerError, match="maintenance"):
        training.optim_step(step()).result(20)
    assert time.monotonic() - started < 5
    assert attempts(proto_service, "optim_step") == 1


@pytest.mark.parametrize(
    "fault",
    [Status(500), Status(408), Answer({"type": "try_again", "queue_state": "active"}), Status(429), Drop()],
    ids=["5xx", "408", "try_again", "429", "reset"],
)
def test_polls_answered_at_once_never_make_a_hot_loop(
    proto_service: ScriptedService, connect: Connect, fault: Status | Answer | Drop
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("retrieve_future", do=fault)
    future = training.optim_step(step())
    proto_service.wait_for_requests("retrieve_future", 3)
    before = attempts(proto_service, "retrieve_future")
    with pytest.raises(TimeoutError):
        future.result(1.0)
    assert attempts(proto_service, "retrieve_future") - before <= 8
    proto_service.script.clear()
    assert future.result(30) is not None


def test_429_on_a_poll_is_waited_out(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("retrieve_future", times=2, do=Status(429, headers={"retry-after-ms": "10"}))
    assert training.optim_step(step()).result(20) is not None


def test_a_404_right_after_acceptance_is_not_yet_the_end(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("retrieve_future", times=1, do=Status(404, "unknown request"))
    assert training.optim_step(step()).result(20) is not None


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
def test_a_failed_training_future_is_surfaced_and_never_resubmitted(
    proto_service: ScriptedService, connect: Connect, category: str
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=FailFuture("boom", category))
    with pytest.raises(tinkex.RequestFailedError, match="boom") as caught:
        training.optim_step(step()).result(20)
    assert caught.value.category == category
    assert attempts(proto_service, "optim_step") == 1


def test_a_failed_sample_is_asked_for_again_unless_it_is_the_users_fault(
    service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(service).create_sampling_client(base_model=MODEL)
    service.script.on("asample", times=2, do=FailFuture("worker lost", "server"))
    params = tinkex.SamplingParams(max_tokens=2)
    assert sampler.sample(prompt(), 1, params).result(20).sequences
    assert attempts(service, "asample") == 3
    service.script.on("asample", do=FailFuture("bad prompt", "user"))
    with pytest.raises(tinkex.RequestFailedError, match="bad prompt"):
        sampler.sample(prompt(), 1, params).result(20)
    assert attempts(service, "asample") == 4


def test_a_failed_sample_is_resubmitted_three_times_at_most(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", do=FailFuture("always", "server"))
    with pytest.raises(tinkex.RequestFailedError, match="always"):
        sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=2)).result(20)
    assert attempts(proto_service, "asample") == 4


@pytest.mark.timing
def test_a_bare_400_is_final(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Answer(b"", status=400))
    started = time.monotonic()
    with pytest.raises(tinkex.BadRequestError):
        training.optim_step(step()).result(20)
    assert time.monotonic() - started < 5
    assert attempts(proto_service, "optim_step") == 1


def test_a_200_that_is_not_json_is_a_typed_error(service: ScriptedService, connect: Connect) -> None:
    training = connect(service).create_lora_training_client(MODEL)
    service.script.on("retrieve_future", do=Answer(b"<html>gateway</html>", content_type="text/html"))
    with pytest.raises(tinkex.APIResponseValidationError):
        training.optim_step(step()).result(20)


def test_poll_errors_keep_their_type(service: ScriptedService, connect: Connect) -> None:
    training = connect(service).create_lora_training_client(MODEL)
    service.script.on("retrieve_future", do=Status(403, "not yours"))
    with pytest.raises(tinkex.PermissionDeniedError, match="not yours"):
        training.optim_step(step()).result(20)


def test_every_retry_is_visible_as_an_event(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", times=2, do=Status(503, headers={"retry-after-ms": "5"}))
    seen: list[object] = []
    stop = tinkex.on("retry", seen.append)
    try:
        training.optim_step(step()).result(20)
    finally:
        stop()
    assert [(event.endpoint, event.attempt) for event in seen] == [("optim_step", 1), ("optim_step", 2)]  # type: ignore[attr-defined]
    assert training.stats()["retries"] >= 2


@pytest.mark.timing
def test_an_unanswered_poll_ends_with_a_reason_within_unreachable_s(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service, unreachable_s=0.6).create_lora_training_client(MODEL)
    proto_service.script.on("retrieve_future", do=Drop())
    started = time.monotonic()
    with pytest.raises(tinkex.DeadlineExceeded, match=r"no valid response from http.*Connection error"):
        training.optim_step(step()).result(20)
    assert time.monotonic() - started < 6


def test_an_operation_that_stays_pending_ends_at_its_deadline_with_the_queue_state(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service, deadline_s=0.7).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Pending("paused_capacity", "all busy", times=1000))
    with pytest.raises(tinkex.DeadlineExceeded, match=r'optim_step seq 1: queue paused_capacity \("all busy"\)'):
        training.optim_step(step()).result(20)


def test_402_on_client_config_is_a_billing_error(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL]) as service:
        service.script.on("client_config", do=Status(402, "pay first"))
        with pytest.raises(tinkex.BillingError, match="pay first"):
            connect(service).create_lora_training_client(MODEL)


def test_a_slow_answer_beyond_the_timeout_is_a_timeout_error(proto_service: ScriptedService, connect: Connect) -> None:
    client = connect(proto_service, timeout_s=0.2, max_retries=1)
    client.get_server_capabilities()
    proto_service.script.on("get_server_capabilities", do=Delay(2.0))
    with pytest.raises(tinkex.APIConnectionError, match="No response in time"):
        client.get_server_capabilities()


def test_sample_async_twins_raise_the_same_errors(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", do=Status(422, "bad"))

    async def go() -> None:
        with pytest.raises(tinkex.UnprocessableEntityError, match="bad"):
            await sampler.sample_async(prompt(), 1, tinkex.SamplingParams(max_tokens=2))

    asyncio.run(go())
