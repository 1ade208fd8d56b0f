"""Counts requests without a valid API key, and logs wrong keys: one line a minute at most, and never the key."""

from __future__ import annotations

import ipaddress
import logging

from tinkex.clock import Clock

logger = logging.getLogger("tinkex.server")

LINE_S = 60.0
"""Somebody who guesses keys may send thousands per second; the log has the number of them."""


class RejectedKeys:
    """Counts what was rejected for its key. Used by the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.wrong = 0
        """Requests with a key that is unknown or was revoked."""
        self.missing = 0
        """Requests without a key. They are not logged: a browser sends one before its user has typed the key."""
        self._logged, self._logged_s = 0, -LINE_S
        self._address = ""

    def note(self, *, has_key: bool, address: str) -> None:
        """Count a rejected request that came from this address."""
        if not has_key:
            self.missing += 1
            return
        self.wrong += 1
        self._address = address
        self.report()

    def report(self) -> None:
        """Log the wrong keys that were not logged yet, unless the last line is less than a minute old.

        Called for every wrong key, and from time to time, for the last ones of a burst.
        """
        now, count = self._clock.now(), self.wrong - self._logged
        if count == 0 or now - self._logged_s < LINE_S:
            return
        self._logged, self._logged_s = self.wrong, now
        logger.warning(
            "rejected %d request%s with an API key that is unknown or was revoked; the last came from %s",
            *(count, "" if count == 1 else "s", _shown(self._address)),
        )


def _shown(address: str) -> str:
    """Return an address for the log. Behind a proxy it is the text of a header, which the sender may have written."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return "an address that cannot be read"
