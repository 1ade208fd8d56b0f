"""Telemetry events as the service's telemetry endpoint takes them. The `event` field tells them apart."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from tinkex.types.base import Value, field

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(Value, tag=("event", "SESSION_START")):
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: dt.datetime


class SessionEndEvent(Value, tag=("event", "SESSION_END")):
    duration: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: dt.datetime


class UnhandledExceptionEvent(Value, tag=("event", "UNHANDLED_EXCEPTION")):
    error_message: str
    error_type: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: dt.datetime
    traceback: str | None = None


class GenericEvent(Value, tag=("event", "GENERIC_EVENT")):
    """Anything else; ids belong into `event_data`, so that there are few different names."""

    event: EventType
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: dt.datetime
    event_data: dict[str, Any] = field(default_factory=dict)


TelemetryEvent = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent


class TelemetryBatch(Value):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None


class TelemetrySendRequest(TelemetryBatch):
    """The same under the name of another release."""


class TelemetryResponse(Value):
    status: Literal["accepted"]
