"""One target per codec: a function of some bytes that raises only if the codec does what it must not do.

A target swallows the errors that the codec documents. Anything else is a finding: another exception, a value that
does not survive a round trip, more output than the limit. Time and memory are watched by the runner (`__main__`).
"""

from __future__ import annotations

import functools
import gzip
import io
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import torch
from safetensors.torch import save

from tinkex.archive import BLOCK, BadArchive, members
from tinkex.client._files.archive import safe_path
from tinkex.engine import frames
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.lora import Role, Site
from tinkex.engine.contract import EngineFault, ModelInfo, pass_frame
from tinkex.errors import TinkexError, ValidationError
from tinkex.rules import checkpoint_names, ranges
from tinkex.server.http import fields
from tinkex.server.http.errors import RequestRejected
from tinkex.server.training.checks import check_data
from tinkex.server.upkeep import adapter_files
from tinkex.types.base import Value
from tinkex.types.sampling import SampleRequest, SampleResponse
from tinkex.types.session import CreateSessionRequest, SessionSearchRequest
from tinkex.types.telemetry import TelemetrySendRequest
from tinkex.types.training import (
    CreateModelRequest,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
)
from tinkex.types.weights import ParsedCheckpointTinkerPath, SaveWeightsRequest
from tinkex.wire import endpoints, json_codec, proto_codec, sse
from tinkex.wire.body import Body, compress, decompress
from tinkex.wire.dialect import Dialect

Target = Callable[[bytes], None]
MODEL = ModelInfo(name="tinkex/tiny", folder="", vocab_size=263, max_context_length=2048, hidden_size=64)
REQUESTS: tuple[type[Value], ...] = (
    ForwardBackwardRequest,
    ForwardRequest,
    SampleRequest,
    CreateModelRequest,
    OptimStepRequest,
    CreateSessionRequest,
    SessionSearchRequest,
    SaveWeightsRequest,
    TelemetrySendRequest,
)


def json(content: bytes) -> None:
    """A JSON body: the first byte chooses the type that it is read as."""
    kind = REQUESTS[(content[0] if content else 0) % len(REQUESTS)]
    text = content[1:]
    try:
        whole = fields.parse_json_object(text)
    except RequestRejected as error:
        _check_rejected(error)
        whole = None
    try:
        pieces, rejected = fields.parse_json_pass(text, "forward_backward_input")
        assert rejected is None, "a few bytes are too many"
        assert pieces == whole or whole != whole or _has_nan(pieces), "in pieces the body is another one"
    except RequestRejected as error:
        _check_rejected(error)
        assert whole is None, "in pieces the body is rejected, as a whole it is not"
    if whole is None:
        return
    for read in (fields.parse_metadata, lambda body: fields.require_seq(body, "seq_id")):
        _rejectable(read, whole)
    try:
        value = fields.parse_as(kind, whole)
        json_codec.encode(json_codec.dump(value, Dialect.JSON))
        if isinstance(value, ForwardBackwardRequest):
            batch = value.forward_backward_input
            check_data(batch.data, batch.loss_fn, batch.loss_fn_config, MODEL)
    except RequestRejected as error:
        _check_rejected(error)
    except ValidationError:
        pass


def protobuf_request(content: bytes) -> None:
    """A training pass, up to the frame that the engine gets. What can be read can be written and read again."""
    try:
        # So few elements that the insides of datums are counted too: smaller bodies are not looked into.
        proto_codec.check_forward_backward_request(content, ranges.MAX_DATUMS, 100_000, 300)
        request = proto_codec.decode_forward_backward_request(content)
    except ValidationError:
        proto_codec.peek_forward_backward_request(content)
        return
    is_forward = isinstance(request, ForwardRequest)
    batch = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
    assert len(batch.data) <= ranges.MAX_DATUMS
    again = proto_codec.encode_forward_backward(
        request.model_id, request.seq_id or 0, batch.data, batch.loss_fn, batch.loss_fn_config, is_forward
    )
    if _is_plain(batch.data):
        repeated = proto_codec.decode_forward_backward_request(again)
        assert repeated == request or _has_nan(request.model_dump()), "a pass changed on its way"
    try:
        check_data(batch.data, batch.loss_fn, batch.loss_fn_config, MODEL, is_forward=is_forward)
    except (ValidationError, RequestRejected):
        return
    frame = pass_frame("forward", "run", batch.data, batch.loss_fn, batch.loss_fn_config)
    assert frames.decode(frame.encode()).head == frame.head or _has_nan(frame.head)


