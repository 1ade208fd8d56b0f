"""The files of the scripted service's checkpoints: links to them, and downloads that can be resumed and checked."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import re
import tarfile
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import orjson

from tinkex.testing.http.messages import Refused, Request, Response
from tinkex.testing.state import Checkpoint, State

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ARCHIVE = "archive.tar"
_LINK_LIFE = timedelta(minutes=15)


def checkpoint_archive(state: State, request: Request) -> Response:
    checkpoint = state.checkpoint_of(request)
    expires = format_datetime(state.now() + _LINK_LIFE, usegmt=True)
    return Response(302, headers={"location": _link(state, checkpoint, ARCHIVE), "expires": expires})


def external_weights_urls(state: State, request: Request) -> Any:
    checkpoint = state.checkpoint_of(request)
    urls = {name: _link(state, checkpoint, name) for name in (WEIGHTS_FILE, CONFIG_FILE)}
    return {"urls": urls, "expires": state.now() + _LINK_LIFE}


def tokenizer_file(state: State, request: Request) -> Response:
    name, file = request.parts["tokenizer"], request.parts["file"]
    content = state.config.tokenizers.get(name, {}).get(file)
    if content is None:
        raise Refused(404, f"tokenizer {name!r} has no file {file!r} here", "unknown_file")
    return Response(200, content, "application/octet-stream")


def file(state: State, request: Request) -> Response:
    """A download; scripts call this endpoint `file`."""
    checkpoint, name = state.checkpoint_of(request), request.parts["file"]
    files = _contents(checkpoint.path, checkpoint.weights.skill, checkpoint.model.lora["rank"], checkpoint.size_bytes)
    if name not in files:
        raise Refused(404, f"no file {name!r}", "unknown_file")
    return _ranged(request, files[name])


def _link(state: State, checkpoint: Checkpoint, file: str) -> str:
    return f"{state.url()}/files/{checkpoint.path.removeprefix('tinker://')}/{file}?signature=scripted"


@functools.lru_cache(maxsize=32)
def _contents(path: str, skill: float, rank: int, size: int) -> dict[str, bytes]:
    values = hashlib.shake_128(f"{path} {skill}".encode()).digest(size)
    header = orjson.dumps({"adapter": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    files = {
        CONFIG_FILE: orjson.dumps({"peft_type": "LORA", "r": rank, "skill": skill}),
        WEIGHTS_FILE: len(header).to_bytes(8, "little") + header + values,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return {**files, ARCHIVE: packed.getvalue()}


def _ranged(request: Request, content: bytes) -> Response:
    digest = hashlib.sha256(content).digest()
    tag = f'"{digest.hex()}"'
    headers = {
        "etag": tag,
        "accept-ranges": "bytes",
        "x-checksum-sha256": digest.hex(),
        "repr-digest": f"sha-256=:{base64.b64encode(digest).decode()}:",
    }
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    kind = "application/octet-stream"
    if asked is None or asked[0] == "bytes=-" or request.headers.get("if-range", tag) != tag:
        return Response(200, content, kind, headers)
    size = len(content)
    if asked[1]:
        first, last = int(asked[1]), min(int(asked[2] or size - 1), size - 1)
    else:
        first, last = max(0, size - int(asked[2])), size - 1
    if first > last:
        return Response(416, b"", kind, {**headers, "content-range": f"bytes */{size}"})
    return Response(206, content[first : last + 1], kind, {**headers, "content-range": f"bytes {first}-{last}/{size}"})
