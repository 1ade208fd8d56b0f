"""Serves a request here, or hands it to the node that has what it is about. One hop at most.

Between nodes a request goes to `/internal/…` with the tenant signed, so that keys stay where they came in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkex.server.cluster.concern import ON_RESULTS, Concern, concern_of
from tinkex.server.cluster.homes import Homes
from tinkex.server.cluster.hop import OF_CONNECTION, Headers, HopFailed, HopResponse, Hops, HopUntrusted
from tinkex.server.cluster.own_counters import ClusterCounters
from tinkex.server.cluster.signature import HEADER, Signer
from tinkex.server.cluster.switch import RETRY, NoNodeForRun, Switch
from tinkex.server.cluster.traces import TraceFilter, handing_on, serving, trace_in
from tinkex.server.http.access import is_guarded, route_path
from tinkex.server.http.errors import RequestRejected, error_response, json_response
from tinkex.server.http.requests import SMALL_BODY_BYTES, ApiRequest
from tinkex.server.openai.errors import openai_error_response

logger = logging.getLogger("tinkex.server")
INTERNAL = "/internal"
SHARED = ("/api/v1/", "/v1/", "/oai/api/v1/")
"""Paths that another node may serve. Pages, metrics and health are each server's own."""
OPENAI_PREFIXES = ("/v1/", "/oai/api/v1/")
OWN = frozenset(("/api/v1/healthz", "/api/v1/service_state"))
ORIGIN = b"x-tinkex-origin"
"""Scheme and host as the client sent them. Links to files lead there: clients may not reach the nodes."""
NOT_SENT = OF_CONNECTION | {b"host", b"content-length", b"x-api-key", b"authorization", b"expect", HEADER, ORIGIN}
POLL_DELAY_S = 1.0
"""How long to hold a poll whose node does not respond: official clients ask again at once."""
LOG_EVERY_S = 60.0
MAX_NOTED_BYTES = 4096
"""Responses up to this size are read for the id of an operation that was accepted."""


_TRACES = TraceFilter()
"""One for the process: a logger that has it already does not add it again."""