def protobuf_answer(content: bytes) -> None:
    """The results of a pass and of a sample, as the client reads them; every field is made."""
    try:
        output = proto_codec.decode_answer(content, ForwardBackwardOutput)
        assert isinstance(output, ForwardBackwardOutput)
        for datum in output.loss_fn_outputs:
            for tensor in datum.values():
                _rejectable(lambda tensor: tensor.tolist(), tensor)
        repeated = proto_codec.decode_forward_backward_output(proto_codec.encode_forward_backward_output(output))
        assert len(repeated.loss_fn_outputs) == len(output.loss_fn_outputs)
    except ValidationError:
        pass
    try:
        response = proto_codec.decode_answer(content, SampleResponse)
        assert isinstance(response, SampleResponse)
        for sequence in response.sequences:
            assert len(sequence.tokens) * 4 == len(sequence.packed_tokens())
            assert sequence.stop_reason in ("stop", "length")
            repr((sequence.logprobs, sequence.topk_logprobs))
        repr((response.prompt_logprobs, response.topk_prompt_logprobs))
        proto_codec.decode_sample_response(proto_codec.encode_sample_response(response))
    except ValidationError:
        pass


def server_sent_events(content: bytes) -> None:
    """A stream of events. However it is cut, the same events come out; an event survives being written again."""
    step, stream = (content[0] % 16 + 1, content[1:]) if content else (1, b"")
    whole = sse.SSEDecoder().feed(stream)
    decoder = sse.SSEDecoder()
    pieces = [event for at in range(0, len(stream), step) for event in decoder.feed(stream[at : at + step])]
    assert pieces == whole, "the events depend on where the stream was cut"
    for event in whole:
        [again] = sse.SSEDecoder().feed(sse.encode(event.event, event.data))
        assert again == event


def path(content: bytes) -> None:
    """A `tinker://` path and a checkpoint's name. The URL of a path names the same checkpoint."""
    text = content.decode("utf-8", "replace")
    _rejectable(checkpoint_names.check_name, text)
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(text)
    except ValidationError:
        return
    assert parsed.tinker_path == f"tinker://{parsed.training_run_id}/{parsed.checkpoint_id}"
    try:
        url = endpoints.DELETE_CHECKPOINT.url(run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id)
    except ValidationError:
        return
    assert url.isascii() and "?" not in url and "#" not in url and "/../" not in f"{url}/" and "/./" not in f"{url}/"
    assert unquote(url) == f"/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}"


def archive(content: bytes) -> None:
    """A tar, plain or gzip. With an odd first byte every header gets the right checksum: few would pass by chance."""
    seals, max_bytes, max_members = bool(content) and content[0] % 2 == 1, 1 << 20, 64
    stream: Any = io.BytesIO(content[1:])
    if content[1:3] == b"\x1f\x8b":
        stream = gzip.GzipFile(fileobj=stream)
    size = count = 0
    try:
        for member in members(cast(BinaryIO, _Sealed(stream)) if seals else stream, max_members, max_bytes):
            count += 1
            length = sum(map(len, member.blocks())) if member.is_file else 0
            assert not member.is_file or length == member.size
            size += length
            _check_below(member.name)
    except (BadArchive, EOFError, zlib.error, gzip.BadGzipFile):
        pass
    assert size <= max_bytes and count <= max_members


def compressed_body(content: bytes) -> None:
    """A zstd or gzip body: never more than the limit comes out, and what was packed here can be unpacked."""
    encoding, body, limit = "gzip" if content[:1] == b"g" else "zstd", content[1:], 1 << 20
    try:
        assert len(decompress(body, encoding, limit)) <= limit
    except ValidationError:
        pass
    packed = compress(Body(content))
    assert decompress(packed.content, packed.content_encoding, limit) == content


