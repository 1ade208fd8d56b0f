"""Endpoints for models and training operations: decode, check, build the engine's command, hand it to the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.contract import pass_frame
from tinkex.engine.frames import Frame
from tinkex.errors import ValidationError
from tinkex.rules import limits
from tinkex.server.http.errors import RequestRejected, bad_request, json_response
from tinkex.server.http.lookup import find_readable_checkpoint, find_session, parse_metadata, parse_ttl, require_text
from tinkex.server.http.requests import (
    IN_THREAD_BYTES,
    optional_object,
    parse_as,
    parse_json_object,
    read_body,
    read_json,
    service_of,
    tenant_of,
)
from tinkex.server.service import Service
from tinkex.server.training.checks import check_data
from tinkex.server.training.run_queue import RunQueue
from tinkex.store.records import RunRecord
from tinkex.types.training import AdamParams, ForwardBackwardRequest, ForwardRequest, LoraConfig
from tinkex.types.weights import ParsedCheckpointTinkerPath
from tinkex.wire import proto_codec
from tinkex.wire.body import PROTOBUF

ADAM_DEFAULTS = AdamParams().model_dump()
"""Old clients leave settings out."""


async def create_model(request: Request) -> Response:
    service, tenant, body = service_of(request), tenant_of(request), await read_json(request)
    info = service.catalog.find(body.get("base_model"))
    optimizer = (optional_object(body, "optimizer_config") or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise bad_request(f"The optimizer {str(optimizer)[:50]!r} is not offered here; adamw is.", "not_offered")
    lora = parse_as(LoraConfig, {"rank": 32, **(optional_object(body, "lora_config") or {})})
    flags = {"train_attn": lora.train_attn, "train_mlp": lora.train_mlp, "train_unembed": lora.train_unembed}
    limits.check_lora(lora.rank, **flags, model=info.name, hidden_size=info.hidden_size)
    run = await _new_run(service, tenant, body, info.name, lora.rank, lora.seed, lora)
    return await _created(service, run, "create_model", {"seed": lora.seed})


async def _new_run(
    service: Service, tenant: str, body: dict[str, Any], base: str, rank: int, seed: int | None, flags: Any
) -> RunRecord:
    session, number = await find_session(service, tenant, require_text(body, "session_id")), body.get("model_seq_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise bad_request(f"model_seq_id must be a whole number from 0 on, got {str(number)[:50]!r}.", "bad_seq_id")
    now = service.clock.wall()
    return RunRecord(
        id=f"{session.id}:train:{number}",
        tenant=tenant,
        session_id=session.id,
        base_model=base,
        rank=rank,
        # Without a seed it is the run's number in its session: the same program gives the same numbers twice.
        seed=number if seed is None else seed % (1 << 63),
        train_attn=flags.train_attn,
        train_mlp=flags.train_mlp,
        train_unembed=flags.train_unembed,
        created_at=now,
        last_request_at=now,
        user_metadata=parse_metadata(body) or None,
    )


async def _created(service: Service, run: RunRecord, kind: str, options: dict[str, Any]) -> Response:
    request_id = await service.intake.create(run, kind, options)
    return json_response({"request_id": request_id, "model_id": run.id})


async def unload_model(request: Request) -> Response:
    service, body = service_of(request), await read_json(request)
    queue = await service.intake.run_queue(tenant_of(request), body.get("model_id"))
    return await _submit(service, queue, body, "unload_model", lambda: (b"", {}, 0))


async def forward(request: Request) -> Response:
    return await _pass(request, "forward")


async def forward_backward(request: Request) -> Response:
    return await _pass(request, "forward_backward")


async def _pass(request: Request, kind: str) -> Response:
    """Submit a forward pass, with or without backward. A protobuf body says which of the two it is."""
    service, tenant, content = service_of(request), tenant_of(request), await read_body(request)
    is_protobuf = PROTOBUF in request.headers.get("content-type", "").lower()
    read = _read_protobuf if is_protobuf else _read_json
    decoded = await asyncio.to_thread(read, content, kind) if len(content) > IN_THREAD_BYTES else read(content, kind)
    if decoded.error is not None and decoded.model_id is None:
        raise decoded.error  # its run is unknown
    queue = await service.intake.run_queue(tenant, decoded.model_id)
    model = service.catalog.find(queue.run.base_model)

    def make() -> tuple[bytes, dict[str, Any], int]:
        if decoded.error is not None:
            raise decoded.error
        batch = decoded.batch
        is_forward = decoded.kind == "forward"
        tokens = check_data(batch.data, batch.loss_fn, batch.loss_fn_config, model, is_forward=is_forward)
        frame = pass_frame(decoded.kind, queue.run.id, batch.data, batch.loss_fn, batch.loss_fn_config)
        return frame.encode(), {}, tokens

    fields = {"seq_id": decoded.seq_id}
    return await _submit(service, queue, fields, decoded.kind, make, in_thread=len(content) > IN_THREAD_BYTES)


class _PassRequest:
    """A decoded pass. An error in its data is stored, because the run must learn that its number arrived."""

    __slots__ = ("batch", "error", "kind", "model_id", "seq_id")

    def __init__(self, kind: str, model_id: object, seq_id: object) -> None:
        self.kind, self.model_id, self.seq_id = kind, model_id, seq_id
        self.batch: Any = None
        self.error: RequestRejected | None = None


def _read_protobuf(content: bytes, kind: str) -> _PassRequest:
    try:
        request = proto_codec.decode_forward_backward_request(content)
    except ValidationError as error:
        decoded = _PassRequest(kind, *proto_codec.peek_forward_backward_request(content))
        decoded.error = bad_request(str(error), error.code)
        return decoded
    is_forward = isinstance(request, ForwardRequest)
    decoded = _PassRequest("forward" if is_forward else "forward_backward", request.model_id, request.seq_id)
    decoded.batch = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
    return decoded


def _read_json(content: bytes, kind: str) -> _PassRequest:
    body = parse_json_object(content)
    decoded = _PassRequest(kind, body.get("model_id"), body.get("seq_id"))
    try:
        if kind == "forward":
            decoded.batch = parse_as(ForwardRequest, body).forward_input
        else:
            decoded.batch = parse_as(ForwardBackwardRequest, body).forward_backward_input
    except RequestRejected as error:
        decoded.error = error
    return decoded


async def optim_step(request: Request) -> Response:
    service, body = service_of(request), await read_json(request)
    queue = await service.intake.run_queue(tenant_of(request), body.get("model_id"))

    def make() -> tuple[bytes, dict[str, Any], int]:
        command = {"op": "optim_step", "adapter": queue.run.id, **_adam(body)}
        return Frame(command).encode(), {}, 0

    return await _submit(service, queue, body, "optim_step", make)


def _adam(body: dict[str, Any]) -> dict[str, float]:
    other = optional_object(body, "optimizer_params")
    if other is not None and other.get("type", "adamw") != "adamw":
        raise bad_request(
            f"The optimizer {str(other.get('type'))[:50]!r} is not offered here; adamw is.", "not_offered"
        )
    given = optional_object(body, "adam_params") or other or {}
    params = {name: default if given.get(name) is None else given[name] for name, default in ADAM_DEFAULTS.items()}
    limits.check_adamw(params)
    return {name: float(value) for name, value in params.items()}


async def save_weights(request: Request) -> Response:
    return await _save(request, "save_weights")


async def save_weights_external(request: Request) -> Response:
    return await _save(request, "save_weights_external")


async def save_weights_for_sampler(request: Request) -> Response:
    return await _save(request, "save_weights_for_sampler")


async def _save(request: Request, kind: str) -> Response:
    service, body = service_of(request), await read_json(request)
    queue = await service.intake.run_queue(tenant_of(request), body.get("model_id"))

    def make() -> tuple[bytes, dict[str, Any], int]:
        if body.get("age_encryption_recipients"):
            raise bad_request(
                "age encryption is not offered here. Encrypt the files after the download.", "not_offered"
            )
        number = body.get("sampling_session_seq_id")
        if kind == "save_weights_for_sampler" and body.get("path") is None and number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
                raise bad_request("sampling_session_seq_id must be a whole number from 0 on.", "bad_seq_id")
            return b"", {"sampling_session_seq_id": number}, 0
        options = {
            "name": limits.check_name(body.get("path")),
            "overwrite": body.get("overwrite"),
            "ttl_seconds": parse_ttl(body),
            "user_metadata": parse_metadata(body) or None,
        }
        return b"", options, 0

    return await _submit(service, queue, body, kind, make)


async def load_weights(request: Request) -> Response:
    service, tenant, body = service_of(request), tenant_of(request), await read_json(request)
    if body.get("model_id") is None and body.get("session_id") is not None:
        return await _create_from(service, tenant, body)
    queue = await service.intake.run_queue(tenant, body.get("model_id"))
    return await _submit(service, queue, body, "load_weights", lambda: (b"", _load_options(body), 0))


def _load_options(body: dict[str, Any]) -> dict[str, Any]:
    path = body.get("path")
    if not isinstance(path, str):
        raise bad_request("path is missing: the tinker:// path of a checkpoint.", "bad_path")
    ParsedCheckpointTinkerPath.from_tinker_path(path)
    # Clients before 0.6 do not send it: load only the weights then.
    return {"path": path, "optimizer": body.get("optimizer") is True}


async def _create_from(service: Service, tenant: str, body: dict[str, Any]) -> Response:
    """Create a run from saved weights, in one request."""
    options = _load_options(body)
    source = await find_readable_checkpoint(service, tenant, options["path"])
    base = service.catalog.find(source.base_model).name
    run = await _new_run(service, tenant, body, base, source.rank, 0, source)
    return await _created(service, run, "load_model", options)


async def _submit(
    service: Service,
    queue: RunQueue,
    fields: dict[str, Any],
    kind: str,
    make: Callable[[], tuple[bytes, dict[str, Any], int]],
    *,
    in_thread: bool = False,
) -> Response:
    """Build the command and submit it.

    A sequence number whose content is rejected counts as arrived, so that the next one does not wait for it.
    """
    seq_id = fields.get("seq_id")
    try:
        command, options, tokens = await asyncio.to_thread(make) if in_thread else make()
    except (RequestRejected, ValidationError) as error:
        rejected = error if isinstance(error, RequestRejected) else bad_request(str(error), error.code)
        await service.intake.reject(queue, seq_id, kind, rejected)
        raise rejected from None
    request_id = await service.intake.submit(queue, seq_id, kind, command, options=options, tokens=tokens)
    return json_response({"request_id": request_id, "model_id": queue.run.id})
