"""The scripted service's sampling endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson

from tinkex.testing.http.messages import Refused, Request, Response
from tinkex.testing.model import Weights, draw, tokens_of
from tinkex.testing.script import FailFuture, Work
from tinkex.testing.state import Sampler, State
from tinkex.wire import sse


def create_sampling_session(state: State, request: Request) -> Any:
    body = request.json
    session = state.session(body["session_id"])
    sampler = _opened(state, f"{session.id}:sample:{body['sampling_session_seq_id']}", body)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


def join_sampling_session(state: State, request: Request) -> Any:
    sampler = state.sampler(request.json["sampling_session_id"])
    sampler.clients += 1  # the creator has block 0
    return {"client_counter": sampler.clients - 1}


def get_sampler(state: State, request: Request) -> Any:
    sampler = state.sampler(request.parts["sampler_id"])
    return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}


def asample(state: State, request: Request) -> Any:
    body = request.json
    sampler = _sampler(state, body)
    prompt = _prompt(state, body)
    name = body.get("seq_id")
    name = request.headers.get("x-idempotency-key") if name is None else name
    # The body is part of the key: clients that share a sampler without joining it count from 0 too.
    key = None if name is None else (name, hash(request.body))
    future = sampler.futures.get(key)
    if future is None or future.is_lost:
        future = state.accept(request, "asample")
        future.on_done = sampler.note
        if key is not None:
            sampler.futures[key] = future
        if future.failure is not None:
            future.finish()
        else:
            state.sampled.append((sampler.id, body.get("seq_id")))
            future.finish_after(future.work_s, draw(sampler.weights, prompt, body, state.config.vocabulary))
    ids = [f"{future.id}:{index}" for index in range(body.get("num_samples") or 1)]
    return {"request_id": future.id, "sample_sequence_ids": ids}


def sample_stream(state: State, request: Request) -> Response:
    body = request.json
    sampler = _sampler(state, body)
    found = draw(sampler.weights, _prompt(state, body), body, state.config.vocabulary)
    state.sampled.append((sampler.id, body.get("seq_id")))
    stream = _events(request, found, state.config.stream_token_s)
    return Response(200, content_type="text/event-stream", stream=stream)


async def _events(request: Request, found: dict[str, Any], token_s: float) -> AsyncIterator[bytes]:
    for twist in request.twists:
        if isinstance(twist, Work):
            await asyncio.sleep(twist.seconds)
        elif isinstance(twist, FailFuture):
            yield sse.encode("error", orjson.dumps({"error": twist.message, "category": twist.category}))
            return
    yield sse.comment("sampling")
    sequences = found["sequences"]
    for place in range(max(len(sequence["tokens"]) for sequence in sequences)):
        await asyncio.sleep(token_s)
        for index, sequence in enumerate(sequences):
            if place < len(sequence["tokens"]):
                token = {name: [sequence[name][place]] for name in ("tokens", "logprobs")}
                yield sse.encode("token", orjson.dumps({"index": index, **token}))
    yield sse.encode("done", orjson.dumps(found))


def _sampler(state: State, body: Mapping[str, Any]) -> Sampler:
    if body.get("sampling_session_id") is not None:
        return state.sampler(body["sampling_session_id"])
    return _opened(state, body.get("model_path") or body.get("base_model") or "", body)


def _opened(state: State, sampler_id: str, body: Mapping[str, Any]) -> Sampler:
    """The sampler of this id; made if there is none yet."""
    if sampler_id in state.samplers:
        return state.samplers[sampler_id]
    path, base_model = body.get("model_path"), body.get("base_model")
    if path is not None:
        if "/sampler_weights/" not in path:
            raise Refused(400, f"{path!r} is no sampler path: save it with save_weights_for_sampler", "bad_path")
        checkpoint = state.checkpoint(path)
        sampler = Sampler(sampler_id, checkpoint.model.base_model, path, checkpoint.weights)
    elif base_model is not None:
        sampler = Sampler(sampler_id, state.known_base(base_model), None, Weights())
    else:
        raise Refused(400, "name a base_model or a model_path", "bad_request")
    state.samplers[sampler_id] = sampler
    return sampler


def _prompt(state: State, body: Mapping[str, Any]) -> list[int]:
    tokens = tokens_of(body["prompt"]["chunks"])
    asked = (body.get("sampling_params") or {}).get("max_tokens") or 0
    limit = state.config.max_context_length
    if len(tokens) + asked > limit:
        raise Refused(
            400,
            f"Prompt length plus max_tokens exceeds the model's context window: "
            f"{len(tokens)} prompt tokens + {asked} max_tokens > {limit}",
            "context_exceeded",
        )
    return tokens
