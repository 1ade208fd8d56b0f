"""Receives a PEFT adapter as a tar with `adapter_model.safetensors` and `adapter_config.json`.

Nothing else is extracted, no name in the tar becomes a path, and nothing in it is executed. Only the rank and the
layers that the adapter acts on are read here; the engine checks the numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from tinkex.archive import BadArchive, Member, members
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.http.requests import ApiRequest

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INCOMING = "incoming"
"""The folder for uploads; the janitor empties it after a crash."""
MAX_ARCHIVE_BYTES = 4_000_000_000
MAX_MEMBERS = 64
"""An adapter has two files; PEFT adds a README, and tar on macOS two entries for each."""
MOST_RANK = 1024
_MAX_CONFIG_BYTES = 1_000_000
_MAX_HEADER_BYTES = 10_000_000
"""Of the list of tensors: 150 bytes each."""
_BATCH = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpload:
    """What the two uploaded files describe: the rank, the layers, and the size and checksum of each file."""

    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    files: dict[str, dict[str, Any]]


@asynccontextmanager
async def receive_archive(
    request: ApiRequest, data_dir: Path, max_bytes: int = MAX_ARCHIVE_BYTES
) -> AsyncIterator[Path]:
    """Write the body to a file, in a folder that is deleted at the end."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _archive_too_large(max_bytes)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise bad_request("Send the tar as it is, without a Content-Encoding.", "bad_encoding")
    folder = data_dir / INCOMING / uuid4().hex
    await asyncio.to_thread(folder.mkdir, parents=True)
    try:
        archive, size, batch = folder / "archive.tar", 0, bytearray()
        with archive.open("wb") as file:
            async for piece in request.pieces():
                size += len(piece)
                if size > max_bytes:
                    raise _archive_too_large(max_bytes)
                batch += piece
                if len(batch) >= _BATCH:
                    await asyncio.to_thread(file.write, batch)
                    batch = bytearray()
            await asyncio.to_thread(file.write, batch)
        yield archive
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


def unpack(archive: Path, folder: Path, max_bytes: int = MAX_ARCHIVE_BYTES) -> AdapterUpload:
    """Extract the two files from the tar into a new folder, and return what they describe. Blocks."""
    folder.mkdir()
    files: dict[str, dict[str, Any]] = {}
    try:
        with archive.open("rb") as content:  # without compression: a small body cannot expand
            for member in members(content, MAX_MEMBERS, max_bytes):
                name = member.name.removeprefix("./")
                if name not in (WEIGHTS, CONFIG) or not member.is_file:
                    continue
                if name in files:
                    raise bad_request(f"The archive holds {name} twice.", "bad_archive")
                files[name] = _write(member, folder / name)
    except BadArchive as error:
        raise bad_request(f"The body cannot be unpacked as a tar archive: {error}.", "bad_archive") from None
    if missing := sorted({WEIGHTS, CONFIG} - files.keys()):
        raise bad_request(
            f"The archive has no {' and no '.join(missing)} at its top. Send exactly the two files that PEFT's "
            "save_pretrained writes: tar cf adapter.tar -C FOLDER adapter_config.json adapter_model.safetensors",
            "bad_archive",
        )
    return AdapterUpload(rank=_rank(folder / CONFIG), **_flags(_tensor_names(folder / WEIGHTS)), files=files)


def _write(member: Member, path: Path) -> dict[str, Any]:
    """Write a file of the archive, and return its size and checksum."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for block in member.blocks():
            digest.update(block)
            file.write(block)
    return {"size_bytes": member.size, "sha256": digest.hexdigest()}


def _rank(config: Path) -> int:
    try:
        fields = orjson.loads(config.read_bytes()) if config.stat().st_size <= _MAX_CONFIG_BYTES else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise bad_request(f"{CONFIG} is not a JSON object.", "bad_adapter")
    rank = fields.get("r")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise bad_request(f"{CONFIG} has r = {rank!r}; a rank from 1 to {MOST_RANK} is needed.", "bad_adapter")
    return rank


def _tensor_names(weights: Path) -> list[str]:
    """Return the names of the LoRA tensors, from the header alone: https://huggingface.co/docs/safetensors#format"""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= min(_MAX_HEADER_BYTES, weights.stat().st_size) else b""
    try:
        tensors = orjson.loads(header)
    except ValueError:
        tensors = None
    if not isinstance(tensors, dict):
        raise bad_request(
            f"{WEIGHTS} is not a safetensors file. Pickled adapters (.bin) are not accepted.", "bad_adapter"
        )
    return [name for name in tensors if ".lora_" in name]


def _flags(names: Iterable[str]) -> dict[str, bool]:
    """Return which kinds of layers an adapter acts on, judged by their names. The engine decides in the end."""
    paths = [name.lower().partition(".lora_")[0].split(".")[:-1] for name in names]
    if not paths:
        raise bad_request(f"{WEIGHTS} holds no LoRA weights.", "bad_adapter")
    attention = [any("attn" in part or "attention" in part for part in path) for path in paths]
    mlp = [
        any(word in part for part in path for word in ("mlp", "feed_forward", "ffn", "moe", "expert")) for path in paths
    ]
    return {
        "train_attn": any(attention),
        "train_mlp": any(m and not a for m, a in zip(mlp, attention, strict=True)),
        "train_unembed": not all(a or m for a, m in zip(attention, mlp, strict=True)),
    }


def _archive_too_large(max_bytes: int) -> RequestRejected:
    return RequestRejected(413, f"The archive is larger than {max_bytes} bytes.", "body_too_large")
