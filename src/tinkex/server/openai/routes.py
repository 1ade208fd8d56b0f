"""The OpenAI-compatible endpoints: models, completions and chats, whole or streamed, of base models and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from tinkex.engine.contract import Sampled, SampleEvent, SampleSpec
from tinkex.server.http.errors import RequestRejected, json_response
from tinkex.server.http.event_stream import open_event_stream
from tinkex.server.http.requests import IN_THREAD_BYTES, ApiRequest, guarded
from tinkex.server.named_runs import weights_named
from tinkex.server.openai.errors import error_body, openai_error_response, rejection_of
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
)
from tinkex.server.sampling.sample_queue import SampleTarget
from tinkex.server.sampling.sample_spec import check_limits
from tinkex.server.sampling.tokenizer_cache import ModelTokenizer
from tinkex.server.service import Service
from tinkex.wire import sse

MAX_PROMPTS_AT_ONCE: Final = 16
"""Prompts of one request that are sampled at the same time, so that a long list does not fill the queue by itself."""
MAX_LISTED_CHECKPOINTS: Final = 1000
NAMED_VALUE_COST: Final = 8
"""A log-probability takes about 8 times as much memory with the text and the bytes of its token."""


# ── Handlers


async def list_models(request: ApiRequest) -> Response:
    """List every name that works: base models, aliases, and the tenant's checkpoints for sampling, newest first."""
    service, tenant = request.service, request.tenant
    if service.others is None:
        entries = [_model(name, 0, model.name) for model in service.catalog.models for name in model.names]
    else:
        served = await service.others.capabilities()
        entries = [_model(row["model_name"], 0, row.get("alias_of") or row["model_name"]) for row in served]
    saved, _ = await service.db(
        lambda: service.store.list_checkpoints(tenant, None, 0, MAX_LISTED_CHECKPOINTS, service.clock.wall())
    )
    entries += [_model(row.path, row.created_at, row.base_model) for row in saved if row.kind == "sampler_weights"]
    return json_response({"object": "list", "data": entries})


async def get_model(request: ApiRequest) -> Response:
    name = request.path_params["name"]
    target = await _open(request.service, request.tenant, name)
    return json_response(_model(name, 0, target.info.name))


def _model(name: str, created_at: float, base: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "tinkex", "root": base}


async def completions(request: ApiRequest) -> Response:
    completion = read_completion(await request.read_json())
    return await _respond(request, "completion", completion.options, partial(_completion_prompts, completion))


async def chat_completions(request: ApiRequest) -> Response:
    chat = read_chat(await request.read_json())
    return await _respond(request, "chat", chat.options, partial(_chat_prompts, chat))


async def unknown(request: ApiRequest) -> Response:
    raise RequestRejected(
        404,
        f"{request.method} {request.url.path[:200]} is not part of this service. It has GET models, POST completions "
        "and POST chat/completions.",
        "unknown_url",
    )


async def _open(service: Service, tenant: str, model: str) -> SampleTarget:
    """Return what `model` names: the adapter of a checkpoint, a base model without one, or the newest of a run."""
    if not model.startswith("tinker://"):
        if model in service.catalog.names:
            return await service.sampling.open(tenant, base_model=model, model_path=None)
        model = (await weights_named(service, tenant, model)).path
    return await service.sampling.open(tenant, base_model=None, model_path=model)


# ── From a request to samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """A request that is ready to be sampled."""

    id: str
    created: int
    tenant: str
    style: Style
    options: CompletionOptions
    target: SampleTarget
    builder: CompletionBuilder
    specs: Sequence[SampleSpec]
    """One for each prompt."""


def _completion_prompts(completion: Completion, tokenizer: ModelTokenizer) -> list[RenderedPrompt]:
    prompts = []
    for prompt in completion.prompts:
        if isinstance(prompt, str):
            tokens, text = tokenizer.encode(prompt, completion.add_special_tokens), prompt
        else:
            tokens, text = list(prompt), tokenizer.decode(prompt) if completion.is_echoed else ""
        prompts.append(RenderedPrompt(tokens=tokens, echo=text if completion.is_echoed else None))
    return prompts


def _chat_prompts(chat: Chat, tokenizer: ModelTokenizer) -> list[RenderedPrompt]:
    text = tokenizer.chat.render(
        tokenizer.name,
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        tools=chat.tools,
        extras=chat.template_extras,
    )
    # The template writes the special tokens itself.
    return [RenderedPrompt(tokens=tokenizer.encode(text, add_special_tokens=False))]


