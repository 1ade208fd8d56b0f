"""The scripted service's sessions, runs, checkpoints and account: what needs no model."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import orjson

from tinkex.testing.http.messages import Refused, Request, Response
from tinkex.testing.state import Model, Session, State, known

OWNER = "tml:user:local"


def _always(answer: Any) -> Callable[[State, Request], Any]:
    return lambda state, request: answer


healthz = _always({"status": "ok"})
whoami = _always({"user_urn": OWNER, "org_urn": "tml:organization:local"})
revoke_key = _always(None)
audit_log = _always({"entries": []})
billing_usage = _always({"data": []})
failed_operations = _always({"operations": [], "cursor": {"offset": 0, "limit": 50, "total_count": 0}})


def client_config(state: State, request: Request) -> Any:
    return {
        "parallel_fwdbwd_chunks": False,
        "custom_loss_server_side": False,
        "tinkex": {
            "version": "testing",
            "stream": True,
            "tokenizers": bool(state.config.tokenizers),
            "run_records": "log_metrics" not in state.config.missing,
        },
        **state.config.client_config,
    }


def client_dynamic_config(state: State, request: Request) -> Any:
    return dict(state.config.dynamic_config)


def auth_token(state: State, request: Request) -> Any:
    expires = int(state.config.clock.wall()) + 3600
    parts = (orjson.dumps({"alg": "none"}), orjson.dumps({"sub": OWNER, "exp": expires}), b"scripted")
    token = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    return {"jwt": token.decode()}


def get_server_capabilities(state: State, request: Request) -> Any:
    about = {"max_context_length": state.config.max_context_length, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name, **about} for name in state.config.base_models]}


def service_state(state: State, request: Request) -> Any:
    return {"version": "testing", "tenant": "local", "is_ready": True, "models": list(state.config.base_models)}


def offer_model(state: State, request: Request) -> Any:
    return {"model_name": request.json["name"]}


withdraw_model = _always(None)


def telemetry(state: State, request: Request) -> Any:
    state.telemetry.append(request.json)
    return {"status": "accepted"}


def create_session(state: State, request: Request) -> Any:
    body = request.json

    def create() -> dict[str, str]:
        session = Session(
            id=str(uuid4()),
            tags=body.get("tags") or [],
            user_metadata=body.get("user_metadata") or {},
            created=state.now(),
            project_id=body.get("project_id"),
            display_name=body.get("display_name"),
        )
        state.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    return state.once(request, create)


def session_heartbeat(state: State, request: Request) -> Any:
    session = state.session(request.json["session_id"])
    if session.finished is not None:
        raise Refused(410, f"session {session.id} is finished", "session_finished")
    session.heartbeats += 1
    return {"type": "session_heartbeat"}


def finish_session(state: State, request: Request) -> Any:
    state.session(request.parts["session_id"]).finished = request.json
    return {}


def list_sessions(state: State, request: Request) -> Any:
    return {"sessions": _page(list(state.sessions), request, 20)[0]}


def get_session(state: State, request: Request) -> Any:
    session = state.session(request.parts["session_id"])
    own = f"{session.id}:"
    return {
        "training_run_ids": [name for name in state.models if name.startswith(own)],
        "sampler_ids": [name for name in state.samplers if name.startswith(own)],
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def set_session_project(state: State, request: Request) -> Any:
    state.session(request.parts["session_id"]).project_id = request.json.get("project_id")


def session_trace_export(state: State, request: Request) -> Any:
    session = state.session(request.parts["session_id"])
    return {"status": "failed", "error": f"no trace is kept of session {session.id}"}


def search_sessions(state: State, request: Request) -> Any:
    body = request.json
    wanted = (body.get("user_metadata") or {}).items()
    found = [
        _session_summary(state, session)
        for session in state.sessions.values()
        if body.get("session_id") in (None, session.id) and wanted <= session.user_metadata.items()
    ]
    return {"sessions": found[: body.get("limit", 50)], "next_cursor": None}


def _session_summary(state: State, session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "created_at": session.created,
        "owner": OWNER,
        "project_id": session.project_id or "default",
        "status": {"type": "client_finished", **session.finished} if session.finished else {"type": "active"},
        "checkpoints_count": sum(c.model.session is session for c in state.live_checkpoints()),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }


def list_training_runs(state: State, request: Request) -> Any:
    """Filters by words, tag and archive; the real service has more."""
    archived, words = request.query.get("archived", "no"), request.query.get("q", "").lower().split()
    tag = request.query.get("tag")
    matches = [
        model
        for model in state.models.values()
        if archived == "all" or (model.archived is not None) == (archived == "only")
        if tag is None or tag in model.tags
        if all(word in f"{model.name} {model.id} {model.base_model} {model.tags}".lower() for word in words)
    ]
    runs, cursor = _page(matches, request, 20)
    return {"training_runs": [_run(state, model) for model in runs], "cursor": cursor}


def get_training_run(state: State, request: Request) -> Any:
    return _run(state, known(state.models, request.parts["run_id"], "training run", "unknown_run"))


def find_training_run(state: State, request: Request) -> Any:
    """By id, path, `latest`, name, or the beginning of an id."""
    text = request.query.get("run", "").removeprefix("tinker://").partition("/")[0]
    newest = list(state.models.values())[::-1]
    found = [model for model in newest if text in (model.id, model.name, "latest")][:1]
    found = found or [model for model in newest if len(text) >= 4 and model.id.startswith(text)]
    if len(found) > 1:
        raise Refused(400, f"Several training runs begin with {text!r}", "ambiguous_run")
    if not found:
        raise Refused(404, f"training run {text!r} is not known", "unknown_run")
    return _run(state, found[0])


def update_training_run(state: State, request: Request) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    body = request.json
    model.name, model.tags = body.get("name", model.name), body.get("tags", model.tags)
    if "archived" in body:
        model.archived = state.now() if body["archived"] else None
    return _run(state, model)


def delete_training_run(state: State, request: Request) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    saved = [path for path, checkpoint in state.checkpoints.items() if checkpoint.model is model]
    if saved and request.query.get("force") != "true":
        raise Refused(409, f"the run has checkpoints: {', '.join(saved)}", "run_in_use")
    for path in saved:
        del state.checkpoints[path]
    del state.models[model.id]
    return {"training_run_id": model.id, "checkpoints": saved, "samplers": 0, "operations": len(model.attempts)}


def run_steps(state: State, request: Request) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    after = int(request.query.get("after_seq_id", "-1"))
    steps = [step for step in model.steps if step["seq_id"] > after]
    return {"steps": steps, "next_seq_id": steps[-1]["seq_id"] if steps else after}


def log_metrics(state: State, request: Request) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    entries, samples = request.json.get("entries", []), request.json.get("samples", [])
    key = request.headers.get("x-idempotency-key")
    if key is None or key not in model.log_keys:
        for rows, kept in ((entries, model.log_entries), (samples, model.log_samples)):
            kept += [{**row, "time": _iso(row["time"]), "number": len(kept) + n} for n, row in enumerate(rows, 1)]
        model.log_keys.add(key or "")
    return {"entries": len(entries), "samples": len(samples)}


def run_metrics(state: State, request: Request) -> Any:
    return _logged(state, request, "entries", lambda model: model.log_entries)


def run_samples(state: State, request: Request) -> Any:
    return _logged(state, request, "samples", lambda model: model.log_samples)


def _logged(state: State, request: Request, name: str, rows_of: Callable[[Model], list[dict[str, Any]]]) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    after, most = int(request.query.get("after", "0")), int(request.query.get("most", "1000"))
    rows = rows_of(model)[after : after + most]
    return {name: rows, "next": after + len(rows)}


def _iso(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat()


def run_history(state: State, request: Request) -> Any:
    model = known(state.models, request.parts["run_id"], "training run", "unknown_run")
    rows = [{"kind": "step", **step} for step in model.steps]
    rows += [{"kind": "metrics", **entry} for entry in model.log_entries]
    return Response(200, b"\n".join(map(orjson.dumps, rows)), "application/x-ndjson")


def _run(state: State, model: Model) -> dict[str, Any]:
    newest = {c.kind: c.as_json() for c in state.live_checkpoints() if c.model is model}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": model.lora["rank"],
        "last_request_time": model.last_request,
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.user_metadata,
        "name": model.name,
        "tags": model.tags,
        "status": "idle",
        "steps": len(model.steps),
        "loss": model.steps[-1]["loss"] if model.steps else None,
        "archived_at": model.archived,
    }


def list_checkpoints(state: State, request: Request) -> Any:
    own = [c.as_json() for c in state.live_checkpoints() if c.model.id == request.parts["run_id"]]
    return {"checkpoints": own, "cursor": None}


def list_user_checkpoints(state: State, request: Request) -> Any:
    page, cursor = _page([c.as_json() for c in state.live_checkpoints()], request, 100)
    return {"checkpoints": page, "cursor": cursor}


def delete_checkpoint(state: State, request: Request) -> Any:
    del state.checkpoints[state.checkpoint_of(request).path]


def publish_checkpoint(state: State, request: Request) -> Any:
    state.checkpoint_of(request).is_public = request.endpoint == "publish_checkpoint"


unpublish_checkpoint = publish_checkpoint


def set_checkpoint_ttl(state: State, request: Request) -> Any:
    state.checkpoint_of(request).expires_at = state.after(request.json["ttl_seconds"])


def weights_info(state: State, request: Request) -> Any:
    model = state.checkpoint(request.json["tinker_path"]).model
    flags = {name: model.lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    about = {"base_model": model.base_model, "is_lora": True, "lora_rank": model.lora["rank"]}
    return {**about, **flags, "optimizer_config": model.optimizer}


def copy_weights(state: State, request: Request) -> Any:
    body = request.json
    source = state.checkpoint(body["source_path"])

    def copy() -> dict[str, str]:
        name = f"copy-{len(state.checkpoints)}-of-{source.name}"
        given = {"user_metadata": source.user_metadata, "ttl_seconds": body.get("ttl_seconds")}
        return {"tinker_path": state.save(source.model, source.kind, name, source.weights, given).path}

    return state.once(request, copy)


def checkpoint_storage_usage(state: State, request: Request) -> Any:
    live = state.live_checkpoints()
    size = sum(c.size_bytes for c in live)
    return {"data": [{"checkpoint_count": len(live), "size_bytes": size, "size_gigabytes": size / 1e9}]}


def _page(entries: list[Any], request: Request, default_limit: int) -> tuple[list[Any], dict[str, int]]:
    offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", default_limit))
    return entries[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(entries)}
