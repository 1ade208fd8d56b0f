"""Every value users touch, loaded on first use: `from tinkex.types import Datum`.

The table below is the one list of public names; the imports above it are for type checkers only.

Others import:
    account, futures, inputs, insight, sampling, session, telemetry, tensor, training, weights
              the public values, by subject
    base      `Value`, from which all of them derive
    coerce    `describe`, for error messages, and `is_lenient`
    packed    runs of numbers as bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.types.account import *  # noqa: F403
    from tinkex.types.futures import *  # noqa: F403
    from tinkex.types.inputs import *  # noqa: F403
    from tinkex.types.insight import *  # noqa: F403
    from tinkex.types.sampling import *  # noqa: F403
    from tinkex.types.session import *  # noqa: F403
    from tinkex.types.telemetry import *  # noqa: F403
    from tinkex.types.tensor import *  # noqa: F403
    from tinkex.types.training import *  # noqa: F403
    from tinkex.types.weights import *  # noqa: F403

_MODULES = {
    "account": """
        AuditLogEntry AuditLogResponse AuthTokenResponse BillingEventInfo BillingUsageEvent BillingUsageResponse
        BillingUsageSession CheckpointBillingEvent ClientConfigRequest ClientConfigResponse
        ClientDynamicConfigResponse CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse
        DeletedTrainingRun GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest GetInfoRequest GetInfoResponse
        GetSamplerResponse GetServerCapabilitiesResponse HealthResponse ModelData SamplingPrefillBillingEvent
        SamplingSampleBillingEvent StorageBillingEvent SupportedModel TrainingBillingEvent TrainingRun
        TrainingRunsResponse UpdateTrainingRunRequest WhoamiResponse
    """,
    "futures": """
        FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest FutureRetrieveResponse
        FuturesRetrieveRequest FuturesRetrieveResponse RequestErrorCategory RequestFailedResponse RequestID
        SamplingSessionFuturesTarget TryAgainResponse UntypedAPIFuture
    """,
    "inputs": """
        Datum DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk LossFnInputs ModelInput
        ModelInputChunk PromptProvenanceSpan ProvenanceSpans SampledProvenanceSpan
    """,
    "insight": """
        FailedOperation FailedOperationsResponse LogMetricsResponse OfferedModel QueuedOperation RunMetrics
        RunMetricsResponse RunSample RunSamplesResponse RunStep RunStepsResponse ServerNode ServiceState
    """,
    "sampling": """
        PromptAltTokens SampleRequest SampleResponse SampledSequence SamplingParams StopReason TopkLogprobs
    """,
    "session": """
        AccessibleSearchOwner ActiveSessionStatusQuery CancelledSessionStatusQuery
        ClientFinishedSessionStatusQuery ClientSessionFinishErrored ClientSessionFinishInterrupted
        ClientSessionFinishReason ClientSessionFinishReasonType ClientSessionFinishSuccess ClientSessionFinished
        CreateSamplingSessionRequest CreateSamplingSessionResponse CreateSessionRequest CreateSessionResponse
        FailedSessionStatusQuery GetSessionResponse JoinSamplingSessionRequest JoinSamplingSessionResponse
        ListSessionsResponse OwnSearchOwner SearchOwner SessionActive SessionCancelled SessionFailed
        SessionFailedReason SessionFailedRequestReason SessionFailedSamplingSessionReason
        SessionFailedTrainingRunReason SessionHeartbeatRequest SessionHeartbeatResponse SessionSearchCursor
        SessionSearchRequest SessionSearchResponse SessionStatus SessionStatusQuery SessionSummary
        UserSearchOwner
    """,
    "telemetry": """
        EventType GenericEvent SessionEndEvent SessionStartEvent Severity TelemetryBatch TelemetryEvent
        TelemetryResponse TelemetrySendRequest UnhandledExceptionEvent
    """,
    "tensor": "TensorData TensorDtype",
    "training": """
        AdamOptimizerConfig AdamParams CreateCustomLossRequest CreateCustomLossResponse CreateModelRequest
        CreateModelResponse CustomLossGraph CustomLossInput CustomLossInputRank CustomLossNode
        DimuonOptimizerConfig DimuonParams ForwardBackwardInput ForwardBackwardOutput ForwardBackwardRequest
        ForwardRequest LoraConfig LossFnOutput LossFnType ModelID OptimParams OptimParamsBase OptimStepRequest
        OptimStepResponse OptimizerConfig OptimizerConfigBase
    """,
    "weights": """
        Checkpoint CheckpointArchiveUrlResponse CheckpointType CheckpointsListResponse CopyWeightsRequest
        CopyWeightsResponse Cursor ExternalWeightsUrlsResponse LoadWeightsRequest LoadWeightsResponse
        ParsedCheckpointTinkerPath SaveWeightsExternalRequest SaveWeightsExternalResponse
        SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest SaveWeightsForSamplerResponse
        SaveWeightsForSamplerResponseInternal SaveWeightsRequest SaveWeightsResponse UnloadModelRequest
        UnloadModelResponse WeightsInfoResponse
    """,
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:
    # Type checkers read the imports above instead: they cannot follow a table, and take any name for granted here.
    __all__ = list(_HOMES)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
