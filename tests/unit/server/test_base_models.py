"""Base models are loaded at their first use and leave for others: a real service, and an engine without maths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import done, idle, scenario, step
from tinkex.engine.contract import EngineFault, EngineState, ModelInfo, OutOfMemory, SampleSpec
from tinkex.errors import ConfigError
from tinkex.server.main import build
from tinkex.server.service import Service
from tinkex.server.training.run_queue import RunQueue
from tinkex.server.training.waiters import OperationResult
from tinkex.server.upkeep import base_models
from tinkex.server.upkeep.base_models import first_models
from tinkex.settings import ServeConfig
from tinkex.store.records import RunRecord, SessionRecord
from tinkex.store.store import Store

MB = 10**6
MODELS = [ModelInfo(name=name, folder=f"/{name}", parameters=MB // 8) for name in ("a", "b", "c")]


class ShelfEngine(FakeEngine):
    """It has models, and refuses what one that is not there, or is in use, does not allow."""

    def __init__(self, *loaded: str) -> None:
        super().__init__()
        self.models = dict.fromkeys(loaded, MB)
        self.bases: dict[str, str] = {}
        self.broken: dict[str, Exception] = {}
        self.loads: list[str] = []
        self.lora_sizes: dict[str, int] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    @property
    def state(self) -> EngineState:
        return replace(super().state, models=dict(self.models), lora_sizes=dict.fromkeys(self.models, self.lora_sizes))

    async def run(self, command: Any, *, tenant: str = "") -> Any:
        if not isinstance(command, bytes) and command.head["op"] == "load_model":
            await self.may_load.wait()
        return await super().run(command, tenant=tenant)

    def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
        match head["op"]:
            case "load_model":
                name = head["model"]["name"]
                self.loads.append(name)
                if name in self.broken:
                    raise self.broken[name]
                self.models[name] = MB
                return {"size_bytes": MB, "lora_sizes": {}}
            case "unload_model":
                assert head["base"] not in [self.bases[adapter] for adapter in self.adapters]
                del self.models[head["base"]]
                return {}
            case "create" | "restore":
                if head["base"] not in self.models:
                    raise EngineFault(f"Base model {head['base']} is not loaded.")
                self.bases[head["adapter"]] = head["base"]
        return super()._reply(head)


@asynccontextmanager
async def serving(folder: Path, engine: ShelfEngine, room: int = 1, **settings: Any) -> AsyncIterator[Service]:
    """A service with room for so many models."""
    config = ServeConfig(data_dir=folder, base_models=("a", "b", "c"), base_model_memory_mb=room, **settings)
    store = Store.open(config.database_url, folder)
    service = build(config, MODELS, store, engine)
    await service.worker.resume()
    loop = asyncio.create_task(service.worker.run())
    try:
        yield service
    finally:
        loop.cancel()
        await service.worker.drain(0)
        service.db.close()
        store.close()


@pytest.fixture(autouse=True)
def short_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_models, "LEAST_STAY_S", 0.1)
    monkeypatch.setattr(base_models, "IDLE_AFTER_S", 0.05)
    monkeypatch.setattr(base_models, "LOOK_AGAIN_S", 0.02)


async def create(service: Service, base: str, name: str) -> tuple[RunQueue, OperationResult]:
    await service.db(service.store.add_session, SessionRecord(id=name, tenant="t", created_at=0.0, seen_at=0.0))
    layers = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True}
    times = {"created_at": 0.0, "last_request_at": 0.0}
    run = RunRecord(id=f"{name}:train:0", tenant="t", session_id=name, base_model=base, seed=7, **layers, **times)  # type: ignore[arg-type]
    outcome = await done(service, await service.intake.create(run, "create_model", {}))
    return await service.intake.run_queue("t", run.id), outcome


@scenario
async def test_a_model_is_loaded_at_its_first_use_and_the_one_unused_for_longest_leaves(tmp_path: Path) -> None:
    engine = ShelfEngine()
    async with serving(tmp_path, engine, room=2) as service:
        first, _ = await create(service, "a", "one")
        await done(service, await step(service, first, 1, 0.5))
        await create(service, "b", "two")
        await done(service, await step(service, first, 2, 0.25))
        await idle(first)
        await create(service, "c", "three")
        assert set(engine.models) == {"a", "c"}
        await create(service, "b", "four")
        assert set(engine.models) == {"c", "b"}
        await done(service, await step(service, first, 3, 0.125))
        assert engine.adapters[first.run.id] == ["seed 7", "step 0.5", "step 0.25", "step 0.125"]
        assert engine.loads == ["a", "b", "c", "b", "a"]
        heads = [(head["op"], head.get("base")) for head in engine.commands]
        assert heads.index(("snapshot", None)) < heads.index(("unload_model", "a"))  # not replayed from its seed
        assert "restore" in [head["op"] for head in engine.commands]


@scenario
async def test_runs_on_two_models_with_room_for_one_both_go_on(tmp_path: Path) -> None:
    engine = ShelfEngine()
    async with serving(tmp_path, engine) as service:
        queues = [(await create(service, base, f"run-{base}"))[0] for base in "ab"]
        ids = [await step(service, queue, number, 1.0) for number in range(1, 21) for queue in queues]
        for request_id in ids:
            assert (await done(service, request_id)).error is None
        for queue in queues:
            (length,) = {len(engine.adapters.get(queue.run.id, [0] * 21))}
            assert length == 21


@scenario
async def test_a_model_in_use_never_leaves(tmp_path: Path) -> None:
    engine = ShelfEngine()
    async with serving(tmp_path, engine) as service:
        first, _ = await create(service, "a", "one")
        engine.gate.clear()
        running = await step(service, first, 1, 0.5)
        creating = asyncio.create_task(create(service, "b", "two"))
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert "a" in engine.models
        (waiting,) = [row for row in service.worker.waiting() if row.row.kind == "create_model"]
        state, reason = service.worker.queue_of(waiting)
        assert state == "paused_capacity" and reason == "loading base model b, once a has left memory"
        engine.gate.set()
        await done(service, running)
        _, outcome = await creating
        assert outcome.error is None and set(engine.models) == {"b"}


@scenario
async def test_clients_of_a_model_that_loads_are_told_and_others_go_on(tmp_path: Path) -> None:
    engine = ShelfEngine("a")
    async with serving(tmp_path, engine, room=2) as service:
        engine.may_load.clear()
        creating = asyncio.create_task(create(service, "b", "two"))
        first, _ = await create(service, "a", "one")
        await done(service, await step(service, first, 1, 0.5))
        (waiting,) = service.worker.waiting()
        assert service.worker.queue_of(waiting) == ("paused_capacity", "loading base model b")
        sample = service.sampling.submit("t", "s", await service.sampling.open("t", base_model="b"), SPEC, None, None)
        await asyncio.sleep(0)
        assert service.sampling.queue_of(sample) == ("paused_capacity", "loading base model b")
        engine.may_load.set()
        await creating
        await service.sampling.wait(sample, 10)
        assert sample.result is not None and engine.loads == ["b"]


SPEC = SampleSpec(base="b", prompt=(1,), max_tokens=2)


@scenario
async def test_a_model_that_cannot_be_loaded_fails_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    engine = ShelfEngine("a")
    engine.broken["b"] = EngineFault("/b/weights: its weights are missing", "server")
    async with serving(tmp_path, engine, room=2) as service:
        first, _ = await create(service, "a", "one")
        _, outcome = await create(service, "b", "two")
        assert outcome.category == "server"
        assert outcome.error is not None and "Base model b could not be loaded" in outcome.error
        assert "b/weights: its weights are missing" in outcome.error
        assert "/b/" not in outcome.error, "tenants do not see where the owner's folder is"
        sample = service.sampling.submit("t", "s", await service.sampling.open("t", base_model="b"), SPEC, None, None)
        await service.sampling.wait(sample, 10)
        assert sample.error is not None and "could not be loaded" in sample.error[0]
        assert engine.loads == ["b"]  # what asked at the same time shares the failure
        assert (await done(service, await step(service, first, 1, 0.5))).error is None
        del engine.broken["b"]
        service.worker.models._use_of("b").failed_at -= base_models.FAILED_S
        _, outcome = await create(service, "b", "three")
        assert outcome.error is None


@scenario
async def test_an_adapter_that_is_too_large_is_rejected_although_its_model_was_not_loaded(tmp_path: Path) -> None:
    """Before it is loaded nobody knows how large its layers are: the check when a run is accepted lets all pass."""
    engine = ShelfEngine("a")
    engine.lora_sizes = {"train_attn": MB, "train_mlp": 0, "train_unembed": 0}
    async with serving(tmp_path, engine, room=2, adapter_memory_mb=4) as service:
        _, outcome = await create(service, "b", "one")
        assert outcome.category == "user"
        assert outcome.error is not None and "--adapter-memory-mb" in outcome.error
        assert not engine.adapters


@scenario
async def test_an_engine_that_dies_while_it_loads_is_asked_once_more_and_then_not_again(tmp_path: Path) -> None:
    engine = ShelfEngine("a")
    async with serving(tmp_path, engine, room=2) as service:
        first, _ = await create(service, "a", "one")
        engine.deaths.append(lambda head: head["op"] == "load_model")
        assert (await create(service, "b", "two"))[1].error is None
        assert (await done(service, await step(service, first, 1, 0.5))).error is None
        engine.deaths += 2 * [lambda head: head["op"] == "load_model"]
        _, outcome = await create(service, "c", "three")
        assert outcome.error is not None and "c could not be loaded" in outcome.error
        assert (await done(service, await step(service, first, 2, 0.5))).error is None
        assert engine.adapters[first.run.id] == ["seed 7", "step 0.5", "step 0.5"]


@scenario
async def test_a_model_without_memory_to_load_it_takes_that_of_an_unused_one(tmp_path: Path) -> None:
    class CrampedEngine(ShelfEngine):
        def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
            if head["op"] == "unload_model":
                self.broken.clear()
            return super()._reply(head)

    engine = CrampedEngine("a")
    engine.broken["b"] = OutOfMemory("out of memory", "server")
    async with serving(tmp_path, engine, room=2) as service:
        assert (await create(service, "b", "two"))[1].error is None
        assert set(engine.models) == {"b"}


@scenario
async def test_a_model_that_the_next_engine_failed_to_load_is_loaded_again_for_its_runs(tmp_path: Path) -> None:
    engine = ShelfEngine("a")
    async with serving(tmp_path, engine) as service:
        first, _ = await create(service, "a", "one")

        def die_and_lose(head: dict[str, Any]) -> bool:
            if head["op"] == "optim_step":
                engine.models.clear()
            return bool(head["op"] == "optim_step")

        engine.deaths.append(die_and_lose)
        assert (await done(service, await step(service, first, 1, 0.5))).error is None
        assert engine.loads == ["a"] and engine.adapters[first.run.id] == ["seed 7", "step 0.5"]


def config_of(tmp_path: Path, **settings: Any) -> ServeConfig:
    return ServeConfig(data_dir=tmp_path, base_models=("a", "b"), **settings)


def test_the_start_loads_what_is_named_and_has_room(tmp_path: Path) -> None:
    def names(**settings: Any) -> list[str]:
        return [model.name for model in first_models(config_of(tmp_path, **settings), MODELS)]

    assert names() == ["a", "b"]
    assert names(base_model_memory_mb=1) == ["a"]
    assert names(load_models="first-use") == []
    assert names(sampler="vllm") == ["a", "b"]


def test_a_named_model_that_never_has_room_is_told_at_the_start(tmp_path: Path) -> None:
    large = [replace(MODELS[0], parameters=MB)]
    with pytest.raises(ConfigError, match=r"Base model a takes 8 MB of memory, more than --base-model-memory-mb 1"):
        first_models(config_of(tmp_path, base_model_memory_mb=1), large)


@pytest.mark.parametrize("fixed", [{"sampler": "vllm"}, {"devices_per_engine": 2}, {"no_engine": True}])
def test_where_models_stay_the_settings_about_them_are_rejected(tmp_path: Path, fixed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="all base models are loaded at the start there"):
        first_models(config_of(tmp_path, load_models="first-use", **fixed), MODELS)