class ClusterMiddleware:
    """Inside `AccessMiddleware`, which has found the tenant of a request that came from a client."""

    def __init__(
        self, app: ASGIApp, switch: Switch, hops: Hops, signer: Signer, counters: ClusterCounters, homes: Homes
    ) -> None:
        self._app, self._switch, self._hops, self._signer = app, switch, hops, signer
        self._counters, self._homes = counters, homes
        self._logged_at: dict[str, float] = {}
        """Address of a node that is not trusted → when that was logged."""
        logger.addFilter(_TRACES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not (trace := trace_in(scope["headers"])):
            return await self._serve(scope, receive, send)
        with serving(scope, trace, route_path(scope).removeprefix(INTERNAL)):
            return await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = ApiRequest(scope, receive), route_path(scope)
        try:
            is_hop = path == INTERNAL or path.startswith(f"{INTERNAL}/")
            if is_hop:
                scope, path = self._admit(request, path)
                request = ApiRequest(scope, receive)
            if not path.startswith(SHARED) or path in OWN:
                return await self._app(scope, receive, send)
            tenant = scope.get("state", {}).get("tenant")
            concern = await concern_of(request, path)
            # Another server chose this one for a new sample, by a list of nodes that may be a second older.
            is_chosen = is_hop and concern.kind == "sampler"
            url = "" if is_chosen else await self._switch.find(tenant, concern, is_hop=is_hop)
            if url and is_hop:  # its home changed while it was under way
                await self._respond_moved(request, path, concern, send)
            elif url:
                with handing_on(scope["headers"], url) as headers:
                    await self._forward(request, path, concern, url, tenant, headers, send)
            else:
                request.give_back_body()
                await self._app(*_with_body(scope, receive, concern.body), send)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except NoNodeForRun as error:
            await self._respond_later(request, path, error.detail, error.code, "paused_capacity", send)
        except Exception as error:  # an edge: middleware runs outside the wrapper of the handlers
            is_openai = path.startswith(OPENAI_PREFIXES)
            respond = openai_error_response if is_openai else error_response
            await respond(error)(scope, receive, send)
        finally:
            request.give_back_body()

    def _admit(self, request: ApiRequest, path: str) -> tuple[Scope, str]:
        """Return the scope of a request that another server of the cluster sends. Raises 403 if none did."""
        scope, now = request.scope, request.service.clock.wall()
        header = next((value for name, value in scope["headers"] if name == HEADER), None)
        tenant = self._signer.verify(header, request.method, _target(scope), now)
        inner = path.removeprefix(INTERNAL)
        if tenant is None and is_guarded(inner):
            raise RequestRejected(403, "A request to this path needs a tenant.", "not_signed")
        state = {**scope.get("state", {}), "is_hop": True, **({} if tenant is None else {"tenant": tenant})}
        raw = inner.encode("ascii", "replace")
        inner_scope = {**scope, **_origin(scope), "path": inner, "raw_path": raw, "root_path": "", "state": state}
        return inner_scope, inner

    async def _forward(
        self,
        request: ApiRequest,
        path: str,
        concern: Concern,
        url: str,
        tenant: str | None,
        sent: Headers,
        send: Send,
    ) -> None:
        target = INTERNAL.encode() + _target(request.scope)
        signature = self._signer.sign(tenant, request.method, target, request.service.clock.wall())
        is_read = concern.body is not None
        left_out = NOT_SENT | {b"content-encoding"} if is_read else NOT_SENT
        headers = [(name, value) for name, value in sent if name not in left_out]
        body: bytes | AsyncIterator[bytes] = b""
        if concern.body is not None:
            body = concern.body
        elif request.method not in ("GET", "HEAD", "DELETE"):
            body, length = request.pieces(), request.headers.get("content-length", "")
            if length.isdigit() and int(length) <= SMALL_BODY_BYTES:
                body = b"".join([piece async for piece in body])  # it can be sent again, so on a kept connection
            else:
                headers += [(name, value) for name, value in request.scope["headers"] if name == b"content-length"]
        try:
            headers += [(HEADER, signature), (ORIGIN, _sent_origin(request.scope))]
            lives = partial(self._switch.lives, url)
            sending = self._hops.send(url, request.method, target, headers, body, lives)
            response = await (_unless_left(request, sending) if isinstance(body, bytes) else sending)
            short_body = await response.short_body()
        except HopFailed as error:
            self._counters.forwarded(is_answered=False)
            self._homes.forget_place(concern.name)
            await self._respond_unreachable(request, path, url, error, send)
            return
        self._counters.forwarded(is_answered=True)
        await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
        if short_body is None:
            await self._relay(request, concern, response, send)
            return
        await send({"type": "http.response.body", "body": short_body, "more_body": False})
        self._note_operation(concern, response.status, short_body)

    async def _relay(self, request: ApiRequest, concern: Concern, response: HopResponse, send: Send) -> None:
        """Stream a long response back; stop the other node if the client leaves."""
        relaying = asyncio.create_task(self._send_pieces(concern, response, send))
        leaving = asyncio.create_task(_disconnected(request.receive))
        try:
            await asyncio.wait((relaying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            for task in (relaying, leaving):
                task.cancel()
            await asyncio.wait((relaying, leaving))
            if not relaying.cancelled():
                relaying.exception()

    async def _send_pieces(self, concern: Concern, response: HopResponse, send: Send) -> None:
        noted = bytearray()
        async for piece in response.pieces():
            if len(noted) <= MAX_NOTED_BYTES:
                noted += piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._note_operation(concern, response.status, bytes(noted))

    def _note_operation(self, concern: Concern, status: int, content: bytes) -> None:
        """Remember which run an operation is of, for the polls that ask for its result."""
        if concern.kind not in ("run", "new_run") or status != 200 or len(content) > MAX_NOTED_BYTES:
            return
        try:
            fields = orjson.loads(content)
        except orjson.JSONDecodeError:
            return
        if isinstance(fields, dict) and isinstance(request_id := fields.get("request_id"), str):
            self._switch.remember(request_id, concern.name)

    async def _respond_unreachable(
        self, request: ApiRequest, path: str, url: str, error: HopFailed, send: Send
    ) -> None:
        if isinstance(error, HopUntrusted):
            reason = f"The server that has this, {url}, is not trusted: {error}. Tell whoever runs this service."
            self._log_untrusted(url, error, request.service.clock.now())
        else:
            engines = await self._switch.engines(without=url)
            reason = (
                f"The server that has this, {url}, does not respond: {error}. Another one takes over within seconds; "
                f"{engines}."
            )
        await self._respond_later(request, path, reason, "node_unreachable", "paused_capacity", send)

    def _log_untrusted(self, url: str, error: HopUntrusted, now: float) -> None:
        """Log it, once a minute: clients ask again every second."""
        if now - self._logged_at.get(url, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[url] = now
            logger.error("no request is handed to %s: %s", url, error)

    async def _respond_moved(self, request: ApiRequest, path: str, concern: Concern, send: Send) -> None:
        reason = f"{concern.name or 'What this is about'} has just moved to another server. Send the request again."
        await self._respond_later(request, path, reason, "not_at_home", "active", send)

    @staticmethod
    async def _respond_later(request: ApiRequest, path: str, reason: str, code: str, state: str, send: Send) -> None:
        """Have the client ask again: both SDKs do, after a 503 with Retry-After, and after the 408 of a poll."""
        if path in ON_RESULTS:
            await request.service.clock.sleep(POLL_DELAY_S)
            fields = {"type": "try_again", "queue_state": state, "queue_state_reason": reason}
            response: Response = json_response(fields, 408)
        else:
            response = error_response(RequestRejected(503, reason, code, "server", RETRY))
        await response(request.scope, request.receive, send)


def _target(scope: Scope) -> bytes:
    """Return the path and the query as they came, without a reverse proxy's prefix."""
    raw = scope.get("raw_path") or scope["path"].encode()
    prefix = str(scope.get("root_path", "")).encode()
    path: bytes = raw.removeprefix(prefix)
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def _sent_origin(scope: Scope) -> bytes:
    host: bytes = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return str(scope["scheme"]).encode() + b"://" + host


def _origin(scope: Scope) -> Scope:
    """Return scheme and headers of a request between servers as its client sent them to the first one."""
    origin = next((value for name, value in scope["headers"] if name == ORIGIN), b"")
    scheme, _, host = origin.partition(b"://")
    if not host:
        return {}
    others = [(name, value) for name, value in scope["headers"] if name not in (b"host", ORIGIN)]
    return {"scheme": scheme.decode("latin-1"), "headers": [(b"host", host), *others]}


def _with_body(scope: Scope, receive: Receive, body: bytes | None) -> tuple[Scope, Receive]:
    """Return the request with a body that was read, as if it had just come."""
    if body is None:
        return scope, receive
    kept: Sequence[tuple[bytes, bytes]] = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-encoding", b"content-length", b"transfer-encoding")
    ]
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return {**scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}, replay


async def _unless_left(request: ApiRequest, sending: Coroutine[object, object, HopResponse]) -> HopResponse:
    """Return the response to a request whose body was read. If the client leaves before, the other node is told."""
    answered, leaving = asyncio.create_task(sending), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((answered, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        return answered.result()
    finally:
        for task in (answered, leaving):
            task.cancel()
        await asyncio.wait((answered, leaving))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
