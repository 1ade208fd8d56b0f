"""Finds the tokenizer of a model: from the service where it hands files out, else by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinkex.client._calls.attempts import call
from tinkex.client._calls.handshake import ready
from tinkex.client._runtime.loop import on_own_loop
from tinkex.client._runtime.session import Session
from tinkex.client.tokenizer import ServiceFiles, load, tokenizer_id
from tinkex.errors import NotFoundError, WrongThread
from tinkex.types import GetInfoResponse
from tinkex.wire import endpoints


def tokenizer_of_model(session: Session, info: GetInfoResponse) -> Any:
    """Return the tokenizer that the service names for a model being trained."""
    name = info.model_data.model_name or info.model_name or ""
    return _load(session, tokenizer_id(name, info.model_data.tokenizer_id))


def tokenizer_by_name(session: Session, model_name: str) -> Any:
    return _load(session, tokenizer_id(model_name))


def _load(session: Session, name: str) -> Any:
    if on_own_loop():
        raise WrongThread("get_tokenizer() waits for files and cannot run on the SDK's own loop thread.")
    link = session.link()
    link.run(session.operation("tokenizer"), lambda: ready(link)).result()
    if not link.extensions.get("tokenizers"):
        return load(name)

    def fetch(file: str) -> bytes | None:
        operation = session.operation("tokenizer_file")
        path = endpoints.TOKENIZER_FILE.url(tokenizer=name, file=file)

        async def work() -> bytes | None:
            try:
                return (await call(link, endpoints.TOKENIZER_FILE, operation=operation, path=path)).content
            except NotFoundError:
                return None

        return link.run(operation, work).result()

    config = session.config
    return load(name, ServiceFiles(fetch, Path(config.cache_dir), config.base_url))
