"""The rows of the database as frozen dataclasses; `tables.py` makes a column of each field.

Times are seconds since 1970; folders are relative to the data folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

OperationState = Literal["queued", "done", "failed", "refused"]
"""`refused` is a rejected operation. The word is in databases of the first release, and in responses of the service."""
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


class DamagedJson(dict[str, Any]):
    """Stands for JSON that cannot be read: empty. One damaged row must not make all others unreadable."""


def lora_of(source: Any) -> dict[str, Any]:
    """Return the fields that say which LoRA layers a run, a checkpoint, a request or an upload has."""
    return {name: getattr(source, name) for name in ("rank", "train_attn", "train_mlp", "train_unembed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    id: str
    tenant: str
    created_at: float
    seen_at: float
    """The last heartbeat, or any other sign of life."""
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    finished: dict[str, Any] | None = None
    """What the client reported when it finished the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A training run. Its id is also that of its model in the API, and of its adapter in the engine."""

    id: str
    tenant: str
    session_id: str
    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created_at: float
    last_request_at: float
    user_metadata: dict[str, Any] | None = None
    is_unloaded: bool = False
    snapshot: str | None = None
    """Folder of the last snapshot, which includes the operations up to and including `snapshot_seq`."""
    snapshot_seq: int = -1
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    archived_at: float | None = None
    steps: int = 0
    """Optimizer steps that are done. With `loss` it is kept up to date, so that lists need not read the journal."""
    loss: float | None = None
    """Of the last step that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The right of one node to work on one run. Whatever it writes about the run is checked against it (the fence)."""

    run_id: str
    node: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """A training operation in the journal. Number 0 of a run is its creation; clients count from 1."""

    request_id: str
    run_id: str
    tenant: str
    seq_id: int
    kind: str
    digest: str
    state: OperationState = "queued"
    created_at: float = 0.0
    finished_at: float | None = None
    cost_tokens: int = 0
    """What the scheduler charges its tenant, in tokens of a forward pass. To be shown: `tokens`."""
    error: str | None = None
    category: str | None = None
    result_type: Literal["json", "proto"] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """What the server needs besides the engine's command: names, paths, times to live."""
    engine_s: float | None = None
    """Seconds from handing it to the engine until the reply, including work of other runs in between."""
    tokens: int = 0
    """Input tokens of a pass: those that a page or a report shows."""
    metrics: dict[str, float] | None = None
    """The metrics of the result. They stay when the result expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session, of a base model, of a saved checkpoint, or of weights saved only for it (ephemeral)."""

    id: str
    tenant: str
    session_id: str
    base_model: str
    created_at: float
    model_path: str | None = None
    folder: str | None = None
    """Weights of an ephemeral sampler, or of a checkpoint that was replaced since. Deleted with the session."""
    clients: int = 1
    size_bytes: int | None = None
    """The size of that folder's files; None in rows of older releases. Version 6 added it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    path: str
    """tinker://{run}/{kind}/{name}"""
    tenant: str
    run_id: str
    kind: CheckpointKind
    name: str
    folder: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created_at: float
    size_bytes: int
    files: dict[str, dict[str, Any]]
    """File name → {"size_bytes", "sha256"}."""
    has_optimizer: bool = False
    expires_at: float | None = None
    is_public: bool = False
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key: its hash, never the key itself. `hint` is how it begins and ends, for people."""

    id: str
    sha256: str
    tenant: str
    name: str
    hint: str
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    id: str
    at: float
    tenant: str
    action: str
    target: str
    detail: dict[str, Any] = field(default_factory=dict)
