"""What every handler asks of a request: its service, its tenant, its body, its page."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from tinkex.errors import ValidationError
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.service import Service
from tinkex.types.base import Value
from tinkex.types.coerce import is_lenient
from tinkex.wire import json_codec
from tinkex.wire.body import decompress

V = TypeVar("V", bound=Value)

IN_THREAD_BYTES = 256 << 10
"""What is larger is decoded in a thread, so that other requests need not wait for it."""
MAX_JSON_BYTES = 64 << 20
"""Of every call but training passes. Reading JSON holds up the whole service: this much takes it some 0.3 s."""


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> str:
    """Whose key this is. `access` has put it there; everything that is kept belongs to it."""
    tenant: str = request.state.tenant
    return tenant


BODY_IDLE_S = 60.0
"""A body that stands still for so long is given up: whoever sends half of one holds a connection no longer."""
MAX_OFFSET = 2**53
"""Beyond it there is nothing, and JSON has no exact number."""


async def read_body(request: Request, most_bytes: int | None = None) -> bytes:
    """The whole body, decompressed, and no larger than the service allows."""
    limit = service_of(request).config.max_body_bytes
    if most_bytes is not None:
        limit = min(limit, most_bytes)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise body_too_large(limit)
    pieces, size = [], 0
    stream = aiter(request.stream())
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), BODY_IDLE_S)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise RequestRejected(408, f"Nothing of the body came for {BODY_IDLE_S:.0f} s.", "body_stalled") from None
        size += len(piece)
        if size > limit:
            raise body_too_large(limit)
        pieces.append(piece)
    content, encoding = b"".join(pieces), request.headers.get("content-encoding")
    if encoding is None:
        return content
    try:
        # A few bytes can take a second to unfold; nobody else need wait for it.
        return await asyncio.to_thread(decompress, content, encoding, limit)
    except ValidationError as problem:
        raise bad_request(str(problem), "bad_encoding") from None


def body_too_large(limit: int) -> RequestRejected:
    return RequestRejected(413, f"The body is larger than {limit} bytes. Send fewer datums per call.", "body_too_large")


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object; an empty one counts as {}."""
    return parse_json_object(await read_body(request, MAX_JSON_BYTES))


def parse_json_object(content: bytes) -> dict[str, Any]:
    """JSON text that must be an object."""
    try:
        body = json_codec.decode(content) if content.strip() else {}
        if b"NaN" in content or b"Infinity" in content:
            orjson.dumps(body)  # read by a parser that lets more pass: texts that are no UTF-8, numbers beyond 64 bits
    except RecursionError:
        raise bad_request("The body is not JSON that can be read: it is nested too deep.", "bad_json") from None
    except (ValueError, TypeError) as problem:
        raise bad_request(f"The body is not JSON: {problem}", "bad_json") from None
    if not isinstance(body, dict):
        raise bad_request(f"The body should be a JSON object, not {type(body).__name__}.", "bad_json")
    return body


def parse_as(cls: type[V], body: dict[str, Any]) -> V:
    """A JSON object as one of our types. Unknown fields are ignored; what does not fit is said with its place."""
    token = is_lenient.set(True)
    try:
        return cls.model_validate(body)
    except ValidationError as problem:
        raise bad_request(str(problem), "invalid") from None
    finally:
        is_lenient.reset(token)


def optional_object(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A field that is an object or absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object or null, not {type(value).__name__}.", f"bad_{name}")
    return value


def parse_page(request: Request, default_limit: int, most: int = 1000) -> tuple[int, int]:
    """`offset` and `limit` of a list."""
    try:
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", default_limit))
    except ValueError:
        raise bad_request("offset and limit must be whole numbers.", "bad_page") from None
    if offset < 0 or limit < 0:
        raise bad_request("offset and limit must not be negative.", "bad_page")
    return min(offset, MAX_OFFSET), min(limit, most)
