"""The scripted service's polls for results of every kind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from tinkex.testing.http import codec
from tinkex.testing.http.messages import PROTOBUF, Request, Response, json_response
from tinkex.testing.script import Pending
from tinkex.testing.state import State, known

# Most results are JSON in both dialects.
_PROTOBUF = {
    "forward": codec.pass_to_protobuf,
    "forward_backward": codec.pass_to_protobuf,
    "asample": codec.sample_to_protobuf,
}


async def retrieve_future(state: State, request: Request) -> Response:
    """The result at once when there is one, else when it comes; held for a while at most."""
    body, config = request.json, state.config
    future = known(state.futures, body["request_id"], "request")
    for twist in request.twists:
        future.twist(twist)
    if future.is_expired:
        future.was_fetched = True
        return json_response(410, {"detail": "the result is gone", "code": "expired", "category": "server"})
    if future.pending:
        return _queued(future.pending.pop(0))
    if not await _set_within(future.done, config.hold_s):
        return _queued(Pending())
    if future.failure is not None:
        future.was_fetched = True
        return json_response(200, {"error": future.failure.message, "category": future.failure.category})
    encode = _PROTOBUF.get(future.op) if request.wants_protobuf and config.dialect == "proto" else None
    response = Response(200, encode(future.result), PROTOBUF) if encode else json_response(200, future.result)
    size, limit = len(response.body), config.metadata_over_bytes
    if limit is not None and size > limit and body.get("allow_metadata_only"):
        return json_response(200, {"status": "complete_metadata", "response_payload_size": size})
    future.was_fetched = True
    return response


async def retrieve_futures(state: State, request: Request) -> Any:
    body = request.json
    sampler = state.sampler(body["target"]["sampling_session_id"])
    seen = body.get("prev_cursor") or 0
    if len(sampler.completed) <= seen:
        await _set_within(sampler.changed, state.config.hold_s)
    completions = [
        {"state": "finished" if future.failure is None else "failed", "request_id": future.id}
        for future in sampler.completed[seen:]
    ]
    return {"completions": completions, "cursor": len(sampler.completed)}


def cancel_future(state: State, request: Request) -> Any:
    request_id = request.json["request_id"]
    state.cancelled.append(request_id)
    future = state.futures.get(request_id)
    # Training that was accepted runs to completion: later operations build on it.
    if future is not None and future.op == "asample" and not future.done.is_set():
        future.fail("cancelled by the client")
    return {}


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    if not event.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


def _queued(state: Pending) -> Response:
    body: dict[str, Any] = {"queue_state": state.queue_state}
    if state.reason is not None:
        body["queue_state_reason"] = state.reason
    return json_response(200, {"type": "try_again", **body}) if state.try_again else json_response(408, body)
