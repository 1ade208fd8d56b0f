"""The scripted service's sessions, runs, checkpoints and account: what needs no model."""

from __future__ import annotations

import base64
import datetime as dt
from typing import Any
from uuid import uuid4

import orjson

from tinkex.testing.handlers.futures import json_response
from tinkex.testing.http.messages import Request, Response
from tinkex.testing.state import Checkpoint, Model, Refused, Session, State

OWNER = "tml:user:local"


class Account:
    """One method per endpoint; a method's name is the endpoint's."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_idempotency_key: dict[str, Any] = {}

    def client_config(self, request: Request) -> Response:
        fixed = {
            "parallel_fwdbwd_chunks": False,
            "custom_loss_server_side": False,
            "tinkex": {"version": "testing", "stream": True, "tokenizers": bool(self._state.config.tokenizers)},
        }
        return json_response(200, {**fixed, **self._state.config.client_config})

    def client_dynamic_config(self, request: Request) -> Response:
        return json_response(200, dict(self._state.config.dynamic_config))

    def auth_token(self, request: Request) -> Response:
        expires = int(self._state.config.clock.wall()) + 3600
        parts = (orjson.dumps({"alg": "none"}), orjson.dumps({"sub": OWNER, "exp": expires}), b"scripted")
        token = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        return json_response(200, {"jwt": token.decode()})

    def healthz(self, request: Request) -> Response:
        return json_response(200, {"status": "ok"})

    def get_server_capabilities(self, request: Request) -> Response:
        config = self._state.config
        about = {"max_context_length": config.max_context_length, "trainable": True, "sampleable": True}
        return json_response(200, {"supported_models": [{"model_name": name, **about} for name in config.base_models]})

    def telemetry(self, request: Request) -> Response:
        self._state.telemetry.append(request.json)
        return json_response(200, {"status": "accepted"})

    def create_session(self, request: Request) -> Response:
        body = request.json

        def create() -> dict[str, Any]:
            session = Session(
                id=str(uuid4()),
                tags=body.get("tags") or [],
                user_metadata=body.get("user_metadata") or {},
                created=self._state.now(),
                project_id=body.get("project_id"),
                display_name=body.get("display_name"),
            )
            self._state.sessions[session.id] = session
            return {"type": "create_session", "session_id": session.id}

        return json_response(200, self._once(request, create))

    def session_heartbeat(self, request: Request) -> Response:
        session = self._state.session(request.json["session_id"])
        if session.finished is not None:
            raise Refused(410, f"session {session.id} is finished", "session_finished")
        session.heartbeats += 1
        return json_response(200, {"type": "session_heartbeat"})

    def finish_session(self, request: Request) -> Response:
        self._state.session(request.parts["session_id"]).finished = request.json
        return json_response(200, {})

    def list_sessions(self, request: Request) -> Response:
        return json_response(200, {"sessions": _page(list(self._state.sessions), request, 20)[0]})

    def get_session(self, request: Request) -> Response:
        session = self._state.session(request.parts["session_id"])
        own = f"{session.id}:"
        return json_response(
            200,
            {
                "training_run_ids": [name for name in self._state.models if name.startswith(own)],
                "sampler_ids": [name for name in self._state.samplers if name.startswith(own)],
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            },
        )

    def set_session_project(self, request: Request) -> Response:
        self._state.session(request.parts["session_id"]).project_id = request.json.get("project_id")
        return json_response(200, None)

    def session_trace_export(self, request: Request) -> Response:
        session = self._state.session(request.parts["session_id"])
        return json_response(200, {"status": "failed", "error": f"no trace is kept of session {session.id}"})

    def search_sessions(self, request: Request) -> Response:
        body = request.json
        wanted = (body.get("user_metadata") or {}).items()
        found = [
            self._summary(session)
            for session in self._state.sessions.values()
            if body.get("session_id") in (None, session.id) and wanted <= session.user_metadata.items()
        ]
        return json_response(200, {"sessions": found[: body.get("limit", 50)], "next_cursor": None})

    def _summary(self, session: Session) -> dict[str, Any]:
        own = [c for c in self._state.live_checkpoints() if c.model.session is session]
        status = {"type": "client_finished", **session.finished} if session.finished else {"type": "active"}
        return {
            "session_id": session.id,
            "created_at": session.created,
            "owner": OWNER,
            "project_id": session.project_id or "default",
            "status": status,
            "checkpoints_count": len(own),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }

    def list_training_runs(self, request: Request) -> Response:
        runs, cursor = _page(list(self._state.models.values()), request, 20)
        return json_response(200, {"training_runs": [self._run(model) for model in runs], "cursor": cursor})

    def get_training_run(self, request: Request) -> Response:
        model = self._state.models.get(request.parts["run_id"])
        if model is None:
            raise Refused(404, f"training run {request.parts['run_id']!r} is not known", "unknown_run")
        return json_response(200, self._run(model))

    def run_steps(self, request: Request) -> Response:
        model = self._state.models.get(request.parts["run_id"])
        if model is None:
            raise Refused(404, f"training run {request.parts['run_id']!r} is not known", "unknown_run")
        after = int(request.query.get("after_seq_id", "-1"))
        steps = [step for step in model.steps if step["seq_id"] > after]
        return json_response(200, {"steps": steps, "next_seq_id": steps[-1]["seq_id"] if steps else after})

    def service_state(self, request: Request) -> Response:
        about = {"version": "testing", "tenant": "local", "is_ready": True}
        return json_response(200, {**about, "models": list(self._state.config.base_models)})

    def failed_operations(self, request: Request) -> Response:
        return json_response(200, {"operations": [], "cursor": {"offset": 0, "limit": 50, "total_count": 0}})

    def _run(self, model: Model) -> dict[str, Any]:
        newest = {c.kind: c for c in self._state.live_checkpoints() if c.run_id == model.id}
        last, last_sampler = newest.get("weights"), newest.get("sampler_weights")
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
            "last_request_time": model.last_request,
            "last_checkpoint": last and last.as_json(),
            "last_sampler_checkpoint": last_sampler and last_sampler.as_json(),
            "user_metadata": model.user_metadata,
        }

    def list_checkpoints(self, request: Request) -> Response:
        own = [c.as_json() for c in self._state.live_checkpoints() if c.run_id == request.parts["run_id"]]
        return json_response(200, {"checkpoints": own, "cursor": None})

    def list_user_checkpoints(self, request: Request) -> Response:
        page, cursor = _page([c.as_json() for c in self._state.live_checkpoints()], request, 100)
        return json_response(200, {"checkpoints": page, "cursor": cursor})

    def delete_checkpoint(self, request: Request) -> Response:
        del self._state.checkpoints[self._checkpoint(request).path]
        return json_response(200, None)

    def publish_checkpoint(self, request: Request) -> Response:
        self._checkpoint(request).is_public = True
        return json_response(200, None)

    def unpublish_checkpoint(self, request: Request) -> Response:
        self._checkpoint(request).is_public = False
        return json_response(200, None)

    def set_checkpoint_ttl(self, request: Request) -> Response:
        ttl_s = request.json["ttl_seconds"]
        expires = None if ttl_s is None else self._state.now() + dt.timedelta(seconds=ttl_s)
        self._checkpoint(request).expires_at = expires
        return json_response(200, None)

    def weights_info(self, request: Request) -> Response:
        model = self._state.checkpoint(request.json["tinker_path"]).model
        lora = model.lora
        flags = {name: lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        answer = {"base_model": model.base_model, "is_lora": True, "lora_rank": lora["rank"], **flags}
        return json_response(200, {**answer, "optimizer_config": model.optimizer})

    def copy_weights(self, request: Request) -> Response:
        body = request.json
        source = self._state.checkpoint(body["source_path"])

        def copy() -> dict[str, Any]:
            name = f"copy-{len(self._state.checkpoints)}-of-{source.name}"
            saved = self._state.save(source.model, source.kind, name, body.get("ttl_seconds"), source.user_metadata)
            saved.weights = source.weights
            return {"tinker_path": saved.path}

        return json_response(200, self._once(request, copy))

    def audit_log(self, request: Request) -> Response:
        return json_response(200, {"entries": []})

    def billing_usage(self, request: Request) -> Response:
        return json_response(200, {"data": []})

    def checkpoint_storage_usage(self, request: Request) -> Response:
        live = self._state.live_checkpoints()
        size = sum(c.size_bytes for c in live)
        item = {"checkpoint_count": len(live), "size_bytes": size, "size_gigabytes": size / 1e9}
        return json_response(200, {"data": [item]})

    def whoami(self, request: Request) -> Response:
        return json_response(200, {"user_urn": OWNER, "org_urn": "tml:organization:local"})

    def revoke_key(self, request: Request) -> Response:
        return json_response(200, None)

    def _checkpoint(self, request: Request) -> Checkpoint:
        return self._state.checkpoint(f"tinker://{request.parts['run_id']}/{request.parts['checkpoint_id']}")

    def _once(self, request: Request, create: Any) -> Any:
        """Attempts with one idempotency key are one creation."""
        key = request.headers.get("x-idempotency-key", "")
        if not key:
            return create()
        if key not in self._by_idempotency_key:
            self._by_idempotency_key[key] = create()
        return self._by_idempotency_key[key]


def _page(entries: list[Any], request: Request, default_limit: int) -> tuple[list[Any], dict[str, int]]:
    offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", default_limit))
    return entries[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(entries)}
