"""Every call of the API, one row each: what 0.4.1 and 0.36.0 use, and our service's own. No I/O, no bodies."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple
from urllib.parse import quote

from tinkex.errors import ValidationError


class Pool(enum.StrEnum):
    """Connections are kept apart by kind, so that a burst of one never delays another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    RETRIEVE_SAMPLES = "retrieve_samples"
    """Polls for samples, thousands at times: apart, or a training step's result would wait behind them."""
    TELEMETRY = "telemetry"


class Endpoint(NamedTuple):
    """One call. `answer` names the type in `tinkex.types` of its response, or, for a future, of its result."""

    name: str
    method: str
    path: str
    pool: Pool
    answer: str = ""
    request_type: str = ""
    """The word of `X-Tinker-Request-Type` while the result is polled for."""
    is_future: bool = False
    """The response is a request id; the result comes from `retrieve_future`."""

    def url(self, **parts: str) -> str:
        """The path with its placeholders filled. Ids that consist of segments (`weights/0001`) keep their slashes."""
        if parts.keys() != set(_PLACEHOLDER.findall(self.path)):
            raise TypeError(f"{self.name} needs exactly {_PLACEHOLDER.findall(self.path)}, got {sorted(parts)}")
        return _PLACEHOLDER.sub(lambda match: _quoted(match[1], parts[match[1]]), self.path)


_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_SEGMENTED = frozenset({"checkpoint_id", "tokenizer", "base_model"})


def _quoted(placeholder: str, part: str) -> str:
    segments = part.split("/") if placeholder in _SEGMENTED else [part]
    if any(segment in ("", ".", "..") for segment in segments):
        # HTTP libraries resolve dots before sending: such an id would reach another endpoint.
        raise ValidationError(f"{part!r} cannot be the {placeholder} in a URL.")
    return "/".join(quote(segment, safe=":@!$&'()*+,;=~") for segment in segments)


def _row(method: str, path: str, pool: Pool, answer: str = "", *, name: str = "") -> Endpoint:
    return Endpoint(name or path.replace("/", "_"), method, f"/api/v1/{path}", pool, answer)


def _future(path: str, pool: Pool, answer: str) -> Endpoint:
    # The official clients' words are the endpoint's name in CamelCase: save_weights -> SaveWeights.
    word = "Sample" if path == "asample" else "".join(map(str.capitalize, path.split("_")))
    return Endpoint(path, "POST", f"/api/v1/{path}", pool, answer, word, is_future=True)


_SESSION, _TRAIN, _SAMPLE, _RETRIEVE = Pool.SESSION, Pool.TRAIN, Pool.SAMPLE, Pool.RETRIEVE
_RUN = "training_runs/{run_id}"
_CHECKPOINT = _RUN + "/checkpoints/{checkpoint_id}"

# The service and the session
CLIENT_CONFIG = _row("POST", "client/config", _SESSION, "ClientConfigResponse")
CLIENT_DYNAMIC_CONFIG = _row("POST", "client/dynamic_config", _SESSION, "ClientDynamicConfigResponse")
AUTH_TOKEN = _row("POST", "auth/token", _SESSION, "AuthTokenResponse")
HEALTHZ = _row("GET", "healthz", _SESSION, "HealthResponse")
GET_SERVER_CAPABILITIES = _row("GET", "get_server_capabilities", _TRAIN, "GetServerCapabilitiesResponse")
CREATE_SESSION = _row("POST", "create_session", _SESSION, "CreateSessionResponse")
SESSION_HEARTBEAT = _row("POST", "session_heartbeat", _SESSION, "SessionHeartbeatResponse")
FINISH_SESSION = _row("POST", "sessions/{session_id}/finish", _SESSION, name="finish_session")
CREATE_SAMPLING_SESSION = _row("POST", "create_sampling_session", _SESSION, "CreateSamplingSessionResponse")
JOIN_SAMPLING_SESSION = _row("POST", "join_sampling_session", _SESSION, "JoinSamplingSessionResponse")
TELEMETRY = _row("POST", "telemetry", Pool.TELEMETRY, "TelemetryResponse")

# Training
CREATE_MODEL = _future("create_model", _TRAIN, "CreateModelResponse")
UNLOAD_MODEL = _future("unload_model", _TRAIN, "UnloadModelResponse")
GET_INFO = _row("POST", "get_info", _TRAIN, "GetInfoResponse")
FORWARD = _future("forward", _TRAIN, "ForwardBackwardOutput")
FORWARD_BACKWARD = _future("forward_backward", _TRAIN, "ForwardBackwardOutput")
OPTIM_STEP = _future("optim_step", _TRAIN, "OptimStepResponse")
CREATE_CUSTOM_LOSS = _future("create_custom_loss", _TRAIN, "CreateCustomLossResponse")
SAVE_WEIGHTS = _future("save_weights", _TRAIN, "SaveWeightsResponse")
SAVE_WEIGHTS_FOR_SAMPLER = _future("save_weights_for_sampler", _TRAIN, "SaveWeightsForSamplerResponseInternal")
SAVE_WEIGHTS_EXTERNAL = _future("save_weights_external", _TRAIN, "SaveWeightsExternalResponse")
LOAD_WEIGHTS = _future("load_weights", _TRAIN, "LoadWeightsResponse")

