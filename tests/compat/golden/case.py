"""A case: one call, or a few, on a client's public API, with the circumstances under which its requests are recorded.

`run_case(case, T, server)` works with any module of this API: an official release, or `tinkex`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .recording import API_KEY, BACKGROUND, PREAMBLE, mark_repeats, merged_telemetry, record
from .server import GoldenServer, Stage

OLD, NEW = ("0.4.1",), ("0.36.0",)
BOTH = OLD + NEW
BASE_MODEL = "Qwen/Qwen3-8B"
# Nothing from the machine may reach a recording.
CLEAN = {"TINKER_TELEMETRY": "0"}
UNSET = (
    "TINKER_API_KEY",
    "TINKER_BASE_URL",
    "TINKER_CREDENTIAL_CMD",
    "TINKER_PROJECT_ID",
    "TINKER_TAGS",
    "CLOUDFLARE_ACCESS_CLIENT_ID",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET",
)


@dataclass(frozen=True)
class Case:
    name: str
    act: Callable[..., object]  # (T, client), or (T, client, stage) with needs_stage
    on: str = "training"  # the client it gets: service, training, sampling, rest, admin or low_level
    versions: tuple[str, ...] = BOTH
    config: dict[str, Any] = field(default_factory=dict)  # what client/config answers
    dynamic_config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    service: dict[str, Any] = field(default_factory=dict)  # further arguments of ServiceClient
    from_start: bool = False  # record how the client introduces itself, too
    keep: tuple[str, ...] = ()  # background endpoints that this case is about
    order: str = "as sent"  # or "polls last", where polls race submissions, or "sorted", where everything races
    needs_torch: bool = False
    needs_stage: bool = False


ALL: dict[str, Case] = {}


def case(name: str, **circumstances: Any) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register the function below under this name."""

    def register(act: Callable[..., object]) -> Callable[..., object]:
        add(name, act, **circumstances)
        return act

    return register


def add(name: str, act: Callable[..., object], **circumstances: Any) -> None:
    assert name not in ALL, f"two cases are called {name}"
    ALL[name] = Case(name, act, **circumstances)


def run_case(case: Case, T: Any, server: GoldenServer, old_service: bool = False) -> dict[str, Any]:
    """Play the case; the golden record: its requests in order, and the type of the error if the call raised one."""
    stage = server.stage(case.name, case.config, case.dynamic_config, old_service)
    with environment(case.env), contextlib.ExitStack() as closing:
        try:
            client = make_client(T, case, stage.url, closing)
            if not case.from_start:
                stage.forget()
            outcome = play(case, T, client, stage)
        except Exception as error:
            outcome = error
        with stage.changed:
            requests = list(stage.requests)
    left_out = set(BACKGROUND if case.from_start else BACKGROUND + PREAMBLE) - set(case.keep)
    requests = [request for request in merged_telemetry(requests) if request.endpoint not in left_out]
    records = in_order([record(request) for request in mark_repeats(requests)], case.order)
    raised = type(outcome).__name__ if isinstance(outcome, Exception) else None
    return {"raised": raised, "requests": records}


def in_order(records: list[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    if order == "sorted":
        return sorted(records, key=str)
    if order == "polls last":
        polls = [one for one in records if one["path"].endswith("/retrieve_future")]
        return [one for one in records if one not in polls] + sorted(polls, key=str)
    return records


def play(case: Case, T: Any, client: Any, stage: Stage) -> object:
    outcome = case.act(T, client, stage) if case.needs_stage else case.act(T, client)
    if asyncio.iscoroutine(outcome):
        return asyncio.run(outcome)
    # A future is waited for, so that its polls are part of the record.
    return outcome.result(60) if hasattr(outcome, "result") else outcome


def make_client(T: Any, case: Case, url: str, closing: contextlib.ExitStack) -> Any:
    if case.on == "low_level":
        return T._client.AsyncTinker(base_url=url, api_key=API_KEY, _strict_response_validation=True)
    if case.on == "admin":
        return T.AdminClient(base_url=url, api_key=API_KEY)
    if case.on == "rest" and hasattr(T, "RestClient"):
        return T.RestClient(base_url=url, api_key=API_KEY)
    service = T.ServiceClient(base_url=url, api_key=API_KEY, **case.service)
    if hasattr(service, "close"):
        closing.callback(lambda: service.close("success").result(60))
    if case.on == "training":
        return service.create_lora_training_client(BASE_MODEL, rank=16)
    if case.on == "sampling":
        return service.create_sampling_client(base_model=BASE_MODEL)
    return service.create_rest_client() if case.on == "rest" else service


@contextlib.contextmanager
def environment(extra: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in UNSET:
        os.environ.pop(name, None)
    os.environ.update(CLEAN | extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
