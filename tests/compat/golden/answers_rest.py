"""Answers of plain endpoints: sessions, configuration, models, runs, checkpoints, archives, usage."""

from __future__ import annotations

from typing import Any

from .canned import CHECKPOINT, CURSOR, TRAINING_RUN, Answer, as_json
from .case import BOTH, NEW, OLD
from .variant import RUN, variant


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def answers(
    group: str, operation: str, endpoint: str, bodies: dict[str, Any], versions: tuple[str, ...] = BOTH
) -> None:
    """One variant per body; an Answer is taken as it is, anything else is sent as JSON."""
    for name, body in bodies.items():
        answer = body if isinstance(body, Answer) else as_json(body)
        variant(f"{group}/{name}", operation, {endpoint: [answer]}, versions)


def empty(status: int, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, b"", headers or {})


answers(
    "create-session",
    "create-sampler",
    "create_session",
    {
        "minimal": {"session_id": "s"},
        "messages": {"session_id": "s", "info_message": "i", "warning_message": "w", "error_message": None},
        "extra-fields": {"session_id": "s", "colour": "blue"},
        "500": as_json({"detail": "down"}, 500),
    },
)
# 0.4.1 may hang for ever when create_session fails: its half-built holder is collected on its own loop thread.
answers(
    "create-session",
    "create-sampler",
    "create_session",
    {
        "type-null": {"session_id": "s", "type": None},
        "no-id": {},
        "id-number": {"session_id": 5},
        "401": as_json({"detail": "bad key"}, 401),
    },
    NEW,
)
answers(
    "client-config",
    "create-sampler",
    "client/config",
    {
        "empty": {},
        "unknown-flags": {"colour": "blue", "parallel_fwdbwd_chunks": False},
        "flag-null": {"parallel_fwdbwd_chunks": None},
        "flag-text": {"parallel_fwdbwd_chunks": "yes"},
        "numbers-as-floats": {"fwdbwd_max_chunk_bytes_count": 5e6},
        "tinkex": {"tinkex": {"version": "1", "stream": True}},
        "null": None,
        "html": Answer(200, b"<html></html>", {"Content-Type": "text/html"}),
        "401": as_json({"detail": "bad key"}, 401),
        "402": as_json({"detail": "unpaid"}, 402),
        "403": as_json({"detail": "no"}, 403),
        "404": as_json({"detail": "Not Found"}, 404),
        "500": as_json({"detail": "down"}, 500),
    },
    NEW,
)
answers(
    "dynamic-config",
    "create-sampler",
    "client/dynamic_config",
    {
        "empty": {},
        "unknown-flags": {"colour": "blue"},
        "interval-small": {"refresh_interval_sec": 1},
        "interval-null": {"refresh_interval_sec": None},
        "404": as_json({"detail": "Not Found"}, 404),
        "403": as_json({"detail": "no"}, 403),
    },
    NEW,
)
answers(
    "create-sampler",
    "create-sampler",
    "create_sampling_session",
    {
        "minimal": {"sampling_session_id": "any id"},
        "extra-fields": {"sampling_session_id": "s", "type": "create_sampling_session", "colour": "blue"},
        "no-id": {},
        "id-null": {"sampling_session_id": None},
        "400": as_json({"detail": "no such model"}, 400),
        "404": as_json({"detail": "no such model"}, 404),
    },
)
answers(
    "finish",
    "finish",
    "sessions/session-1/finish",
    {"json": {}, "no-content": empty(204), "404": as_json({}, 404)},
    NEW,
)
INFO: dict[str, Any] = {"model_id": "m", "model_data": {"arch": "qwen3", "model_name": "Qwen/Qwen3-8B"}}
answers(
    "get-info",
    "get-info",
    "get_info",
    {
        "plain": INFO,
        "all": INFO | {"type": "get_info", "is_lora": True, "lora_rank": 16, "model_name": "n"},
        "nulls": INFO | {"type": None, "is_lora": None, "lora_rank": None, "model_name": None},
        "tokenizer-id": INFO | {"model_data": {"tokenizer_id": "t"}},
        "model-data-empty": INFO | {"model_data": {}},
        "model-data-nulls": INFO | {"model_data": {"arch": None, "model_name": None, "tokenizer_id": None}},
        "model-data-missing": {"model_id": "m"},
        "model-data-extra": INFO | {"model_data": {"colour": "blue"}},
        "extra-fields": INFO | {"colour": "blue"},
        "optimizer": INFO | {"optimizer_config": {"type": "dimuon", "version": 1}},
        "optimizer-unknown": INFO | {"optimizer_config": {"type": "new", "speed": 5}},
        "optimizer-null": INFO | {"optimizer_config": None},
    },
)
answers(
    "capabilities",
    "capabilities",
    "get_server_capabilities",
    {
        "plain": {"supported_models": [{"model_name": "a"}, {"model_name": "b"}]},
        "later-fields": {
            "supported_models": [{"model_name": "a", "max_context_length": 4096, "trainable": True, "sampleable": None}]
        },
        "name-null": {"supported_models": [{"model_name": None}]},
        "name-missing": {"supported_models": [{}]},
        "none": {"supported_models": []},
        "missing": {},
        "null": {"supported_models": None},
        "extra-fields": {"supported_models": [{"model_name": "a", "colour": "blue"}], "max_batch_size": 5},
    },
)

