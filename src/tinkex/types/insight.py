"""What our service reports about its work: a run's steps, the queue, failures. Not available on the hosted service."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from tinkex.types.base import Value, field
from tinkex.types.weights import Cursor


class RunStep(Value):
    """One `optim_step` with the sums of the forward_backward calls before it."""

    seq_id: int
    """The number of the step's last operation: ask for the steps after it."""
    time: dt.datetime
    loss: float | None = None
    """Mean over the weights of its data, or the sum where a loss has no weights. Of a custom loss, what your function
    returned; None where a program that does not send it (an official client) used one."""
    evaluation_loss: float | None = None
    """The same of `forward` calls since the step before."""
    loss_fn: str | None = None
    """The loss function; "custom" is one of your program."""
    learning_rate: float | None = None
    optimizer: dict[str, float] = field(default_factory=dict)
    """Settings of the optimizer that are not the usual ones."""
    tokens: int = 0
    seconds: float = 0.0
    """From when the engine was given the operations until it answered them."""
    queue_seconds: float = 0.0
    """How long its operations waited while none of this run was in the engine."""
    failed: int = 0
    """How many of its operations failed or were rejected."""
    failure: str = ""
    """The first of them and its reason."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of the last operations, as they were answered."""
    number: int | None = None
    """In a thinned list: which of the steps after `after_seq_id` it is; the first is 1."""
    tokens_so_far: int | None = None
    """In a thinned list: tokens of all steps from `after_seq_id` to this one, as `seconds_so_far` are their seconds."""
    seconds_so_far: float | None = None


class RunStepsResponse(Value):
    steps: list[RunStep]
    count: int = 0
    """How many steps there were: more than are listed where `most_steps` thinned them."""
    is_thinned: bool = False
    next_seq_id: int
    """Pass it as `after_seq_id` to get what comes next."""
    open_passes: int = 0
    """forward_backward calls after the last step: their gradients wait for an optim_step."""
    is_active: bool = False
    """Whether operations of the run are waiting or running."""
    home: str | None = None
    """The address of the node that works on the run, where several servers share a store."""


class RunMetrics(Value):
    """Numbers that a program logged for a run, at one time."""

    number: int
    """Counts the entries of the run, from 1."""
    step: int | None = None
    seq_id: int | None = None
    """The last operation of the run that was called before."""
    time: dt.datetime
    metrics: dict[str, float | None] = field(default_factory=dict)
    """None for a number that was not finite."""


class RunMetricsResponse(Value):
    entries: list[RunMetrics]
    next: int
    """Pass it as `after` to get what comes next."""


class RunSample(Value):
    """A sample that a program logged for a run."""

    number: int
    step: int | None = None
    time: dt.datetime
    prompt: str = ""
    text: str = ""
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class RunSamplesResponse(Value):
    samples: list[RunSample]
    next: int


class LogMetricsResponse(Value):
    """How many of what was sent the service has stored."""

    entries: int = 0
    samples: int = 0


class QueuedOperation(Value):
    run_id: str
    seq_id: int
    kind: str
    tokens: int = 0
    waiting_s: float = 0.0
    state: str = ""
    reason: str = ""


class OfferedModel(Value):
    """A base model that the service offers. It is loaded at its first use, and leaves when another needs its memory."""

    model_name: str
    aliases: list[str] = field(default_factory=list)
    source: str = ""
    is_loaded: bool = False
    is_loading: bool = False
    is_in_use: bool = False
    """Whether operations or samples run on it now: then it stays loaded."""
    size_bytes: int = 0
    """What it takes in memory, or would; 0 if that is not known."""
    loads: int = 0
    """How often it was loaded after the start of the service."""


class ServerNode(Value):
    """A server with an engine, one of several that share a store. What it does is as of its last renewal."""

    id: str
    url: str
    is_this: bool = False
    """Whether it is the server that responds."""
    kind: str = "train"
    state: str = ""
    """busy, idle, starting, draining, or gone: it did not renew its lease."""
    runs: int = 0
    """Runs that it works on, of all tenants, busy or not."""
    busy_runs: int = 0
    queued_operations: int = 0
    samples: int = 0
    """Sequences that wait or are being drawn."""
    lease_left_s: float = 0.0
    """How long others rely on it unless it renews; negative: since when they do not."""
    models: list[str] = field(default_factory=list)
    version: str = ""


class ServiceState(Value):
    """The service as one tenant may see it. Other tenants appear only in sums."""

    version: str
    tenant: str
    uses_keys: bool = False
    is_ready: bool
    reason: str = ""
    """Why it is not ready, or why nothing new is started."""
    models: list[str] = field(default_factory=list)
    base_models: list[OfferedModel] = field(default_factory=list)
    base_model_budget_bytes: int = 0
    """What base models may take in memory together."""
    nodes: list[ServerNode] = field(default_factory=list)
    """The servers of the cluster; empty if this one is alone. The rest of this is about the one that responds."""
    queue: list[QueuedOperation] = field(default_factory=list)
    """Yours, the longest waiting first; at most a hundred."""
    queued_operations: int = 0
    queued_operations_of_others: int = 0
    queued_samples: int = 0
    """Of all tenants."""
    running_samples: int = 0
    adapters: int = 0
    """In the engine's memory, of all tenants."""
    engine_bytes: int = 0
    engine_restarts: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


class FailedOperation(Value):
    request_id: str
    run_id: str
    seq_id: int
    kind: str
    state: Literal["failed", "refused"]
    time: dt.datetime
    error: str = ""
    category: str = ""


class FailedOperationsResponse(Value):
    operations: list[FailedOperation]
    cursor: Cursor
