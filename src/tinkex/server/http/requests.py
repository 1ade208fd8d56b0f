"""A request as every handler gets it: the service, the tenant, the body, and the objects that the request names.

This is the one place where a request is read; `fields` reads what is in its JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinkex.errors import ValidationError
from tinkex.server.http.errors import RequestRejected, bad_request, error_response, not_found
from tinkex.server.http.fields import parse_json_object
from tinkex.server.service import Service
from tinkex.store.records import AuditEntry, CheckpointRecord, RunRecord, SamplerRecord, SessionRecord
from tinkex.wire.body import decompressed

IN_THREAD_BYTES = 256 << 10
"""Larger bodies are decoded in a thread, so that other requests need not wait."""
MAX_JSON_BYTES = 4 << 20
"""Limit for every call but training passes. Decoding JSON blocks the whole service: this much takes some 30 ms."""
SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size are not counted as in flight: a poll must not fail because of its tenant's uploads, and
connections are counted anyway."""
MAX_RATIO = 200
FREE_BYTES = 16 << 20
"""A compressed body may unfold to 16 MiB, or to 200 times its size. Weights that are all equal unfold 100 times."""
BODY_IDLE_S = 60.0
"""How long to wait for the next piece of a body: a client that stops half-way must not keep the connection."""
SLOW_BODY_S = 30.0
"""How long a body may arrive at any rate; after that `min_body_rate` is required."""
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

    _body_bytes = 0
    """Bytes of the body that are known to come or to be there, compressed and decompressed."""
    _held_bytes = 0
    """Bytes of the body that the ledger counts as in flight."""

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
        """Return the whole body, decompressed. Raises 413 if it is larger than the service allows.

        The bytes of a larger one count as in flight until the request ends; 429 if the tenant or the service has too
        many of them.
        """
        limit = self.service.config.max_body_bytes
        if max_bytes is not None:
            limit = min(limit, max_bytes)
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise self._body_too_large(limit)
        self._hold(int(declared) if declared.isdigit() else 0)
        pieces, size = [], 0
        async for piece in self.pieces():
            size += len(piece)
            if size > limit:
                raise self._body_too_large(limit)
            self._hold(size - self._body_bytes)
            pieces.append(piece)
        content, encoding = b"".join(pieces), self.headers.get("content-encoding")
        if encoding is None:
            return content
        ledger, plain = self.service.ledger, []
        ledger.check_decompressed(self.tenant)
        try:
            unfolded = decompressed(content, encoding, min(limit, max(FREE_BYTES, MAX_RATIO * len(content))))
            # A few bytes can take a second to decompress; other requests need not wait for it.
            while (part := await asyncio.to_thread(lambda: next(unfolded, None))) is not None:
                ledger.charge_decompressed(self.tenant, len(part))
                self._hold(len(part))
                plain.append(part)
        except ValidationError as error:
            raise bad_request(str(error), "bad_encoding") from None
        return b"".join(plain)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises 408 if it stalls, or is slower than the service allows on average."""
        clock, ledger = self.service.clock, self.service.ledger
        stream, size, waited_s = aiter(self.stream()), 0, 0.0
        while True:
            began = clock.now()
            try:
                async with asyncio.timeout(BODY_IDLE_S):
                    piece = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise RequestRejected(
                    408, f"No data of the body arrived for {BODY_IDLE_S:.0f} s.", "body_stalled"
                ) from None
            size += len(piece)
            waited_s += clock.now() - began  # not the time that we took for the last piece
            if waited_s > SLOW_BODY_S and size < waited_s * ledger.value("min_body_rate"):
                raise ledger.rejection(
                    "min_body_rate", f"The body arrived at {size / waited_s:.0f} bytes per second for {waited_s:.0f} s"
                )
            yield piece

    def _hold(self, size: int) -> None:
        """Count bytes as in flight, until `give_back_body`, if the body is not small."""
        if size > 0:
            self._body_bytes += size
            if self._body_bytes > SMALL_BODY_BYTES:
                more = self._body_bytes - self._held_bytes
                self.service.ledger.take("body_bytes", self.tenant, more, "bytes of request bodies")
                self._held_bytes += more

    def give_back_body(self) -> None:
        """Count the bytes of the body as in flight no longer: the request has ended."""
        if self._held_bytes:
            self.service.ledger.give_back("body_bytes", self.tenant, self._held_bytes)
            self._held_bytes = 0

    def _body_too_large(self, limit: int) -> RequestRejected:
        if limit == self.service.config.max_body_bytes:
            return self.service.ledger.rejection("max_body_bytes", "The body is larger")
        return RequestRejected(
            413, f"The body is larger than {limit} bytes, which this call allows. Send less.", "body_too_large"
        )

    async def read_json(self) -> dict[str, Any]:
        """Return the body as a JSON object. An empty body counts as {}."""
        return parse_json_object(await self.read_body(MAX_JSON_BYTES))

    def check_text(self, name: str, text: str | list[str] | None) -> None:
        """Reject a text that is longer than the service allows, or a list of texts that are longer together."""
        size = len(text) if isinstance(text, str) else sum(len(part) + 1 for part in text or ())
        if size > self.service.config.max_text_characters:
            raise self.service.ledger.rejection("max_text_characters", f"{name} has {size} characters")

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
        await self.service.db(self.service.store.add_audit, self.audit_entry(action, target, **detail))

    def audit_entry(self, action: str, target: str, **detail: Any) -> AuditEntry:
        """Return an entry that is stored together with what it is about."""
        at = self.service.clock.wall()
        return AuditEntry(id=uuid4().hex, at=at, tenant=self.tenant, action=action, target=target, detail=detail)


Handler = Callable[[ApiRequest], Awaitable[Response]]


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of those before it. They hold the body, and one of them may hold the error: such
    a cycle would keep the body until a full garbage collection (12 bombs of 400 bytes left 192 MB)."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


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
            _forget_frames(error)
        finally:
            request.give_back_body()
        # A signed link to a file needs no key, so its requests have no tenant.
        tenant = getattr(request.state, "tenant", None)
        service.metrics.request(name, response.status_code, service.clock.now() - started, tenant)
        return response

    return run
