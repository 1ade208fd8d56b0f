"""Decides when to try again: the one retry curve, what a Retry-After header asks for, the pauses of a request that the
service puts off, the pause between two polls.

Pure: time, randomness and counters are handed in, so every rule is tested without waiting. `errors` decides *whether*
a response may be retried; this module decides *when*, and when to stop.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

Rng = Callable[[], float]
"""Gives a number in [0, 1), as `random.random` does."""

LONGEST_S: Final = 10.0
"""Up to here a pause grows. A longer one is the service's own wish."""
QUICK_S: Final = 0.5
"""A pending response that came sooner than this was not held open by the service: it was not a long poll."""


class RetryPolicy(NamedTuple):
    """How often and how long one request is tried."""

    max_attempts: int = 10
    budget_s: float = 300.0

    def delay(
        self, attempt: int, elapsed_s: float, hint_s: float | None = None, rng: Rng = random.random
    ) -> float | None:
        """Seconds to wait after `attempt` (counted from 0) failed, or None to give up.

        A pause that would outlast the budget is not begun: the caller gets the error at once instead of after it.
        """
        if attempt + 1 >= self.max_attempts:
            return None
        pause_s = fault_delay(attempt, hint_s, rng)
        return pause_s if elapsed_s + pause_s <= self.budget_s else None


def fault_delay(attempt: int, hint_s: float | None = None, rng: Rng = random.random) -> float:
    """Seconds to wait after a fault: what the service asks for (`hint_s`), however long, or else the curve.

    The curve: 0.5, 1, 2, 4, 8, 10, 10 … s, less up to a quarter. That jitter keeps clients that failed together apart.
    """
    if hint_s is not None:
        return hint_s
    # Past 16 doublings the cap always wins, and floats stay far from overflow.
    return min(0.5 * 2.0 ** min(attempt, 16), LONGEST_S) * (1.0 - 0.25 * rng())


def put_off_delay(times: int, hint_s: float, most_s: float, rng: Rng = random.random) -> float:
    """Seconds before a request is sent again that the service has put off so many times in a row (from 1).

    What the service asks for, doubled each time up to LONGEST_S, and up to a quarter more: many clients that were put
    off together must not come back together, and none of them sooner than it was asked to. Never more than `most_s`,
    whatever the service asks for: then it is asked again. Never gives up: the operation's deadline does.
    """
    pause_s = max(hint_s, min(hint_s * 2.0 ** min(times - 1, 16), LONGEST_S))
    return min(pause_s * (1.0 + 0.25 * rng()), most_s)


def pending_delay(quick: int) -> float:
    """Seconds before the next poll, after `quick` pending responses in a row that came within QUICK_S.

    A service that held the poll open is asked again at once. One that says "pending" immediately is asked after
    0.05, 0.1, 0.2 … 1 s, so that no response can make a hot loop. Never gives up: the operation's deadline does.
    """
    return min(0.05 * 2.0 ** min(quick - 1, 16), 1.0) if quick else 0.0


def retry_after(headers: Mapping[str, str], wall_now: float) -> float | None:
    """The pause the service asks for, in seconds, or None if it asks for none that makes sense.

    `retry-after-ms` first, then `retry-after` as seconds (whole or fractional), then as a date. Names are lower case.
    Zero and less, NaN, infinity and garbage are None, so that the curve applies: "at once" would be a hot loop.
    """
    milliseconds = _positive(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    text = headers.get("retry-after")
    seconds = _positive(text)
    if seconds is not None or text is None:
        return seconds
    at = _seconds_since_1970(text)
    return at - wall_now if at is not None and at > wall_now else None


def _positive(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if number > 0 and math.isfinite(number) else None


def _seconds_since_1970(date: str) -> float | None:
    """Read "Wed, 21 Oct 2026 07:28:00 GMT", whatever the locale; None if it is no such date."""
    if not date.rstrip().endswith(" GMT"):  # the library reads a date with anything behind it
        return None
    from email.utils import parsedate_to_datetime  # loads eight modules, and hardly any service sends a date

    try:
        # A leap second (:60) is a legal date but not a legal datetime.
        parsed = parsedate_to_datetime(date.replace(":60 ", ":59 "))
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return parsed.replace(tzinfo=parsed.tzinfo or dt.UTC).timestamp()
