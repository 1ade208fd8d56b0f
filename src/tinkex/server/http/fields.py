"""Reads the fields of a JSON body. Pure; an error names the field that is wrong."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson

from tinkex.errors import ValidationError
from tinkex.server.http.errors import bad_request
from tinkex.types.base import Value
from tinkex.types.coerce import is_lenient
from tinkex.types.weights import ParsedCheckpointTinkerPath
from tinkex.wire import json_codec
from tinkex.wire.scan import count_json_containers, split_json_datums

V = TypeVar("V", bound=Value)

MAX_METADATA_BYTES = 64 * 1024
"""Metadata is read with every list."""
MAX_CONTAINERS = 100_000
"""Lists and objects in one body. A pass of 1,024 datums has some 12,000; parsing so many takes 15 ms."""


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Decode JSON text that must be an object."""
    _check_containers(content)
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


def parse_json_pass(content: bytes, name: str) -> dict[str, Any]:
    """Decode the JSON text of a training pass datum by datum. `name` is the field that has the list `data`.

    Each piece holds the interpreter only briefly; a body of 8 MB parsed at once would stop all others for 60 ms.
    """
    _check_containers(content)
    pieces = split_json_datums(content, name.encode())
    body = parse_json_object(content if pieces is None else pieces.envelope)
    data = body.get(name)
    if pieces is None or not isinstance(data, dict) or data.get("data") != []:  # a second list of that name
        return body if pieces is None else parse_json_object(content)
    return body | {name: data | {"data": [parse_json_object(datum) for datum in pieces.datums]}}


def _check_containers(content: bytes) -> None:
    """Reject JSON text with more lists and objects than any honest body has, before any of them is made."""
    if count_json_containers(content) > MAX_CONTAINERS:
        raise bad_request(
            f"The body has more than {MAX_CONTAINERS:,} lists and objects. Send less at once.", "too_many"
        )


def parse_as(cls: type[V], body: dict[str, Any]) -> V:
    """Read a JSON object as one of our types. Unknown fields are ignored."""
    token = is_lenient.set(True)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        raise bad_request(str(error), "invalid") from None
    finally:
        is_lenient.reset(token)


def optional_object(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object or null, not {type(value).__name__}.", f"bad_{name}")
    return value


def require_text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} is missing: it must be text.", "invalid")
    return value


def require_checkpoint_path(body: dict[str, Any], name: str) -> str:
    """Return a field that must be the path of a checkpoint."""
    return ParsedCheckpointTinkerPath.from_tinker_path(require_text(body, name)).tinker_path


def require_seq(body: dict[str, Any], name: str) -> int:
    """Return a field that must be a number which the client counts from 0."""
    number = body.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise bad_request(f"{name} must be a whole number from 0 on, got {str(number)[:50]!r}.", "bad_seq_id")
    return number


def parse_metadata(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body.get("user_metadata") or {}
    if not isinstance(metadata, dict) or len(orjson.dumps(metadata)) > MAX_METADATA_BYTES:
        raise bad_request(
            f"user_metadata must be an object of at most {MAX_METADATA_BYTES} bytes as JSON.", "bad_metadata"
        )
    return metadata
