"""Builds a service, runs it, and stops it in order: HTTP, worker, engine, store, lock."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from tinkex.clock import REAL, Clock
from tinkex.engine.contract import Engine, ModelInfo
from tinkex.engine.host import LocalEngine
from tinkex.engine.models.registry import resolve
from tinkex.errors import ConfigError, TinkexError
from tinkex.home.lock import FileLock
from tinkex.server.app import make_app
from tinkex.server.http import links
from tinkex.server.http.access import AccessControl
from tinkex.server.http.metrics import Metrics
from tinkex.server.http.protocol import protocol_class
from tinkex.server.limits.ledger import Ledger
from tinkex.server.limits.open_files import fit_connections, raise_file_limit
from tinkex.server.limits.quotas import Quotas
from tinkex.server.routes.metrics import ServiceGauges
from tinkex.server.sampling.sample_queue import Sampling
from tinkex.server.sampling.tokenizer_cache import Tokenizers
from tinkex.server.service import Service
from tinkex.server.training.intake import Intake
from tinkex.server.training.waiters import Waiters
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.base_models import first_models, models_offered_before
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.server.upkeep.home import SharedHome, home_of
from tinkex.server.upkeep.janitor import Janitor
from tinkex.server.upkeep.machine import adapter_budget, return_large_blocks
from tinkex.server.upkeep.permissions import make_private
from tinkex.server.upkeep.sparse_log import sparse_log
from tinkex.server.upkeep.watchdog import Watchdog
from tinkex.settings import ServeConfig, bucket_access, check_cluster, check_keys
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.disk import is_full
from tinkex.store.errors import DatabaseAway, LeaseLost
from tinkex.store.lease import Lease
from tinkex.store.store import Store

if TYPE_CHECKING:
    import ssl

    from tinkex.server.cluster.member import ClusterMember

logger = logging.getLogger("tinkex.server")
GC_THRESHOLDS = (10_000, 10, 20)
"""Python's own are 700, 10, 10. With those, the objects of open requests survive two collections, and the full ones
that follow visit all objects. 512 clients beside hostile ones: stalls were 0.13 % of the loop's beats, and then none in
two minutes."""

SWITCH_S = 0.0002
"""How long a thread keeps the interpreter while the loop waits for it. Python's own is 5 ms. A heartbeat beside 6.5 MB
bodies of JSON that came without a pause, each decoded in a thread: median 7 ms and p99 80, now 1.7 and 19 (1 ms: 5 and
23). As many bodies were decoded."""
ACCEPTS_AT_ONCE = 128
"""Connections that asyncio accepts before it turns to other work, if an eighth of the limit is not less. They are open
before they are counted: when they need more files than are spare, asyncio accepts nothing for a second."""
WAITING_CONNECTIONS = 1024
"""Connections that the kernel keeps until then; beyond, clients wait a second and try again."""

DATABASE_WITHIN_S = 30.0
"""How long a start waits for a database that does not respond."""
DATABASE_AGAIN_S = 2.0
MAX_SAMPLED_ADAPTERS = 1 << 30
"""Bytes of adapters that are kept for sampling beside those in training."""
SAMPLED_ADAPTERS = "sampled-adapters"
"""In the data folder: links to the files of adapters that vLLM has loaded."""
Progress = Callable[[str, int, int], None]
Tls = tuple["ssl.SSLContext", float]
"""What to serve with, and how many seconds a handshake may take."""
OnReady = Callable[[bool, str], None]
"""Is told whether clients need a key, and the address."""


def serve(
    config: ServeConfig,
    *,
    on_ready: OnReady | None = None,
    progress: Progress | None = None,
    detached_s: float | None = None,
) -> int:
    """Run until SIGTERM or SIGINT, then finish the work in progress. Raises ConfigError if it cannot start.

    `detached_s`: it runs in the background, and ends so many seconds after its last user left (0: it stays).
    """
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr is no file
        faulthandler.enable()  # if the interpreter itself crashes, the log says where
    return_large_blocks()
    check_cluster(config)
    tls = None if config.node_cert is None else _tls_of(config)
    config = fit_connections(config, raise_file_limit())
    with listening(config) as sock, sparse_log():
        make_private(config)
        address = address_of(config, sock)
        with _data_lock(config, address), home_of(config, sock, detached_s) as home:
            store = _open_store(config)
            try:
                _prepare_for_full_disk(config, store)
                has_stored_keys = store.has_keys()
                check_keys(config, has_stored_keys=has_stored_keys)
                needs_key = has_stored_keys or bool(config.api_keys) or (home is not None and home.is_private)
                names = () if config.no_engine else config.base_models
                with nullcontext() if config.is_clustered else store.lease(address, config.data_dir) as lease:
                    if home is not None:
                        home.adopt_runs(store)
                    models = [resolve(name, config.cache_dir, progress=progress) for name in names]
                    models += models_offered_before(config, store, models)
                    ready = partial(_tell_ready, needs_key, home, on_ready)
                    asyncio.run(_run(config, models, store, lease, sock, tls, home, ready))
            finally:
                store.close()
    return 0


def _data_lock(config: ServeConfig, address: str) -> AbstractContextManager[object]:
    """Lock the data folder: for this server alone, or with the other nodes. A front keeps nothing there.

    With a bucket nodes need no folder in common, and the copies in it are those of one server.
    """
    if config.no_engine:
        return nullcontext()
    return FileLock(config.data_dir, address=address, is_shared=config.is_clustered and config.blobs is None)


def _open_store(config: ServeConfig) -> Store:
    """Open the store. Waits for a database that does not respond: it may be starting, as after a power cut."""
    kind = Store
    if config.is_clustered:
        from tinkex.store.cluster.cluster_store import ClusterStore as kind
    bucket, cache_bytes = _open_bucket(config), int(config.blobs_cache_gb * 1e9)
    end = REAL.now() + DATABASE_WITHIN_S
    while True:
        try:
            return kind.open(
                config.database_url,
                config.data_dir,
                durability=config.durability,
                bucket=bucket,
                cache_bytes=cache_bytes,
            )
        except DatabaseAway as error:
            left_s = end - REAL.now()
            if left_s <= 0:
                raise
            logger.warning("%s. Trying again, for %.0f s more.", str(error).rstrip("."), left_s)
            threading.Event().wait(min(DATABASE_AGAIN_S, left_s))  # border: before there is a loop


def _open_bucket(config: ServeConfig) -> Bucket | None:
    if config.blobs is None or config.no_engine:  # a front reads and writes no files
        return None
    bucket = Bucket(config.blobs, bucket_access())
    bucket.check()  # a wrong name or a wrong key is reported now, and not with the first checkpoint
    return bucket


def _prepare_for_full_disk(config: ServeConfig, store: Store) -> None:
    """Write now what deletes and links need when the disk is full. If it is full already, they do without."""
    store.keep_reserve()
    try:
        links.prepare_secret(config.data_dir)
        if config.blobs is not None:  # other machines check links that this one signed
            links.share_secret(config.data_dir, store)
    except OSError as error:
        if not is_full(error):
            raise
        logger.warning("the disk is full: links to files are not available until there is room")


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
        sock.listen(WAITING_CONNECTIONS)  # now: until then a second server could bind the port too
        yield sock


def build(
    config: ServeConfig,
    models: list[ModelInfo],
    store: Store,
    engine: Engine,
    clock: Clock = REAL,
    home: SharedHome | None = None,
) -> Service:
    """Build the parts of a service. Nothing runs yet."""
    owner_key, is_private = (None, False) if home is None else (home.key, home.is_private)
    db, metrics, waiters, catalog = Db(store.interrupt), Metrics(), Waiters(), Catalog(models)
    ledger = Ledger(config, clock, metrics.limit_rejection)
    quotas = Quotas(config, ledger, store, db)
    worker = Worker(config, clock, store, db, engine, waiters, metrics, catalog, quotas, ledger)
    service = Service(
        config=config,
        clock=clock,
        store=store,
        db=db,
        engine=engine,
        catalog=catalog,
        access=AccessControl(config, store, db, clock, owner_key=owner_key, is_private=is_private),
        intake=Intake(clock, store, db, worker, ledger, quotas),
        worker=worker,
        waiters=waiters,
        sampling=Sampling(
            config, clock, store, db, engine, catalog, metrics, ledger, worker.models, worker.memory.relieve
        ),
        tokenizers=Tokenizers(catalog),
        metrics=metrics,
        ledger=ledger,
        quotas=quotas,
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
        devices=config.devices_per_engine,
        adapters_bytes=min(MAX_SAMPLED_ADAPTERS, adapter_budget(config.adapter_memory_mb)),
    )


def _with_samplers(config: ServeConfig, models: list[ModelInfo], trainer: LocalEngine) -> Engine:
    """Return the engine, or one that samples with vLLM, or writes proofs for one that does."""
    if config.sampler == "own" and not config.proofs:
        return trainer
    from tinkex.engine.split import SplitEngine
    from tinkex.engine.vllm.launch import vllm_engine

    samplers = {
        model.name: vllm_engine(
            model,
            python=None if config.vllm_python is None else str(config.vllm_python),
            links=config.data_dir / SAMPLED_ADAPTERS,
            max_rank=config.vllm_max_rank,
            slots=config.vllm_slots,
            cache_gb=config.vllm_cache_gb,
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            max_rows=config.max_rows,
        )
        for model in (models if config.sampler == "vllm" else ())
    }
    return SplitEngine(models, trainer, samplers)


async def _run(
    config: ServeConfig,
    models: list[ModelInfo],
    store: Store,
    lease: Lease | None,
    sock: socket.socket,
    tls: Tls | None,
    home: SharedHome | None,
    ready: Callable[[str], None],
) -> None:
    first = first_models(config, models)
    engine = _engine_of_front() if config.no_engine else _with_samplers(config, models, engine_for(config, first))
    starting = asyncio.create_task(engine.start())
    service = build(config, models, store, engine, home=home)
    member = _member_of(service)
    inner = () if member is None else (member.middleware,)
    server = _Server(make_app(service, *inner), service.ledger, config.max_connections, tls)
    stopping = asyncio.Event()
    _on_signals(stopping, server)
    if lease is not None:
        _on_lost_lease(lease, stopping)
    tasks: list[asyncio.Task[None]] = []
    serving: asyncio.Task[None] | None = None
    watchdog = Watchdog(service.clock, service.metrics.stall)
    watchdog.start()
    try:
        await _resume(service)
        if member is not None:
            await member.join()
        tasks += map(asyncio.create_task, _background(service, member, home))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait([starting, stopped, serving], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _keep_interpreter_for_loop()
            ready(address_of(config, sock))
            await asyncio.wait([stopped, serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # it should run until cancelled: raise why it ended
        if lease is not None and lease.is_lost:
            raise LeaseLost
        await _drain(service, home)
    finally:
        watchdog.stop()
        service.waiters.wake_all()
        service.sampling.wake_all()
        server.should_exit = True
        await service.worker.drain(0)
        for task in (*tasks, starting):
            task.cancel()
        if serving is not None:
            await asyncio.wait([serving], timeout=5)
        await asyncio.gather(*tasks, starting, return_exceptions=True)
        if member is not None:
            await member.leave()
        await engine.close()
        service.db.close()


def _tell_ready(needs_key: bool, home: SharedHome | None, on_ready: OnReady | None, address: str) -> None:
    if home is not None:
        home.announce(needs_key=needs_key)
    if on_ready is not None:
        on_ready(needs_key, address)


async def _drain(service: Service, home: SharedHome | None) -> None:
    if home is not None:
        home.retract()
    logger.info("stopping: finishing the work in progress; queued operations stay in the journal")
    drain_s = service.config.drain_s
    await asyncio.gather(service.worker.drain(drain_s), service.sampling.drain(drain_s))


def _member_of(service: Service) -> ClusterMember | None:
    """Return what makes the service one of several, if it is."""
    if not service.config.is_clustered:
        return None
    from tinkex.server.cluster.member import ClusterMember

    return ClusterMember(service)


def _used_at(service: Service) -> float:
    """Return when something last used the service. Work that it has accepted is use: its program may have ended."""
    is_working = bool(service.worker.queued or service.sampling.running)
    return service.clock.now() if is_working else service.access.last_request_at


def _background(
    service: Service, member: ClusterMember | None, home: SharedHome | None
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield what runs as long as the service does. The service stops when one of them ends."""
    yield service.worker.run()
    if home is not None and home.ends_unused:
        yield home.until_unused(partial(_used_at, service))
    if member is not None:
        yield member.run()
    if not service.config.no_engine:
        yield Janitor(service, leads=None if member is None else member.leads).run()


