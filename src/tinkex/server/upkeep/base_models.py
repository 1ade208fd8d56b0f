"""Which base models are in the engine: loads one that is offered at its first use, and unloads others for it.

The model that was not used for longest leaves first, after the adapters on it (with snapshots), and never while
something uses it. If all are in use, one whose least stay is over takes no new work until it is free: work on two
models that have room for one goes in turns. An engine that keeps the models of its start (a gang, a sampler beside the
trainer, a front) has all of them open, and none is loaded or unloaded.

`enter` and `leave` count what uses a model. Whoever enters does not wait for another model meanwhile, so that models
that wait for each other cannot be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinkex.clock import Clock
from tinkex.engine.contract import Engine, EngineDied, EngineFault, EngineUnusable, ModelInfo, OutOfMemory
from tinkex.engine.frames import Frame
from tinkex.engine.models.registry import resolve
from tinkex.errors import ConfigError
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.machine import memory_bytes
from tinkex.settings import ServeConfig
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

IDLE_AFTER_S = 1.0
"""A loop that awaits every call is idle for a moment between two of them. Before this time its model counts as used."""
LEAST_STAY_S = 2.0
"""Seconds that a model with work stays before it leaves for another one."""
STAY_PER_LOAD = 4.0
"""It stays at least so many times as long as it took to load, so that loading never is most of the work."""
LOOK_AGAIN_S = 0.5
FAILED_S = 5.0
"""How long a failure counts for all that ask for the model; after that the next one has it tried again."""
MOST_DEATHS = 2
"""Deaths of the engine while it loads a model, after which the model is given up: all runs are rebuilt each time."""
READ_BYTES = 8 << 20
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def fixed_reason(config: ServeConfig) -> str | None:
    """Return where the engine keeps the base models of its start; None if it loads and unloads them when used."""
    reasons = {
        "with --sampler vllm or --proofs": config.sampler == "vllm" or config.proofs,
        "with --devices-per-engine": config.devices_per_engine > 1,
        "on servers that share a database": config.is_clustered,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def models_offered_before(config: ServeConfig, store: Store, named: list[ModelInfo]) -> Iterator[ModelInfo]:
    """Yield the base models that the owner offered while an earlier server ran, as far as they are still there."""
    if fixed_reason(config) is not None:
        return
    taken = {name for model in named for name in model.names}
    for name, source in store.offered_models():
        try:
            model = resolve(source, config.cache_dir, may_download=False)
        except ConfigError as error:
            logger.warning("base model %s, which was offered before, is not offered now: %s", name, error)
            continue
        if not taken & set(model.names):
            taken |= set(model.names)
            yield model


def size_estimate(config: ServeConfig, info: ModelInfo) -> int:
    """Return the bytes that a model takes at most, by its files; 0 if they do not say.

    On a CPU a model in float32 gets a second copy of its weights for sampling, in the numbers of `--decode-weights`.
    """
    is_packed = config.dtype == "float32" and config.device in ("auto", "cpu")
    return info.parameters * (NUMBER_BYTES[config.dtype] + (NUMBER_BYTES[config.decode_weights] if is_packed else 0))


def first_models(config: ServeConfig, models: Sequence[ModelInfo]) -> list[ModelInfo]:
    """Return the models that the engine loads at its start: those named, as far as they have room together.

    Raises ConfigError if one of those has no room even alone.
    """
    named = [model for model in models if set(model.names) & set(config.base_models)]
    if (reason := fixed_reason(config)) is not None:
        if config.load_models != "start" or config.base_model_memory_mb is not None:
            raise ConfigError(
                f"--load-models and --base-model-memory-mb do not work {reason}: all base models are loaded at the "
                "start there, and stay. Leave them out."
            )
        return named
    first, left = [], model_budget(config, models)
    for model in named:
        size = size_estimate(config, model)
        if size > model_budget(config, models):
            raise ConfigError(
                f"Base model {model.name} takes {-(-size // 10**6)} MB of memory, more than --base-model-memory-mb "
                f"{config.base_model_memory_mb} allows. Allow more, or serve a smaller model."
            )
        if config.load_models == "start" and size <= left:
            first.append(model)
            left -= size
    return first


def model_budget(config: ServeConfig, models: Sequence[ModelInfo]) -> int:
    """Return the bytes that base models may take: what is set, or half of the machine's memory, or what is named."""
    if config.base_model_memory_mb is not None:
        return config.base_model_memory_mb * 10**6
    named = [model for model in models if set(model.names) & set(config.base_models)]
    together = sum(size_estimate(config, model) for model in named)
    return max(memory_bytes() // 2, together if config.load_models == "start" else 0)


@dataclass(slots=True)
class ModelUse:
    """How a base model is used, and what is known of it since it was last loaded."""

    users: int = 0
    used_at: float = -math.inf
    stays_until: float = -math.inf
    size_bytes: int = 0
    loads: int = 0
    failure: str = ""
    failed_at: float = -math.inf


class BaseModels:
    """`evict_adapters` drops a model's adapters from the engine and returns whether none is left; `on_change` is called
    when work on some model may go on."""

    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        engine: Engine,
        catalog: Catalog,
        evict_adapters: Callable[[str], Awaitable[bool]],
        on_change: Callable[[], None],
    ) -> None:
        self._config, self._clock, self._engine, self._catalog = config, clock, engine, catalog
        self._evict_adapters, self._on_change = evict_adapters, on_change
        self.budget_bytes = model_budget(config, catalog.models)
        self._uses: dict[str, ModelUse] = {}
        self._wanted: dict[str, None] = {}
        """Models that are to be loaded, the first to come first."""
        self._loading = ""
        self._leaving = ""
        """The model that takes no new work, because another one needs its room."""
        self._loader: asyncio.Task[None] | None = None
        self._is_closed = False
        self._changing = asyncio.Lock()
        """Held while the engine loads or unloads a model."""
        self._changed = asyncio.Event()
        """Set once, at the next change; then there is a new one."""

    # ── What there is

    @property
    def loaded(self) -> Mapping[str, int]:
        """The models in the engine, and their bytes. Of an engine that keeps its models the bytes are not known."""
        models = self._engine.state.models
        return dict.fromkeys((model.name for model in self._catalog.models), 0) if models is None else models

    def is_open(self, name: str) -> bool:
        """Whether work on a model may begin: it is there, or it is certain that it cannot be loaded."""
        name, models = self.name_of(name), self._engine.state.models
        return models is None or (name in models and name != self._leaving) or bool(self._failure_of(name))

    def reason(self, name: str) -> str | None:
        """Return why work on a model waits, or None if it does not."""
        name = self.name_of(name)
        if self.is_open(name):
            return None
        if name == self._leaving:
            return f"base model {name} makes room for {next(iter(self._wanted), 'another')}, and is loaded again then"
        if name == self._loading or not self._leaving:
            return f"loading base model {name}"
        return f"loading base model {name}, once {self._leaving} has left memory"

    def status(self, info: ModelInfo) -> dict[str, Any]:
        """Return what the API says of an offered model."""
        use, loaded = self._use_of(info.name), self.loaded
        return {
            "model_name": info.name,
            "aliases": list(info.aliases),
            "source": info.source,
            "is_loaded": info.name in loaded,
            "is_loading": info.name == self._loading,
            "is_in_use": use.users > 0,
            "size_bytes": loaded.get(info.name) or use.size_bytes or size_estimate(self._config, info),
            "loads": use.loads,
        }

    # ── Using a model

    def enter(self, name: str) -> None:
        """Count a user of a model that is open. It stays until the user leaves."""
        self._use_of(self.name_of(name)).users += 1

    def leave(self, name: str) -> None:
        use = self._use_of(self.name_of(name))
        use.users -= 1
        use.used_at = self._clock.now()
        if not use.users:
            self._notify()

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Wait until a model is loaded, and keep it while the block runs. Raises EngineFault if it cannot be loaded."""
        while not self.is_open(name):
            if self._catalog.get(name) is None:
                raise EngineFault(f"Base model {name} is not offered any more.")
            self.want(name)
            await self._wait()
        self.enter(name)
        try:
            await self.ensure(name)
            yield
        finally:
            self.leave(name)

    def want(self, name: str) -> None:
        """Have a model loaded, unless it is there or wanted already."""
        name = self.name_of(name)
        if self.is_open(name) or name in self._wanted:
            return
        self._wanted[name] = None
        if self._loader is None or self._loader.done():
            self._loader = asyncio.create_task(self._load_wanted(), name="base models")

    async def ensure(self, name: str) -> None:
        """Load a model that the caller uses and the engine lacks: after a crash it may have failed to load it again.

        It does not wait for room, which others may hold as long as the caller does not go on.
        """
        name, models = self.name_of(name), self._engine.state.models
        if models is None or name in models:
            return
        if failure := self._failure_of(name):
            raise EngineFault(failure, "server")
        if (info := self._catalog.get(name)) is not None:
            await self._load(info)

    async def unload(self, name: str) -> bool:
        """Unload a model that nothing uses, because it is offered no longer. Return whether it is gone."""
        if self._engine.state.models is None or name in self._wanted:
            return False
        return name not in self._engine.state.models or await self._unload(name)

    async def close(self) -> None:
        self._is_closed = True
        if self._loader is not None:
            self._loader.cancel()
            await asyncio.gather(self._loader, return_exceptions=True)

    # ── Loading

    async def _load_wanted(self) -> None:
        while self._wanted:
            name = next(iter(self._wanted))
            try:
                if (info := self._catalog.get(name)) is not None:
                    await asyncio.to_thread(self._read_ahead, Path(info.folder))
                    await self._engine.ready()
                    await self._make_room(info)
                    await self._load(info)
            except EngineUnusable:
                return  # the service ends
            except (EngineFault, EngineDied):
                pass  # it is noted, for all that wait for the model
            except Exception as error:  # an edge: what waits for the model must not wait for ever
                logger.error("base model %s could not be loaded", name, exc_info=error)
                self._note_failure(name, "The service's log says why.")
            finally:
                self._wanted.pop(name, None)
                self._leaving = ""
                self._notify()

    def _read_ahead(self, folder: Path) -> None:
        """Read the weights once. The engine does nothing else while it loads, so it should find them in memory."""
        with contextlib.suppress(OSError):  # the engine says what is wrong with a file
            for file in folder.glob("*.safetensors"):
                with file.open("rb", buffering=0) as weights:
                    while not self._is_closed and weights.read(READ_BYTES):
                        pass

    async def _load(self, info: ModelInfo) -> None:
        """Load a model. A failure is noted and raised."""
        use = self._use_of(info.name)
        async with self._changing:
            if info.name in self.loaded:
                return
            self._loading, started = info.name, self._clock.now()
            try:
                reply = await self._ask_engine(info)
            except (EngineFault, EngineDied) as error:
                failure = self._note_failure(info.name, str(error).replace(info.folder, info.name))  # tenants see it
                logger.error("%s", failure)
                raise EngineFault(failure, "server") from None
            finally:
                self._loading = ""
        now = self._clock.now()
        use.failure, use.size_bytes, use.loads = "", reply.head["size_bytes"], use.loads + 1
        use.used_at, use.stays_until = now, now + max(LEAST_STAY_S, STAY_PER_LOAD * (now - started))
        logger.info("loaded base model %s (%.0f MB, %.1f s)", info.name, use.size_bytes / 1e6, now - started)

    async def _ask_engine(self, info: ModelInfo) -> Frame:
        deaths = 0
        while True:
            try:
                await self._engine.ready()
                return await self._engine.run(Frame({"op": "load_model", "model": asdict(info)}))
            except OutOfMemory:
                unused = [name for name in self._by_use(info.name) if not self._use_of(name).users]
                if not any([await self._unload_now(name) for name in unused]):
                    raise
            except EngineDied:
                deaths += 1
                if deaths == MOST_DEATHS:
                    raise

    async def _make_room(self, info: ModelInfo) -> None:
        """Unload others until a model fits, or is alone. Waits until one may leave."""
        need = self._use_of(info.name).size_bytes or size_estimate(self._config, info)
        while (others := self._by_use(info.name)) and need + sum(self.loaded.values()) > self.budget_bytes:
            self._leaving = self._next_to_leave(others)
            if not self._leaving or not await self._unload(self._leaving):
                await self._wait()

    def _next_to_leave(self, others: Sequence[str]) -> str:
        """Return the model that leaves next: an idle one, else one whose stay is over. "" if none may leave yet."""
        now = self._clock.now()
        idle = [name for name in others if self._is_idle(name, now)]
        due = [name for name in others if self._use_of(name).stays_until <= now]
        if self._leaving in others and not idle:
            return self._leaving
        return next(iter(idle or due), "")

    def _is_idle(self, name: str, now: float) -> bool:
        use = self._use_of(name)
        return not use.users and use.used_at < now - IDLE_AFTER_S

    def _by_use(self, but: str) -> list[str]:
        """Return the other models in the engine, the one that was not used for longest first."""
        return sorted((name for name in self.loaded if name != but), key=lambda name: self._use_of(name).used_at)

    async def _unload(self, name: str) -> bool:
        async with self._changing:
            return await self._unload_now(name)

    async def _unload_now(self, name: str) -> bool:
        """Evict a model's adapters and unload it, if nothing uses it. Return whether it has left."""
        former, self._leaving = self._leaving, name  # nothing may enter meanwhile
        try:
            if self._use_of(name).users or not await self._evict_adapters(name):
                return False
            await self._engine.run(Frame({"op": "unload_model", "base": name}))
        except (EngineFault, EngineDied) as error:
            logger.warning("base model %s stays in memory: %s", name, error)
            return False
        finally:
            self._leaving = former
            self._notify()
        logger.info("unloaded base model %s", name)
        return True

    # ── What is known

    def name_of(self, name: str) -> str:
        """Return the first name of a model; older runs may have another."""
        info = self._catalog.get(name)
        return name if info is None else info.name

    def _use_of(self, name: str) -> ModelUse:
        return self._uses.setdefault(name, ModelUse())

    def _failure_of(self, name: str) -> str:
        """Return why a model could not be loaded just now; "" if it was not tried, or was loaded."""
        use = self._uses.get(name)
        return "" if use is None or self._clock.now() - use.failed_at > FAILED_S else use.failure

    def _note_failure(self, name: str, reason: str) -> str:
        use = self._use_of(name)
        use.failure, use.failed_at = f"Base model {name} could not be loaded. {reason}", self._clock.now()
        return use.failure

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK_AGAIN_S)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()
