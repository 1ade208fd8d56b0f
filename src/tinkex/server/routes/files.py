"""Endpoints for files: links to the files of checkpoints, the downloads themselves, and the tokenizers of models."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from starlette.responses import Response

from tinkex.server.http import links, views
from tinkex.server.http.downloads import ARCHIVE, Download, archive_of, file_of, respond
from tinkex.server.http.errors import json_response, not_found
from tinkex.server.http.requests import ApiRequest
from tinkex.server.upkeep.blob_calls import hold_checked
from tinkex.server.upkeep.checksums import check_files
from tinkex.store.records import CheckpointRecord

TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "config.json",
        "generation_config.json",
    }
)
"""The only files of a model's folder that can be read: those of a tokenizer. config.json names its class."""


async def checkpoint_archive(request: ApiRequest) -> Response:
    """Redirect to a tar of the checkpoint. With `redirect=false`, return its URL: a web page cannot read a redirect."""
    saved = await request.find_readable_checkpoint()
    expires_at = _expiry(request)
    url = _link(request, saved, ARCHIVE, expires_at)
    headers = {"expires": formatdate(expires_at, usegmt=True), "cache-control": "no-store"}
    await request.write_audit("checkpoint.download", saved.path)
    if request.query_params.get("redirect") == "false":
        return json_response({"url": url, "expires": views.time_text(expires_at)}, headers=headers)
    return Response(status_code=302, headers={"location": url, **headers})


async def external_weights_urls(request: ApiRequest) -> Response:
    saved = await request.find_readable_checkpoint()
    expires_at = _expiry(request)
    urls = {name: _link(request, saved, name, expires_at) for name in sorted(saved.files)}
    await request.write_audit("checkpoint.download", saved.path)
    return json_response({"urls": urls, "expires": views.time_text(expires_at)})


async def download_file(request: ApiRequest) -> Response:
    """`GET /api/v1/files/{token}/{name}`: send a file or the archive. The signed token is the permission to read."""
    service = request.service
    token, name = request.path_params["token"], request.path_params["name"]
    link = links.verify(service.config.data_dir, token, service.clock.wall())
    saved = await service.db(service.store.get_live_checkpoint, link.path, service.clock.wall())
    # A link that another tenant got for a published checkpoint ends when its owner unpublishes it.
    if saved is None or not (saved.is_public or links.hash_reader(saved.tenant) == link.reader):
        raise not_found("checkpoint", link.path)
    if name != ARCHIVE and name not in saved.files:
        raise not_found("file", name)
    # Through this server also from a bucket: docs/decisions/blobs.md says why no client is sent there.
    downloads: list[Download] = []

    def open_checked(folder: Path) -> None:
        check_files(saved, folder)
        downloads.append(archive_of(saved, folder) if name == ARCHIVE else file_of(saved, folder, name))

    try:
        folder = await hold_checked(service.db, service.store, link.reader, saved.folder, open_checked)
    except FileNotFoundError:  # deleted meanwhile
        raise not_found("checkpoint", link.path) from None
    return respond(request, downloads[-1], name, folder.release)


async def tokenizer_file(request: ApiRequest) -> Response:
    """Send a file of a tokenizer, of models that are served only. No text of a client becomes a path."""
    tokenizer, name = request.path_params["tokenizer"], request.path_params["file"]
    model = request.service.catalog.get(tokenizer)
    if model is None:
        raise not_found("tokenizer", tokenizer)
    if name not in TOKENIZER_FILES:
        raise not_found("file", name)
    try:
        content = await asyncio.to_thread((Path(model.folder) / name).read_bytes)
    except OSError:
        raise not_found("file", name) from None
    return Response(content, media_type="application/octet-stream", headers={"cache-control": "private"})


def _expiry(request: ApiRequest) -> int:
    return int(request.service.clock.wall()) + links.LINK_LIFE_S


def _link(request: ApiRequest, saved: CheckpointRecord, name: str, expires_at: int) -> str:
    config = request.service.config
    base = (config.public_url or str(request.base_url)).rstrip("/")
    token = links.sign(config.data_dir, request.tenant, saved.path, expires_at)
    return f"{base}/api/v1/files/{token}/{quote(name, safe='')}"
