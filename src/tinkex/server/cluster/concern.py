"""Says what a request is about: a run, a sample, a sampler, or nothing that one node alone has. Reads no more of it.

The run of a training pass is read past its datums: from the fields before them (protobuf), or from the text around them
(JSON). Whatever cannot be read is for the handler to reject.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

import orjson

from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.fields import parse_json_object
from tinkex.server.http.requests import IN_THREAD_BYTES, MAX_JSON_BYTES, ApiRequest
from tinkex.server.sampling.sample_queue import PREFIX as SAMPLE_PREFIX
from tinkex.wire import endpoints, proto_codec
from tinkex.wire.body import PROTOBUF
from tinkex.wire.scan import fields_before, split_json_datums

PASSES = {endpoints.FORWARD.path: b"forward_input", endpoints.FORWARD_BACKWARD.path: b"forward_backward_input"}
ON_RUNS = frozenset(
    endpoint.path
    for endpoint in (
        endpoints.UNLOAD_MODEL,
        endpoints.OPTIM_STEP,
        endpoints.SAVE_WEIGHTS,
        endpoints.SAVE_WEIGHTS_EXTERNAL,
        endpoints.SAVE_WEIGHTS_FOR_SAMPLER,
        endpoints.LOAD_WEIGHTS,
    )
)
ON_RESULTS = frozenset((endpoints.RETRIEVE_FUTURE.path, endpoints.CANCEL_FUTURE.path))
ON_SAMPLERS = frozenset((endpoints.ASAMPLE.path, endpoints.SAMPLE_STREAM.path))
READ = ON_RUNS | ON_RESULTS | ON_SAMPLERS | {endpoints.CREATE_MODEL.path, endpoints.CREATE_SAMPLING_SESSION.path}
OPENAI = re.compile(r"(?:/v1|/oai/api/v1)/(?:chat/)?completions")
RUN = re.compile(r"/api/v1/training_runs/([^/]+)")
STEPS = re.compile(r"/api/v1/training_runs/([^/]+)/steps")
TOKENIZERS = re.compile(r"/api/v1/tokenizers/(.+)/[^/]+")
MODELS = re.compile(r"(?:/v1|/oai/api/v1)/models/(.+)")
PROMPT_TOKENS = 256
"""Tokens of a prompt that choose its node: requests that begin alike meet one prefix cache."""
TOKEN_BYTES = 4
"""What a token of text takes, roughly."""
MOST_COUNTED = 10_000
_SAMPLE = re.compile(rf"{SAMPLE_PREFIX}([0-9a-f]{{16}})-[0-9a-f]{{32}}")


@dataclass(frozen=True, slots=True)
class Concern:
    """What a request is about."""

    kind: Literal["none", "run", "new_run", "operation", "sample", "sampler"]
    name: str = ""
    """The id of the run, the operation, or the sample's node; for a sampler what chooses its node."""
    session_id: str = ""
    """The session of a new run; the sampling session of a sample."""
    model: str | None = None
    """The base model that it needs, where the request names one."""
    checkpoint: str | None = None
    """The path of the checkpoint that a new run begins with, or that is sampled from. It has a base model too."""
    sequences: int = 1
    """How many sequences a sample has."""
    is_read: bool = False
    """Whether a request about a run only reads what is stored: any node can, if it is at home nowhere."""
    body: bytes | None = None
    """The body, if it was read, decompressed."""


def _in_path(path: str) -> Concern:
    if (steps := STEPS.fullmatch(path)) is not None:
        return Concern("run", unquote(steps[1]), is_read=True)
    if (tokenizer := TOKENIZERS.fullmatch(path)) is not None:
        return Concern("none", model=unquote(tokenizer[1]))
    if (model := MODELS.fullmatch(path)) is not None:
        return replace(_source(unquote(model[1]), ""), kind="none")
    return Concern("none")


