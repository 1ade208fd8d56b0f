"""Endpoints for samplers and samples. A sample is polled for, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import orjson
from starlette.responses import Response

from tinkex.engine.contract import EngineFault, Sampled, SampleEvent, SampleSpec
from tinkex.server.http.errors import as_rejected, bad_request, json_response
from tinkex.server.http.event_stream import Event, open_event_stream
from tinkex.server.http.fields import optional_object, parse_as, parse_json_object, require_seq, require_text
from tinkex.server.http.large_response import written
from tinkex.server.http.requests import IN_THREAD_BYTES, MAX_JSON_BYTES, ApiRequest
from tinkex.server.sampling.sample_queue import SampleTarget, TargetsLayout
from tinkex.server.sampling.sample_spec import check_limits, response_of, spec_of
from tinkex.server.service import Service
from tinkex.store.records import SamplerRecord
from tinkex.types.sampling import SampleRequest
from tinkex.wire import json_codec, json_pieces, sse
from tinkex.wire.dialect import Dialect

SAMPLERS_COUNT_S = 3600.0
"""How long a sampling session counts. It is one row; a loop that makes one per step may go on for days."""


async def create_sampling_session(request: ApiRequest) -> Response:
    service, tenant, body = request.service, request.tenant, await request.read_json()
    session = await request.find_session(require_text(body, "session_id"))
    number = require_seq(body, "sampling_session_seq_id")
    path = body.get("model_path")
    target = await service.sampling.open(tenant, base_model=body.get("base_model"), model_path=path)
    sampler = SamplerRecord(
        id=f"{session.id}:sample:{number}",
        tenant=tenant,
        session_id=session.id,
        base_model=target.info.name,
        created_at=service.clock.wall(),
        model_path=path,
    )
    stored = await service.db(_add_sampler, service, sampler)
    if (stored.base_model, stored.model_path, stored.folder) != (sampler.base_model, path, None):
        raise bad_request(
            f"Sampling session {sampler.id} exists already and samples from another model. "
            "Use another sampling_session_seq_id.",
            "conflict",
        )
    service.worker.models.want(target.info.name)  # its first sample follows soon
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})


def _add_sampler(service: Service, sampler: SamplerRecord) -> SamplerRecord:
    """Add a sampler unless it exists or the tenant has made too many lately; return the one that is stored."""
    if (existing := service.store.get_sampler(sampler.id)) is not None:
        return existing
    recent = service.store.count_samplers(sampler.tenant, sampler.created_at - SAMPLERS_COUNT_S)
    service.ledger.check("max_samplers", recent + 1, f"This key has made {recent} sampling sessions within an hour")
    return service.store.add_sampler(sampler)


async def join_sampling_session(request: ApiRequest) -> Response:
    service, body = request.service, await request.read_json()
    sampler, _ = await service.sampling.sampler(request.tenant, body.get("sampling_session_id"))
    return json_response({"client_counter": await service.db(service.store.join_sampler, sampler.id)})


async def asample(request: ApiRequest) -> Response:
    service, tenant, content = request.service, request.tenant, await request.read_body(MAX_JSON_BYTES)
    sample_request, target, spec = await _read(service, tenant, content)
    name: object = (
        sample_request.seq_id if sample_request.seq_id is not None else request.headers.get("x-idempotency-key")
    )
    # The body is part of the key, because clients that share a sampler without joining it all count from 0.
    digest = hashlib.blake2b(content, digest_size=16).digest()
    key = None if name is None else (tenant, sample_request.sampling_session_id, name, digest)
    layout = TargetsLayout.of(sample_request.target_prompt_logprobs)
    sample = service.sampling.submit(tenant, sample_request.sampling_session_id or "", target, spec, key, layout)
    return json_response({"request_id": sample.id, "sample_sequence_ids": sample.sequence_ids})


async def _read(
    service: Service, tenant: str, content: bytes, *, is_streamed: bool = False
) -> tuple[SampleRequest, SampleTarget, SampleSpec]:
    is_large = len(content) > IN_THREAD_BYTES
    sample_request = await asyncio.to_thread(_parse, content) if is_large else _parse(content)
    if sample_request.sampling_session_id is not None:
        _, target = await service.sampling.sampler(tenant, sample_request.sampling_session_id)
    else:
        target = await service.sampling.open(
            tenant, base_model=sample_request.base_model, model_path=sample_request.model_path
        )
    make = partial(spec_of, sample_request, target, is_streamed=is_streamed)
    spec = await asyncio.to_thread(make) if is_large else make()
    check_limits([spec], service.ledger)
    return sample_request, target, spec


def _parse(content: bytes) -> SampleRequest:
    body = parse_json_object(content)
    body["sampling_params"] = {
        name: value for name, value in (optional_object(body, "sampling_params") or {}).items() if value is not None
    }
    return parse_as(SampleRequest, body)


async def sample_stream(request: ApiRequest) -> Response:
    service, tenant, content = request.service, request.tenant, await request.read_body(MAX_JSON_BYTES)
    sample_request, target, spec = await _read(service, tenant, content, is_streamed=True)
    return await open_event_stream(
        _events(service, tenant, service.sampling.run(tenant, target, spec), sample_request), _error_event
    )


async def _events(
    service: Service, tenant: str, samples: AsyncIterator[SampleEvent], sample_request: SampleRequest
) -> AsyncGenerator[Event, None]:
    """Yield the encoded events of a stream: `token` for each step, then `done` with the whole result, or `error`."""
    async with aclosing(samples):  # type: ignore[type-var]
        try:
            async for event in samples:
                if isinstance(event, Sampled):
                    noun = "bytes of results that are being sent"
                    with service.ledger.hold("response_bytes", tenant, event.nbytes, noun):
                        yield _done_event(service, tenant, event, sample_request)
                    return
                token = {"index": event.index, "tokens": event.tokens, "logprobs": event.logprobs}
                yield sse.encode("token", orjson.dumps(token))
        except EngineFault as error:  # an event even if it is the first: the request itself was accepted
            yield _encode_error(str(error), error.category)


def _done_event(service: Service, tenant: str, result: Sampled, sample_request: SampleRequest) -> Event:
    layout = TargetsLayout.of(sample_request.target_prompt_logprobs)
    response = response_of(result, layout, [""] * len(result.sequences))
    if result.nbytes <= IN_THREAD_BYTES:
        return sse.encode("done", json_codec.encode(json_codec.dump(response, Dialect.PROTO)))
    pieces = sse.encode_pieces("done", json_pieces.sample_pieces(response))
    return written(pieces, service.writing, tenant)


def _error_event(error: Exception) -> bytes:
    rejected = as_rejected(error)
    return _encode_error(rejected.detail, rejected.category)


def _encode_error(error: str, category: str) -> bytes:
    return sse.encode("error", orjson.dumps({"error": error, "category": category}))
