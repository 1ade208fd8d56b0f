"""The retry curve, Retry-After and the pace of polls."""

from __future__ import annotations

import datetime as dt
import email.utils
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client._calls.retry import LONGEST_S, RetryPolicy, fault_delay, pending_delay, put_off_delay, retry_after

NOW = dt.datetime(2026, 10, 21, 7, 28, tzinfo=dt.UTC).timestamp()


def no_jitter() -> float:
    return 0.0


def most_jitter() -> float:
    return 1.0 - 2**-53


def test_the_pause_doubles_up_to_ten_seconds() -> None:
    policy = RetryPolicy()
    assert [policy.delay(attempt, 0.0, None, no_jitter) for attempt in range(9)] == [0.5, 1, 2, 4, 8, 10, 10, 10, 10]


def test_jitter_takes_off_at_most_a_quarter() -> None:
    policy = RetryPolicy()
    assert policy.delay(0, 0.0, None, most_jitter) == pytest.approx(0.375)
    assert policy.delay(7, 0.0, None, most_jitter) == pytest.approx(7.5)


def test_two_clients_that_fail_together_do_not_return_together() -> None:
    first, second = random.Random(1), random.Random(2)
    policy = RetryPolicy()
    assert policy.delay(3, 0.0, None, first.random) != policy.delay(3, 0.0, None, second.random)


def test_ten_attempts_and_no_more() -> None:
    policy = RetryPolicy()
    assert policy.delay(8, 0.0, None, no_jitter) == 10
    assert policy.delay(9, 0.0, None, no_jitter) is None
    assert policy.delay(9, 0.0, 1.0, no_jitter) is None, "a hint does not buy another attempt"
    assert RetryPolicy(max_attempts=1).delay(0, 0.0, None, no_jitter) is None


def test_a_pause_that_would_outlast_the_budget_is_not_begun() -> None:
    policy = RetryPolicy(budget_s=20.0)
    assert policy.delay(5, 10.0, None, no_jitter) == 10
    assert policy.delay(5, 10.1, None, no_jitter) is None
    assert policy.delay(0, 0.0, 20.0, no_jitter) == 20.0
    assert policy.delay(0, 0.0, 20.1, no_jitter) is None


def test_the_services_own_wish_replaces_the_curve_also_beyond_a_minute() -> None:
    assert RetryPolicy().delay(0, 0.0, 95.0, most_jitter) == 95.0
    assert RetryPolicy().delay(7, 0.0, 0.02, most_jitter) == 0.02


def test_a_huge_attempt_number_does_not_overflow() -> None:
    assert RetryPolicy(max_attempts=10**6).delay(10**5, 0.0, None, no_jitter) == 10


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after-ms": "12.5"}, 0.0125),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after-ms": "-1", "retry-after": "7"}, 7.0),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": " 2 "}, 2.0),
        ({"retry-after": "61"}, 61.0),
        ({"retry-after": "86400"}, 86400.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2026 09:28:00 GMT"}, 7200.0),
        ({"retry-after": " Wed, 21 Oct 2026 07:28:01 GMT "}, 1.0),
    ],
)
def test_retry_after_is_read_as_milliseconds_then_seconds_then_a_date(headers: dict[str, str], seconds: float) -> None:
    assert retry_after(headers, NOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "nan", "inf", "-inf", "-5", "0", "0.0", "1h", "Wed, 21 Oct 2026 07:27:59 GMT",
     "Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 31 Feb 2027 00:00:00 GMT", "Wed, 21 Oct 2026 27:28:00 GMT",
     "Mit, 21 Okt 2026 09:28:00 GMT", "2026-10-21T09:28:00Z", "Wed, 21 Oct 2026 09:28:00 GMT and more"],
)  # fmt: skip
def test_a_senseless_retry_after_falls_back_to_the_curve(text: str) -> None:
    assert retry_after({"retry-after": text}, NOW) is None
    assert retry_after({"retry-after-ms": text}, NOW) is None


def test_no_header_is_no_hint() -> None:
    assert retry_after({}, NOW) is None


def test_a_leap_second_is_a_date() -> None:
    assert retry_after({"retry-after": "Wed, 21 Oct 2026 23:59:60 GMT"}, NOW) == pytest.approx(59519.0)


@settings(deadline=None)  # a busy machine is no failure
@given(st.datetimes(dt.datetime(2026, 10, 22), dt.datetime(2199, 1, 1)))
def test_every_date_a_server_writes_is_read_back(at: dt.datetime) -> None:
    written = email.utils.format_datetime(at.replace(microsecond=0, tzinfo=dt.UTC), usegmt=True)
    assert retry_after({"retry-after": written}, NOW) == pytest.approx(
        at.replace(microsecond=0, tzinfo=dt.UTC).timestamp() - NOW
    )


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(st.characters(max_codepoint=255)))
def test_no_text_in_the_header_can_crash_a_call(text: str) -> None:
    for name in ("retry-after", "retry-after-ms"):
        hint = retry_after({name: text}, NOW)
        assert hint is None or 0 < hint < float("inf")


def test_a_service_that_holds_the_poll_is_asked_again_at_once() -> None:
    assert pending_delay(0) == 0.0


def test_quick_pending_answers_cannot_make_a_hot_loop() -> None:
    assert [pending_delay(quick) for quick in range(1, 9)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    assert pending_delay(10**6) == 1.0


def test_faults_of_a_poll_follow_the_curve_for_ever() -> None:
    assert [fault_delay(n, rng=no_jitter) for n in (0, 1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert fault_delay(0, rng=most_jitter) == pytest.approx(0.375)


def test_a_poll_honours_what_the_service_asks_for() -> None:
    assert fault_delay(0, hint_s=90.0) == 90.0


def test_a_request_that_is_put_off_comes_later_and_later_and_never_sooner_than_asked() -> None:
    assert [put_off_delay(times, 1.0, 300.0, no_jitter) for times in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert put_off_delay(1, 1.0, 300.0, most_jitter) == pytest.approx(1.25)
    assert put_off_delay(7, 60.0, 300.0, no_jitter) == 60, "a longer wish does not grow"
    assert put_off_delay(1, 3600.0, 300.0, no_jitter) == 300, "but no pause is without bound"


@given(st.integers(1, 10**9), st.floats(0.001, 1e9), st.floats(0.01, 1e4), st.floats(0, 0.999))
def test_no_pause_of_a_request_that_is_put_off_is_out_of_its_bounds(
    times: int, hint_s: float, most_s: float, chance: float
) -> None:
    pause_s = put_off_delay(times, hint_s, most_s, lambda: chance)
    assert min(hint_s, most_s) <= pause_s <= min(1.25 * max(hint_s, LONGEST_S), most_s)
