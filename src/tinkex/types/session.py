"""Sessions: opening them, keeping them alive, ending them, finding them again."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from tinkex.errors import ValidationError
from tinkex.types.base import Value, field


class CreateSessionRequest(Value):
    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Value):
    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Value):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Value):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class CreateSamplingSessionRequest(Value):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Value):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Value):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Value):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(Value):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Value):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Value):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted


class SessionActive(Value):
    type: Literal["active"] = "active"


class SessionCancelled(Value):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Value):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Value):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Value):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Value):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason


class SessionFailed(Value):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


class ListSessionsResponse(Value):
    sessions: list[str]


class GetSessionResponse(Value):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class OwnSearchOwner(Value):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(Value):
    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Value):
    type: Literal["user"] = "user"
    owner_urns: list[str]

    def _check(self) -> None:
        if not 1 <= len(self.owner_urns) <= 10:
            raise ValidationError(f"UserSearchOwner.owner_urns takes 1 to 10 owners, got {len(self.owner_urns)}")


SearchOwner = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Value):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Value):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Value):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Value):
    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = None

    def _check(self) -> None:
        _refuse_empty("ClientFinishedSessionStatusQuery.reasons", self.reasons)


SessionStatusQuery = (
    ActiveSessionStatusQuery | CancelledSessionStatusQuery | FailedSessionStatusQuery | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Value):
    last_created_at: dt.datetime
    last_session_id: str

    def _check(self) -> None:
        if self.last_created_at.tzinfo is None:
            raise ValidationError("SessionSearchCursor.last_created_at needs a time zone")


class SessionSearchRequest(Value):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    owner: SearchOwner = field(default_factory=OwnSearchOwner)
    statuses: list[SessionStatusQuery] | None = None
    limit: int = 50
    cursor: SessionSearchCursor | None = None

    def _check(self) -> None:
        _refuse_empty("SessionSearchRequest.display_name", self.display_name)
        _refuse_empty("SessionSearchRequest.statuses", self.statuses)
        if not 1 <= self.limit <= 200:
            raise ValidationError(f"SessionSearchRequest.limit must be between 1 and 200, got {self.limit}")


class SessionSummary(Value):
    session_id: str
    created_at: dt.datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Value):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


def _refuse_empty(name: str, given: str | list[Any] | None) -> None:
    if given is not None and not given:
        raise ValidationError(f"{name} is empty: leave it out instead")