# Sampling
ASAMPLE = _future("asample", _SAMPLE, "SampleResponse")
SAMPLE_STREAM = _row("POST", "sample_stream", _SAMPLE, "SampleResponse")  # ours: answers server-sent events
GET_SAMPLER = _row("GET", "samplers/{sampler_id}", _TRAIN, "GetSamplerResponse", name="get_sampler")
TOKENIZER_FILE = _row("GET", "tokenizers/{tokenizer}/{file}", _TRAIN, name="tokenizer_file")  # ours

# Results
RETRIEVE_FUTURE = _row("POST", "retrieve_future", _RETRIEVE)  # for samples: Pool.RETRIEVE_SAMPLES
RETRIEVE_FUTURES = _row("POST", "retrieve_futures", Pool.RETRIEVE_SAMPLES, "FuturesRetrieveResponse")
CANCEL_FUTURE = _row("POST", "cancel_future", _RETRIEVE)

# Runs and checkpoints
LIST_TRAINING_RUNS = _row("GET", "training_runs", _TRAIN, "TrainingRunsResponse", name="list_training_runs")
FIND_TRAINING_RUN = _row("GET", "training_runs/find", _TRAIN, "TrainingRun", name="find_training_run")  # ours
GET_TRAINING_RUN = _row("GET", _RUN, _TRAIN, "TrainingRun", name="get_training_run")
UPDATE_TRAINING_RUN = _row("PATCH", _RUN, _TRAIN, "TrainingRun", name="update_training_run")  # ours
DELETE_TRAINING_RUN = _row("DELETE", _RUN, _TRAIN, "DeletedTrainingRun", name="delete_training_run")  # ours
LIST_CHECKPOINTS = _row("GET", f"{_RUN}/checkpoints", _TRAIN, "CheckpointsListResponse", name="list_checkpoints")
LIST_USER_CHECKPOINTS = _row("GET", "checkpoints", _TRAIN, "CheckpointsListResponse", name="list_user_checkpoints")
DELETE_CHECKPOINT = _row("DELETE", _CHECKPOINT, _TRAIN, name="delete_checkpoint")
PUBLISH_CHECKPOINT = _row("POST", f"{_CHECKPOINT}/publish", _TRAIN, name="publish_checkpoint")
UNPUBLISH_CHECKPOINT = _row("DELETE", f"{_CHECKPOINT}/publish", _TRAIN, name="unpublish_checkpoint")
SET_CHECKPOINT_TTL = _row("PUT", f"{_CHECKPOINT}/ttl", _TRAIN, name="set_checkpoint_ttl")
CHECKPOINT_ARCHIVE = _row("GET", f"{_CHECKPOINT}/archive", _TRAIN, name="checkpoint_archive")  # answers a redirect
EXTERNAL_WEIGHTS_URLS = _row(
    "GET", f"{_CHECKPOINT}/external_weights_urls", _TRAIN, "ExternalWeightsUrlsResponse", name="external_weights_urls"
)
WEIGHTS_INFO = _row("POST", "weights_info", _TRAIN, "WeightsInfoResponse")
COPY_WEIGHTS = _row("POST", "copy_weights", _TRAIN, "CopyWeightsResponse")

# What our own service tells its console and `tinkex run watch`
RUN_STEPS = _row("GET", f"{_RUN}/steps", _TRAIN, "RunStepsResponse", name="run_steps")
LOG_METRICS = _row("POST", f"{_RUN}/metrics", _TRAIN, "LogMetricsResponse", name="log_metrics")
RUN_METRICS = _row("GET", f"{_RUN}/metrics", _TRAIN, "RunMetricsResponse", name="run_metrics")
RUN_SAMPLES = _row("GET", f"{_RUN}/samples", _TRAIN, "RunSamplesResponse", name="run_samples")
RUN_HISTORY = _row("GET", f"{_RUN}/history", _TRAIN, name="run_history")  # answers a file
SERVICE_STATE = _row("GET", "service_state", _TRAIN, "ServiceState")
FAILED_OPERATIONS = _row("GET", "failed_operations", _TRAIN, "FailedOperationsResponse")

# What the owner of our own service does
OFFER_MODEL = _row("POST", "models", _TRAIN, "OfferedModel", name="offer_model")
WITHDRAW_MODEL = _row("DELETE", "models/{base_model}", _TRAIN, name="withdraw_model")

# Sessions and the account
LIST_SESSIONS = _row("GET", "sessions", _TRAIN, "ListSessionsResponse", name="list_sessions")
GET_SESSION = _row("GET", "sessions/{session_id}", _TRAIN, "GetSessionResponse", name="get_session")
SET_SESSION_PROJECT = _row("PUT", "sessions/{session_id}/project", _TRAIN, name="set_session_project")
SESSION_TRACE_EXPORT = _row("GET", "sessions/{session_id}/trace_export", _TRAIN, name="session_trace_export")
SEARCH_SESSIONS = _row("POST", "sessions/search", _TRAIN, "SessionSearchResponse", name="search_sessions")
AUDIT_LOG = _row("GET", "audit", _TRAIN, "AuditLogResponse", name="audit_log")
BILLING_USAGE = _row("GET", "billing/usage/events", _TRAIN, "BillingUsageResponse", name="billing_usage")
CHECKPOINT_STORAGE_USAGE = _row(
    "GET",
    "billing/usage/checkpoints/current",
    _TRAIN,
    "CurrentCheckpointStorageUsageResponse",
    name="checkpoint_storage_usage",
)
WHOAMI = _row("GET", "auth/apikey/me", _TRAIN, "WhoamiResponse", name="whoami")
REVOKE_KEY = _row("DELETE", "auth/apikey/me", _TRAIN, name="revoke_key")

ALL: tuple[Endpoint, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Endpoint))
