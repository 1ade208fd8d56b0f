"""The OpenAI-compatible endpoint: models, completions and chats, whole or streamed, from any base or checkpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinkex.engine.contract import Sampled, SampleEvent, SampleSpec
from tinkex.server.http.errors import RequestRejected, json_response
from tinkex.server.http.requests import read_json, service_of, tenant_of
from tinkex.server.openai.requests import (
    Chat,
    Completion,
    CompletionOptions,
    read_chat,
    read_completion,
    seeds_of,
    spec_of,
)
from tinkex.server.openai.responses import (
    CompletionBuilder,
    RenderedPrompt,
    Style,
    TextPiece,
    as_rejected,
    chunk_choice,
    error_body,
    whole_choice,
)
from tinkex.server.sampling.sample_queue import Sampling, Target
from tinkex.server.sampling.tokenizer_cache import ModelTokenizer
from tinkex.server.service import Service

logger = logging.getLogger("tinkex.server")

MAX_PROMPTS_AT_ONCE: Final = 16
"""Prompts of one request that are sampled at the same time, so that a long list does not fill the queue by itself."""
FIRST_EVENT_S: Final = 0.5
"""A stream waits so long for a first word or a refusal: after its headers are sent, a status can no longer be."""
QUIET_S: Final = 15.0
"""A comment is sent into a stream that has been silent for so long, lest a proxy think it dead."""
MAX_LISTED_CHECKPOINTS: Final = 1000
GONE: Final = 499
"""The status for a client that hung up. Nobody reads it but the metrics."""


# ── Handlers


async def list_models(request: Request) -> Response:
    """Every name that works: base models, aliases, and the caller's checkpoints for sampling, newest first."""
    service, tenant = service_of(request), tenant_of(request)
    entries = [_model(name, 0, model.name) for model in service.catalog.models for name in model.names]
    saved, _ = await service.db(
        lambda: service.store.list_checkpoints(tenant, None, 0, MAX_LISTED_CHECKPOINTS, service.clock.wall())
    )
    entries += [_model(row.path, row.created_at, row.base_model) for row in saved if row.kind == "sampler_weights"]
    return json_response({"object": "list", "data": entries})


async def get_model(request: Request) -> Response:
    name = request.path_params["name"]
    target = await _open(service_of(request), tenant_of(request), name)
    return json_response(_model(name, 0, target.info.name))


def _model(name: str, created_at: float, base: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "tinkex", "root": base}


async def completions(request: Request) -> Response:
    asked = read_completion(await read_json(request))
    service, tenant = service_of(request), tenant_of(request)
    target = await _open(service, tenant, asked.wish.model)
    job = await asyncio.to_thread(_completion_job, service, target, asked)
    return await _respond(request, service, tenant, job)


async def chat_completions(request: Request) -> Response:
    asked = read_chat(await read_json(request))
    service, tenant = service_of(request), tenant_of(request)
    target = await _open(service, tenant, asked.wish.model)
    job = await asyncio.to_thread(_chat_job, service, target, asked)
    return await _respond(request, service, tenant, job)


async def unknown(request: Request) -> Response:
    raise RequestRejected(
        404,
        f"{request.method} {request.url.path[:200]} is not part of this service. It has GET models, POST completions "
        "and POST chat/completions.",
        "unknown_url",
    )


async def _open(service: Service, tenant: str, model: str) -> Target:
    """What `model` names: the adapter of a checkpoint, or a base model without one."""
    if model.startswith("tinker://"):
        return await service.sampling.open(tenant, base_model=None, model_path=model)
    return await service.sampling.open(tenant, base_model=model, model_path=None)


# ── From a request to samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """A request that is ready to be sampled."""

    id: str
    style: Style
    wish: CompletionOptions
    target: Target
    tokenizer: ModelTokenizer
    prompts: Sequence[RenderedPrompt]
    specs: Sequence[SampleSpec]


