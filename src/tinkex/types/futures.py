"""Futures on the wire: the response to a submission, requests for results, and failures."""

from __future__ import annotations

from typing import Literal

from tinkex.errors import RequestErrorCategory as RequestErrorCategory
from tinkex.types.base import Value, field
from tinkex.types.training import CreateModelResponse, ForwardBackwardOutput, OptimStepResponse
from tinkex.types.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)

RequestID = str


class UntypedAPIFuture(Value):
    """A submission was accepted; its result is asked for by `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class FutureRetrieveRequest(Value):
    """Ask for a result, or (`allow_metadata_only`) first for its size."""

    request_id: str
    allow_metadata_only: bool = False


class TryAgainResponse(Value):
    """Not done yet. `queue_state` is `active`, `paused_capacity`, `paused_rate_limit`, or a word of a newer service."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: str
    queue_state_reason: str | None = None


class RequestFailedResponse(Value):
    """The operation ran and failed. `category` is read in any casing; a word that is not known is `Unknown`."""

    error: str
    category: RequestErrorCategory


FutureRetrieveResponse = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)


class SamplingSessionFuturesTarget(Value):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Value):
    """Ask which results of a sampling session are there since `prev_cursor`."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = field(default_factory=list)


class FutureFinished(Value, tag=("state", "finished")):
    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Value, tag=("state", "failed")):
    state: Literal["failed"] = "failed"
    request_id: str


FutureCompletion = FutureFinished | FutureFailed


class FuturesRetrieveResponse(Value):
    completions: list[FutureCompletion]
    cursor: int
