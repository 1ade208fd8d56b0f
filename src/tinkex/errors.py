"""The whole error tree. Nothing public raises outside it (except TypeError for wrong call shapes).

    TinkexError
    ├── ConfigError                    settings are missing or contradict each other
    ├── ValidationError (ValueError)   rejected before anything was sent
    ├── MissingExtra (ImportError)     an optional dependency is not installed
    ├── ClosedError                    the client was closed
    ├── DeadlineExceeded (TimeoutError) an operation ran out of time; says what it waited for
    ├── WrongThread                    a blocking call on the loop that must complete it
    ├── StreamAlreadyConsumed          a stream was read twice
    ├── RequestFailedError             the service ran the operation and it failed (category: user | server | unknown)
    ├── ResultExpired                  the service no longer has the result (HTTP 410)
    └── APIError
        ├── APIConnectionError         no response
        │   └── APITimeoutError
        ├── APIResponseValidationError a response that does not fit
        └── APIStatusError             400 BadRequestError (ContextOverflow) … 5xx InternalServerError

Errors carry data, pickle, and never hold a request's headers: no secret can leak through them.
`retryable` is decided here and nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any


class RequestErrorCategory(enum.StrEnum):
    """Whose fault a failed operation is, as the service reports it."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, word: object) -> RequestErrorCategory:
        """Read any casing; an unknown word is `Unknown`, never an error."""
        try:
            return cls(str(word).lower())
        except ValueError:
            return cls.Unknown


class TinkexError(Exception):
    """Root of everything this package raises."""

    retryable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ConfigError(TinkexError):
    """Settings are missing or contradict each other."""


class ValidationError(TinkexError, ValueError):
    """The call was rejected before anything was sent; the client stays usable.

    `code` names the broken rule, in the words that a service's own error response would have.
    """

    def __init__(self, message: str = "", code: str = "invalid") -> None:
        super().__init__(message)
        self.code = code


class MissingExtra(TinkexError, ImportError):
    """An optional dependency is needed for this call; the message names the extra to install."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the extra `{extra}`, which is not installed. Install it with: pip install 'tinkex[{extra}]' "
            f"(in a clone of the repository: pip install -e '.[{extra}]')"
        )
        self.extra = extra


class ClosedError(TinkexError):
    """The client was closed, or the process is shutting down."""


class DeadlineExceeded(TinkexError, TimeoutError):
    """An operation ran out of time. The message says what was waited for, how long and why."""


class WrongThread(TinkexError, RuntimeError):
    """A blocking call was made on the loop that would have to complete it."""


class StreamAlreadyConsumed(TinkexError):
    """A stream can be read once."""


class ResultExpired(TinkexError):
    """The service no longer holds the result of this request (HTTP 410)."""

    retryable = True


class RequestFailedError(TinkexError):
    """The service accepted the operation, ran it, and it failed."""

    def __init__(
        self,
        message: str,
        request_id: str = "",
        category: RequestErrorCategory | str = RequestErrorCategory.Unknown,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = RequestErrorCategory.parse(category)

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.category is not RequestErrorCategory.User


class Response:
    """The part of an HTTP response that an error keeps: status, headers, url. Never the request's headers."""

    def __init__(self, status_code: int, headers: Mapping[str, str] | None = None, url: str = "") -> None:
        self.status_code = status_code
        self.headers = dict(headers or {})
        self.url = url

    def __repr__(self) -> str:
        return f"<Response [{self.status_code}] {self.url}>"


class APIError(TinkexError):
    """The exchange between this process and the service failed."""

    def __init__(self, message: str, request: Any = None, *, body: object | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIConnectionError(APIError):
    """The service gave no response."""

    retryable = True

    def __init__(self, request: Any = None, message: str = "Connection error.", *, body: object | None = None) -> None:
        super().__init__(message, request, body=body)


class APITimeoutError(APIConnectionError):
    """The service gave no response in time."""

    def __init__(self, request: Any = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class APIResponseValidationError(APIError):
    """The service's response does not fit the protocol."""

    def __init__(self, response: Any = None, body: object | None = None, message: str | None = None) -> None:
        super().__init__(message or "The service's response does not fit the protocol.", body=body)
        self.response = response
        self.status_code = getattr(response, "status_code", None)


class APIStatusError(APIError):
    """The service responded with an error status. Takes any response with `status_code` and `headers`."""

    def __init__(self, message: str, response: Any = None, body: object | None = None) -> None:
        super().__init__(message, body=body)
        self.response = response
        self.status_code: int = getattr(response, "status_code", 0)

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return is_retryable_status(self.status_code, getattr(self.response, "headers", None) or {})


class BadRequestError(APIStatusError):
    """The service rejects the request as it stands: a wrong argument, a bad path."""


class ContextOverflow(BadRequestError, ValidationError):
    """Prompt and max_tokens together exceed the model's context.

    Also a `BadRequestError` with status 400, because that is how the service would respond and what programs catch to
    shorten their prompt.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        message = (
            f"Prompt length plus max_tokens exceeds the model's context window: {prompt_tokens} prompt tokens + "
            f"{max_tokens} max_tokens > {limit}. Shorten the prompt, or set max_tokens to at most "
            f"{max(limit - prompt_tokens, 0)}."
        )
        super().__init__(message, Response(400), {"detail": message, "category": "user"})
        self.code = "context_exceeded"


class AuthenticationError(APIStatusError):
    """The key is missing, wrong or revoked."""


class BillingError(APIStatusError):
    """The account cannot pay for the work."""


class PermissionDeniedError(APIStatusError):
    """The key is right and may not do this."""


class NotFoundError(APIStatusError):
    """No such model, run, checkpoint, session or call."""


class ConflictError(APIStatusError):
    """The request contradicts what is there, for example a name that is taken."""


class UnprocessableEntityError(APIStatusError):
    """The service can read the request and cannot make sense of it."""


class RateLimitError(APIStatusError):
    """Too much at once. Samples and training calls wait this out; other requests retry."""


class InternalServerError(APIStatusError):
    """The service failed, or something in front of it did."""


class ExperimentalWarning(FutureWarning):
    """A call whose behaviour the service may still change."""


TinkerError = TinkexError
"""The official package's name for the root."""

_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def is_retryable_status(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the same request may be sent again. `x-should-retry` has the last word."""
    verdict = headers.get("x-should-retry", "").lower()
    if verdict in ("true", "false"):
        return verdict == "true"
    # 409 is a lasting conflict unless the service says otherwise: repeating it for minutes does not help.
    return status in (408, 425, 429) or status >= 500


def status_error(response: Response, body: object | None) -> APIStatusError:
    """The typed error for a response with an error status."""
    status = response.status_code
    kind = _BY_STATUS.get(status) or (InternalServerError if status >= 500 else APIStatusError)
    return kind(f"Error code: {status} - {body}", response, body)


def _rebuild(cls: type[TinkexError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkexError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