async def _sample_prompts(service: Service, job: CompletionJob) -> AsyncGenerator[tuple[int, SampleEvent], None]:
    """Sample all prompts of a job and yield (index of the prompt, event) until each has its result.

    Closing the generator cancels what is not finished. The first error of any prompt is raised.
    """
    # One at a time: what a client does not read stays in the buffers of `Sampling.run`, which are bounded.
    events: asyncio.Queue[tuple[int, SampleEvent] | Exception] = asyncio.Queue(1)
    slots, streams = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE), min(len(job.specs), MAX_PROMPTS_AT_ONCE)

    async def sample(index: int, spec: SampleSpec) -> None:
        try:
            samples = service.sampling.run(job.tenant, job.target, spec, streams)
            async with slots, aclosing(samples) as stream:  # type: ignore[type-var]
                async for event in stream:
                    await events.put((index, event))
        except Exception as error:  # raised below, to the reader of the events
            await events.put(error)

    tasks = [asyncio.create_task(sample(index, spec)) for index, spec in enumerate(job.specs)]
    unfinished = len(tasks)
    try:
        while unfinished:
            item = await events.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= isinstance(item[1], Sampled)
            yield item
    finally:
        # Not awaited: the reader may itself be cancelled, and each task cleans up after itself.
        for task in tasks:
            task.cancel()


# ── From samples to a response


async def _respond(
    request: ApiRequest,
    style: Style,
    options: CompletionOptions,
    render: Callable[[ModelTokenizer], list[RenderedPrompt]],
) -> Response:
    service = request.service
    target = await _open(service, request.tenant, options.model)

    def prepare() -> CompletionJob:
        tokenizer = service.tokenizers.load(target.info.name)
        prompts = render(tokenizer)
        seeds = seeds_of(options.seed, len(prompts))
        specs = [
            spec_of(options, target.info, target.weights, prompt.tokens, seed, is_echoed=prompt.echo is not None)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        check_limits(specs, service.ledger, 1 if options.top_logprobs is None else NAMED_VALUE_COST)
        return CompletionJob(
            id=f"{'cmpl' if style == 'completion' else 'chatcmpl'}-{uuid4().hex}",
            created=int(service.clock.wall()),
            tenant=request.tenant,
            style=style,
            options=options,
            target=target,
            builder=CompletionBuilder(style, options, tokenizer, prompts),
            specs=specs,
        )

    job = await asyncio.to_thread(prepare)
    if options.is_streamed:
        return await open_event_stream(_stream(service, job), _error_event)
    events = await _collect(request, service, job)
    return await asyncio.to_thread(_whole_response, events, job)


async def _collect(request: ApiRequest, service: Service, job: CompletionJob) -> list[tuple[int, SampleEvent]]:
    """Return all events of a job. Raises ClientDisconnect, and cancels the samples, if the client hangs up."""

    async def collect() -> list[tuple[int, SampleEvent]]:
        async with aclosing(_sample_prompts(service, job)) as events:
            return [event async for event in events]

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, waiting = asyncio.create_task(collect()), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((collecting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientDisconnect
        return collecting.result()
    finally:
        collecting.cancel()
        waiting.cancel()


def _whole_response(events: Sequence[tuple[int, SampleEvent]], job: CompletionJob) -> Response:
    pieces: dict[int, list[TextPiece]] = {}
    for index, event in events:
        for piece in job.builder.feed(index, event):
            pieces.setdefault(piece.index, []).append(piece)
    # Each choice by itself: encoding holds the interpreter, and the lists of a choice are gone before the next.
    choices = [orjson.Fragment(orjson.dumps(job.builder.whole_choice(pieces.pop(index)))) for index in sorted(pieces)]
    kind = "text_completion" if job.style == "completion" else "chat.completion"
    return json_response({**_head(job, kind), "choices": choices, "usage": job.builder.usage})


def _head(job: CompletionJob, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.options.model}


async def _stream(service: Service, job: CompletionJob) -> AsyncGenerator[bytes, None]:
    head = _head(job, "text_completion" if job.style == "completion" else "chat.completion.chunk")
    no_usage = {"usage": None} if job.options.with_usage else {}
    begun: set[int] = set()

    def encode(index: int, event: SampleEvent) -> list[bytes]:
        contents = []
        for piece in job.builder.feed(index, event):
            choice = job.builder.chunk_choice(piece, piece.index not in begun)
            begun.add(piece.index)
            contents.append(_event({**head, "choices": [choice], **no_usage}))
        return contents

    async with aclosing(_sample_prompts(service, job)) as events:
        async for index, event in events:
            is_large = isinstance(event, Sampled) and event.nbytes > IN_THREAD_BYTES
            for content in await asyncio.to_thread(encode, index, event) if is_large else encode(index, event):
                yield content
    if job.options.with_usage:
        yield _event({**head, "choices": [], "usage": job.builder.usage})
    yield sse.encode("", "[DONE]")


def _event(content: Any) -> bytes:
    return sse.encode("", orjson.dumps(content))


def _error_event(error: Exception) -> bytes:
    return _event(error_body(rejection_of(error)))


# ── The routes

PREFIXES: Final = ("/v1", "/oai/api/v1")
_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]

ROUTES: list[Route] = [
    Route(prefix + path, guarded(f"openai.{handler.__name__}", handler, openai_error_response), methods=methods)
    for prefix in PREFIXES
    for path, handler, methods in (
        ("/models", list_models, ["GET"]),
        ("/models/{name:path}", get_model, ["GET"]),
        ("/completions", completions, ["POST"]),
        ("/chat/completions", chat_completions, ["POST"]),
        ("/{rest:path}", unknown, _METHODS),
    )
]
