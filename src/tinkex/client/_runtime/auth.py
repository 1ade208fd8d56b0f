"""The key on every request. Where the service asks for it, it is traded for a short-lived token, renewed in time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from typing import TYPE_CHECKING, Any

from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIError, AuthenticationError
from tinkex.settings import Config
from tinkex.wire import endpoints, json_codec, requests

if TYPE_CHECKING:
    from tinkex.client._runtime.link import Connection

log = logging.getLogger("tinkex.auth")
RENEW_BEFORE_S = 300.0
RETRY_S = 60.0


class Auth:
    """Holds what goes into `X-API-Key`."""

    def __init__(self, config: Config) -> None:
        self._key = config.api_key
        self._token: str | None = None
        self._renewing: asyncio.Task[APIError | None] | None = None

    @property
    def header(self) -> str:
        return self._token or self._key

    @property
    def key(self) -> str:
        """Signs the trade for a token, and nothing else once there is one."""
        return self._key

    def claims(self) -> dict[str, Any]:
        """What the token says about its owner; {} without a token."""
        return _claims(self._token or "")

    async def start(self, connection: Connection) -> None:
        """Trade the key for a token, then keep it fresh in the background."""
        problem = await self._trade(connection)
        if problem is not None:
            raise problem
        connection.loop.spawn(self._keep_fresh(connection))

    async def renewed(self, connection: Connection, used: str) -> bool:
        """Whether there is another token than the one that was refused; one trade for all who ask at once."""
        if self._token is None:
            return False
        if self._token == used:
            if self._renewing is None or self._renewing.done():
                self._renewing = connection.loop.spawn(self._trade(connection))
            await asyncio.shield(self._renewing)
        return self._token != used

    async def _trade(self, connection: Connection) -> APIError | None:
        """A new token for the key. The old one stays in use until then: it may still be good for minutes."""
        try:
            self._token = await self._fetch(connection)
        except APIError as problem:
            return problem
        return None

    async def _fetch(self, connection: Connection) -> str:
        from tinkex.client._calls.call import call

        operation = Operation("auth_token", connection.clock.now())
        answer = await call(connection, endpoints.AUTH_TOKEN, requests.auth_token(), operation=operation, attempts=3)
        token = json_codec.decode_answer(answer.content).get("jwt")
        if not isinstance(token, str) or not token:
            raise AuthenticationError("The service asked for token sign-in but gave no token. Check the API key.")
        return token

    async def _keep_fresh(self, connection: Connection) -> None:
        while True:
            left = _expiry(self._token or "") - connection.clock.wall() - RENEW_BEFORE_S
            await connection.clock.sleep(max(left, RETRY_S))
            problem = await self._trade(connection)
            if problem is not None:
                log.warning("The access token could not be renewed (%s); trying again.", type(problem).__name__)


def _expiry(token: str) -> float:
    """The `exp` claim of a JWT; an unreadable one counts as expired, which leads to renewal."""
    try:
        return float(_claims(token)["exp"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def _claims(token: str) -> dict[str, Any]:
    """Read, not verified: the service that gave the token is the one that will be shown it."""
    try:
        payload = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
