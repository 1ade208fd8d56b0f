"""The one attempt loop: what it repeats, how long it waits, how it gives up. No network; time passes at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex import settings
from tinkex.client._calls.attempts import Attempts
from tinkex.client._calls.sample_call import SampleAttempts
from tinkex.client._calls.sampling_session import FAULTS_ALLOWED, BatchAttempts
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, APITimeoutError, Response, status_error
from tinkex.testing import FakeClock
from tinkex.wire.body import Body

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
