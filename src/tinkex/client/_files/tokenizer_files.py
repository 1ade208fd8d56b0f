"""Loads a tokenizer: from the service where it hands files out, else by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinkex.client._calls.attempts import call
from tinkex.client._calls.handshake import ready
from tinkex.client._runtime.loop import on_own_loop
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.session import Session
from tinkex.client.tokenizer import ServiceFiles, load
from tinkex.errors import NotFoundError, WrongThread
from tinkex.wire import endpoints


def load_tokenizer(session: Session, name: str) -> Any:
    """Return the tokenizer of an id (see `tokenizer_id`), after waiting for its files."""
    if on_own_loop():
        raise WrongThread("get_tokenizer() waits for files and cannot run on the SDK's own loop thread.")
    link = session.link()
    session.run("tokenizer", lambda operation: ready(link)).result()
    if not link.extensions.get("tokenizers"):
        return load(name)

    def fetch(file: str) -> bytes | None:
        path = endpoints.TOKENIZER_FILE.url(tokenizer=name, file=file)

        async def work(operation: Operation) -> bytes | None:
            try:
                return (await call(link, endpoints.TOKENIZER_FILE, operation=operation, path=path)).content
            except NotFoundError:
                return None

        return session.run("tokenizer_file", work).result()

    config = session.config
    return load(name, ServiceFiles(fetch, Path(config.cache_dir), config.base_url))
