"""Makes the body of every request.

`request` writes any request value as it was made. Other functions know more than the fields of a value: what a client
leaves out, which data go as protobuf, how a hot path is quick.

The bytes are those of the official clients: 0.4.1 for Dialect.JSON, 0.36.0 for Dialect.PROTO, keys in the same order
(golden recordings pin this). The rules are in `Dialect`; these fields have quirks of their own:

| field | quirk |
|---|---|
| create_session.user_metadata | required: None is sent as null (JSON) by hand-made requests; clients send {} |
| create_model.user_metadata, lora_config.seed | JSON clients always pass them: null is none, and a random seed |
| create_sampling_session.base_model, model_path | JSON clients always pass both; the one not meant is null |
| forward(_backward).loss_fn_config | JSON clients always pass it; null and {} mean no settings; numbers are floats |
| optim_step.adam_params | JSON: {} means all defaults. PROTO: stands last; other optimizers are optimizer_params |
| load_weights.optimizer | JSON: absent in 0.4.1, where the service decides; sent when given. PROTO: always sent |
| load_weights key order | JSON: model_id, path, seq_id. PROTO: path after the ids |
| asample.prompt_logprobs | JSON: null is sent, PROTO: dropped; both mean false |
| sampling_params.stop | absent or null keeps the model's own end tokens, [] switches them off |
| sampling_params.temperature, top_p | PROTO sends the defaults as floats (1.0) |
| options newer than 0.4.1 | JSON: sent only if they differ from their default |
| tensors | no shape: JSON leaves the key out, protobuf the field; float32 data are exactly the float32 values |
| images | PROTO has no height, width and tokens: `tokens` travels as expected_tokens |
| image asset pointers | legal in prompts of asample and in JSON training data; protobuf training data have none |
| datum spans | protobuf only; JSON has no field for them and leaves them out |
| finish.detail, set_checkpoint_ttl.ttl_seconds | null is always sent: it means no detail, and keep for ever |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from tinkex.errors import ValidationError
from tinkex.types.base import Value
from tinkex.types.inputs import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    room_of,
)
from tinkex.types.packed import unpack
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.types.training import (
    AdamParams,
    CreateModelRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
    OptimStepRequest,
)
from tinkex.types.weights import LoadWeightsRequest, SaveWeightsForSamplerRequest, SaveWeightsRequest
from tinkex.wire.body import PROTOBUF, Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.json_codec import dump, encode, reject_non_finite

if TYPE_CHECKING:
    from tinkex.types.telemetry import TelemetryEvent


def request(value: Value, dialect: Dialect) -> Body:
    """Any request value, each field absent, null or set, as its maker left it."""
    if isinstance(value, (ForwardRequest, ForwardBackwardRequest)):
        return _training_request(value, dialect)
    if isinstance(value, SampleRequest):
        fields = dump(value, dialect)
        fields["prompt"] = write_prompt(value.prompt, dialect)
        fields["sampling_params"] = _params(value.sampling_params, dialect)
        return Body(encode(fields))
    fields = dump(value, dialect)
    if isinstance(value, OptimStepRequest):
        return Body(encode(_optim_fields(fields, value.optim_params, dialect)))
    if isinstance(value, LoadWeightsRequest) and dialect is Dialect.JSON:
        fields = {name: fields[name] for name in ("model_id", "path", "seq_id") if name in fields} | fields
    return Body(encode(fields))


def _without_none(**options: Any) -> dict[str, Any]:
    """The options that were given; the others stay at their default, and in the JSON dialect off the wire."""
    return {name: value for name, value in options.items() if value is not None}


# ── The service and the session


def client_config(sdk_version: str) -> Body:
    """Also the body of client/dynamic_config."""
    return Body(encode({"sdk_version": sdk_version}))


def auth_token() -> Body:
    return Body(b"{}")


def create_session(
    tags: Iterable[str],
    user_metadata: Mapping[str, Any] | None,
    sdk_version: str,
    project_id: str | None = None,
    display_name: str | None = None,
    *,
    dialect: Dialect,
) -> Body:
    from tinkex.types.session import CreateSessionRequest

    options = _without_none(project_id=project_id, display_name=display_name)
    metadata = dict(user_metadata or {})
    value = CreateSessionRequest(tags=list(tags), user_metadata=metadata, sdk_version=sdk_version, **options)
    return request(value, dialect)


def finish_session(reason: str, detail: str | None) -> Body:
    return Body(encode({"reason": {"type": reason}, "detail": detail}))


def telemetry(
    events: Sequence[TelemetryEvent],
    platform: str,
    sdk_version: str,
    session_id: str,
    process_uuid: str,
    *,
    dialect: Dialect,
) -> Body:
    fields: dict[str, Any] = {
        "events": [dump(event, dialect) for event in events],
        "platform": platform,
        "sdk_version": sdk_version,
        "session_id": session_id,
    }
    if dialect is Dialect.PROTO:
        fields["process_uuid"] = process_uuid
    return Body(encode(fields))


# ── Training


def create_model(
    session_id: str,
    model_seq_id: int,
    base_model: str,
    lora_config: LoraConfig,
    user_metadata: Mapping[str, Any] | None = None,
    optimizer_config: OptimizerConfig | None = None,
    *,
    dialect: Dialect,
) -> Body:
    value = CreateModelRequest(
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=base_model,
        user_metadata=None if user_metadata is None else dict(user_metadata),
        lora_config=lora_config,
        **_without_none(optimizer_config=optimizer_config),
    )
    fields = dump(value, dialect)
    if optimizer_config is not None:
        # Told apart by its `type`, which therefore travels in either dialect.
        fields["optimizer_config"] = dump(optimizer_config, Dialect.PROTO)
    return Body(encode(fields))


def forward_backward(
    model_id: str,
    seq_id: int,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
    *,
    dialect: Dialect,
) -> Body:
    """One chunk of a training pass. Forward only: JSON services have an endpoint for it, protobuf bodies say so."""
    if dialect is Dialect.PROTO:
        from tinkex.wire import proto_codec

        content = proto_codec.encode_forward_backward(model_id, seq_id, data, loss_fn, loss_fn_config, forward_only)
        return Body(content, PROTOBUF)
    batch = {"data": _data(data), "loss_fn": loss_fn, "loss_fn_config": _config(loss_fn_config)}
    key = "forward_input" if forward_only else "forward_backward_input"
    reject_non_finite(batch["loss_fn_config"], "loss_fn_config")
    return Body(encode({key: batch, "model_id": model_id, "seq_id": seq_id}, is_finite=True))


def _training_request(value: ForwardRequest | ForwardBackwardRequest, dialect: Dialect) -> Body:
    is_forward = isinstance(value, ForwardRequest)
    batch = value.forward_input if isinstance(value, ForwardRequest) else value.forward_backward_input
    if dialect is Dialect.PROTO:
        seq_id = value.seq_id or 0  # the message has no way to leave it out
        config = batch.loss_fn_config
        return forward_backward(value.model_id, seq_id, batch.data, batch.loss_fn, config, is_forward, dialect=dialect)
    fields: dict[str, Any] = {"data": _data(batch.data), "loss_fn": batch.loss_fn}
    if "loss_fn_config" in batch.model_fields_set:
        fields["loss_fn_config"] = _config(batch.loss_fn_config)
    outer: dict[str, Any] = {"forward_input" if is_forward else "forward_backward_input": fields}
    outer["model_id"] = value.model_id
    if "seq_id" in value.model_fields_set:
        outer["seq_id"] = value.seq_id
    return Body(encode(outer))


def _config(config: Mapping[str, float | str] | None) -> dict[str, float | str] | None:
    if config is None:
        return None
    return {name: value if isinstance(value, str) else float(value) for name, value in config.items()}


def optim_step(model_id: str, seq_id: int, params: OptimParams, *, dialect: Dialect) -> Body:
    fields: dict[str, Any] = {"model_id": model_id, "seq_id": seq_id}
    if dialect is Dialect.PROTO:
        fields["type"] = "optim_step"
    return Body(encode(_optim_fields(fields, params, dialect)))


def _optim_fields(fields: dict[str, Any], params: OptimParams | None, dialect: Dialect) -> dict[str, Any]:
    rest = {name: value for name, value in fields.items() if name not in ("adam_params", "optim_params")}
    if not isinstance(params, AdamParams):
        assert params is not None
        return {**rest, "optimizer_params": dump(params, Dialect.PROTO)}
    if dialect is Dialect.JSON:
        return {"adam_params": dump(params, dialect), **rest}
    return {**rest, "adam_params": dump(params, dialect)}


# ── Weights


def save_weights(
    model_id: str,
    seq_id: int,
    path: str,
    ttl_seconds: int | None = None,
    overwrite: bool = False,
    user_metadata: Mapping[str, str] | None = None,
    *,
    dialect: Dialect,
) -> Body:
    options = _without_none(ttl_seconds=ttl_seconds, overwrite=overwrite or None, user_metadata=user_metadata)
    return request(SaveWeightsRequest(model_id=model_id, path=path, seq_id=seq_id, **options), dialect)


def save_weights_for_sampler(
    model_id: str,
    seq_id: int,
    path: str | None = None,
    sampling_session_seq_id: int | None = None,
    ttl_seconds: int | None = None,
    user_metadata: Mapping[str, str] | None = None,
    *,
    dialect: Dialect,
) -> Body:
    """A path makes a named checkpoint, a sampling_session_seq_id an ephemeral sampler."""
    options = _without_none(
        path=path,
        sampling_session_seq_id=sampling_session_seq_id,
        ttl_seconds=ttl_seconds,
        user_metadata=user_metadata,
    )
    return request(SaveWeightsForSamplerRequest(model_id=model_id, seq_id=seq_id, **options), dialect)


def load_weights(
    model_id: str,
    seq_id: int,
    path: str,
    optimizer: bool | None = None,
    weights_access_token: str | None = None,
    *,
    dialect: Dialect,
) -> Body:
    """Load into a model that exists. `optimizer` None leaves the choice to a JSON service; PROTO then sends False."""
    options = _without_none(optimizer=optimizer, weights_access_token=weights_access_token)
    return request(LoadWeightsRequest(model_id=model_id, path=path, seq_id=seq_id, **options), dialect)


def weights_info(tinker_path: str) -> Body:
    return Body(encode({"tinker_path": tinker_path}))


def set_checkpoint_ttl(ttl_seconds: int | None) -> Body:
    return Body(encode({"ttl_seconds": ttl_seconds}))


def update_run(changes: Mapping[str, Any]) -> Body:
    """Only what is to be changed: name, tags, archived."""
    return Body(encode(dict(changes)))


def offer_model(name: str) -> Body:
    return Body(encode({"name": name}))


def set_session_project(project_id: str) -> Body:
    return Body(encode({"project_id": project_id}))


# ── Sampling


def asample(
    prompt: ModelInput,
    num_samples: int,
    sampling_params: SamplingParams,
    *,
    sampling_session_id: str,
    seq_id: int,
    prompt_logprobs: bool | None = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    target_prompt_logprobs: TensorData | None = None,
    prompt_alt_tokens_k: int = 0,
    prompt_logprobs_last_n: int | None = None,
    record_stability_info: bool = False,
    dialect: Dialect,
) -> Body:
    """A sample of a sampling session (also the body of sample_stream); `request(SampleRequest(...))` knows other ways.

    The hot one: no value is made on the way, and the prompt's bytes are kept with the prompt.
    """
    is_proto = dialect is Dialect.PROTO
    fields: dict[str, Any] = {
        "num_samples": num_samples,
        "prompt": write_prompt(prompt, dialect),
        # On their own, because only these can hold a NaN, and a long prompt need not be searched for it.
        "sampling_params": orjson.Fragment(encode(_params(sampling_params, dialect))),
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
    }
    if not is_proto or prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs
    fields["topk_prompt_logprobs"] = topk_prompt_logprobs
    if is_proto or topk_sample_logprobs:
        fields["topk_sample_logprobs"] = topk_sample_logprobs
    if target_prompt_logprobs is not None:
        fields["target_prompt_logprobs"] = _tensor(target_prompt_logprobs, "target_prompt_logprobs")
    if is_proto or prompt_alt_tokens_k:
        fields["prompt_alt_tokens_k"] = prompt_alt_tokens_k
    if prompt_logprobs_last_n is not None:
        fields["prompt_logprobs_last_n"] = prompt_logprobs_last_n
    if is_proto or record_stability_info:
        fields["record_stability_info"] = record_stability_info
    if is_proto:
        fields["type"] = "sample"
    return Body(encode(fields, is_finite=True))


# ── Results


def retrieve_future(request_id: str, allow_metadata_only: bool = False, *, dialect: Dialect) -> Body:
    fields: dict[str, Any] = {"request_id": request_id}
    if dialect is Dialect.PROTO:
        fields["allow_metadata_only"] = allow_metadata_only
    return Body(encode(fields))


def retrieve_futures(
    sampling_session_id: str, prev_cursor: int, retrieved_request_ids: Sequence[str], cloned_sampler_id: int = 0
) -> Body:
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampling_session_id,
        "cloned_sampler_id": cloned_sampler_id,
    }
    fields = {"target": target, "prev_cursor": prev_cursor, "retrieved_request_ids": list(retrieved_request_ids)}
    return Body(encode(fields))


def cancel_future(request_id: str) -> Body:
    return Body(encode({"request_id": request_id}))


# ── Prompts, sampling parameters, datums and tensors as JSON


def write_prompt(prompt: ModelInput, dialect: Dialect) -> orjson.Fragment:
    """The JSON of a prompt, made once per prompt and dialect: prompts are sampled from many times."""
    return prompt.cached(dialect.value, lambda prompt: _model_input(prompt, dialect))


def _model_input(model_input: ModelInput, dialect: Dialect) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps({"chunks": [_chunk(chunk, dialect) for chunk in model_input.chunks]}))


def _chunk(chunk: ModelInputChunk, dialect: Dialect) -> dict[str, Any]:
    if isinstance(chunk, EncodedTextChunk):
        fields: dict[str, Any] = {"tokens": unpack("i", chunk.packed())}
        if dialect is Dialect.PROTO or "type" in chunk.model_fields_set:
            fields["type"] = "encoded_text"
        return fields
    if isinstance(chunk, (ImageChunk, ImageAssetPointerChunk)) and dialect is Dialect.PROTO:
        newer = {"height": None, "tokens": None, "width": None, "expected_tokens": room_of(chunk)}
        chunk = chunk.model_copy(update=newer)
    return dump(chunk, dialect)


_PARAMS: tuple[str, ...] = SamplingParams.__match_args__


def _params(params: SamplingParams, dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.JSON:
        given = params.model_fields_set
        return {name: getattr(params, name) for name in _PARAMS if name in given}
    fields: dict[str, Any] = {name: value for name in _PARAMS if (value := getattr(params, name)) is not None}
    # Their defaults are written as whole numbers, for the sake of their reprs.
    fields["temperature"], fields["top_p"] = float(params.temperature), float(params.top_p)
    return fields


def _data(data: Sequence[Datum]) -> list[dict[str, Any]]:
    """Datums as 0.4.1 sends them, the loss inputs first; the newer dialect has no JSON for them."""
    out = []
    for index, datum in enumerate(data):
        tensors = {
            name: _tensor(_dense(tensor), f"data[{index}].loss_fn_inputs[{name!r}]")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        # Sent once, as a rule: nothing is kept for a second time.
        out.append({"loss_fn_inputs": tensors, "model_input": _model_input(datum.model_input, Dialect.JSON)})
    return out


def _dense(tensor: TensorData) -> TensorData:
    """Services of this dialect's age know no sparse tensors."""
    if not tensor.is_sparse:
        return tensor
    return TensorData.from_list(tensor.tolist(), key="target_tokens" if tensor.dtype == "int64" else "weights")


def _tensor(tensor: TensorData, where: str) -> dict[str, Any]:
    """Return a tensor as JSON has it. The numbers become text here, so that no later step walks over them again."""
    values = unpack("q" if tensor.dtype == "int64" else "f", tensor.buffer)
    # A sum of float32 values cannot overflow a double, so it is finite if and only if all of them are.
    if tensor.dtype == "float32" and not math.isfinite(sum(values)):
        raise ValidationError(f"{where} holds NaN or an infinity, which JSON cannot carry. Mask it out before sending.")
    fields: dict[str, Any] = {"data": orjson.Fragment(orjson.dumps(values)), "dtype": tensor.dtype}
    if tensor.shape is not None:
        fields["shape"] = tensor.shape
    if tensor.sparse_crow_indices is not None:
        fields["sparse_crow_indices"] = tensor.sparse_crow_indices
        fields["sparse_col_indices"] = tensor.sparse_col_indices
    return fields
