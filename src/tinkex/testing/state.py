"""The state of the scripted service: its configuration, sessions, models, samplers, checkpoints and futures."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tinkex.clock import REAL, Clock
from tinkex.testing.handlers.futures import Future, Result
from tinkex.testing.model import Weights
from tinkex.testing.run_queue import RunQueue

Kind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_TYPES: dict[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a scripted service behaves when nothing is scripted."""

    dialect: Literal["proto", "json"] = "proto"
    base_models: Collection[str] = ("tinkex/tiny",)
    api_key: str | None = None
    """Reject every other key with 401. None takes any."""
    hold_s: float = 1.0
    """How long a poll is held before it is answered 408."""
    gap_s: float = 10.0
    """How long a missing seq_id is awaited before it is skipped."""
    work_s: float = 0.0
    """How long a training operation or a sample takes."""
    client_config: Mapping[str, Any] = field(default_factory=dict)
    dynamic_config: Mapping[str, Any] = field(default_factory=dict)
    missing: Collection[str] = ()
    """Endpoints that this service does not have: they answer 404."""
    metadata_over_bytes: int | None = None
    """Larger results are announced by `complete_metadata` first, where the poll allows it."""
    file_bytes: int = 4096
    """The size of the weights file in each checkpoint."""
    stream_token_s: float = 0.0
    """The pause before each token of a stream."""
    vocabulary: int = 1000
    max_context_length: int = 32768
    tokenizer_id: str | None = None
    tokenizers: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """Files to hand out, by tokenizer and name."""
    clock: Clock = REAL


class Refused(Exception):
    """A response other than success: decided anywhere, written by the service."""

    def __init__(self, status: int, detail: str, code: str, category: str = "user") -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"detail": detail, "code": code, "category": category}


@dataclass(slots=True)
class Session:
    id: str
    tags: list[str]
    user_metadata: dict[str, str]
    created: dt.datetime
    project_id: str | None = None
    display_name: str | None = None
    heartbeats: int = 0
    finished: dict[str, Any] | None = None


@dataclass(slots=True)
class Model:
    """A training run: the two are one."""

    id: str
    session: Session
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any]
    user_metadata: dict[str, str] | None
    queue: RunQueue
    created: Future
    last_request: dt.datetime
    weights: Weights = field(default_factory=Weights)
    gradient: float | None = None
    losses: list[float] = field(default_factory=list)
    """Of the passes since the last step."""
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Sampler:
    id: str
    base_model: str
    model_path: str | None
    weights: Weights
    futures: dict[object, Future] = field(default_factory=dict)
    """By seq_id or idempotency key, and body: a repeated request finds its earlier attempt."""
    completed: list[Future] = field(default_factory=list)
    watchers: list[asyncio.Future[None]] = field(default_factory=list)
    clients: int = 1

    def note(self, future: Future) -> None:
        """A sample is done: whoever waits for any of this sampler's wakes up."""
        self.completed.append(future)
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)
        self.watchers.clear()


@dataclass(slots=True)
class Checkpoint:
    run_id: str
    kind: Kind
    name: str
    model: Model
    weights: Weights
    time: dt.datetime
    size_bytes: int
    user_metadata: dict[str, str] | None = None
    expires_at: dt.datetime | None = None
    is_public: bool = False

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def is_expired(self, now: dt.datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": CHECKPOINT_TYPES[self.kind],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": self.is_public,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


class State:
    """Everything a service knows. Touched only on the service's own thread; tests may read."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.loop = loop
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.futures: dict[str, Future] = {}
        self.executed: list[tuple[str, int | None, str]] = []
        self.sampled: list[tuple[str, int | None]] = []
        self.cancelled: list[str] = []
        self.telemetry: list[dict[str, Any]] = []

    def now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.config.clock.wall(), dt.UTC)

    def session(self, session_id: str) -> Session:
        found = self.sessions.get(session_id)
        if found is None:
            raise Refused(404, f"session {session_id!r} is not known", "unknown_session")
        return found

    def model(self, model_id: str) -> Model:
        found = self.models.get(model_id)
        if found is None:
            raise Refused(404, f"model {model_id!r} is not known", "unknown_model")
        found.last_request = self.now()
        return found

    def sampler(self, sampler_id: str) -> Sampler:
        found = self.samplers.get(sampler_id)
        if found is None:
            raise Refused(404, f"sampling session {sampler_id!r} is not known", "unknown_sampler")
        return found

    def checkpoint(self, path: str) -> Checkpoint:
        found = self.checkpoints.get(path)
        if found is None or found.is_expired(self.now()):
            raise Refused(404, f"checkpoint {path!r} is not known", "unknown_checkpoint")
        return found

    def live_checkpoints(self) -> list[Checkpoint]:
        now = self.now()
        return [checkpoint for checkpoint in self.checkpoints.values() if not checkpoint.is_expired(now)]

    def known_base(self, base_model: str) -> str:
        if base_model not in self.config.base_models:
            offered = ", ".join(self.config.base_models)
            raise Refused(400, f"base model {base_model!r} is not offered. Offered: {offered}", "unknown_base_model")
        return base_model

    def keep(self, future: Future) -> Future:
        self.futures[future.id] = future
        return future

    def finish_after(self, future: Future, result: Result, seconds: float) -> None:
        """The work is done; its result shows after so long."""
        if seconds > 0:
            self.loop.call_later(seconds, future.finish, result)
        else:
            future.finish(result)

    def save(
        self, model: Model, kind: Kind, name: str, ttl_s: float | None, user_metadata: dict[str, str] | None
    ) -> Checkpoint:
        now = self.now()
        expires = None if ttl_s is None else now + dt.timedelta(seconds=ttl_s)
        size = self.config.file_bytes
        checkpoint = Checkpoint(model.id, kind, name, model, model.weights, now, size, user_metadata, expires)
        self.checkpoints[checkpoint.path] = checkpoint
        return checkpoint