RUNS: dict[str, Any] = {
    "plain": TRAINING_RUN,
    "minimal": {
        key: TRAINING_RUN[key]
        for key in ("training_run_id", "base_model", "model_owner", "is_lora", "last_request_time")
    },
    "nulls": TRAINING_RUN
    | {"lora_rank": None, "last_checkpoint": None, "last_sampler_checkpoint": None, "user_metadata": None},
    "corrupted": TRAINING_RUN | {"corrupted": True},
    "corrupted-null": TRAINING_RUN | {"corrupted": None},
    "metadata-integer": TRAINING_RUN | {"user_metadata": {"step": 5}},
    "metadata-null-value": TRAINING_RUN | {"user_metadata": {"step": None}},
    "metadata-nested": TRAINING_RUN | {"user_metadata": {"step": {"n": 5}}},
    "metadata-empty": TRAINING_RUN | {"user_metadata": {}},
    "last-checkpoint": TRAINING_RUN | {"last_checkpoint": CHECKPOINT},
    "last-checkpoint-size-null": TRAINING_RUN | {"last_checkpoint": CHECKPOINT | {"size_bytes": None}},
    "is-lora-text": TRAINING_RUN | {"is_lora": "true"},
    "is-lora-number": TRAINING_RUN | {"is_lora": 1},
    "is-lora-missing": without(TRAINING_RUN, "is_lora"),
    "owner-missing": without(TRAINING_RUN, "model_owner"),
    "rank-text": TRAINING_RUN | {"lora_rank": "16"},
    "rank-whole-float": TRAINING_RUN | {"lora_rank": 16.0},
    "id-number": TRAINING_RUN | {"training_run_id": 5},
    "extra-fields": TRAINING_RUN | {"colour": "blue", "project_id": "p"},
    "null": None,
    "not-json": Answer(200, b"fine", {"Content-Type": "text/plain"}),
    "no-content-type": Answer(200, b"", {}),
}
TIMES = {
    "utc": "2026-01-02T03:04:05Z",
    "offset": "2026-01-02T03:04:05+02:00",
    "naive": "2026-01-02T03:04:05",
    "fraction": "2026-01-02T03:04:05.678901+00:00",
    "nanoseconds": "2026-01-02T03:04:05.678901234Z",
    "space": "2026-01-02 03:04:05",
    "date": "2026-01-02",
    "epoch": 1767323045,
    "epoch-fraction": 1767323045.5,
    "epoch-milliseconds": 1767323045000,
    "nonsense": "yesterday",
    "null": None,
}
RUNS |= {f"time-{name}": TRAINING_RUN | {"last_request_time": value} for name, value in TIMES.items()}
answers("training-run", "training-run", f"training_runs/{RUN}", RUNS)
answers(
    "training-runs",
    "training-runs",
    "training_runs",
    {
        "plain": {"training_runs": [TRAINING_RUN], "cursor": CURSOR},
        "none": {"training_runs": [], "cursor": CURSOR | {"total_count": 0}},
        "cursor-missing": {"training_runs": [TRAINING_RUN]},
        "cursor-null": {"training_runs": [TRAINING_RUN], "cursor": None},
        "cursor-extra": {"training_runs": [], "cursor": CURSOR | {"next": "x"}},
        "one-bad-run": {"training_runs": [TRAINING_RUN, {}], "cursor": CURSOR},
    },
)

