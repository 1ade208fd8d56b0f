"""A service on a real port with a real store, and no engine behind it: for everything that needs no maths."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import pytest
import uvicorn

from tinkex.engine.contract import EngineState, ModelInfo
from tinkex.server.app import make_app
from tinkex.server.http.access import AccessControl
from tinkex.server.http.metrics import Metrics
from tinkex.server.http.protocol import protocol_class
from tinkex.server.limits.ledger import Ledger
from tinkex.server.limits.quotas import Quotas
from tinkex.server.service import Service
from tinkex.server.training.adapter_memory import Activity, AdapterMemory
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.records import CheckpointKind, CheckpointRecord, OperationRecord, RunRecord, SessionRecord
from tinkex.store.store import Store
from tinkex.testing.clock import FakeClock

T = TypeVar("T")
WEIGHTS = b"weights " * 1000 + b"end"
CONFIG = b'{"peft_type": "LORA", "r": 8}'


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class QuietWorker:
    """Remembers what it was told; runs nothing."""

    held: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    paused: dict[str, str] = field(default_factory=dict)
    memory: AdapterMemory = field(init=False)
    models: BaseModels = field(init=False)

    @property
    def pause_reason(self) -> str | None:
        return next(iter(self.paused.values()), None)

    def resident(self) -> list[str]:
        return list(self.held)

    async def evict(self, run_id: str) -> bool:
        self.held.remove(run_id)
        self.evicted.append(run_id)
        return True

    def forget_idle_queues(self) -> int:
        return 0

    def pause(self, cause: str, reason: str) -> None:
        self.paused[cause] = reason

    def unpause(self, cause: str) -> None:
        self.paused.pop(cause, None)


class NoSamples:
    """A queue of samples in which the janitor finds nothing."""

    async def drop_expired(self) -> None: ...


class Served:
    """The service, its address, and what tests do with it."""

    def __init__(self, config: ServeConfig, model_folder: Path, bucket: Bucket | None = None) -> None:
        self.config, self.clock, self.worker = config, FakeClock(), QuietWorker()
        config.data_dir.mkdir(parents=True, exist_ok=True)
        self.store = Store.open(config.database_url, config.data_dir, bucket=bucket, cache_bytes=10**9)
        self.engine = SimpleNamespace(state=EngineState(is_ready=True))
        self.worker.memory = AdapterMemory(
            10**12, self.clock, cast(Any, self.engine), lambda run_id: Activity.BUSY, self.worker.evict, lambda: None
        )
        model = ModelInfo(
            name="tinkex/tiny", folder=str(model_folder), aliases=("tiny",), arch="llama", max_context_length=2048
        )
        db, metrics, absent = Db(), Metrics(), cast(Any, None)
        catalog = Catalog([model])
        self.worker.models = BaseModels(
            config, self.clock, cast(Any, self.engine), catalog, self.worker.evict, lambda: None
        )
        self.service = Service(
            config=config,
            clock=self.clock,
            store=self.store,
            db=db,
            engine=cast(Any, self.engine),
            catalog=catalog,
            access=AccessControl(config, self.store, db, self.clock),
            intake=absent,
            worker=cast(Any, self.worker),
            waiters=absent,
            sampling=cast(Any, NoSamples()),
            tokenizers=absent,
            metrics=metrics,
            ledger=(ledger := Ledger(config, self.clock, metrics.limit_rejection)),
            quotas=Quotas(config, ledger, self.store, db),
        )
        self.protocol = protocol_class(self.service.ledger)
        self.app = make_app(self.service)
        settings = uvicorn.Config(self.app, port=0, lifespan="off", log_config=None, http=self.protocol)
        self._server = uvicorn.Server(settings)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _serve(self) -> None:
        async def main() -> None:
            self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.005)
            self.port = self._server.servers[0].sockets[0].getsockname()[1]
            self._started.set()
            await self._stopping.wait()
            await self._server.shutdown()  # at once: serve() would look up only every 100 ms
            serving.cancel()

        asyncio.run(main())

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        self.service.db.close()
        self.store.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the service's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = None, headers: Mapping[str, str] = {}
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = {**headers, **({"x-api-key": key} if key else {})}
            content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            url = path if path.startswith("/") else f"/api/v1/{path}"
            connection.request(method, url, content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    # -- rows, as training would have made them ---------------------------------------------------------------------

    def session(self, session_id: str = "s", tenant: str = "local", **given: Any) -> SessionRecord:
        now = self.clock.wall()
        session = SessionRecord(id=session_id, tenant=tenant, **{"created_at": now, "seen_at": now, **given})
        self.run(self.service.db(self.store.add_session, session))
        return session

    def training_run(self, run_id: str = "s:train:0", tenant: str = "local", **given: Any) -> RunRecord:
        now = self.clock.wall()
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": False}
        facts = {"session_id": run_id.partition(":")[0], "base_model": "tinkex/tiny", "rank": 8, "seed": 1, **flags}
        run = RunRecord(id=run_id, tenant=tenant, **{"created_at": now, "last_request_at": now, **facts, **given})
        creation = OperationRecord(
            request_id=f"create-{run_id}", run_id=run_id, tenant=tenant, seq_id=0, kind="create_model", digest=""
        )
        self.run(self.service.db(self.store.add_run, run, replace(creation, state="done"), b""))
        return run

    def checkpoint(
        self,
        run: RunRecord,
        name: str = "0001",
        kind: CheckpointKind = "weights",
        tenant: str | None = None,
        **given: Any,
    ) -> CheckpointRecord:
        files = {"adapter_model.safetensors": WEIGHTS, "adapter_config.json": CONFIG}
        folder = f"checkpoints/{run.id}/{kind}/{name}"
        (self.config.data_dir / folder).mkdir(parents=True)
        about = {}
        for file, content in files.items():
            (self.config.data_dir / folder / file).write_bytes(content)
            about[file] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        saved = CheckpointRecord(
            path=f"tinker://{run.id}/{kind}/{name}",
            tenant=tenant or run.tenant,
            run_id=run.id,
            kind=kind,
            name=name,
            folder=folder,
            base_model=run.base_model,
            rank=run.rank,
            train_attn=run.train_attn,
            train_mlp=run.train_mlp,
            train_unembed=run.train_unembed,
            size_bytes=sum(map(len, files.values())),
            files=about,
            **{"created_at": self.clock.wall(), **given},
        )
        self.run(self.service.db(self.store.add_checkpoint, saved))
        return saved


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts services; each has its own data folder unless given one."""
    running: list[Served] = []

    def start(bucket: Bucket | None = None, **given: Any) -> Served:
        models = tmp_path / "model"
        models.mkdir(exist_ok=True)
        (models / "tokenizer.json").write_text('{"version": "1.0"}')
        (models / "model.safetensors").write_bytes(b"secret weights")
        config = ServeConfig(**{"data_dir": tmp_path / f"data{len(running)}", "base_models": ("tinkex/tiny",), **given})
        running.append(Served(config, models, bucket))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
