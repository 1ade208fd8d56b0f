"""The state of the scripted service: its configuration, sessions, models, samplers, checkpoints and futures."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tinkex.clock import REAL, Clock
from tinkex.testing.http.messages import Refused, Request
from tinkex.testing.model import Weights
from tinkex.testing.operations import Future, RunQueue

T = TypeVar("T")

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
    attempts: dict[int, tuple[int, Future]] = field(default_factory=dict)
    """By seq_id, the hash of the body and what became of it: a retry finds its earlier attempt."""
    weights: Weights = field(default_factory=Weights)
    gradient: float | None = None
    losses: list[float] = field(default_factory=list)
    """Of the passes since the last step."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    log_entries: list[dict[str, Any]] = field(default_factory=list)
    """What the program logged: numbers, and samples."""
    log_samples: list[dict[str, Any]] = field(default_factory=list)
    log_keys: set[str] = field(default_factory=set)
    """Idempotency keys of such requests."""
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    archived: dt.datetime | None = None


@dataclass(slots=True)
class Sampler:
    id: str
    base_model: str
    model_path: str | None
    weights: Weights
    futures: dict[object, Future] = field(default_factory=dict)
    """By seq_id or idempotency key, and body: a repeated request finds its earlier attempt."""
    completed: list[Future] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    clients: int = 1

    def note(self, future: Future) -> None:
        """A sample is done: whoever waits for any of this sampler's wakes up."""
        self.completed.append(future)
        self.changed.set()
        self.changed.clear()


@dataclass(slots=True)
class Checkpoint:
    model: Model
    kind: Kind
    name: str
    weights: Weights
    time: dt.datetime
    size_bytes: int
    user_metadata: dict[str, str] | None = None
    expires_at: dt.datetime | None = None
    is_public: bool = False

    @property
    def path(self) -> str:
        return f"tinker://{self.model.id}/{self.kind}/{self.name}"

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

    def __init__(self, config: Config, url: Callable[[], str]) -> None:
        self.config = config
        self.url = url
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.futures: dict[str, Future] = {}
        self.executed: list[tuple[str, int | None, str]] = []
        self.sampled: list[tuple[str, int | None]] = []
        self.cancelled: list[str] = []
        self.telemetry: list[dict[str, Any]] = []
        self._by_idempotency_key: dict[str, Any] = {}

    def now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.config.clock.wall(), dt.UTC)

    def after(self, seconds: float | None) -> dt.datetime | None:
        """When something that lives so long expires."""
        return None if seconds is None else self.now() + dt.timedelta(seconds=seconds)

    def session(self, session_id: str) -> Session:
        return known(self.sessions, session_id, "session")

    def model(self, model_id: str) -> Model:
        found = known(self.models, model_id, "model")
        found.last_request = self.now()
        return found

    def sampler(self, sampler_id: str) -> Sampler:
        return known(self.samplers, sampler_id, "sampling session", "unknown_sampler")

    def checkpoint(self, path: str) -> Checkpoint:
        return known({checkpoint.path: checkpoint for checkpoint in self.live_checkpoints()}, path, "checkpoint")

    def checkpoint_of(self, request: Request) -> Checkpoint:
        """The one that the request's path names."""
        return self.checkpoint(f"tinker://{request.parts['run_id']}/{request.parts['checkpoint_id']}")

    def live_checkpoints(self) -> list[Checkpoint]:
        now = self.now()
        return [c for c in self.checkpoints.values() if c.expires_at is None or c.expires_at > now]

    def known_base(self, base_model: str) -> str:
        if base_model not in self.config.base_models:
            offered = ", ".join(self.config.base_models)
            raise Refused(400, f"base model {base_model!r} is not offered. Offered: {offered}", "unknown_base_model")
        return base_model

    def accept(self, request: Request, op: str) -> Future:
        future = Future(op, request.twists, self.config.work_s)
        self.futures[future.id] = future
        return future

    def once(self, request: Request, create: Callable[[], T]) -> T:
        """Attempts with one idempotency key are one creation."""
        key = request.headers.get("x-idempotency-key", "")
        if not key:
            return create()
        if key not in self._by_idempotency_key:
            self._by_idempotency_key[key] = create()
        created: T = self._by_idempotency_key[key]
        return created

    def save(self, model: Model, kind: Kind, name: str, weights: Weights, given: Mapping[str, Any]) -> Checkpoint:
        """Keep weights as a checkpoint of the model; `given` may say how long to keep them, and what for."""
        checkpoint = Checkpoint(
            model=model,
            kind=kind,
            name=name,
            weights=weights,
            time=self.now(),
            size_bytes=self.config.file_bytes,
            user_metadata=given.get("user_metadata"),
            expires_at=self.after(given.get("ttl_seconds")),
        )
        self.checkpoints[checkpoint.path] = checkpoint
        return checkpoint


def known(table: Mapping[str, T], name: str, kind: str, code: str = "") -> T:
    """What the table has under this name; else the request is refused."""
    if name not in table:
        raise Refused(404, f"{kind} {name!r} is not known", code or f"unknown_{kind}")
    return table[name]
