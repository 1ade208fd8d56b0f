"""What a service says about itself and an account: models, runs, samplers, settings, audit, billing."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from tinkex.types.base import Value, field
from tinkex.types.training import AdamOptimizerConfig, OptimizerConfig
from tinkex.types.weights import Checkpoint, Cursor


class HealthResponse(Value):
    status: Literal["ok"]


class SupportedModel(Value):
    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    alias_of: str | None = None
    """The model's full name, if this is another name of it. Services of our own say it."""


class GetServerCapabilitiesResponse(Value):
    supported_models: list[SupportedModel]


class ModelData(Value):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoRequest(Value):
    model_id: str
    type: Literal["get_info"] = "get_info"


class GetInfoResponse(Value):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig | None = field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    last_seq_id: int | None = None
    """The highest number of an operation that the service has received. Services of our own say it."""


class GetSamplerResponse(Value):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class TrainingRun(Value):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    lora_config: dict[str, Any] | None = None
    """Which layers are trained, with which rank and seed; said by services of our own."""
    last_request_time: dt.datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None
    name: str | None = None
    """This and what follows is said by services of our own (`run_records` of the client's configuration)."""
    tags: list[str] = field(default_factory=list)
    status: str | None = None
    """running, idle, finished or failed."""
    steps: int | None = None
    """Optimizer steps that are done."""
    loss: float | None = None
    """Of the last step that has one."""
    created_at: dt.datetime | None = None
    archived_at: dt.datetime | None = None


class UpdateTrainingRunRequest(Value):
    """What to change of a run: only the fields that are given."""

    name: str | None = None
    tags: list[str] | None = None
    archived: bool | None = None


class DeletedTrainingRun(Value):
    """What was deleted with a run."""

    training_run_id: str
    checkpoints: list[str] = field(default_factory=list)
    """Their paths."""
    samplers: int = 0
    operations: int = 0


class TrainingRunsResponse(Value):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ClientConfigRequest(Value):
    sdk_version: str


class ClientConfigResponse(Value):
    """How the service wants clients to behave. `tinkex` is said by services of our own: version, stream, …"""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    tinkex: dict[str, Any] | None = None


class ClientDynamicConfigResponse(Value):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(Value):
    jwt: str


class WhoamiResponse(Value):
    user_urn: str
    org_urn: str
    email: str | None = None


class AuditLogEntry(Value):
    timestamp: dt.datetime
    event: str
    event_details: dict[str, Any] = field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Value):
    entries: list[AuditLogEntry]


class TrainingBillingEvent(Value):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Value):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Value):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Value):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Value):
    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class GetBillingUsageRequest(Value):
    starting_on: dt.datetime
    ending_before: dt.datetime


class BillingUsageEvent(Value):
    bucket_start: dt.datetime
    bucket_end: dt.datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Value):
    user_metadata: dict[str, Any] | None = None


class BillingUsageResponse(Value):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = field(default_factory=dict)
    cost_data_through: dt.datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Value):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Value):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Value):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
