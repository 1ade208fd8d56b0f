"""Endpoints for models and training operations: decode, check, build the engine's command, hand it to the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.responses import Response

from tinkex.engine.contract import pass_frame
from tinkex.engine.frames import Frame
from tinkex.errors import ValidationError
from tinkex.rules import checkpoint_names, ranges
from tinkex.rules.run_names import name_in, printable_name, tags_in
from tinkex.server.http.errors import RequestRejected, bad_request, json_response
from tinkex.server.http.fields import (
    DatumReader,
    optional_object,
    parse_as,
    parse_json_object,
    parse_json_pass,
    parse_metadata,
    require_seq,
    require_text,
)
from tinkex.server.http.requests import IN_THREAD_BYTES, ApiRequest
from tinkex.server.service import Service
from tinkex.server.training.checks import check_data, count_targets
from tinkex.server.training.pass_notes import optimizer_options, pass_options
from tinkex.server.training.run_queue import RunQueue
from tinkex.store.records import CheckpointRecord, RunRecord, lora_of
from tinkex.types.inputs import Datum
from tinkex.types.training import AdamParams, ForwardBackwardRequest, ForwardRequest, LoraConfig
from tinkex.types.weights import ParsedCheckpointTinkerPath
from tinkex.wire import proto_codec
from tinkex.wire.body import PROTOBUF
from tinkex.wire.scan import fields_before

MAX_FIELDS = 100_000
"""Chunks, inputs of the loss and spans of all datums of a protobuf body. A datum of text has three or four."""
MAX_ELEMENTS = 1 << 21
"""Fields and numbers inside of those, as `wire.scan` bounds them. An input of the loss counts some ten, so that 1,024
datums with seven inputs have 70,000. As extents of one shape this many take 32 MB."""
ADAM_DEFAULTS = AdamParams().model_dump()
"""Old clients leave settings out."""


class OperationContent(NamedTuple):
    """The content of an operation: the command for the engine, and what the server needs besides it."""

    command: bytes = b""
    options: dict[str, Any] | None = None
    tokens: int = 0
    targets: int = 0
    """Log-probabilities that a pass returns."""


async def create_model(request: ApiRequest) -> Response:
    body = await request.read_json()
    info = request.service.catalog.find(body.get("base_model"))
    optimizer = (optional_object(body, "optimizer_config") or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise bad_request(f"The optimizer {str(optimizer)[:50]!r} is not offered here; adamw is.", "not_offered")
    lora = parse_as(LoraConfig, {"rank": 32, **(optional_object(body, "lora_config") or {})})
    ranges.check_lora(**lora_of(lora), model=info.name, hidden_size=info.hidden_size)
    # Any whole number is a seed, as it is of a sample. The journal has 64 bits for it.
    seed = None if lora.seed is None else lora.seed % (1 << 63)
    return await _create(request, body, "create_model", {"seed": seed}, info.name, seed, lora)


async def _create(
    request: ApiRequest,
    body: dict[str, Any],
    kind: str,
    options: dict[str, Any],
    base: str,
    seed: int | None,
    lora: LoraConfig | CheckpointRecord,
) -> Response:
    """Submit the creation of a run, with the layers and the rank of `lora`."""
    session = await request.find_session(require_text(body, "session_id"))
    number, now = require_seq(body, "model_seq_id"), request.service.clock.wall()
    metadata = parse_metadata(body)
    run = RunRecord(
        id=f"{session.id}:train:{number}",
        tenant=request.tenant,
        session_id=session.id,
        base_model=base,
        **lora_of(lora),
        # Without a seed it is the run's number in its session: the same program gives the same numbers twice.
        seed=number if seed is None else seed,
        created_at=now,
        last_request_at=now,
        user_metadata=metadata or None,
        name=name_in(metadata) or printable_name(session.display_name),
        tags=tags_in(metadata),
    )
    request_id = await request.service.intake.create(run, kind, options)
    return json_response({"request_id": request_id, "model_id": run.id})


async def unload_model(request: ApiRequest) -> Response:
    return await _operation(request, await request.read_json(), "unload_model", lambda queue: OperationContent())


async def forward(request: ApiRequest) -> Response:
    return await _pass(request, "forward")


async def forward_backward(request: ApiRequest) -> Response:
    return await _pass(request, "forward_backward")


async def _pass(request: ApiRequest, kind: str) -> Response:
    """Submit a forward pass, with or without backward. A protobuf body says which of the two it is."""
    service, content = request.service, await request.read_body()
    is_protobuf = PROTOBUF in request.headers.get("content-type", "").lower()
    read, is_large = _read_protobuf if is_protobuf else _read_json, len(content) > IN_THREAD_BYTES
    decoded = await asyncio.to_thread(read, content, kind) if is_large else read(content, kind)
    if decoded.error is not None and decoded.model_id is None:
        raise decoded.error  # its run is unknown
    queue = await service.intake.run_queue(request.tenant, decoded.model_id)
    model = service.catalog.find(queue.run.base_model)

    def make(queue: RunQueue) -> OperationContent:
        if decoded.error is not None:
            raise decoded.error
        batch, is_forward = decoded.batch, decoded.kind == "forward"
        tokens = check_data(batch.data, batch.loss_fn, batch.loss_fn_config, model, is_forward=is_forward)
        targets = count_targets(batch.data)
        service.ledger.check("max_targets", targets, f"The call asks for {targets} log-probabilities")
        frame = pass_frame(decoded.kind, queue.run.id, batch.data, batch.loss_fn, batch.loss_fn_config)
        return OperationContent(frame.encode(), pass_options(batch, request.headers), tokens, targets)

    return await _submit(service, queue, decoded.seq_id, decoded.kind, make, in_thread=is_large)


@dataclass(slots=True)
class _PassRequest:
    """A decoded pass. An error in its data is stored, because the run must learn that its number arrived."""

    kind: str
    model_id: object
    seq_id: object
    batch: Any = None
    error: RequestRejected | None = None


def _read_protobuf(content: bytes, kind: str) -> _PassRequest:
    try:
        proto_codec.check_forward_backward_request(content, ranges.MAX_DATUMS, MAX_FIELDS, MAX_ELEMENTS)
    except ValidationError as error:  # nothing of such a body is read but its envelope, so that its run is told
        envelope = fields_before(content, proto_codec.DATUMS)
        model_id, seq_id = proto_codec.peek_forward_backward_request(envelope)
        return _PassRequest(kind, model_id or None, seq_id, error=RequestRejected(413, str(error), error.code))
    try:
        request = proto_codec.decode_forward_backward_request(content)
    except ValidationError as error:
        model_id, seq_id = proto_codec.peek_forward_backward_request(content)
        return _PassRequest(kind, model_id, seq_id, error=bad_request(str(error), error.code))
    if isinstance(request, ForwardRequest):
        return _PassRequest("forward", request.model_id, request.seq_id, request.forward_input)
    return _PassRequest("forward_backward", request.model_id, request.seq_id, request.forward_backward_input)


def _read_json(content: bytes, kind: str) -> _PassRequest:
    name = "forward_input" if kind == "forward" else "forward_backward_input"
    error = None
    if len(content) > IN_THREAD_BYTES:
        body, error = parse_json_pass(content, name, DatumReader(Datum))
    else:
        body = parse_json_object(content)
    decoded = _PassRequest(kind, body.get("model_id"), body.get("seq_id"), error=error)
    if error is not None:
        return decoded
    try:
        if kind == "forward":
            decoded.batch = parse_as(ForwardRequest, body).forward_input
        else:
            decoded.batch = parse_as(ForwardBackwardRequest, body).forward_backward_input
    except RequestRejected as error:
        decoded.error = error
    return decoded


async def optim_step(request: ApiRequest) -> Response:
    body = await request.read_json()

    def make(queue: RunQueue) -> OperationContent:
        params = _adam(body)
        frame = Frame({"op": "optim_step", "adapter": queue.run.id, **params})
        return OperationContent(frame.encode(), optimizer_options(params, ADAM_DEFAULTS))

    return await _operation(request, body, "optim_step", make)


def _adam(body: dict[str, Any]) -> dict[str, float]:
    other = optional_object(body, "optimizer_params")
    if other is not None and other.get("type", "adamw") != "adamw":
        raise bad_request(
            f"The optimizer {str(other.get('type'))[:50]!r} is not offered here; adamw is.", "not_offered"
        )
    given = optional_object(body, "adam_params") or other or {}
    params = {name: default if given.get(name) is None else given[name] for name, default in ADAM_DEFAULTS.items()}
    ranges.check_adamw(params)
    return {name: float(value) for name, value in params.items()}


async def save_weights(request: ApiRequest) -> Response:
    return await _save(request, "save_weights")


async def save_weights_external(request: ApiRequest) -> Response:
    return await _save(request, "save_weights_external")


async def save_weights_for_sampler(request: ApiRequest) -> Response:
    return await _save(request, "save_weights_for_sampler")


async def _save(request: ApiRequest, kind: str) -> Response:
    body = await request.read_json()
    return await _operation(request, body, kind, lambda queue: OperationContent(options=_save_options(body, kind)))


def _save_options(body: dict[str, Any], kind: str) -> dict[str, Any]:
    if body.get("age_encryption_recipients"):
        raise bad_request("age encryption is not offered here. Encrypt the files after the download.", "not_offered")
    number = body.get("sampling_session_seq_id")
    if kind == "save_weights_for_sampler" and body.get("path") is None and number is not None:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
            raise bad_request("sampling_session_seq_id must be a whole number from 0 on.", "bad_seq_id")
        return {"sampling_session_seq_id": number}
    return {
        "name": checkpoint_names.check_name(body.get("path")),
        "overwrite": body.get("overwrite"),
        "ttl_seconds": checkpoint_names.check_ttl(body.get("ttl_seconds")),
        "user_metadata": parse_metadata(body) or None,
    }


async def load_weights(request: ApiRequest) -> Response:
    """Load weights into a run, or create a run from them, in one request."""
    body = await request.read_json()
    if body.get("model_id") is not None or body.get("session_id") is None:
        return await _operation(
            request, body, "load_weights", lambda queue: OperationContent(options=_load_options(body))
        )
    options = _load_options(body)
    source = await request.find_readable_checkpoint(options["path"])
    base = request.service.catalog.find(source.base_model).name
    return await _create(request, body, "load_model", options, base, 0, source)


def _load_options(body: dict[str, Any]) -> dict[str, Any]:
    path = body.get("path")
    if not isinstance(path, str):
        raise bad_request("path is missing: the tinker:// path of a checkpoint.", "bad_path")
    ParsedCheckpointTinkerPath.from_tinker_path(path)
    # Clients before 0.6 do not send it: load only the weights then.
    return {"path": path, "optimizer": body.get("optimizer") is True}


async def _operation(
    request: ApiRequest, body: dict[str, Any], kind: str, make: Callable[[RunQueue], OperationContent]
) -> Response:
    """Submit an operation on the run that a JSON body names."""
    queue = await request.service.intake.run_queue(request.tenant, body.get("model_id"))
    return await _submit(request.service, queue, body.get("seq_id"), kind, make)


async def _submit(
    service: Service,
    queue: RunQueue,
    seq_id: Any,
    kind: str,
    make: Callable[[RunQueue], OperationContent],
    *,
    in_thread: bool = False,
) -> Response:
    """Make the content of an operation and submit it: every operation of every run comes through here.

    A sequence number whose content is rejected counts as arrived, so that the next one does not wait for it.
    """
    try:
        content = await asyncio.to_thread(make, queue) if in_thread else make(queue)
    except (RequestRejected, ValidationError) as error:
        rejected = error if isinstance(error, RequestRejected) else bad_request(str(error), error.code)
        await service.intake.reject(queue, seq_id, kind, rejected)
        raise rejected from None
    request_id = await service.intake.submit(
        queue, seq_id, kind, content.command, options=content.options, tokens=content.tokens, targets=content.targets
    )
    return json_response({"request_id": request_id, "model_id": queue.run.id})