def _completion_job(service: Service, target: Target, asked: Completion) -> CompletionJob:
    tokenizer = service.tokenizers.load(target.info.name)
    prompts = []
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            tokens, text = tokenizer.encode(prompt, asked.add_special_tokens), prompt
        else:
            tokens, text = list(prompt), tokenizer.decode(prompt) if asked.is_echoed else ""
        prompts.append(RenderedPrompt(tokens=tokens, echo=text if asked.is_echoed else None))
    return _job("completion", asked.wish, target, tokenizer, prompts)


def _chat_job(service: Service, target: Target, asked: Chat) -> CompletionJob:
    tokenizer = service.tokenizers.load(target.info.name)
    text = tokenizer.chat.render(
        target.info.name,
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        tools=asked.tools,
        extras=asked.template_extras,
    )
    # The template writes the special tokens itself.
    prompt = RenderedPrompt(tokens=tokenizer.encode(text, add_special_tokens=False))
    return _job("chat", asked.wish, target, tokenizer, [prompt])


def _job(
    style: Style, wish: CompletionOptions, target: Target, tokenizer: ModelTokenizer, prompts: Sequence[RenderedPrompt]
) -> CompletionJob:
    specs = [
        spec_of(wish, target.info, target.weights, prompt.tokens, seed, is_echoed=prompt.echo is not None)
        for prompt, seed in zip(prompts, seeds_of(wish.seed, len(prompts)), strict=True)
    ]
    prefix = "cmpl" if style == "completion" else "chatcmpl"
    return CompletionJob(
        id=f"{prefix}-{uuid4().hex}",
        style=style,
        wish=wish,
        target=target,
        tokenizer=tokenizer,
        prompts=prompts,
        specs=specs,
    )


