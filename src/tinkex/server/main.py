"""Builds a service, runs it, and stops it in order: HTTP, worker, engine, store, lock."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.clock import REAL, Clock
from tinkex.engine.contract import Engine, ModelInfo
from tinkex.engine.host import LocalEngine
from tinkex.engine.models.registry import resolve
from tinkex.errors import ConfigError
from tinkex.server.app import make_app
from tinkex.server.http.access import AccessControl
from tinkex.server.http.metrics import Metrics
from tinkex.server.routes.metrics import ServiceGauges
from tinkex.server.sampling.sample_queue import Sampling
from tinkex.server.sampling.tokenizer_cache import Tokenizers
from tinkex.server.service import Service
from tinkex.server.training.intake import Intake
from tinkex.server.training.waiters import Waiters
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.server.upkeep.janitor import Janitor
from tinkex.server.upkeep.watchdog import Watchdog
from tinkex.settings import ServeConfig, check_keys
from tinkex.store.lock import DataLock
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

MAX_HEAD_BYTES = 64 << 10
"""Limit for the request line and the headers. The first read, of at most some 256 KB, is not counted."""

Progress = Callable[[str, int, int], None]


def serve(
    config: ServeConfig, *, on_ready: Callable[[str], None] | None = None, progress: Progress | None = None
) -> int:
    """Run until SIGTERM or SIGINT, then finish the work in progress. Raises ConfigError if it cannot start."""
    with listening(config) as sock:
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with DataLock(config.data_dir):
            store = Store.open(config.database_url, config.data_dir, durability=config.durability)
            try:
                check_keys(config, has_stored_keys=store.has_keys())
                models = [resolve(name, config.cache_dir, progress=progress) for name in config.base_models]
                asyncio.run(_run(config, models, store, sock, on_ready))
            finally:
                store.close()
    return 0


@contextmanager
def listening(config: ServeConfig) -> Iterator[socket.socket]:
    """Open the socket before anything slow, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only then: 40 ms per response otherwise.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Is another service using the port? "
                "Choose another one with --port (0 finds a free one)."
            ) from None
        sock.listen(2048)  # now: until then a second server could bind the port too
        yield sock


def build(config: ServeConfig, models: list[ModelInfo], store: Store, engine: Engine, clock: Clock = REAL) -> Service:
    """Build the parts of a service. Nothing runs yet."""
    db, metrics, waiters, catalog = Db(), Metrics(), Waiters(), Catalog(models)
    worker = Worker(config, clock, store, db, engine, waiters, metrics, catalog)
    service = Service(
        config=config,
        clock=clock,
        store=store,
        db=db,
        engine=engine,
        catalog=catalog,
        access=AccessControl(config, store, db, clock),
        intake=Intake(config, clock, store, db, worker),
        worker=worker,
        waiters=waiters,
        sampling=Sampling(config, clock, store, db, engine, catalog, metrics),
        tokenizers=Tokenizers(catalog),
        metrics=metrics,
    )
    metrics.registry.register(ServiceGauges(service))
    return service


def engine_for(config: ServeConfig, models: list[ModelInfo]) -> LocalEngine:
    return LocalEngine(
        models,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        token_budget=config.max_batch_tokens,
        max_rows=config.max_rows,
        max_cache_tokens=config.max_cache_tokens,
        decode_weights=config.decode_weights,
    )


async def _run(
    config: ServeConfig,
    models: list[ModelInfo],
    store: Store,
    sock: socket.socket,
    on_ready: Callable[[str], None] | None,
) -> None:
    engine = engine_for(config, models)
    starting = asyncio.create_task(engine.start())
    service = build(config, models, store, engine)
    server = _Server(make_app(service))
    stopping = asyncio.Event()
    _on_signals(stopping, server)
    resumed = await service.worker.resume()
    if resumed:
        logger.info("resumed %d queued operations", resumed)
    tasks = [asyncio.create_task(service.worker.run()), asyncio.create_task(Janitor(service).run())]
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    watchdog = Watchdog(service.clock, service.metrics.stall)
    watchdog.start()
    try:
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait([starting, stopped, serving], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if on_ready is not None:
                on_ready(address_of(config, sock))
            await asyncio.wait([stopped, serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # it should run until cancelled: raise why it ended
        logger.info("stopping: finishing the work in progress; queued operations stay in the journal")
        await asyncio.gather(service.worker.drain(config.drain_s), service.sampling.drain(config.drain_s))
    finally:
        watchdog.stop()
        service.waiters.wake_all()
        service.sampling.wake_all()
        server.should_exit = True
        for task in (*tasks, starting):
            task.cancel()
        await asyncio.wait([serving], timeout=5)
        await asyncio.gather(*tasks, starting, return_exceptions=True)
        await engine.close()
        service.db.close()


def address_of(config: ServeConfig, sock: socket.socket) -> str:
    if config.public_url:
        return config.public_url
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a limit on the size of headers; httptools has none."""

    _is_in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: this module stops it, after the work in progress is done."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                backlog=2048,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _on_signals(stopping: asyncio.Event, server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():  # a second signal: do not wait any longer
            server.force_exit = True
            for task in asyncio.all_tasks(loop):
                task.cancel()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
