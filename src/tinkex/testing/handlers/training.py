"""The scripted service's training endpoints: models, and the operations that run on them in order, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from tinkex.testing.http import codec
from tinkex.testing.http.messages import Refused, Request
from tinkex.testing.model import BadData, Weights, run
from tinkex.testing.operations import Future, RunQueue
from tinkex.testing.state import Kind, Model, Sampler, State

# Old clients leave defaults out.
ADAM_LEARNING_RATE = 1e-4
LORA_DEFAULTS = {"rank": 32, "train_unembed": True, "train_mlp": True, "train_attn": True}

_KINDS: dict[str, Kind] = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}


def create_model(state: State, request: Request) -> Any:
    body = request.json
    return _accepted(_new_model(state, request, body, state.known_base(body["base_model"])).created)


def unload_model(state: State, request: Request) -> Any:
    model = state.model(request.json["model_id"])
    return _done(state, request, {"type": "unload_model", "model_id": model.id})


def get_info(state: State, request: Request) -> Any:
    model = state.model(request.json["model_id"])
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": {"arch": "tiny", "model_name": model.base_model, "tokenizer_id": state.config.tokenizer_id},
        "is_lora": True,
        "lora_rank": model.lora["rank"],
        "model_name": model.base_model,
    }


def forward(state: State, request: Request) -> Any:
    return _pass(state, request, request.json, "forward_input")


def forward_backward(state: State, request: Request) -> Any:
    if not request.is_protobuf:
        return _pass(state, request, request.json, "forward_backward_input")
    if state.config.dialect == "json":
        raise Refused(415, "this service reads JSON only", "unsupported_media_type")
    body = codec.training_from_protobuf(request.content)
    return _pass(state, request, body, "forward_input" if "forward_input" in body else "forward_backward_input")


def _pass(state: State, request: Request, body: Mapping[str, Any], key: str) -> Any:
    given = body[key]
    returned = request.headers.get("x-tinkex-custom-loss")
    data, loss_fn, config = given["data"], given["loss_fn"], given.get("loss_fn_config") or {}

    def compute(model: Model) -> Any:
        found = run(model.weights, data, loss_fn, config)
        if key == "forward_backward_input":
            model.gradient = (model.gradient or 0.0) + found.gradient
            if returned is not None:  # what the function of a custom loss returned
                model.losses.append(orjson.loads(returned)["loss"])
            elif request.headers.get("x-tinkex-pass") != "custom":
                model.losses.append(found.loss)
        outputs = [{"logprobs": tensor} for tensor in found.logprobs]
        metrics = {"loss:sum": found.loss}
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}

    return _submit(state, request, body, key.removesuffix("_input"), compute)


def optim_step(state: State, request: Request) -> Any:
    body = request.json
    params = body.get("adam_params") or body.get("optimizer_params") or {}
    learning_rate = params.get("learning_rate", ADAM_LEARNING_RATE)

    def compute(model: Model) -> Any:
        no_gradient = model.gradient is None
        if model.gradient is not None:
            model.weights = model.weights.step(model.gradient, learning_rate)
            model.gradient = None
        metrics = {"step:max": float(model.weights.steps), "no_gradient:max": float(no_gradient)}
        model.steps.append(
            {
                "seq_id": body.get("seq_id") or len(model.steps) + 1,
                "time": state.now().isoformat(),
                "loss": sum(model.losses) if model.losses else None,
                "learning_rate": learning_rate,
                "metrics": metrics,
            }
        )
        model.losses = []
        return {"type": "optim_step", "metrics": metrics}

    return _submit(state, request, body, "optim_step", compute)


def create_custom_loss(state: State, request: Request) -> Any:
    body = request.json
    return _done(state, request, {"loss_id": f"{body['session_id']}:loss:{body['custom_loss_seq_id']}"})


def save_weights(state: State, request: Request) -> Any:
    body, kind = request.json, _KINDS[request.endpoint]

    def compute(model: Model) -> Any:
        path = f"tinker://{model.id}/{kind}/{body['path']}"
        if path in state.checkpoints and body.get("overwrite") is False:
            raise BadData(f"{path} exists. Choose another name, or pass overwrite=True.")
        state.save(model, kind, body["path"], model.weights, body)
        return {"type": request.endpoint, "path": path}

    return _submit(state, request, body, request.endpoint, compute)


save_weights_external = save_weights


def save_weights_for_sampler(state: State, request: Request) -> Any:
    body = request.json
    if body.get("path") is not None:
        return save_weights(state, request)

    def compute(model: Model) -> Any:
        sampler_id = f"{model.session.id}:sample:{body['sampling_session_seq_id']}"
        state.samplers[sampler_id] = Sampler(sampler_id, model.base_model, None, model.weights)
        # No `path`: clients before 0.36 reject an ephemeral answer that has one.
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    return _submit(state, request, body, "save_weights_for_sampler", compute)


def load_weights(state: State, request: Request) -> Any:
    body = request.json
    checkpoint = state.checkpoint(body["path"])
    # Clients before 0.6 do not say: weights only, then.
    steps = checkpoint.weights.steps if body.get("optimizer") else 0

    def compute(model: Model) -> Any:
        model.weights = Weights(checkpoint.weights.skill, steps)
        model.gradient = None
        return {"type": "load_weights", "path": checkpoint.path, "model_id": model.id}

    if body.get("model_id") is not None:
        return _submit(state, request, body, "load_weights", compute)
    lora = {"lora_config": checkpoint.model.lora, **body}
    model = _new_model(state, request, lora, body.get("base_model") or checkpoint.model.base_model)
    compute(model)
    return _accepted(model.created)


def _new_model(state: State, request: Request, body: dict[str, Any], base_model: str) -> Model:
    session = state.session(body["session_id"])
    model_id = f"{session.id}:train:{body['model_seq_id']}"
    if model_id in state.models:
        return state.models[model_id]
    future = state.accept(request, request.endpoint)
    model = Model(
        id=model_id,
        session=session,
        base_model=base_model,
        lora={**LORA_DEFAULTS, **(body.get("lora_config") or {})},
        optimizer=body.get("optimizer_config") or {"type": "adamw"},
        user_metadata=body.get("user_metadata"),
        queue=RunQueue(state.config.gap_s),
        created=future,
        last_request=state.now(),
        name=(body.get("user_metadata") or {}).get("name"),
        tags=[tag.strip() for tag in (body.get("user_metadata") or {}).get("tags", "").split(",") if tag.strip()],
    )
    if future.failure is not None:
        future.finish()
        return model
    state.models[model_id] = model
    path = {"path": body["path"]} if body.get("path") else {}
    future.finish_after(future.work_s, {"type": request.endpoint, "model_id": model_id, **path})
    return model


def _submit(state: State, request: Request, body: Mapping[str, Any], op: str, compute: Callable[[Model], Any]) -> Any:
    """Accept an operation, or find its earlier attempt; it runs when its turn comes."""
    model, seq_id = state.model(body["model_id"]), body.get("seq_id")
    digest = hash(request.body)
    if seq_id in model.attempts:
        earlier, future = model.attempts[seq_id]
        if earlier != digest:
            raise Refused(
                400,
                f"model {model.id}: seq_id {seq_id} was already used with another body. "
                "Use a new seq_id for new work; a retry must repeat the same body.",
                "conflict",
            )
        return _accepted(future, model.id)
    future = state.accept(request, op)

    def execute() -> None:
        if future.failure is not None:
            future.finish()
            return
        try:
            result = compute(model)
        except BadData as error:
            future.fail(str(error))
            return
        state.executed.append((model.id, seq_id, op))
        now = asyncio.get_running_loop().time()
        model.queue.busy_until = max(model.queue.busy_until, now) + future.work_s
        future.finish_after(model.queue.busy_until - now, result)

    if seq_id is None:
        execute()
    else:
        model.attempts[seq_id] = (digest, future)
        model.queue.submit(seq_id, future, execute)
    return _accepted(future, model.id)


def _done(state: State, request: Request, result: Any) -> dict[str, str]:
    """What takes no time has its result at once, and yet it is polled for."""
    future = state.accept(request, request.endpoint)
    future.finish(result)
    return _accepted(future)


def _accepted(future: Future, model_id: str | None = None) -> dict[str, str]:
    return {"request_id": future.id, **({"model_id": model_id} if model_id else {})}
