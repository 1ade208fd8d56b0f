"""Models and the operations that run on them: decoded, checked, turned into the engine's command, journaled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import isfinite
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.frames import Frame
from tinkex.engine.messages import pass_frame
from tinkex.errors import ValidationError
from tinkex.server.http.errors import Refused, answer, bad, not_found
from tinkex.server.http.lookup import metadata_in, own_session, text_in, ttl_in
from tinkex.server.http.requests import (
    IN_THREAD_BYTES,
    body_of,
    content_of,
    decode_object,
    object_of,
    read_as,
    service_of,
    tenant_of,
)
from tinkex.server.service import Service
from tinkex.server.training.checks import check_data, check_name
from tinkex.server.training.run_queue import RunQueue
from tinkex.store.records import Run
from tinkex.types.training import ForwardBackwardRequest, ForwardRequest, LoraConfig
from tinkex.types.weights import ParsedCheckpointTinkerPath
from tinkex.wire import proto_codec
from tinkex.wire.body import PROTOBUF

MAX_RANK = 1024
ADAM = {
    "learning_rate": (1e-4, 0.0, 1e6),
    "beta1": (0.9, 0.0, 1.0),
    "beta2": (0.95, 0.0, 1.0),
    "eps": (1e-12, 0.0, 1.0),
    "weight_decay": (0.0, 0.0, 1e6),
    "grad_clip_norm": (0.0, 0.0, 1e12),
}
"""Name → default (old clients leave them out), least, most."""


async def create_model(request: Request) -> Response:
    service, tenant, body = service_of(request), tenant_of(request), await body_of(request)
    info = service.catalog.find(body.get("base_model"))
    optimizer = (object_of(body, "optimizer_config") or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise bad(f"The optimizer {str(optimizer)[:50]!r} is not offered here; adamw is.", "not_offered")
    lora = read_as(LoraConfig, {"rank": 32, **(object_of(body, "lora_config") or {})})
    if not 1 <= lora.rank <= MAX_RANK:
        raise bad(f"rank must be from 1 to {MAX_RANK}, not {lora.rank}.", "bad_rank")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise bad("Nothing to train: set train_attn, train_mlp or train_unembed.", "nothing_to_train")
    run = await _new_run(service, tenant, body, info.name, lora.rank, lora.seed, lora)
    return await _created(service, run, "create_model", {"seed": lora.seed})


async def _new_run(
    service: Service, tenant: str, body: dict[str, Any], base: str, rank: int, seed: int | None, flags: Any
) -> Run:
    session, number = await own_session(service, tenant, text_in(body, "session_id")), body.get("model_seq_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise bad(f"model_seq_id must be a whole number from 0 on, got {str(number)[:50]!r}.", "bad_seq_id")
    now = service.clock.wall()
    return Run(
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
        user_metadata=metadata_in(body) or None,
    )


async def _created(service: Service, run: Run, kind: str, options: dict[str, Any]) -> Response:
    request_id = await service.intake.create(run, kind, options)
    return answer({"request_id": request_id, "model_id": run.id})


async def unload_model(request: Request) -> Response:
    service, body = service_of(request), await body_of(request)
    lane = await service.intake.run_queue(tenant_of(request), body.get("model_id"))
    return await _submit(service, lane, body, "unload_model", lambda: (b"", {}, 0))


async def forward(request: Request) -> Response:
    return await _pass(request, "forward")


async def forward_backward(request: Request) -> Response:
    return await _pass(request, "forward_backward")


async def _pass(request: Request, kind: str) -> Response:
    """Forward, with or without backward. Protobuf bodies say themselves which of the two."""
    service, tenant, content = service_of(request), tenant_of(request), await content_of(request)
    is_protobuf = PROTOBUF in request.headers.get("content-type", "").lower()
    read = _read_protobuf if is_protobuf else _read_json
    given = await asyncio.to_thread(read, content, kind) if len(content) > IN_THREAD_BYTES else read(content, kind)
    if given.problem is not None and given.model_id is None:
        raise given.problem  # it is not known whose it is
    lane = await service.intake.run_queue(tenant, given.model_id)
    model = service.catalog.find(lane.run.base_model)

    def make() -> tuple[bytes, dict[str, Any], int]:
        if given.problem is not None:
            raise given.problem
        batch = given.batch
        tokens = check_data(batch.data, batch.loss_fn, batch.loss_fn_config, model)
        frame = pass_frame(given.kind, lane.run.id, batch.data, batch.loss_fn, batch.loss_fn_config)
        return frame.encode(), {}, tokens

    fields = {"seq_id": given.seq_id}
    return await _submit(service, lane, fields, given.kind, make, in_thread=len(content) > IN_THREAD_BYTES)


class _Given:
    """A pass as it came in. What is wrong with its data is kept: the run must hear that its number arrived."""

    __slots__ = ("batch", "kind", "model_id", "problem", "seq_id")

    def __init__(self, kind: str, model_id: object, seq_id: object) -> None:
        self.kind, self.model_id, self.seq_id = kind, model_id, seq_id
        self.batch: Any = None
        self.problem: Refused | None = None


def _read_protobuf(content: bytes, kind: str) -> _Given:
    try:
        request = proto_codec.decode_forward_backward_request(content)
    except ValidationError as problem:
        given = _Given(kind, *proto_codec.peek_forward_backward_request(content))
        given.problem = bad(str(problem), "invalid")
        return given
    is_forward = isinstance(request, ForwardRequest)
    given = _Given("forward" if is_forward else "forward_backward", request.model_id, request.seq_id)
    given.batch = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
    return given


def _read_json(content: bytes, kind: str) -> _Given:
    body = decode_object(content)
    given = _Given(kind, body.get("model_id"), body.get("seq_id"))
    try:
        if kind == "forward":
            given.batch = read_as(ForwardRequest, body).forward_input
        else:
            given.batch = read_as(ForwardBackwardRequest, body).forward_backward_input
    except Refused as problem:
        given.problem = problem
    return given


async def optim_step(request: Request) -> Response:
    service, body = service_of(request), await body_of(request)
    lane = await service.intake.run_queue(tenant_of(request), body.get("model_id"))

    def make() -> tuple[bytes, dict[str, Any], int]:
        command = {"op": "optim_step", "adapter": lane.run.id, **_adam(body)}
        return Frame(command).encode(), {}, 0

    return await _submit(service, lane, body, "optim_step", make)


def _adam(body: dict[str, Any]) -> dict[str, float]:
    other = object_of(body, "optimizer_params")
    if other is not None and other.get("type", "adamw") != "adamw":
        raise bad(f"The optimizer {str(other.get('type'))[:50]!r} is not offered here; adamw is.", "not_offered")
    given = object_of(body, "adam_params") or other or {}
    params = {}
    for name, (default, low, high) in ADAM.items():
        value = given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise bad(f"adam_params.{name} must be a number, not {str(value)[:50]!r}.", "bad_adam_params")
        if not low <= value <= high or (name.startswith("beta") and value >= 1):
            raise bad(f"adam_params.{name} must be from {low:g} to {high:g}, not {value}.", "bad_adam_params")
        params[name] = float(value)
    return params


async def save_weights(request: Request) -> Response:
    return await _save(request, "save_weights")


async def save_weights_external(request: Request) -> Response:
    return await _save(request, "save_weights_external")


async def save_weights_for_sampler(request: Request) -> Response:
    return await _save(request, "save_weights_for_sampler")


async def _save(request: Request, kind: str) -> Response:
    service, body = service_of(request), await body_of(request)
    lane = await service.intake.run_queue(tenant_of(request), body.get("model_id"))

    def make() -> tuple[bytes, dict[str, Any], int]:
        if body.get("age_encryption_recipients"):
            raise bad("age encryption is not offered here. Encrypt the files after the download.", "not_offered")
        number = body.get("sampling_session_seq_id")
        if kind == "save_weights_for_sampler" and body.get("path") is None and number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
                raise bad("sampling_session_seq_id must be a whole number from 0 on.", "bad_seq_id")
            return b"", {"sampling_session_seq_id": number}, 0
        options = {
            "name": check_name(body.get("path")),
            "overwrite": body.get("overwrite"),
            "ttl_seconds": ttl_in(body),
            "user_metadata": metadata_in(body) or None,
        }
        return b"", options, 0

    return await _submit(service, lane, body, kind, make)


async def load_weights(request: Request) -> Response:
    service, tenant, body = service_of(request), tenant_of(request), await body_of(request)
    if body.get("model_id") is None and body.get("session_id") is not None:
        return await _create_from(service, tenant, body)
    lane = await service.intake.run_queue(tenant, body.get("model_id"))
    return await _submit(service, lane, body, "load_weights", lambda: (b"", _load_options(body), 0))


def _load_options(body: dict[str, Any]) -> dict[str, Any]:
    path = body.get("path")
    if not isinstance(path, str):
        raise bad("path is missing: the tinker:// path of a checkpoint.", "bad_path")
    ParsedCheckpointTinkerPath.from_tinker_path(path)
    # Clients before 0.6 do not say: weights only, then.
    return {"path": path, "optimizer": body.get("optimizer") is True}


async def _create_from(service: Service, tenant: str, body: dict[str, Any]) -> Response:
    """A new run that begins with saved weights, in one request."""
    options = _load_options(body)
    source = await service.db(service.store.get_checkpoint, options["path"])
    if source is None or not (source.tenant == tenant or source.is_public):
        raise not_found("checkpoint", options["path"])
    base = service.catalog.find(source.base_model).name
    run = await _new_run(service, tenant, body, base, source.rank, 0, source)
    return await _created(service, run, "load_model", options)


async def _submit(
    service: Service,
    lane: RunQueue,
    fields: dict[str, Any],
    kind: str,
    make: Callable[[], tuple[bytes, dict[str, Any], int]],
    *,
    in_thread: bool = False,
) -> Response:
    """Make the command. A number whose content is refused counts as arrived: the next one does not wait for it."""
    seq_id = fields.get("seq_id")
    try:
        command, options, tokens = await asyncio.to_thread(make) if in_thread else make()
    except (Refused, ValidationError) as problem:
        refused = problem if isinstance(problem, Refused) else bad(str(problem), "invalid")
        await service.intake.reject(lane, seq_id, kind, refused)
        raise refused from None
    request_id = await service.intake.submit(lane, seq_id, kind, command, options=options, tokens=tokens)
    return answer({"request_id": request_id, "model_id": lane.run.id})
