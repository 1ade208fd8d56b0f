"""A service on a loop and a port of its own, for tests that speak real HTTP to it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp

from tinkex.store.records import CheckpointRecord

T = TypeVar("T")


class Loop:
    """An event loop in a thread. `call` runs a coroutine there and gives its result."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live service")
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @contextmanager
    def serve(self, app: ASGIApp) -> Iterator[str]:
        """The application on a free port of loopback; its address."""
        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[sock]), self._loop)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            serving.result(10)
            sock.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def checkpoint(path: str, tenant: str) -> CheckpointRecord:
    """A row for a checkpoint of the tiny model; its folder has its name."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return CheckpointRecord(
        path=path,
        tenant=tenant,
        run_id=run,
        kind=cast(Any, kind),
        name=name,
        folder=f"checkpoints/{name}",
        base_model="tinkex/tiny",
        rank=8,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        created_at=1_700_000_000.0,
        size_bytes=1,
        files={},
    )
