"""`BaseClient`: what all clients share. A session, statistics, closing, pickling without the key."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Self

import tinkex.types
from tinkex import settings
from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import decoded, read_value
from tinkex.client._calls.handshake import ready
from tinkex.client._runtime.operation import Operation, QueueObserver
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture
from tinkex.errors import ConfigError, TinkexError
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

CONSOLE = "https://tinker.thinkingmachines.ai"


def warn_of_retry_config(retry_config: Any) -> None:
    """Accept the official package's per-sampler retry settings, so that programs run, and say that they are ignored."""
    if retry_config is not None:
        warnings.warn(
            "retry_config is ignored: retries are settled once, by max_retries, unreachable_s and deadline_s of "
            "ServiceClient or the environment.",
            stacklevel=3,
        )


class BaseClient:
    """The base of all clients: light, shares everything heavy through its session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._observers: tuple[QueueObserver, ...] = ()

    @property
    def session_id(self) -> str | None:
        """The id of the session on the service; None until the first call has opened it."""
        return self._session.session_id

    def stats(self) -> dict[str, Any]:
        """Return requests, retries, bytes and seconds per operation, over all clients of this service and key."""
        return self._session.link().stats.snapshot()

    def on_queue_state(self, observer: QueueObserver) -> Callable[[], None]:
        """Call `observer(state, reason)` when the service says why this client's work waits.

        Returns a function that unsubscribes.
        """
        self._observers = (*self._observers, observer)

        def stop() -> None:
            self._observers = tuple(each for each in self._observers if each is not observer)

        return stop

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called on every change; override it, or use `on_queue_state`."""
        for observer in self._observers:
            observer(queue_state, queue_state_reason)

    def _observer(self) -> QueueObserver:
        """Return a function that calls `on_queue_state_change`, looked up at call time: a subclass or a patch is heard.

        Holds the client weakly: work in flight must not keep a client alive that its user has dropped.
        """
        reference = weakref.ref(self)

        def observe(state: str, reason: str | None) -> None:
            client = reference()
            if client is not None:
                client.on_queue_state_change(state, reason)

        return observe

    def result(self, timeout: float | None = None) -> Self:
        """Return the client itself: programs that treat `create_*` as a future work unchanged."""
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield  # makes this a generator, so that `await client` gives the client

    def get_telemetry(self) -> None:
        """Kept for programs that ask; the SDK's own events are at `tinkex.on`."""
        return None

    def _ask(
        self,
        endpoint: Endpoint,
        body: Body | Callable[[Dialect], Body] | None = None,
        *,
        path: str | Callable[[Dialect], str] | None = None,
        read: Callable[[Any], Any] | None = None,
        headers: Mapping[str, str] | None = None,
        follow: bool = True,
    ) -> APIFuture[Any]:
        """Start a call that the service responds to at once (it makes no future for it).

        `read` makes a value of the response; without it, the endpoint's own type is read. Redirects are not followed
        with `follow=False`.
        """
        link = self._session.link()

        async def work(operation: Operation) -> Any:
            dialect = await ready(link)
            response = await call(
                link,
                endpoint,
                body(dialect) if callable(body) else body,
                operation=operation,
                path=path(dialect) if callable(path) else path,
                headers=headers,
                follow=follow,
            )
            if read is not None:
                return await decoded(functools.partial(read, response), len(response.content))
            if not endpoint.answer:
                return None
            return await read_value(getattr(tinkex.types, endpoint.answer), response.content)

        return self._session.run(endpoint.name, work)

    def _console(self) -> str:
        config = self._session.config
        return config.base_url if settings.is_loopback(config.base_url) else CONSOLE

    def _pickled(self) -> tuple[dict[str, Any], str | None]:
        """Return the service's address and settings; the key stays here, only its fingerprint travels."""
        config = self._session.config
        address = {
            "base_url": config.base_url,
            "key": _fingerprint(config.api_key),
            "timeout_s": config.timeout_s,
            "max_retries": config.max_retries,
            "unreachable_s": config.unreachable_s,
            "deadline_s": config.deadline_s,
            "max_response_bytes": config.max_response_bytes,
            "pools": dict(config.pools),
        }
        return address, self._session.session_id

    @staticmethod
    def _session_from(address: dict[str, Any], session_id: str | None) -> Session:
        address = dict(address)
        fingerprint = address.pop("key", None)
        config = settings.resolve(**address)
        if fingerprint not in (None, _fingerprint(config.api_key)):
            raise ConfigError(
                "This client was pickled with another API key than the one set here. Keys do not travel in pickles: "
                "set TINKER_API_KEY to the same key in this process."
            )
        return Session(config, attach_to=session_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closing = self._session.close(*_outcome(error))
        # A failing goodbye must not hide the error of the `with` block.
        if (failure := closing.exception()) is not None and kind is None:
            raise failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closing = self._session.close(*_outcome(error))
        try:
            await closing
        except TinkexError:
            if kind is None:
                raise


def _outcome(error: BaseException | None) -> tuple[str, str | None]:
    """Return how a `with` block ended, in the service's words."""
    if error is None:
        return "success", None
    is_stopped = isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError))
    return "interrupted" if is_stopped else "errored", type(error).__name__


def _fingerprint(key: str) -> str:
    return hashlib.sha256(f"tinkex pickle {key}".encode()).hexdigest()[:8]
