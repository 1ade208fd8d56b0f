"""Asks a service single questions: for `tinkex doctor` and other tools that look at the way to a service."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import decoded
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.send import send
from tinkex.client._http.dial import tls_context
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.link import link_for
from tinkex.client._runtime.operation import Operation
from tinkex.settings import Config
from tinkex.types import ClientConfigResponse
from tinkex.wire import json_codec
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

__all__ = ["HTTPResponse", "Handshake", "ServiceProbe", "fetch_json", "tls_context"]

T = TypeVar("T")


class Handshake(NamedTuple):
    """What a service says about itself when a client first asks."""

    dialect: Dialect
    server: ClientConfigResponse
    """The limits it sets."""
    extensions: dict[str, Any]
    """What our own service offers beyond the protocol ({} elsewhere)."""


class ServiceProbe:
    """Asks one thing at a time and waits for the response; nothing is repeated, and nothing takes longer than asked."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        self._link = link_for(config)
        self._timeout_s = timeout_s

    def ask(self, endpoint: Endpoint, path: str | None = None) -> HTTPResponse:
        """Send one request without a body and return the response, whatever its status."""
        return self._run(lambda: send(self._link, endpoint, path=path, timeout_s=self._timeout_s))

    def handshake(self) -> Handshake:
        """Return which dialect the service speaks, and what it announces."""
        dialect = self._run(lambda: ready(self._link))
        return Handshake(dialect, self._link.server, self._link.extensions)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        operation = Operation("probe", self._link.clock.now())
        return self._link.run(operation, work, self._timeout_s).result()


def fetch_json(config: Config, endpoint: Endpoint) -> Any:
    """Return the JSON of an endpoint as it came, with the usual retries: our own service says more than types hold."""
    link = link_for(config)
    operation = Operation(endpoint.name, link.clock.now())

    async def work() -> Any:
        await ready(link)
        content = (await call(link, endpoint, operation=operation)).content
        return await decoded(lambda: json_codec.decode_answer(content), len(content))

    return link.run(operation, work).result()
