"""Reads responses of `retrieve_future`: not yet, how large, failed, or the result.

    match envelope.read(status, headers, content, SampleResponse, request_id):
        case Pending(queue_state, reason): ...   # ask again
        case Metadata(size): ...                 # finished; make room for this many bytes, then ask for all of it
        case Failed(error, category): ...
        case Done(value): ...

Any other status says nothing about the operation: the caller raises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tinkex.errors import APIResponseValidationError, RequestErrorCategory, Response, ValidationError
from tinkex.types.base import Value
from tinkex.wire import json_codec
from tinkex.wire.body import PROTOBUF

MAX_ACCEPTED_BYTES = 1 << 20
"""Of the response to a submission: an id, and one for each sample, of which there are a thousand at most."""


class Pending(NamedTuple):
    """Not finished: HTTP 408 when the poll's time was up, or 200 and `try_again`.

    The states known today: active, paused_rate_limit, paused_capacity. Without one: unknown.
    """

    queue_state: str = "unknown"
    reason: str | None = None


class Metadata(NamedTuple):
    """Finished; the response itself has `size` bytes and comes when asked for without `allow_metadata_only`."""

    size: int


class Failed(NamedTuple):
    """The operation ran and failed for good."""

    error: str
    category: RequestErrorCategory


class Done(NamedTuple):
    """Finished; `value` is of the type that was asked for."""

    value: Any


Envelope = Pending | Metadata | Failed | Done


def read(
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    result_type: type[Value],
    request_id: str = "",
    sequence_ids: Sequence[str] = (),
    asked: int | None = None,
) -> Envelope:
    """Return which of the four a response with status 200 or 408 is.

    A response that fits none of them raises APIResponseValidationError with the request's id. `sequence_ids` are those
    of the acceptance: results of a sample do not repeat them, so they are filled in here. `asked` is how many datums or
    samples the request had: a result with more of them does not fit.
    """
    try:
        if status == 408:
            return Pending(*_queue(_json_or_none(content)))
        return _read_success(headers, content, result_type, sequence_ids, asked)
    except APIResponseValidationError as error:
        message = f"{error.message} (request {request_id})"
        raise APIResponseValidationError(Response(status, headers), error.body, message) from None


def _read_success(
    headers: Mapping[str, str],
    content: bytes,
    result_type: type[Value],
    sequence_ids: Sequence[str],
    asked: int | None,
) -> Envelope:
    if PROTOBUF in headers.get("content-type", "").lower():
        from tinkex.wire import proto_codec

        try:
            return Done(proto_codec.decode_answer(content, result_type, sequence_ids, asked))
        except ValidationError as error:
            raise APIResponseValidationError(message=f"The service's answer does not fit: {error}") from None
    obj = json_codec.read_object(content)
    if obj.get("type") == "try_again":
        return Pending(*_queue(obj))
    if obj.get("status") == "complete_metadata":
        return Metadata(_size(obj))
    # A result with a null `error` beside its fields is a result; a null error with a category is still a failure.
    if obj.get("error") is not None or ("error" in obj and "category" in obj):
        reason = "The service gave no reason." if obj["error"] is None else str(obj["error"])
        return Failed(reason, RequestErrorCategory.parse(obj.get("category")))
    for name in ("sequences", "loss_fn_outputs"):
        if asked is not None and isinstance(entries := obj.get(name), list) and len(entries) > asked:
            raise APIResponseValidationError(message=f"The service's answer has {len(entries)} {name} for {asked}")
    if isinstance(sequences := obj.get("sequences"), list):
        for sequence, name in zip(sequences, sequence_ids, strict=False):
            if isinstance(sequence, dict):
                sequence.setdefault("sequence_id", name)
    return Done(json_codec.read(result_type, obj))


def _queue(obj: Any) -> tuple[str, str | None]:
    if not isinstance(obj, dict):
        return "unknown", None
    reason = obj.get("queue_state_reason")
    return str(obj.get("queue_state") or "unknown").lower(), None if reason is None else str(reason)


def _size(obj: dict[str, Any]) -> int:
    size = obj.get("response_payload_size", 0)  # unsaid: nothing to reserve, the response is fetched all the same
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise APIResponseValidationError(body=obj, message=f"response_payload_size should be a count, got {size!r}")
    return size


def _json_or_none(content: bytes) -> Any:
    try:
        return json_codec.decode_bounded(content)
    except ValueError:
        return None  # the status is enough


class Accepted(NamedTuple):
    """The service took the operation on; its result is polled for under `request_id`."""

    request_id: str
    sample_sequence_ids: list[str] | None = None
    model_id: str | None = None


def read_accepted(content: bytes) -> Accepted:
    """Read the response to a submission. Raises APIResponseValidationError, also for one that is far too large."""
    if len(content) > MAX_ACCEPTED_BYTES:
        raise APIResponseValidationError(
            message=f"The service accepted with {len(content):,} bytes, of which it needs a few hundred."
        )
    obj = json_codec.decode_answer(content)
    request_id = obj.get("request_id") if isinstance(obj, dict) else None
    if not isinstance(request_id, str) or not request_id:
        raise APIResponseValidationError(
            body=obj, message=f"The service accepted without a request_id: {content[:200]!r}"
        )
    ids = obj.get("sample_sequence_ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(entry, str) for entry in ids)):
        raise APIResponseValidationError(
            body=obj, message=f"sample_sequence_ids should be a list of ids: {content[:200]!r}"
        )
    model_id = obj.get("model_id")
    return Accepted(request_id, ids, model_id if isinstance(model_id, str) else None)
