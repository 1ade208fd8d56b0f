"""A request as every handler gets it: the service, the tenant, the body, and the objects that the request names.

This is the one place where a request is read; `fields` reads what is in its JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinkex.errors import ValidationError
from tinkex.server.http.errors import RequestRejected, bad_request, error_response, not_found
from tinkex.server.http.fields import parse_json_object
from tinkex.server.service import Service
from tinkex.store.records import AuditEntry, CheckpointRecord, RunRecord, SamplerRecord, SessionRecord
from tinkex.wire.body import decompress

IN_THREAD_BYTES = 256 << 10
"""Larger bodies are decoded in a thread, so that other requests need not wait."""
MAX_JSON_BYTES = 4 << 20
"""Limit for every call but training passes. Decoding JSON blocks the whole service: this much takes some 30 ms."""
MAX_RATIO = 200
FREE_BYTES = 16 << 20
"""A compressed body may unfold to 16 MiB, or to 200 times its size. Weights that are all equal unfold 100 times."""
BODY_IDLE_S = 60.0
"""How long to wait for the next piece of a body: a client that stops half-way must not keep the connection."""
MAX_OFFSET = 2**53
"""Larger numbers are not exact in JSON, and no list is that long."""
CLIENT_CLOSED_REQUEST: Final = 499
"""The status, known from nginx, for a client that hung up. Only the metrics see it."""


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


R = TypeVar("R", bound=_Owned)


class ApiRequest(Request):
    """A request to one of the APIs.

    Objects of other tenants are reported as not found, with the same message as objects that do not exist.
    """

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def tenant(self) -> str:
        """The tenant that `AccessMiddleware` found for the request's key. It owns all that the request creates."""
        tenant: str = self.state.tenant
        return tenant

    async def read_body(self, max_bytes: int | None = None) -> bytes:
        """Return the whole body, decompressed. Raises 413 if it is larger than the service allows."""
        limit = self.service.config.max_body_bytes
        if max_bytes is not None:
            limit = min(limit, max_bytes)
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise _body_too_large(limit)
        pieces, size = [], 0
        stream = aiter(self.stream())
        while True:
            try:
                piece = await asyncio.wait_for(anext(stream), BODY_IDLE_S)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise RequestRejected(
                    408, f"No data of the body arrived for {BODY_IDLE_S:.0f} s.", "body_stalled"
                ) from None
            size += len(piece)
            if size > limit:
                raise _body_too_large(limit)
            pieces.append(piece)
        content, encoding = b"".join(pieces), self.headers.get("content-encoding")
        if encoding is None:
            return content
        try:
            # A few bytes can take a second to decompress; other requests need not wait for it.
            return await asyncio.to_thread(
                decompress, content, encoding, min(limit, max(FREE_BYTES, MAX_RATIO * len(content)))
            )
        except ValidationError as error:
            raise bad_request(str(error), "bad_encoding") from None

    async def read_json(self) -> dict[str, Any]:
        """Return the body as a JSON object. An empty body counts as {}."""
        return parse_json_object(await self.read_body(MAX_JSON_BYTES))

    def parse_page(self, default_limit: int, max_limit: int = 1000) -> tuple[int, int]:
        """Return the `offset` and `limit` of a request for a list."""
        try:
            offset = int(self.query_params.get("offset", 0))
            limit = int(self.query_params.get("limit", default_limit))
        except ValueError:
            raise bad_request("offset and limit must be whole numbers.", "bad_page") from None
        if offset < 0 or limit < 0:
            raise bad_request("offset and limit must not be negative.", "bad_page")
        return min(offset, MAX_OFFSET), min(limit, max_limit)

    async def find_session(self, session_id: str) -> SessionRecord:
        return await self._own("session", session_id, self.service.store.get_session)

    async def find_run(self, run_id: str, noun: str = "training run") -> RunRecord:
        return await self._own(noun, run_id, self.service.store.get_run)

    async def find_sampler(self, sampler_id: str) -> SamplerRecord:
        return await self._own("sampling session", sampler_id, self.service.store.get_sampler)

    async def _own(self, noun: str, name: str, get: Callable[[str], R | None]) -> R:
        record = await self.service.db(get, name)
        if record is None or record.tenant != self.tenant:
            raise not_found(noun, name)
        return record

    async def find_readable_checkpoint(self, path: str | None = None) -> CheckpointRecord:
        """Return a checkpoint that this tenant may read: its own, or one that its owner published.

        Without a path it is the one that the URL names.
        """
        path = path or f"tinker://{self.path_params['run_id']}/{self.path_params['checkpoint_id']}"
        store = self.service.store
        checkpoint = await self.service.db(store.get_readable_checkpoint, path, self.tenant, self.service.clock.wall())
        if checkpoint is None:
            raise not_found("checkpoint", path)
        return checkpoint

    async def find_own_checkpoint(self) -> CheckpointRecord:
        """Return the checkpoint that the URL names, if this tenant may change it."""
        checkpoint = await self.find_readable_checkpoint()
        if checkpoint.tenant != self.tenant:
            raise not_found("checkpoint", checkpoint.path)
        return checkpoint

    async def write_audit(self, action: str, target: str, **detail: Any) -> None:
        """Add an entry to the audit log. `action` is `noun.verb`."""
        at = self.service.clock.wall()
        entry = AuditEntry(id=uuid4().hex, at=at, tenant=self.tenant, action=action, target=target, detail=detail)
        await self.service.db(self.service.store.add_audit, entry)


Handler = Callable[[ApiRequest], Awaitable[Response]]


def guarded(name: str, handler: Handler, to_response: Callable[[Exception], Response] = error_response) -> Handler:
    """Wrap a handler: exceptions become responses, and every request is counted under `name` in the metrics."""

    async def run(http_request: Request) -> Response:
        request = ApiRequest(http_request.scope, http_request.receive)
        service = request.service
        started = service.clock.now()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # an edge: no handler may take the connection down
            response = to_response(error)
        # A signed link to a file needs no key, so its requests have no tenant.
        tenant = getattr(request.state, "tenant", None)
        service.metrics.request(name, response.status_code, service.clock.now() - started, tenant)
        return response

    return run


def _body_too_large(limit: int) -> RequestRejected:
    return RequestRejected(413, f"The body is larger than {limit} bytes. Send fewer datums per call.", "body_too_large")