CHECKPOINTS: dict[str, Any] = {
    "plain": CHECKPOINT,
    "minimal": {key: CHECKPOINT[key] for key in ("checkpoint_id", "checkpoint_type", "time", "tinker_path")},
    "size-null": CHECKPOINT | {"size_bytes": None},
    "size-float": CHECKPOINT | {"size_bytes": 4096.0},
    "size-fraction": CHECKPOINT | {"size_bytes": 1.5},
    "size-text": CHECKPOINT | {"size_bytes": "4096"},
    "size-large": CHECKPOINT | {"size_bytes": 2**60},
    "public": CHECKPOINT | {"public": True},
    "public-null": CHECKPOINT | {"public": None},
    "sampler": CHECKPOINT | {"checkpoint_type": "sampler"},
    "external": CHECKPOINT | {"checkpoint_type": "external"},
    "type-unknown": CHECKPOINT | {"checkpoint_type": "weird"},
    "type-upper-case": CHECKPOINT | {"checkpoint_type": "Training"},
    "expires": CHECKPOINT | {"expires_at": "2026-02-02T03:04:05Z"},
    "expires-naive": CHECKPOINT | {"expires_at": "2026-02-02T03:04:05"},
    "expires-null": CHECKPOINT | {"expires_at": None},
    "metadata": CHECKPOINT | {"user_metadata": {"step": "5"}},
    "metadata-integer": CHECKPOINT | {"user_metadata": {"step": 5}},
    "time-naive": CHECKPOINT | {"time": "2026-01-02T03:04:05"},
    "time-missing": without(CHECKPOINT, "time"),
    "extra-fields": CHECKPOINT | {"colour": "blue"},
}
answers(
    "checkpoint",
    "checkpoints",
    f"training_runs/{RUN}/checkpoints",
    {name: {"checkpoints": [record]} for name, record in CHECKPOINTS.items()},
)
answers(
    "checkpoints",
    "user-checkpoints",
    "checkpoints",
    {
        "cursor": {"checkpoints": [CHECKPOINT], "cursor": CURSOR},
        "cursor-null": {"checkpoints": [], "cursor": None},
        "cursor-missing": {"checkpoints": []},
        "missing": {},
    },
)
DELETIONS = {
    "no-content": empty(204),
    "empty-200": empty(200),
    "json": as_json({"deleted": True}),
    "text": Answer(200, b"gone", {"Content-Type": "text/plain"}),
    "404": as_json({"detail": "no such checkpoint"}, 404),
    "403": as_json({"detail": "not yours"}, 403),
    "409-once": as_json({"detail": "busy"}, 409),
}
answers("delete", "delete", f"training_runs/{RUN}/checkpoints/weights/a", DELETIONS)
answers("publish", "publish", f"training_runs/{RUN}/checkpoints/weights/a/publish", DELETIONS)
PLACE = {"Location": "https://files.example.org/a.tar"}
answers(
    "archive",
    "archive",
    f"training_runs/{RUN}/checkpoints/weights/a/archive",
    {
        "expires": empty(302, PLACE | {"Expires": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        "expires-absent": empty(302, PLACE),
        "expires-nonsense": empty(302, PLACE | {"Expires": "soon"}),
        "expires-iso": empty(302, PLACE | {"Expires": "2026-10-21T07:28:00Z"}),
        "expires-zone": empty(302, PLACE | {"Expires": "Wed, 21 Oct 2026 07:28:00 +0000"}),
        "without-location": empty(302, {"Expires": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        "200": as_json({"url": "https://files.example.org/a.tar"}),
        "404": as_json({"detail": "no such checkpoint"}, 404),
        "410": as_json({"detail": "removed"}, 410),
    },
    OLD,
)
WEIGHTS: dict[str, Any] = {"base_model": "m", "is_lora": True, "lora_rank": 16}
INFOS: dict[str, Any] = {
    "minimal": {"base_model": "m", "is_lora": False},
    "plain": WEIGHTS,
    "flags": WEIGHTS | {"train_unembed": False, "train_mlp": True, "train_attn": None},
    "optimizer-adamw": WEIGHTS | {"optimizer_config": {"type": "adamw"}},
    "optimizer-dimuon": WEIGHTS | {"optimizer_config": {"type": "dimuon", "version": 1}},
    "optimizer-unknown": WEIGHTS | {"optimizer_config": {"type": "new", "speed": 5}},
    "optimizer-null": WEIGHTS | {"optimizer_config": None},
    "extra-fields": WEIGHTS | {"colour": "blue"},
    "empty": {},
    "404": as_json({"detail": "no such checkpoint"}, 404),
}
answers("weights-info", "weights-info", "weights_info", INFOS, NEW)
answers(
    "from-state",
    "from-state",
    "weights_info",
    {name: INFOS[name] for name in ("minimal", "plain", "flags", "404")},
    NEW,
)
answers(
    "from-run",
    "from-state",
    f"training_runs/{RUN}",
    {
        "plain": TRAINING_RUN,
        "rank-null": TRAINING_RUN | {"lora_rank": None},
        "metadata-null": TRAINING_RUN | {"user_metadata": None},
    },
    OLD,
)
URLS: dict[str, Any] = {"urls": {"a": "https://files.example.org/a"}, "expires": "2026-10-21T07:28:00Z"}
answers(
    "external-urls",
    "external-urls",
    f"training_runs/{RUN}/checkpoints/external_weights/a/external_weights_urls",
    {
        "plain": URLS,
        "naive": URLS | {"expires": "2026-10-21T07:28:00"},
        "none": URLS | {"urls": {}},
        "expires-missing": without(URLS, "expires"),
    },
    NEW,
)
answers(
    "sampler",
    "base-model",
    "samplers/session-1:sample:0",
    {
        "plain": {"sampler_id": "s", "base_model": "m", "model_path": None},
        "extra-fields": {"sampler_id": "s", "base_model": "m", "x": 1},
        "empty": {},
    },
    NEW,
)
answers(
    "session",
    "session",
    "sessions/session-0",
    {
        "minimal": {"training_run_ids": [], "sampler_ids": []},
        "all": {"training_run_ids": ["a"], "sampler_ids": ["b"], "user_metadata": {"k": "v"}, "display_name": "n"},
        "metadata-integer": {"training_run_ids": [], "sampler_ids": [], "user_metadata": {"k": 5}},
        "empty": {},
    },
    NEW,
)
answers(
    "sessions", "sessions", "sessions", {"plain": {"sessions": ["a"]}, "none": {"sessions": []}, "missing": {}}, NEW
)
SUMMARY: dict[str, Any] = {
    "session_id": "s",
    "created_at": "2026-01-02T03:04:05Z",
    "owner": "o",
    "project_id": "p",
    "checkpoints_count": 2,
}
STATUSES: dict[str, Any] = {
    "null": None,
    "active": {"type": "active"},
    "cancelled": {"type": "cancelled", "detail": None},
    "finished": {"type": "client_finished", "reason": {"type": "success"}, "detail": "d"},
    "failed": {
        "type": "failed",
        "category": "user",
        "reason": {"type": "request", "request_id": "r", "request_type": "t"},
        "message": "m",
    },
    "unknown": {"type": "sleeping"},
}
answers(
    "search",
    "search",
    "sessions/search",
    {f"status-{name}": {"sessions": [SUMMARY | {"status": status}]} for name, status in STATUSES.items()}
    | {
        "minimal": {"sessions": [SUMMARY]},
        "all": {
            "sessions": [SUMMARY | {"display_name": "n", "user_metadata": {"k": "v"}, "checkpoint_storage_bytes": 5}]
        },
        "next-page": {
            "sessions": [],
            "next_cursor": {"last_created_at": "2026-01-02T03:04:05Z", "last_session_id": "s"},
        },
        "next-page-naive": {
            "sessions": [],
            "next_cursor": {"last_created_at": "2026-01-02T03:04:05", "last_session_id": "s"},
        },
    },
    NEW,
)
answers(
    "trace-export",
    "trace-export",
    "sessions/session-0/trace_export",
    {
        "ready": {"status": "ready", "url": "https://files.example.org/t"},
        "ready-without-url": {"status": "ready"},
        "failed": {"status": "failed", "error": "too large"},
        "unknown": {"status": "sleeping"},
    },
    NEW,
)
answers("copy", "copy", "copy_weights", {"plain": {"tinker_path": "tinker://r/weights/a"}, "empty": {}}, NEW)
ENTRY: dict[str, Any] = {"timestamp": "2026-01-02T03:04:05Z", "event": "created"}
answers(
    "audit",
    "audit",
    "audit",
    {
        "none": {"entries": []},
        "minimal": {"entries": [ENTRY]},
        "all": {"entries": [ENTRY | {"event_details": {"n": 5}, "model_id": "m", "tinker_path": "t", "purpose": "p"}]},
    },
    NEW,
)
USAGE: dict[str, Any] = {"bucket_start": "2026-01-01T00:00:00Z", "bucket_end": "2026-01-02T00:00:00Z"}
EVENTS: dict[str, Any] = {
    "training": {"type": "training", "token_count": 5},
    "prefill": {"type": "sampling_prefill", "cached": True, "token_count": 5},
    "sample": {"type": "sampling_sample", "token_count": 5},
    "checkpoint": {"type": "checkpoint", "count": 5},
    "storage": {"type": "storage", "gigabyte_hours": 0.5},
    "unknown": {"type": "new", "count": 5},
}
answers(
    "billing",
    "billing",
    "billing/usage/events",
    {name: {"data": [USAGE | {"event_info": event}], "sessions": {"s": {}}} for name, event in EVENTS.items()},
    NEW,
)
STORAGE = {"checkpoint_count": 1, "size_bytes": 5, "size_gigabytes": 0.5}
answers(
    "storage", "storage", "billing/usage/checkpoints/current", {"none": {"data": []}, "one": {"data": [STORAGE]}}, NEW
)
