"""An ordinary call: one request, repeated until the service responds with success or a lasting error."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.client._calls.attempts import Attempts
from tinkex.client._calls.send import send
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.wire.body import Body
from tinkex.wire.endpoints import Endpoint


async def call(
    link: ServiceLink,
    endpoint: Endpoint,
    body: Body | None = None,
    *,
    operation: Operation,
    path: str | None = None,
    headers: Mapping[str, str] | None = None,
    max_attempts: int | None = None,
    follow: bool = True,
) -> HTTPResponse:
    """Send the same bytes under the same idempotency key until there is a response below 400, and return it."""
    key = link.idempotency_key() if endpoint.method != "GET" else None

    async def send_once(attempt: int) -> HTTPResponse:
        operation.attempts = attempt
        response = await send(
            link, endpoint, body, path=path, headers=headers, key=key, attempt=attempt, follow=follow, raises=True
        )
        operation.last_response_at = link.clock.now()
        return response

    return await Attempts(link, operation, endpoint.name, max_attempts).run(send_once)
