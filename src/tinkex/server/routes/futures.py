"""Endpoints for results: a long poll for one request, one for many, and cancelling a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response

from tinkex.server.http.errors import RequestRejected, bad_request, json_response, not_found
from tinkex.server.http.large_response import LargeResponse, WrittenResponse
from tinkex.server.http.requests import IN_THREAD_BYTES, ApiRequest
from tinkex.server.sampling.sample_queue import PREFIX
from tinkex.server.sampling.sample_spec import response_of
from tinkex.server.service import Service
from tinkex.server.training.waiters import OperationResult
from tinkex.server.upkeep.blob_calls import payload
from tinkex.store.records import OperationRecord
from tinkex.types.base import Value
from tinkex.wire import json_codec, json_pieces, proto_codec
from tinkex.wire.body import JSON, PROTOBUF
from tinkex.wire.dialect import Dialect

UNREAD_DELAY_S = 1.0
"""How long to hold a poll whose tenant does not read what it has polled: official clients ask again at once."""
STOPPING_S = 1.0
"""How long to hold a poll while the service stops."""
METADATA_OVER_BYTES = 1 << 20
"""Of a larger result, a client that supports it gets the size first, so that it can free memory."""


async def retrieve_future(request: ApiRequest) -> Response:
    service, tenant, body = request.service, request.tenant, await request.read_json()
    request_id = body.get("request_id")
    if not isinstance(request_id, str) or not request_id:
        raise bad_request("request_id is missing.", "no_request_id")
    wants_protobuf = PROTOBUF in request.headers.get("accept", "").lower()
    may_be_metadata = body.get("allow_metadata_only") is True
    if request_id.startswith(PREFIX):
        return await _sample(service, tenant, request_id, wants_protobuf, may_be_metadata)
    outcome = service.waiters.recent(request_id)
    pending = service.worker.pending(request_id) if outcome is None else None
    if pending is not None and pending.row.tenant == tenant:
        outcome = await service.waiters.wait(request_id, service.config.poll_hold_s)
        if outcome is None:
            engines = await service.engines()
            if service.worker.pending(request_id) is not None:
                return _not_yet(*service.queue_of(pending, engines))
    if outcome is None:
        row = await service.db(service.store.get_operation, request_id)
        if row is None or row.tenant != tenant or row.state == "refused":
            raise not_found("request", request_id)
        if row.state == "queued":
            # The service is stopping; the operation runs after the next start. Wait, or the client polls without pause.
            await service.waiters.wait(request_id, STOPPING_S)
            return _not_yet("active", "the operation waits in the journal")
        if row.state == "done" and (size := await service.db(service.store.result_size, request_id)) > IN_THREAD_BYTES:
            read = partial(_read_stored, service, row, wants_protobuf, may_be_metadata)
            return await _large(service, tenant, size, read)
        outcome = await _stored(service, row)
    if outcome.tenant != tenant:
        raise not_found("request", request_id)
    if outcome.error is not None:
        return _failed(outcome.error, outcome.category)
    return await _training_result(service, outcome, wants_protobuf, may_be_metadata)


async def _stored(service: Service, row: OperationRecord) -> OperationResult:
    """Return how an operation ended, from the journal."""
    if row.state == "failed":
        error = row.error or "The operation failed."
        return OperationResult(tenant=row.tenant, error=error, category=row.category or "server")
    content = await payload(service.db, service.store, row.request_id, "result")
    if content is None or row.result_type is None:
        raise RequestRejected(
            410,
            f"The result of {row.request_id} has expired and was deleted. The service keeps results for "
            "--result-ttl-s, and of one tenant --max-tenant-result-bytes.",
            "result_expired",
        )
    return OperationResult(tenant=row.tenant, content=content, content_type=row.result_type)


async def _read_stored(service: Service, row: OperationRecord, wants_protobuf: bool, may_be_metadata: bool) -> Response:
    """Read a large result from the journal, one at a time: other calls of the store go between."""
    async with service.reading.of(row.tenant):
        outcome = await _stored(service, row)
    return await asyncio.to_thread(_training_response, service, outcome, wants_protobuf, may_be_metadata)


async def _training_result(
    service: Service, outcome: OperationResult, wants_protobuf: bool, may_be_metadata: bool
) -> Response:
    respond = partial(_training_response, service, outcome, wants_protobuf, may_be_metadata)
    if len(outcome.content) <= IN_THREAD_BYTES:
        return respond()
    return await _large(service, outcome.tenant, len(outcome.content), partial(asyncio.to_thread, respond))


def _training_response(
    service: Service, outcome: OperationResult, wants_protobuf: bool, may_be_metadata: bool
) -> Response:
    content = outcome.content
    if outcome.content_type == "json":
        return LargeResponse(content, media_type=JSON)
    if wants_protobuf or (may_be_metadata and len(content) > METADATA_OVER_BYTES):
        return _as_protobuf(content, may_be_metadata)
    output = proto_codec.decode_forward_backward_output(content)
    if len(content) <= IN_THREAD_BYTES:
        return _as_json(output)
    return WrittenResponse(json_pieces.training_pieces(output), service.writing, outcome.tenant, JSON)


async def _sample(
    service: Service, tenant: str, request_id: str, wants_protobuf: bool, may_be_metadata: bool
) -> Response:
    sample = service.sampling.find(tenant, request_id)
    if sample is None:
        raise RequestRejected(
            410, f"The sample {request_id} is no longer stored. Request it again.", "sample_lost", "server"
        )
    await service.sampling.wait(sample, service.waiters.hold_s(service.config.poll_hold_s))
    if not sample.is_done:
        engines = await service.engines()
        state, reason = service.sampling.queue_of(sample)
        return _not_yet(state, f"{reason}; {engines}" if engines else reason)
    if sample.error is not None:
        return _failed(*sample.error)
    result, layout, ids = sample.result, sample.targets_layout, sample.sequence_ids
    assert result is not None

    def respond() -> Response:
        response = response_of(result, layout, ids)
        if wants_protobuf:
            return _as_protobuf(proto_codec.encode_sample_response(response), may_be_metadata)
        if result.nbytes <= IN_THREAD_BYTES:
            return _as_json(response)
        return WrittenResponse(json_pieces.sample_pieces(response), service.writing, tenant, JSON)

    if result.nbytes <= IN_THREAD_BYTES:
        return respond()
    return await _large(service, tenant, result.nbytes, partial(asyncio.to_thread, respond))


async def _large(service: Service, tenant: str, size: int, respond: Callable[[], Awaitable[Response]]) -> Response:
    """Make a large response, and count its bytes until its client has read it or has left.

    Every poll has a response of its own: 30 polls of one result that nobody read took 1.5 GB. A tenant with too many
    is told that the result is not there yet, and asks again; after a 429 official clients would give it up for good.
    """
    if not service.ledger.has_room("response_bytes", tenant, size):
        used = service.ledger.used("response_bytes", tenant)
        rejection = service.ledger.rejection("max_tenant_response_bytes", f"Results of {used} bytes are being sent")
        await service.clock.sleep(UNREAD_DELAY_S)
        return _not_yet("active", str(rejection))
    service.ledger.count("response_bytes", tenant, size)
    release = partial(service.ledger.give_back, "response_bytes", tenant, size)
    try:
        response = await respond()
    except BaseException:
        release()
        raise
    if isinstance(response, LargeResponse | WrittenResponse):
        response.on_end = release
    else:
        release()
    return response


async def retrieve_futures(request: ApiRequest) -> Response:
    service, tenant, body = request.service, request.tenant, await request.read_json()
    target = body.get("target")
    sampler_id = target.get("sampling_session_id") if isinstance(target, dict) else None
    await service.sampling.sampler(tenant, sampler_id)
    cursor = body.get("prev_cursor") or 0
    if isinstance(cursor, bool) or not isinstance(cursor, int):
        raise bad_request("prev_cursor must be a whole number.", "bad_cursor")
    hold_s = service.waiters.hold_s(service.config.poll_hold_s)
    completed, cursor = await service.sampling.completions.since(str(sampler_id), cursor, hold_s)
    completions = [{"state": state, "request_id": request_id} for request_id, state in completed]
    return json_response({"completions": completions, "cursor": cursor})


async def cancel_future(request: ApiRequest) -> Response:
    """Cancel a sample. Accepted training is not cancelled, because later operations build on it."""
    service, tenant, body = request.service, request.tenant, await request.read_json()
    request_id = body.get("request_id")
    sample = service.sampling.find(tenant, request_id) if isinstance(request_id, str) else None
    if sample is not None:
        service.sampling.cancel(sample)
    return json_response({})


def _not_yet(state: str, reason: str) -> Response:
    return json_response({"type": "try_again", "queue_state": state, "queue_state_reason": reason}, 408)


def _failed(error: str, category: str) -> Response:
    return json_response({"error": error, "category": category})


def _as_protobuf(content: bytes, may_be_metadata: bool) -> Response:
    if may_be_metadata and len(content) > METADATA_OVER_BYTES:
        return json_response({"status": "complete_metadata", "response_payload_size": len(content)})
    return LargeResponse(content, media_type=PROTOBUF)


def _as_json(value: Value) -> Response:
    return Response(json_codec.encode(json_codec.dump(value, Dialect.PROTO)), media_type=JSON)