def _engine_of_front() -> Engine:
    from tinkex.server.cluster.member import engine_of_front

    return engine_of_front()


def _tls_of(config: ServeConfig) -> Tls | None:
    from tinkex.server.cluster.member import tls_of

    return tls_of(config)


def _keep_interpreter_for_loop() -> None:
    """Make rare and short what takes the interpreter from the loop: garbage collections, and the turns of threads.

    What was imported is half of all objects. A thread that decodes a body keeps the interpreter for 5 ms by default,
    and the loop needs it again after every read and write of a socket.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)


async def _resume(service: Service) -> None:
    """Put what was queued back into its queues, or end the process with the reason."""
    try:
        resumed = await service.worker.resume()
    except Exception as error:
        logger.error("the journal cannot be read", exc_info=error)
        raise TinkexError(f"The service cannot start, because its journal cannot be read: {error}") from error
    if resumed:
        logger.info("resumed %d queued operations", resumed)


def _on_lost_lease(lease: Lease, stopping: asyncio.Event) -> None:
    """Stop when another server has taken the store over: what this one stores is rolled back from then on."""
    loop = asyncio.get_running_loop()

    def on_lost() -> None:
        loop.call_soon_threadsafe(stop)

    def stop() -> None:
        logger.error("another server has taken over this database; this one stops. Only one server may use a database.")
        stopping.set()

    lease.on_lost(on_lost)


def address_of(config: ServeConfig, sock: socket.socket) -> str:
    if config.public_url:
        return config.public_url
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.node_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: this module stops it, after the work in progress is done."""

    def __init__(self, app: Any, ledger: Ledger, max_connections: int, tls: Tls | None) -> None:
        self._tls, self._protocol = tls, protocol_class(ledger)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                backlog=min(ACCEPTS_AT_ONCE, max(max_connections // 8, 1)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self.servers = [await self._serve_tls(sock, *self._tls) for sock in sockets or []]
        for sock in sockets or []:
            sock.listen(WAITING_CONNECTIONS)  # asyncio has set it to the number that it accepts at once

    async def _serve_tls(self, sock: socket.socket, context: ssl.SSLContext, handshake_s: float) -> asyncio.Server:
        """Listen as uvicorn does, which gives a handshake a minute."""
        parts = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return await asyncio.get_running_loop().create_server(
            partial(self._protocol, **parts),
            sock=sock,
            ssl=context,
            ssl_handshake_timeout=handshake_s,
            backlog=self.config.backlog,
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
