"""Reads what every handler needs from a request: the service, the tenant, the body, the page of a list."""

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
"""Larger bodies are decoded in a thread, so that other requests need not wait."""
MAX_JSON_BYTES = 64 << 20
"""Limit for every call but training passes. Decoding JSON blocks the whole service: this much takes some 0.3 s."""


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> str:
    """Return the tenant that `AccessMiddleware` found for the request's key. It owns all that the request creates."""
    tenant: str = request.state.tenant
    return tenant


BODY_IDLE_S = 60.0
"""How long to wait for the next piece of a body: a client that stops half-way must not keep the connection."""
MAX_OFFSET = 2**53
"""Larger numbers are not exact in JSON, and no list is that long."""


async def read_body(request: Request, max_bytes: int | None = None) -> bytes:
    """Return the whole body, decompressed. Raises 413 if it is larger than the service allows."""
    limit = service_of(request).config.max_body_bytes
    if max_bytes is not None:
        limit = min(limit, max_bytes)
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
            raise RequestRejected(
                408, f"No data of the body arrived for {BODY_IDLE_S:.0f} s.", "body_stalled"
            ) from None
        size += len(piece)
        if size > limit:
            raise body_too_large(limit)
        pieces.append(piece)
    content, encoding = b"".join(pieces), request.headers.get("content-encoding")
    if encoding is None:
        return content
    try:
        # A few bytes can take a second to decompress; other requests need not wait for it.
        return await asyncio.to_thread(decompress, content, encoding, limit)
    except ValidationError as error:
        raise bad_request(str(error), "bad_encoding") from None


def body_too_large(limit: int) -> RequestRejected:
    return RequestRejected(413, f"The body is larger than {limit} bytes. Send fewer datums per call.", "body_too_large")


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. An empty body counts as {}."""
    return parse_json_object(await read_body(request, MAX_JSON_BYTES))


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Decode JSON text that must be an object."""
    try:
        body = json_codec.decode(content) if content.strip() else {}
        if b"NaN" in content or b"Infinity" in content:
            # Only a more lenient parser reads these: make sure of UTF-8, and of numbers within 64 bits.
            orjson.dumps(body)
    except RecursionError:
        raise bad_request("The body is not JSON that can be read: it is nested too deeply.", "bad_json") from None
    except (ValueError, TypeError) as error:
        raise bad_request(f"The body is not JSON: {error}", "bad_json") from None
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {type(body).__name__}.", "bad_json")
    return body


def parse_as(cls: type[V], body: dict[str, Any]) -> V:
    """Read a JSON object as one of our types. Unknown fields are ignored; an error names the field that is wrong."""
    token = is_lenient.set(True)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        raise bad_request(str(error), "invalid") from None
    finally:
        is_lenient.reset(token)


def optional_object(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a field that is an object or absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object or null, not {type(value).__name__}.", f"bad_{name}")
    return value


def parse_page(request: Request, default_limit: int, max_limit: int = 1000) -> tuple[int, int]:
    """Return the `offset` and `limit` of a request for a list."""
    try:
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", default_limit))
    except ValueError:
        raise bad_request("offset and limit must be whole numbers.", "bad_page") from None
    if offset < 0 or limit < 0:
        raise bad_request("offset and limit must not be negative.", "bad_page")
    return min(offset, MAX_OFFSET), min(limit, max_limit)
