"""The key on every request. Where the service asks for it, it is traded for a short-lived token, renewed in time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from typing import TYPE_CHECKING, Any

from tinkex.client._operation import Operation
from tinkex.errors import APIError, AuthenticationError
from tinkex.settings import Config
from tinkex.wire import endpoints, json_codec
from tinkex.wire.body import Body

if TYPE_CHECKING:
    from tinkex.client._connection import Connection

log = logging.getLogger("tinkex.auth")
RENEW_BEFORE_S = 300.0
RETRY_S = 60.0


class Auth:
    """Holds what goes into `X-API-Key`."""

    def __init__(self, config: Config) -> None:
        self._key = config.api_key
        self._token: str | None = None

    @property
    def header(self) -> str:
        return self._token or self._key

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def claims(self) -> dict[str, Any]:
        """What the token says about its owner; {} without a token."""
        return _claims(self._token or "")

    async def start(self, connection: Connection) -> None:
        """Trade the key for a token, then keep it fresh in the background."""
        await self.renew(connection)
        connection.loop.spawn(self._keep_fresh(connection))

    async def renew(self, connection: Connection) -> None:
        from tinkex.client._call import call

        self._token = None  # the trade itself is signed with the key
        operation = Operation("auth_token", connection.clock.now())
        answer = await call(connection, endpoints.AUTH_TOKEN, Body(b"{}"), operation=operation, attempts=3)
        token = json_codec.decode_answer(answer.content).get("jwt")
        if not isinstance(token, str) or not token:
            raise AuthenticationError("The service asked for token sign-in but gave no token. Check the API key.")
        self._token = token

    async def _keep_fresh(self, connection: Connection) -> None:
        while True:
            left = _expiry(self._token or "") - connection.clock.wall() - RENEW_BEFORE_S
            await connection.clock.sleep(max(left, RETRY_S))
            held = self._token
            try:
                await self.renew(connection)
            except asyncio.CancelledError:
                raise
            except APIError as problem:
                self._token = held  # the old one may still be good for minutes
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