async def concern_of(request: ApiRequest, path: str) -> Concern:
    """Return what a request is about. Its body is read only if it says so. Raises as a handler that reads it does."""
    if request.method == "GET":
        return _in_path(path)
    if request.method == "DELETE" and (run := RUN.fullmatch(path)) is not None:
        return Concern("run", unquote(run[1]))  # its home has the adapter, and the right to write
    if path in PASSES:
        content = await request.read_body()
        is_protobuf = PROTOBUF in request.headers.get("content-type", "").lower()
        read = partial(_run_of_protobuf if is_protobuf else _run_of_json, content, PASSES[path])
        run_id = await asyncio.to_thread(read) if len(content) > IN_THREAD_BYTES and not is_protobuf else read()
        return Concern("run", run_id, body=content) if run_id else Concern("none", body=content)
    if path in READ or OPENAI.fullmatch(path):
        content = await request.read_body(MAX_JSON_BYTES)
        try:
            body = parse_json_object(content)
        except RequestRejected:  # the handler says why
            return Concern("none", body=content)
        return replace(_in_json(path, body), body=content)
    return Concern("none")


def _in_json(path: str, body: dict[str, Any]) -> Concern:
    if path in ON_RESULTS:
        request_id = str(body.get("request_id"))
        if (sample := _SAMPLE.fullmatch(request_id)) is not None:
            return Concern("sample", sample[1])
        return Concern("operation", request_id)
    if path in ON_SAMPLERS:
        return _sampler(body)
    if path == endpoints.CREATE_SAMPLING_SESSION.path:
        return Concern("none", model=_text(body, "base_model"), checkpoint=_text(body, "model_path"))
    if OPENAI.fullmatch(path):
        return _completion(body)
    run_id, session_id, number = body.get("model_id"), body.get("session_id"), body.get("model_seq_id")
    if isinstance(run_id, str) and path in ON_RUNS:
        return Concern("run", run_id)
    if isinstance(session_id, str) and isinstance(number, int):  # `load_weights` creates a run too
        new = Concern("new_run", f"{session_id}:train:{number}", session_id)
        return replace(new, model=_text(body, "base_model"), checkpoint=_text(body, "path"))
    return Concern("none")


def _sampler(body: dict[str, Any]) -> Concern:
    """Choose by what is sampled from and by how the prompt begins, so that equal beginnings are computed once."""
    source = _text(body, "sampling_session_id") or _text(body, "model_path") or _text(body, "base_model") or ""
    prompt = body.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    first = chunks[0] if isinstance(chunks, list) and chunks and isinstance(chunks[0], dict) else {}
    tokens = first.get("tokens")
    beginning = orjson.dumps(tokens[:PROMPT_TOKENS] if isinstance(tokens, list) else None)
    return Concern(
        "sampler",
        f"{source} {beginning.decode()}",
        sequences=_count(body, "num_samples"),
        session_id=_text(body, "sampling_session_id") or "",
        model=_text(body, "base_model"),
        checkpoint=_text(body, "model_path"),
    )


def _completion(body: dict[str, Any]) -> Concern:
    """Choose a completion's node as a sample's, by the text of its prompt or chat."""
    text = orjson.dumps(body.get("messages") or body.get("prompt"))[: PROMPT_TOKENS * TOKEN_BYTES]
    return replace(_source(_text(body, "model") or "", text.decode(errors="replace")), sequences=_count(body, "n"))


def _source(name: str, beginning: str) -> Concern:
    """Return the concern of a request that names what to sample from: a checkpoint, or a base model."""
    if name.startswith("tinker://"):
        return Concern("sampler", f"{name} {beginning}", checkpoint=name)
    return Concern("sampler", f"{name} {beginning}", model=name)


def _count(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    return value if isinstance(value, int) and 0 < value < MOST_COUNTED else 1


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) else None


def _run_of_protobuf(content: bytes, _: bytes) -> str | None:
    """Read the run without the datums. All writers put its field first."""
    run_id, _number = proto_codec.peek_forward_backward_request(fields_before(content, proto_codec.DATUMS))
    return run_id or None


def _run_of_json(content: bytes, name: bytes) -> str | None:
    """Read the run of a pass: a small body as a whole, a large one without the text of its datums."""
    try:
        pieces = split_json_datums(content, name) if len(content) > IN_THREAD_BYTES else None
        envelope = content if pieces is None else pieces.envelope
        if len(envelope) > MAX_JSON_BYTES:
            return None
        return _text(parse_json_object(envelope), "model_id")
    except RequestRejected:
        return None
