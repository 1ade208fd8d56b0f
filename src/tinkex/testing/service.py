"""`ScriptedService`: a Tinker API on 127.0.0.1 for tests, which works normally unless its script has a fault."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import orjson
from google.protobuf.message import DecodeError

from tinkex.errors import ValidationError
from tinkex.testing.handlers import account, files, futures, sampling, training
from tinkex.testing.http.messages import Refused, Reply, Request, Response, json_response
from tinkex.testing.http.server import HttpServer
from tinkex.testing.script import ENDPOINTS, FILE, Answer, Delay, Drop, Hang, Script, Status, Twist
from tinkex.testing.state import Checkpoint, Config, Model, Sampler, Session, State
from tinkex.wire import endpoints

# What a service of the JSON dialect has never heard of.
NEW_ENDPOINTS = frozenset({"client_config", "client_dynamic_config", "sample_stream"})

ROUTES: dict[str, Callable[[State, Request], Any]] = {
    name: getattr(room, name)
    for room in (account, files, futures, sampling, training)
    for name in ENDPOINTS
    if hasattr(room, name)
}


class ScriptedService(HttpServer):
    """A whole service in this process, on its own thread and a free port.

        with ScriptedService(dialect="proto", base_models=["tinkex/tiny"]) as service:
            service.script.on("optim_step", nth=1, do=Drop(when="after_accept"))
            client = tinkex.ServiceClient(base_url=service.url, api_key="tml-test")

    `dialect="json"` is a service of 0.4.1's days: `client/config` answers 404 and no protobuf is read or written.
    The other arguments are the fields of `Config`.
    """

    def __init__(self, dialect: Literal["proto", "json"] = "proto", **config: Any) -> None:
        if dialect not in ("proto", "json"):
            raise ValueError(f"dialect is 'proto' or 'json', not {dialect!r}")
        super().__init__()
        self.script = Script()
        self.requests: list[Request] = []
        self._arrived = threading.Condition()
        self._running = asyncio.Event()
        self._running.set()
        self._state = state = State(Config(dialect=dialect, **config), lambda: self.url)
        self.executed: list[tuple[str, int | None, str]] = state.executed
        """Training operations in the order they ran: (model_id, seq_id, op)."""
        self.sampled: list[tuple[str, int | None]] = state.sampled
        """Samples drawn: (sampler_id, seq_id)."""
        self.cancelled: list[str] = state.cancelled
        """Request ids that clients cancelled."""
        self.telemetry: list[dict[str, Any]] = state.telemetry
        """Bodies sent to the telemetry endpoint."""
        self.sessions: dict[str, Session] = state.sessions
        self.models: dict[str, Model] = state.models
        self.samplers: dict[str, Sampler] = state.samplers
        self.checkpoints: dict[str, Checkpoint] = state.checkpoints
        lacking = {*state.config.missing, *(NEW_ENDPOINTS if dialect == "json" else ())}
        self._routes = {name: route for name, route in ROUTES.items() if name not in lacking}

    def pause(self) -> None:
        """Accept connections and requests, and answer nothing until `resume`."""
        self._loop.call_soon_threadsafe(self._running.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._running.set)

    def requests_to(self, endpoint: str) -> list[Request]:
        """The requests to one endpoint, in the order of arrival."""
        return [request for request in self.requests if request.endpoint == endpoint]

    def wait_for_requests(self, endpoint: str = "*", count: int = 1, timeout_s: float = 10.0) -> None:
        """Block until so many requests to an endpoint ("*": to any) have arrived since the service was made."""

        def have_come() -> bool:
            return len(self.requests if endpoint == "*" else self.requests_to(endpoint)) >= count

        with self._arrived:
            if not self._arrived.wait_for(have_come, timeout_s):
                raise TimeoutError(f"fewer than {count} requests to {endpoint!r} within {timeout_s} s")

    def _refuse_head(self, request: Request) -> bool:
        request.endpoint, request.parts = find(request.method, request.path)
        is_refused = bool(self.script.decide(request, at_head=True))
        if is_refused:
            self._record(request)
        return is_refused

    def _record(self, request: Request) -> None:
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()

    async def _handle(self, request: Request) -> Reply:
        self._record(request)
        actions = self.script.decide(request, at_head=False)
        await self._running.wait()
        request.twists = tuple(action for action in actions if isinstance(action, Twist))
        response: Response | None = None
        for action in actions:
            if isinstance(action, Twist):
                continue
            if action.when != "before" and response is None:
                response = await self._answer(request)
            match action:
                case Delay(seconds):
                    await asyncio.sleep(seconds)
                case Hang():
                    await asyncio.get_running_loop().create_future()
                case Status(status, detail, headers):
                    return json_response(status, {"detail": detail, "code": "scripted"}, headers)
                case Answer(body, content_type, status, headers):
                    return Response(status, _bytes(body), content_type, headers)
                case Drop("mid_answer") if response is not None:
                    return replace(response, cut=True)
                case Drop():
                    return None
        return response or await self._answer(request)

    async def _answer(self, request: Request) -> Response:
        try:
            self._check_key(request)
            route = self._routes.get(request.endpoint)
            if route is None:
                raise Refused(404, f"{request.method} {request.path} does not exist here", "not_found")
            answer = route(self._state, request)
            if inspect.isawaitable(answer):
                answer = await answer
            return answer if isinstance(answer, Response) else json_response(200, answer)
        except Refused as refused:
            return refused.response
        except KeyError as error:
            return Refused(422, f"the field {error} is missing", "bad_request").response
        except (ValidationError, orjson.JSONDecodeError, DecodeError) as error:
            return Refused(400, f"the body cannot be read: {error}", "bad_request").response

    def _check_key(self, request: Request) -> None:
        expected = self._state.config.api_key
        if expected is None or request.endpoint in (FILE, "healthz"):
            return
        given = request.headers.get("x-api-key", "")
        if given != expected and not given.startswith("eyJ"):  # a token of auth/token will do
            raise Refused(401, "the key in X-API-Key is not valid here", "unauthorized")


@functools.lru_cache(maxsize=1024)
def find(method: str, path: str) -> tuple[str, dict[str, str]]:
    """The endpoint's name and what its placeholders hold; ("", {}) if there is none."""
    start = path.rfind("/api/v1/")  # base URLs may have a path of their own
    if start >= 0:
        path = path[start:]
    elif method in ("GET", "HEAD"):
        method, path = "GET", path[max(0, path.find("/files/")) :]
    for verb, pattern, name in _PATTERNS:
        if verb == method and (found := pattern.fullmatch(path)):
            return name, found.groupdict()
    return "", {}


def _pattern(path: str) -> re.Pattern[str]:
    # Ids that consist of segments: weights/0001, organisation/model.
    path = re.sub(r"\{checkpoint_id\}", r"(?P<checkpoint_id>[^/]+/[^/]+)", path)
    path = re.sub(r"\{(tokenizer|base_model)\}", r"(?P<\1>.+)", path)
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


_PATTERNS = [
    *((row.method, _pattern(row.path), row.name) for row in endpoints.ALL),
    ("GET", _pattern("/files/{run_id}/{checkpoint_id}/{file}"), FILE),
]


def _bytes(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode()
    return body if isinstance(body, bytes) else orjson.dumps(body)
