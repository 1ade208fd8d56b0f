"""The scripted service's training endpoints: models, and the operations that run on them in order, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinkex.testing.handlers.futures import Future, Result, json_response
from tinkex.testing.http import codec
from tinkex.testing.http.messages import Request, Response
from tinkex.testing.model import BadData, Weights, run
from tinkex.testing.run_queue import Conflict, RunQueue
from tinkex.testing.state import Kind, Model, Refused, Sampler, State

# Old clients leave defaults out.
ADAM_LEARNING_RATE = 1e-4
LORA_DEFAULTS = {"rank": 32, "train_unembed": True, "train_mlp": True, "train_attn": True}


class Training:
    """One method per endpoint; a method's name is the endpoint's."""

    def __init__(self, state: State) -> None:
        self._state = state

    def create_model(self, request: Request) -> Response:
        body = request.json
        return _accepted(self._new_model(request, body, self._state.known_base(body["base_model"])).created)

    def unload_model(self, request: Request) -> Response:
        model = self._state.model(request.json["model_id"])
        future = self._state.keep(Future("unload_model", request.twists, 0.0))
        future.finish(Result(lambda: {"type": "unload_model", "model_id": model.id}))
        return _accepted(future)

    def get_info(self, request: Request) -> Response:
        model = self._state.model(request.json["model_id"])
        data = {"arch": "tiny", "model_name": model.base_model, "tokenizer_id": self._state.config.tokenizer_id}
        return json_response(
            200,
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": data,
                "is_lora": True,
                "lora_rank": model.lora["rank"],
                "model_name": model.base_model,
            },
        )

    def forward(self, request: Request) -> Response:
        return self._pass(request, codec.training_input_from_json(request.json, forward_only=True))

    def forward_backward(self, request: Request) -> Response:
        if not request.is_protobuf:
            return self._pass(request, codec.training_input_from_json(request.json, forward_only=False))
        if self._state.config.dialect == "json":
            raise Refused(415, "this service reads JSON only", "unsupported_media_type")
        return self._pass(request, codec.training_input_from_protobuf(request.content))

    def _pass(self, request: Request, given: codec.TrainingInput) -> Response:
        def compute(model: Model) -> Result:
            found = run(model.weights, given.rows(), given.loss_fn, given.config)
            if not given.forward_only:
                model.gradient = (model.gradient or 0.0) + found.gradient
                model.losses.append(found.loss)
            return Result(lambda: codec.pass_to_json(found), lambda: codec.pass_to_protobuf(found))

        op = "forward" if given.forward_only else "forward_backward"
        return self._submit(request, given.model_id, given.seq_id, op, compute)

    def optim_step(self, request: Request) -> Response:
        body = request.json
        params = body.get("adam_params") or body.get("optimizer_params") or {}
        learning_rate = params.get("learning_rate", ADAM_LEARNING_RATE)

        def compute(model: Model) -> Result:
            metrics = {"step:max": float(model.weights.steps), "no_gradient:max": 1.0}
            if model.gradient is not None:
                model.weights = model.weights.step(model.gradient, learning_rate)
                model.gradient = None
                metrics = {"step:max": float(model.weights.steps), "no_gradient:max": 0.0}
            model.steps.append(
                {
                    "seq_id": body.get("seq_id") or len(model.steps) + 1,
                    "time": self._state.now().isoformat(),
                    "loss": sum(model.losses) if model.losses else None,
                    "learning_rate": learning_rate,
                    "metrics": metrics,
                }
            )
            model.losses = []
            return Result(lambda: {"type": "optim_step", "metrics": metrics})

        return self._submit(request, body["model_id"], body.get("seq_id"), "optim_step", compute)

    def create_custom_loss(self, request: Request) -> Response:
        body = request.json
        loss_id = f"{body['session_id']}:loss:{body['custom_loss_seq_id']}"
        future = self._state.keep(Future("create_custom_loss", request.twists, 0.0))
        future.finish(Result(lambda: {"loss_id": loss_id}))
        return _accepted(future)

    def save_weights(self, request: Request) -> Response:
        return self._save(request, "weights")

    def save_weights_external(self, request: Request) -> Response:
        return self._save(request, "external_weights")

    def save_weights_for_sampler(self, request: Request) -> Response:
        body = request.json
        if body.get("path") is not None:
            return self._save(request, "sampler_weights")

        def compute(model: Model) -> Result:
            sampler_id = f"{model.session.id}:sample:{body['sampling_session_seq_id']}"
            self._state.samplers[sampler_id] = Sampler(sampler_id, model.base_model, None, model.weights)
            # No `path`: clients before 0.36 reject an ephemeral answer that has one.
            return Result(lambda: {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        return self._submit(request, body["model_id"], body.get("seq_id"), "save_weights_for_sampler", compute)

    def _save(self, request: Request, kind: Kind) -> Response:
        body = request.json
        state = self._state

        def compute(model: Model) -> Result:
            path = f"tinker://{model.id}/{kind}/{body['path']}"
            if path in state.checkpoints and body.get("overwrite") is False:
                raise BadData(f"{path} exists. Choose another name, or pass overwrite=True.")
            saved = state.save(model, kind, body["path"], body.get("ttl_seconds"), body.get("user_metadata"))
            return Result(lambda: {"type": request.endpoint, "path": saved.path})

        return self._submit(request, body["model_id"], body.get("seq_id"), request.endpoint, compute)

    def load_weights(self, request: Request) -> Response:
        body = request.json
        checkpoint = self._state.checkpoint(body["path"])
        # Clients before 0.6 do not say: weights only, then.
        steps = checkpoint.weights.steps if body.get("optimizer") else 0

        def compute(model: Model) -> Result:
            model.weights = Weights(checkpoint.weights.skill, steps)
            model.gradient = None
            return Result(lambda: {"type": "load_weights", "path": checkpoint.path, "model_id": model.id})

        if body.get("model_id") is not None:
            return self._submit(request, body["model_id"], body.get("seq_id"), "load_weights", compute)
        lora = {"lora_config": checkpoint.model.lora, **body}
        model = self._new_model(request, lora, body.get("base_model") or checkpoint.model.base_model)
        compute(model)
        return _accepted(model.created)

    def _new_model(self, request: Request, body: dict[str, Any], base_model: str) -> Model:
        state = self._state
        session = state.session(body["session_id"])
        model_id = f"{session.id}:train:{body['model_seq_id']}"
        if model_id in state.models:
            return state.models[model_id]
        future = state.keep(Future(request.endpoint, request.twists, state.config.work_s))
        model = Model(
            id=model_id,
            session=session,
            base_model=base_model,
            lora={**LORA_DEFAULTS, **(body.get("lora_config") or {})},
            optimizer=body.get("optimizer_config") or {"type": "adamw"},
            user_metadata=body.get("user_metadata"),
            queue=RunQueue(state.config.gap_s, state.loop.call_later),
            created=future,
            last_request=state.now(),
        )
        if future.failure is not None:
            future.finish(None)
            return model
        state.models[model_id] = model
        path = body.get("path")
        result = {"type": request.endpoint, "model_id": model_id, **({"path": path} if path else {})}
        state.finish_after(future, Result(lambda: result), future.work_s)
        return model

    def _submit(
        self, request: Request, model_id: str, seq_id: int | None, op: str, compute: Callable[[Model], Result]
    ) -> Response:
        state = self._state
        model = state.model(model_id)
        digest = hash(request.body)
        if seq_id is not None:
            try:
                earlier = model.queue.find(seq_id, digest)
            except Conflict as error:
                raise Refused(400, f"model {model_id}: {error}", "conflict") from None
            if earlier is not None:
                return _accepted(earlier, model_id)
        future = state.keep(Future(op, request.twists, state.config.work_s))

        def execute() -> None:
            if future.failure is not None:
                future.finish(None)
                return
            try:
                result = compute(model)
            except BadData as error:
                future.fail(str(error), "user")
                return
            state.executed.append((model.id, seq_id, op))
            now = state.loop.time()
            model.queue.busy_until = max(model.queue.busy_until, now) + future.work_s
            state.finish_after(future, result, model.queue.busy_until - now)

        if seq_id is None:
            execute()
        else:
            model.queue.submit(seq_id, digest, future, execute)
        return _accepted(future, model_id)


def _accepted(future: Future, model_id: str | None = None) -> Response:
    return json_response(200, {"request_id": future.id, **({"model_id": model_id} if model_id else {})})
