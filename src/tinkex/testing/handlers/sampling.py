"""The scripted service's sampling endpoints, and the polls for results of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import orjson

from tinkex.testing.draw import Draw, draw
from tinkex.testing.handlers.futures import Future, Result, json_response
from tinkex.testing.http import codec
from tinkex.testing.http.messages import Request, Response
from tinkex.testing.model import Weights
from tinkex.testing.script import FailFuture, Work
from tinkex.testing.state import Refused, Sampler, State
from tinkex.wire import sse

DEFAULT_MAX_TOKENS = 16
CANCELLED = "cancelled by the client"


class Sampling:
    """One method per endpoint; a method's name is the endpoint's."""

    def __init__(self, state: State) -> None:
        self._state = state

    def create_sampling_session(self, request: Request) -> Response:
        body = request.json
        session = self._state.session(body["session_id"])
        sampler_id = f"{session.id}:sample:{body['sampling_session_seq_id']}"
        if sampler_id not in self._state.samplers:
            self._state.samplers[sampler_id] = self._open(sampler_id, body)
        return json_response(200, {"type": "create_sampling_session", "sampling_session_id": sampler_id})

    def join_sampling_session(self, request: Request) -> Response:
        sampler = self._state.sampler(request.json["sampling_session_id"])
        sampler.clients += 1  # the creator has block 0
        return json_response(200, {"client_counter": sampler.clients - 1})

    def get_sampler(self, request: Request) -> Response:
        sampler = self._state.sampler(request.parts["sampler_id"])
        answer = {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        return json_response(200, answer)

    def asample(self, request: Request) -> Response:
        body, state = request.json, self._state
        sampler = self._sampler(body)
        prompt = self._prompt(body)
        name = body.get("seq_id")
        name = request.headers.get("x-idempotency-key") if name is None else name
        # The body is part of the key: clients that share a sampler without joining it count from 0 too.
        key = None if name is None else (name, hash(request.body))
        future = sampler.futures.get(key)
        if key is None or future is None or future.is_lost:
            future = state.keep(Future("asample", request.twists, state.config.work_s))
            future.on_done = sampler.note
            if key is not None:
                sampler.futures[key] = future
            if future.failure is not None:
                future.finish(None)
            else:
                state.sampled.append((sampler.id, body.get("seq_id")))
                state.finish_after(future, self._result(self._draw(sampler, prompt, body)), future.work_s)
        ids = [f"{future.id}:{index}" for index in range(body.get("num_samples") or 1)]
        return json_response(200, {"request_id": future.id, "sample_sequence_ids": ids})

    def sample_stream(self, request: Request) -> Response:
        body = request.json
        sampler = self._sampler(body)
        found = self._draw(sampler, self._prompt(body), body)
        self._state.sampled.append((sampler.id, body.get("seq_id")))
        return Response(200, content_type="text/event-stream", stream=self._events(request, found))

    async def _events(self, request: Request, found: Draw) -> AsyncIterator[bytes]:
        for twist in request.twists:
            if isinstance(twist, Work):
                await asyncio.sleep(twist.seconds)
            elif isinstance(twist, FailFuture):
                yield sse.encode("error", orjson.dumps({"error": twist.message, "category": twist.category}))
                return
        yield sse.comment("sampling")
        for place in range(max(len(drawn.tokens) for drawn in found.sequences)):
            await asyncio.sleep(self._state.config.stream_token_s)
            for index, drawn in enumerate(found.sequences):
                if place < len(drawn.tokens):
                    event = {"index": index, "tokens": [drawn.tokens[place]], "logprobs": [drawn.logprobs[place]]}
                    yield sse.encode("token", orjson.dumps(event))
        yield sse.encode("done", orjson.dumps(codec.draw_to_json(found)))

    def retrieve_future(self, request: Request) -> Response | Awaitable[Response]:
        body, config = request.json, self._state.config
        future = self._state.futures.get(body["request_id"])
        if future is None:
            raise Refused(404, f"request {body['request_id']!r} is not known", "unknown_request")
        for twist in request.twists:
            future.twist(twist)
        metadata_over = config.metadata_over_bytes if body.get("allow_metadata_only") else None
        wants_protobuf = request.wants_protobuf and config.dialect == "proto"
        return future.poll(wants_protobuf, config.hold_s, metadata_over)

    async def retrieve_futures(self, request: Request) -> Response:
        body = request.json
        sampler = self._state.sampler(body["target"]["sampling_session_id"])
        seen = body.get("prev_cursor") or 0
        if len(sampler.completed) <= seen:
            watcher: asyncio.Future[None] = self._state.loop.create_future()
            sampler.watchers.append(watcher)
            await asyncio.wait([watcher], timeout=self._state.config.hold_s)
        completions = [
            {"state": "finished" if future.failure is None else "failed", "request_id": future.id}
            for future in sampler.completed[seen:]
        ]
        return json_response(200, {"completions": completions, "cursor": len(sampler.completed)})

    def cancel_future(self, request: Request) -> Response:
        request_id = request.json["request_id"]
        self._state.cancelled.append(request_id)
        future = self._state.futures.get(request_id)
        # Training that was accepted runs to completion: later operations build on it.
        if future is not None and future.op == "asample" and not future.is_done:
            future.fail(CANCELLED, "user")
        return json_response(200, {})

    def _open(self, sampler_id: str, body: Mapping[str, Any]) -> Sampler:
        path, base_model = body.get("model_path"), body.get("base_model")
        if path is not None:
            if "/sampler_weights/" not in path:
                raise Refused(400, f"{path!r} is no sampler path: save it with save_weights_for_sampler", "bad_path")
            checkpoint = self._state.checkpoint(path)
            return Sampler(sampler_id, checkpoint.model.base_model, path, checkpoint.weights)
        if base_model is None:
            raise Refused(400, "name a base_model or a model_path", "bad_request")
        return Sampler(sampler_id, self._state.known_base(base_model), None, Weights())

    def _sampler(self, body: Mapping[str, Any]) -> Sampler:
        session_id = body.get("sampling_session_id")
        if session_id is not None:
            return self._state.sampler(session_id)
        name = body.get("model_path") or body.get("base_model") or ""
        if name not in self._state.samplers:
            self._state.samplers[name] = self._open(name, body)
        return self._state.samplers[name]

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        tokens = codec.tokens_of(body["prompt"]["chunks"])
        asked = (body.get("sampling_params") or {}).get("max_tokens") or 0
        limit = self._state.config.max_context_length
        if len(tokens) + asked > limit:
            raise Refused(
                400,
                f"Prompt length plus max_tokens exceeds the model's context window: "
                f"{len(tokens)} prompt tokens + {asked} max_tokens > {limit}",
                "context_exceeded",
            )
        return tokens

    def _draw(self, sampler: Sampler, prompt: list[int], body: Mapping[str, Any]) -> Draw:
        return draw(sampler.weights, prompt, body, self._state.config.vocabulary, DEFAULT_MAX_TOKENS)

    @staticmethod
    def _result(found: Draw) -> Result:
        return Result(lambda: codec.draw_to_json(found), lambda: codec.draw_to_protobuf(found))