def frame(content: bytes) -> None:
    """A frame of the journal or of the engine's pipe. What can be read is the same after it is written again.

    First byte odd: up to the first NUL it is the head, the rest are the buffers, and the lengths before them are right.
    """
    if content[:1] and content[0] % 2:
        head, _, buffers = content[1:].partition(b"\0")
        content = frames.PREFIX.pack(len(head), len(buffers)) + head + buffers
    try:
        decoded = frames.decode(content)
    except ValueError:
        return
    again = frames.decode(decoded.encode())
    assert again.head == decoded.head and list(map(bytes, again.buffers)) == list(map(bytes, decoded.buffers))


def safetensors(content: bytes) -> None:
    """The two files of an adapter that somebody else made, as the server looks at them and as the engine loads them.

    First byte even: the bytes are the weights' file. Odd: up to the first NUL they are its JSON header, whose length is
    written before it. 2 and 3 in the first byte: they are the configuration's file.
    """
    mode, rest = (content[0] % 4, content[1:]) if content else (0, b"")
    header, _, numbers = rest.partition(b"\0")
    weights = len(header).to_bytes(8, "little") + header + numbers if mode == 1 else rest
    folder = _adapter_folder()
    (folder / checkpoint.WEIGHTS).write_bytes(_GOOD_WEIGHTS if mode > 1 else weights)
    (folder / checkpoint.CONFIG).write_bytes(rest if mode > 1 else _GOOD_CONFIG)
    try:
        adapter_files._rank(folder / checkpoint.CONFIG)
        adapter_files._flags(adapter_files._tensor_names(folder / checkpoint.WEIGHTS))
    except RequestRejected as error:
        _check_rejected(error)
        return
    try:
        loaded = checkpoint.read_weights(folder, _stand_in(), is_upload=True)
        assert all(a.isfinite().all() and b.isfinite().all() for a, b in loaded.pairs.values())
    except EngineFault as fault:
        assert fault.category == "user" and len(str(fault)) < 5000


_GOOD_CONFIG = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 32}'
_GOOD_WEIGHTS = save({f"base_model.model.l.self_attn.q_proj.lora_{letter}.weight": torch.ones(2, 2) for letter in "AB"})


@functools.cache
def _adapter_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").exists() else None))


@functools.cache
def _stand_in() -> Any:
    """A model of one small layer: transformers alone would take most of the memory that the fuzzer allows."""
    module = torch.nn.Linear(2, 2)
    site = Site("l.self_attn.q_proj", Role.ATTENTION, 2, 2)
    return SimpleNamespace(info=MODEL, sites=[site], module=module, device=torch.device("cpu"))


def _check_rejected(error: RequestRejected) -> None:
    assert 400 <= error.status < 500 and len(error.detail) < 5000, (error.status, error.detail[:200])


def _rejectable(call: Callable[[Any], object], value: object) -> None:
    try:
        call(value)
    except RequestRejected as error:
        _check_rejected(error)
    except ValidationError:
        pass


def _has_nan(body: object) -> bool:
    return "nan" in repr(body)


def _is_plain(data: Any) -> bool:
    """Whether the wire has a field for everything: an image's size has none when it is sent."""
    return all(type(chunk).__name__ != "ImageChunk" for datum in data for chunk in datum.model_input.chunks)


def _check_below(name: str) -> None:
    folder = Path("/below")
    try:
        assert folder in safe_path(folder, name).parents
    except TinkexError:
        pass


class _Sealed:
    """A stream whose blocks have the right checksum of a tar header."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        if size != BLOCK or len(block) != BLOCK or not block.strip(b"\0"):
            return block
        checksum = sum(block) - sum(block[148:156]) + 8 * 0x20
        return block[:148] + b"%06o\0 " % checksum + block[156:]


TARGETS: dict[str, Target] = {
    "json": json,
    "protobuf-request": protobuf_request,
    "protobuf-answer": protobuf_answer,
    "sse": server_sent_events,
    "path": path,
    "archive": archive,
    "body": compressed_body,
    "frame": frame,
    "safetensors": safetensors,
}
