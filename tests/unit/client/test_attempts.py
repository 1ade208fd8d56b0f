"""The one attempt loop: what it repeats, how long it waits, how it gives up. Time passes at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex import settings
from tinkex.client._calls.attempts import Attempts, QueuedAttempts
from tinkex.client._calls.sample_call import SampleAttempts
from tinkex.client._calls.sampling_session import FAULTS_ALLOWED, BatchAttempts
from tinkex.client._calls.submit import submit
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError, Response, status_error
from tinkex.testing import FakeClock, ScriptedService, Status
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect

LOST = APIConnectionError(None, "connection lost")


def busy() -> APIError:
    return status_error(Response(503, {"retry-after-ms": "2000"}), "busy")


@pytest.fixture
def link() -> ServiceLink:
    config = settings.resolve(base_url="http://127.0.0.1:9", api_key="tml-attempts", max_retries=4, unreachable_s=100.0)
    return ServiceLink(config, FakeClock(auto=True))


@pytest.fixture
def retries() -> Iterator[list[tinkex.events.RetryEvent]]:
    heard: list[tinkex.events.RetryEvent] = []
    stop = tinkex.on("retry", heard.append)
    yield heard
    stop()


def outcome(link: ServiceLink, attempts: Attempts, *results: APIError | str) -> Any:
    """What comes of attempts that end like this, one after the other; a text is a success."""
    given = iter(results)

    async def send_once(attempt: int) -> str:
        result = next(given)
        if isinstance(result, APIStatusError) and result.status_code < 500:
            link.last_heard_at = link.clock.now()  # as `send` does
        if isinstance(result, APIError):
            raise result
        return f"{result} {attempt}"

    operation = Operation("test", link.clock.now())
    return link.run(operation, lambda: attempts.run(send_once)).result(10)


def attempts(link: ServiceLink, **options: Any) -> Attempts:
    return Attempts(link, Operation("call", link.clock.now()), "some_call", **options)


def test_a_retryable_failure_is_repeated_after_the_pause_the_service_asks_for(
    link: ServiceLink, retries: list[tinkex.events.RetryEvent]
) -> None:
    before = link.clock.now()
    assert outcome(link, attempts(link), busy(), busy(), "done") == "done 3"
    assert link.clock.now() - before == pytest.approx(4.0)
    assert [(event.endpoint, event.attempt, event.delay_s) for event in retries] == [
        ("some_call", 1, 2.0),
        ("some_call", 2, 2.0),
    ]
    assert link.stats.retries == 2


def test_a_lasting_error_is_raised_at_once(link: ServiceLink, retries: list[tinkex.events.RetryEvent]) -> None:
    with pytest.raises(tinkex.BadRequestError):
        outcome(link, attempts(link), status_error(Response(400), "wrong"))
    assert not retries and link.stats.retries == 0


@pytest.mark.parametrize("error", [busy(), LOST, APITimeoutError(None, "too slow")], ids=["503", "lost", "timeout"])
def test_giving_up_keeps_the_type_and_says_how_often_it_was_tried(link: ServiceLink, error: APIError) -> None:
    with pytest.raises(type(error), match=r"some_call: gave up after 4 attempts in \d+ s\. Last error: ") as caught:
        outcome(link, attempts(link), *[error] * 4, "never")
    assert type(caught.value) is type(error)
    assert caught.value.__context__ is None


def test_a_call_may_ask_for_fewer_attempts(link: ServiceLink) -> None:
    with pytest.raises(APIConnectionError, match="after 1 attempts"):
        outcome(link, attempts(link, max_attempts=1), LOST, "never")


def test_a_batch_gives_up_soon_whatever_the_error(link: ServiceLink) -> None:
    batch = BatchAttempts(link, Operation("batch", link.clock.now()), "retrieve_futures")
    gone = status_error(Response(404), "no such call")
    assert outcome(link, batch, *[gone] * (FAULTS_ALLOWED - 1), "done") == f"done {FAULTS_ALLOWED}"
    with pytest.raises(tinkex.NotFoundError):
        outcome(link, batch, *[gone] * FAULTS_ALLOWED, "never")


def test_rate_limits_use_up_no_attempts_of_a_sample(link: ServiceLink) -> None:
    sample = SampleAttempts(link, Operation("sample", link.clock.now()), "asample", Body(b"{}"))
    slow_down = status_error(Response(429, {"retry-after-ms": "1"}), "slow down")
    assert outcome(link, sample, *[slow_down] * 20, LOST, "done") == "done 22"
    assert (link.stats.rate_limited, link.stats.retries) == (20, 1)


def put_off(seconds: int = 1, status: int = 429, **headers: str) -> APIError:
    return status_error(Response(status, {"retry-after": str(seconds), **headers}), {"detail": "The queue is full."})


def queued(link: ServiceLink, **options: Any) -> QueuedAttempts:
    return QueuedAttempts(link, Operation("optim_step", link.clock.now()), "optim_step", **options)


def slept(link: ServiceLink) -> list[float]:
    assert isinstance(link.clock, FakeClock)
    return link.clock.slept


def test_a_full_queue_uses_up_neither_attempts_nor_the_time_of_silence(
    link: ServiceLink, retries: list[tinkex.events.RetryEvent]
) -> None:
    before = link.clock.now()
    assert outcome(link, queued(link), *[put_off()] * 50, "done") == "done 51"
    assert link.clock.now() - before > 4 * link.config.unreachable_s
    assert 1.0 <= slept(link)[0] <= 1.25 and all(10.0 <= pause_s <= 12.5 for pause_s in slept(link)[4:])
    assert len(set(slept(link))) == 50, "clients that were put off together come back apart"
    assert (link.stats.rate_limited, link.stats.retries, len(retries)) == (50, 0, 50)


def test_a_service_that_asks_for_a_day_is_asked_again_before(link: ServiceLink) -> None:
    assert outcome(link, queued(link), put_off(86_400), "done") == "done 2"
    assert slept(link) == [link.config.unreachable_s]


def test_a_429_without_retry_after_is_a_fault_as_before(link: ServiceLink) -> None:
    with pytest.raises(tinkex.RateLimitError, match="gave up after 4 attempts"):
        outcome(link, queued(link), *[status_error(Response(429), "no more today")] * 4, "never")


def test_x_should_retry_false_ends_a_429_at_once(link: ServiceLink) -> None:
    with pytest.raises(tinkex.RateLimitError, match="queue is full"):
        outcome(link, queued(link), put_off(1, 429, **{"x-should-retry": "false"}), "never")


def test_a_call_that_is_no_work_gives_up_after_its_attempts_at_a_429(link: ServiceLink) -> None:
    with pytest.raises(tinkex.RateLimitError, match="gave up after 4 attempts in 3 s"):
        outcome(link, attempts(link), *[put_off()] * 4, "never")


def test_faults_count_from_the_last_sign_of_life(link: ServiceLink) -> None:
    results: list[APIError | str] = [LOST, LOST, LOST, *[put_off()] * 50, LOST, LOST, LOST, "done"]
    assert outcome(link, queued(link), *results) == "done 57"
    with pytest.raises(APIConnectionError, match="gave up after 5 attempts"):
        outcome(link, queued(link), put_off(), *[LOST] * 4, "never")


def test_a_503_with_retry_after_is_waited_out_while_the_service_gives_signs_of_life(link: ServiceLink) -> None:
    """Heartbeats and polls are heard meanwhile: here, whenever a request is sent."""
    given = iter([put_off(5, 503)] * 40)

    async def send_once(attempt: int) -> int:
        link.last_heard_at = link.clock.now()
        if error := next(given, None):
            raise error
        return attempt

    before = link.clock.now()
    work = queued(link)
    assert link.run(Operation("test", before), lambda: work.run(send_once)).result(10) == 41
    assert link.clock.now() - before > 2 * link.config.unreachable_s


def test_a_503_with_retry_after_ends_with_the_signs_of_life(link: ServiceLink) -> None:
    before = link.clock.now()
    with pytest.raises(tinkex.InternalServerError, match=r"gave up after \d+ attempts in \d+ s.*queue is full"):
        outcome(link, queued(link), *[put_off(5, 503)] * 100)
    assert link.config.unreachable_s / 2 < link.clock.now() - before <= link.config.unreachable_s
    with pytest.raises(tinkex.InternalServerError, match="gave up after 1 attempts"):
        outcome(link, queued(link), put_off(101, 503), "never")


def test_polls_wait_out_a_429_for_longer_than_silence_may_last() -> None:
    with ScriptedService() as service:
        config = settings.resolve(base_url=service.url, api_key="tml-attempts", unreachable_s=20.0)
        link = ServiceLink(config, FakeClock(auto=True))
        operation = Operation("optim_step", link.clock.now())
        with tinkex.ServiceClient(base_url=service.url, api_key="tml-attempts", telemetry=False) as client:
            model_id = client.create_lora_training_client("tinkex/tiny").model_id
        service.requests.clear()
        service.script.on("retrieve_future", times=30, do=Status(429, headers={"retry-after": "10"}))

        def encode(seq_id: int, dialect: Dialect) -> Body:
            return requests.optim_step(model_id, seq_id, tinkex.AdamParams(learning_rate=1e-3), dialect=dialect)

        async def work() -> Any:
            collect = await submit(link, operation, endpoints.OPTIM_STEP, 1, encode)
            return await collect()

        assert isinstance(link.run(operation, work).result(20), tinkex.OptimStepResponse)
        assert [request.status for request in service.requests_to("retrieve_future")][:30] == [429] * 30
        assert sum(slept(link)) >= 300
