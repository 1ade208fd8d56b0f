"""The credential of every request. Where the service asks for it, the API key is traded for a short-lived token,
which is renewed in time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from tinkex.client._runtime.loop import LoopThread
from tinkex.clock import Clock
from tinkex.errors import APIError
from tinkex.settings import Config

log = logging.getLogger("tinkex.auth")
RENEW_BEFORE_S = 300.0
RETRY_S = 60.0


class Auth:
    """Holds the value of `X-API-Key`. Knows no HTTP: how a token is fetched is passed to `start`."""

    def __init__(self, config: Config) -> None:
        self.key = config.api_key
        """The API key. Once there is a token, it is used only to fetch the next one."""
        self._token: str | None = None
        self._loop: LoopThread | None = None
        self._fetch_token: Callable[[], Awaitable[str]] | None = None
        self._renewing: asyncio.Task[APIError | None] | None = None

    @property
    def header(self) -> str:
        return self._token or self.key

    def claims(self) -> dict[str, Any]:
        """Return what the token says about its owner; {} without a token."""
        return _claims(self._token or "")

    async def start(self, fetch_token: Callable[[], Awaitable[str]], loop: LoopThread, clock: Clock) -> None:
        """Trade the key for a token, then keep the token fresh in the background."""
        self._fetch_token, self._loop = fetch_token, loop
        error = await self._trade()
        if error is not None:
            raise error
        loop.spawn(self._keep_fresh(clock))

    async def renewed(self, used: str) -> bool:
        """Return whether there is another token than the rejected one; one trade for all that ask at once."""
        if self._token is None or self._loop is None:
            return False
        if self._token == used:
            if self._renewing is None or self._renewing.done():
                self._renewing = self._loop.spawn(self._trade())
            await asyncio.shield(self._renewing)
        return self._token != used

    async def _trade(self) -> APIError | None:
        """Fetch a new token, or return why not. The old one stays in use until then: it may be good for minutes."""
        assert self._fetch_token is not None
        try:
            self._token = await self._fetch_token()
        except APIError as error:
            return error
        return None

    async def _keep_fresh(self, clock: Clock) -> None:
        while True:
            left_s = _expiry(self._token or "") - clock.wall() - RENEW_BEFORE_S
            await clock.sleep(max(left_s, RETRY_S))
            error = await self._trade()
            if error is not None:
                log.warning("The access token could not be renewed (%s); trying again.", type(error).__name__)


def _expiry(token: str) -> float:
    """Return the `exp` claim of a JWT; an unreadable one counts as expired, which leads to renewal."""
    try:
        expiry = float(_claims(token)["exp"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0.0
    return expiry if math.isfinite(expiry) else 0.0


def _claims(token: str) -> dict[str, Any]:
    """Read, not verified: the service that gave the token is the one that will be shown it."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