class SampleEvents:
    """The events of several prompts as one sequence of (prompt, event). Closing it cancels what is not finished."""

    def __init__(self, sampling: Sampling, tenant: str, job: CompletionJob) -> None:
        self._events: asyncio.Queue[tuple[int, SampleEvent] | Exception] = asyncio.Queue()
        self._first: tuple[int, SampleEvent] | None = None
        self._left = len(job.specs)
        self._room = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
        self._tasks = [
            asyncio.create_task(self._sample(sampling, tenant, job.target, place, spec))
            for place, spec in enumerate(job.specs)
        ]

    async def _sample(self, sampling: Sampling, tenant: str, target: Target, place: int, spec: SampleSpec) -> None:
        try:
            async with self._room, aclosing(sampling.run(tenant, target, spec)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._events.put_nowait((place, event))
        except Exception as problem:  # raised to whoever reads
            self._events.put_nowait(problem)

    async def begin(self) -> None:
        """Wait a moment for the first event. Raises if it is a refusal."""
        try:
            async with asyncio.timeout(FIRST_EVENT_S):
                self._first = await self._next()
        except TimeoutError:
            pass

    async def next(self) -> tuple[int, SampleEvent] | None:
        """None when every prompt has its result."""
        if self._first is not None:
            found, self._first = self._first, None
        elif self._left:
            found = await self._next()
        else:
            return None
        self._left -= isinstance(found[1], Sampled)
        return found

    async def _next(self) -> tuple[int, SampleEvent]:
        found = await self._events.get()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        # Not awaited: whoever closes may itself be cancelled, and each task cleans up after itself.
        for task in self._tasks:
            task.cancel()


# ── From samples to an answer


async def _respond(request: Request, service: Service, tenant: str, job: CompletionJob) -> Response:
    samples = SampleEvents(service.sampling, tenant, job)
    created = int(service.clock.wall())
    if not job.wish.is_streamed:
        try:
            return await _whole(request, samples, job, created)
        finally:
            samples.close()
    try:
        await samples.begin()
    except BaseException:
        samples.close()
        raise
    return EventStream(_lines(samples, job, created), samples)


async def _whole(request: Request, samples: SampleEvents, job: CompletionJob, created: int) -> Response:
    """The answer in one piece. Nobody waits for it any more if the client is gone."""
    collected = asyncio.create_task(_collect(samples))
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((collected, gone), return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            return Response(status_code=GONE)
        events = collected.result()
    finally:
        collected.cancel()
        gone.cancel()
    return await asyncio.to_thread(_answer, events, job, created)


async def _collect(samples: SampleEvents) -> list[tuple[int, SampleEvent]]:
    events = []
    while (event := await samples.next()) is not None:
        events.append(event)
    return events


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(events: Sequence[tuple[int, SampleEvent]], job: CompletionJob, created: int) -> Response:
    told = CompletionBuilder(job.wish, job.tokenizer, job.prompts)
    pieces: dict[int, list[TextPiece]] = {}
    for place, event in events:
        for piece in told.feed(place, event):
            pieces.setdefault(piece.index, []).append(piece)
    choices = [whole_choice(job.style, job.tokenizer, job.wish, pieces[index]) for index in sorted(pieces)]
    kind = "text_completion" if job.style == "completion" else "chat.completion"
    return json_response({**_head(job, kind, created), "choices": choices, "usage": told.usage})


def _head(job: CompletionJob, kind: str, created: int) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": created, "model": job.wish.model}


async def _lines(samples: SampleEvents, job: CompletionJob, created: int) -> AsyncIterator[bytes]:
    """The lines of a stream. An error is one of them, and the last: the status is sent already."""
    told = CompletionBuilder(job.wish, job.tokenizer, job.prompts)
    head = _head(job, "text_completion" if job.style == "completion" else "chat.completion.chunk", created)
    with_usage = {"usage": None} if job.wish.with_usage else {}
    begun: set[int] = set()
    try:
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    found = await samples.next()
            except TimeoutError:
                yield b": still at work\n\n"
                continue
            if found is None:
                break
            for piece in told.feed(*found):
                choice = chunk_choice(job.style, job.tokenizer, job.wish, piece, piece.index not in begun)
                begun.add(piece.index)
                yield _line({**head, "choices": [choice], **with_usage})
        if job.wish.with_usage:
            yield _line({**head, "choices": [], "usage": told.usage})
        yield b"data: [DONE]\n\n"
    except Exception as problem:
        yield _line(error_body(_refusal(problem)))


def _line(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream whose samples end with it, however it ends."""

    def __init__(self, lines: AsyncIterator[bytes], samples: SampleEvents) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(lines, headers=headers, media_type="text/event-stream")
        self._samples = samples

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._samples.close()


# ── Errors, and the table

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def openai_error(problem: Exception) -> Response:
    """Any problem as OpenAI's clients expect it."""
    refused = _refusal(problem)
    return json_response(error_body(refused), refused.status, refused.headers)


def _refusal(problem: Exception) -> RequestRejected:
    refused = as_rejected(problem)
    if refused is None:
        logger.error("a request failed", exc_info=problem)
        refused = RequestRejected(
            500, "The service failed to answer this request; its log says why.", "internal", "server"
        )
    return refused


def guarded(handler: Handler) -> Handler:
    """Whatever a handler raises becomes an answer in OpenAI's form; everything is counted."""

    async def run(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        started = service.clock.now()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as problem:
            response = openai_error(problem)
        name = f"openai.{handler.__name__}"
        service.metrics.request(name, response.status_code, service.clock.now() - started, tenant)
        return response

    return run


PREFIXES: Final = ("/v1", "/oai/api/v1")
_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]

ROUTES: list[Route] = [
    Route(prefix + path, guarded(handler), methods=methods)
    for prefix in PREFIXES
    for path, handler, methods in (
        ("/models", list_models, ["GET"]),
        ("/models/{name:path}", get_model, ["GET"]),
        ("/completions", completions, ["POST"]),
        ("/chat/completions", chat_completions, ["POST"]),
        ("/{rest:path}", unknown, _METHODS),
    )
]
