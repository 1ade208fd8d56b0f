"""Small replacements for names of the official package that tinkex itself does not need.

Loaded when a program first uses one of them.
"""

from __future__ import annotations

import concurrent.futures
import enum
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from tinkex.client.future import APIFuture, reject, resolve
from tinkex.client.service import server_side_loss_error
from tinkex.errors import APIConnectionError
from tinkex.types.base import Value

T = TypeVar("T")
PerDatumLossFn = Callable[..., tuple[Any, Mapping[str, Any]]]


class LossHandle:
    """A loss that runs on the service. It cannot be created: see `ServiceClient.create_custom_loss`."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        raise server_side_loss_error()


class Timeout(types.SimpleNamespace):
    """Seconds per phase of a request, for `ServiceClient(timeout=…)`, which uses `read` as the time for a response.

    As upstream: equal by value, mutable and therefore not hashable.
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        connect: float | None = None,
        read: float | None = None,
        write: float | None = None,
        pool: float | None = None,
    ) -> None:
        phases = {"connect": connect, "read": read, "write": write, "pool": pool}
        super().__init__(**{phase: timeout if value is None else value for phase, value in phases.items()})

    def as_dict(self) -> dict[str, float | None]:
        return dict(vars(self))


class RequestOptions(TypedDict, total=False):
    """The options of a low-level call; for annotations only."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool


@dataclass
class RetryConfig:
    """Accepted wherever upstream accepts one, and ignored: limits and retries are those of `tinkex.Config`."""

    max_connections: int | None = 1000
    progress_timeout: float = 7200
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (TimeoutError, APIConnectionError)


class QueueState(enum.StrEnum):
    """Why work waits; equal to the strings that observers receive."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"


class AwaitableConcurrentFuture(APIFuture[T]):
    """A `concurrent.futures.Future` that can be awaited."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        super().__init__()
        future.add_done_callback(self._take)

    def _take(self, done: concurrent.futures.Future[T]) -> None:
        if done.cancelled():
            self.cancel()
            return
        error = done.exception()
        if error is not None:
            reject(self, error)
        else:
            resolve(self, done.result())


def model_dump(model: Any, *, exclude: Any = None, warnings: bool = True, **options: Any) -> dict[str, Any]:
    """Return the fields of a tinkex value or of a pydantic model. Only pydantic knows the option `warnings`."""
    if not isinstance(model, Value):
        options["warnings"] = warnings
    fields: dict[str, Any] = model.model_dump(exclude=exclude or set(), **options)
    return fields
