"""Tracks when the service last responded, to give up on a dead one and to warn about it once."""

from __future__ import annotations

import logging

from tinkex.client._runtime.operation import Operation
from tinkex.clock import Clock
from tinkex.errors import APIConnectionError, APIError

log = logging.getLogger("tinkex.wait")


class Reachability:
    """When one service last responded. Written on the loop thread."""

    def __init__(self, base_url: str, clock: Clock) -> None:
        self._base_url = base_url
        self._clock = clock
        self.last_heard_at = clock.now()
        """When the last response below 500 came."""
        self.last_progress_at = self.last_heard_at
        """When the service last accepted a sample or had something to say about a result."""
        self._warned_of_silence_since: float | None = None

    def silent_s(self, operation: Operation) -> float:
        """Return how long the service has returned nothing but faults, as seen by this operation.

        Counted from before its own first attempt: an operation that queued behind a dead service does not wait the
        full time again.
        """
        return self._clock.now() - max(operation.created_at, self.last_heard_at)

    def warn_unreachable(self, error: APIError, attempt: int) -> None:
        """Log once per silence, at a third attempt: a wrong address or a dead service must not look like a slow one."""
        if (
            attempt < 3
            or not isinstance(error, APIConnectionError)
            or self._warned_of_silence_since == self.last_heard_at
        ):
            return
        self._warned_of_silence_since = self.last_heard_at
        reason = str(error).rstrip(".")
        log.warning("No response from %s (%s). Still trying; `tinkex doctor` finds out why.", self._base_url, reason)
