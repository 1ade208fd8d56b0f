"""The janitor: what it deletes, what it keeps, and that an error does not stop it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.server.conftest import Served
from tinkex.server.limits.quotas import QuotaExceeded
from tinkex.server.sampling.sample_queue import PolledSample, SampleJob, SampleTarget, Sampling
from tinkex.server.upkeep.janitor import (
    DISK_PAUSE,
    MIN_FREE_BYTES,
    MIN_ORPHAN_AGE_S,
    MIN_ORPHAN_SEEN_S,
    TICK_S,
    Janitor,
)
from tinkex.store.records import OperationRecord, SamplerRecord


def tick(served: Served, free_bytes: int = 10**12) -> None:
    served.run(Janitor(served.service, lambda folder: free_bytes, started_at=0.0).tick())


def age(served: Served, folder: Path, seconds: float) -> None:
    """As if nobody had touched it for so long."""
    at = served.clock.wall() - seconds
    for entry in (*folder.rglob("*"), folder):
        os.utime(entry, (at, at))


def sample_for_real(served: Served) -> None:
    service = served.service
    service.sampling = Sampling(
        served.config,
        served.clock,
        served.store,
        service.db,
        service.engine,
        service.catalog,
        service.metrics,
        service.ledger,
        served.worker.models,
        served.worker.memory.relieve,
    )


def ephemeral(served: Served, run_id: str, number: int = 0) -> SamplerRecord:
    folder = f"checkpoints/{run_id}/ephemeral/{number}"
    (served.config.data_dir / folder).mkdir(parents=True)
    (served.config.data_dir / folder / "adapter_config.json").write_text("{}")
    session_id = run_id.partition(":")[0]
    sampler = SamplerRecord(
        id=f"{session_id}:sample:{number}",
        tenant="local",
        session_id=session_id,
        base_model="tinkex/tiny",
        created_at=served.clock.wall(),
        folder=folder,
    )
    return served.run(served.service.db(served.store.add_sampler, sampler))


def test_expired_checkpoints_are_deleted_with_their_folders(served: Served) -> None:
    run = served.training_run()
    gone = served.checkpoint(run, "gone", expires_at=served.clock.wall() + 5)
    kept = served.checkpoint(run, "kept", expires_at=served.clock.wall() + 50)
    served.clock.advance(10)
    tick(served)
    assert not (served.config.data_dir / gone.folder).exists()
    assert (served.config.data_dir / kept.folder).exists()
    assert served.run(served.service.db(served.store.get_checkpoint, gone.path)) is None


def test_results_are_kept_for_a_day(served: Served) -> None:
    served.training_run()
    operation = OperationRecord(
        request_id="r", run_id="s:train:0", tenant="local", seq_id=1, kind="optim_step", digest="", created_at=0.0
    )
    served.run(served.service.db(served.store.add_operation, operation, b"command"))

    def finish() -> None:
        served.store.finish("r", at=served.clock.wall(), result=b"result", result_type="json")

    served.run(served.service.db(finish))
    served.clock.advance(86_000)
    tick(served)
    assert served.run(served.service.db(served.store.result, "r")) == b"result"
    served.clock.advance(1000)
    tick(served)
    assert served.run(served.service.db(served.store.result, "r")) is None


def test_runs_of_idle_and_finished_sessions_are_evicted_from_the_engine(served: Served) -> None:
    served.session("busy")
    served.session("silent")
    served.session("done", finished={"reason": {"type": "success"}, "detail": None})
    served.session("hand")  # without heartbeats, but it works
    for name in ("busy", "silent", "done", "hand"):
        served.training_run(f"{name}:train:0")
    served.worker.held = [f"{name}:train:0" for name in ("busy", "silent", "done", "hand")]
    tick(served)
    assert served.worker.evicted == ["done:train:0"]
    served.clock.advance(601)
    served.run(served.service.db(served.store.touch_session, "busy", served.clock.wall()))
    working = OperationRecord(
        request_id="r",
        run_id="hand:train:0",
        tenant="local",
        seq_id=1,
        kind="optim_step",
        digest="",
        created_at=served.clock.wall(),
    )
    served.run(served.service.db(served.store.add_operation, working, b""))
    tick(served)
    assert served.worker.evicted == ["done:train:0", "silent:train:0"]


def test_ephemeral_samplers_are_deleted_with_their_session(served: Served) -> None:
    served.session("s")
    served.session("live")
    run = served.training_run("s:train:0")
    served.training_run("live:train:0")
    mine, other = ephemeral(served, "s:train:0"), ephemeral(served, "live:train:0", 1)
    saved = served.checkpoint(run, "named", "sampler_weights")
    named = replace(mine, id="s:sample:9", folder=None, model_path=saved.path)
    served.run(served.service.db(served.store.add_sampler, named))
    tick(served)
    assert (served.config.data_dir / str(mine.folder)).exists()
    assert served.ask("POST", "sessions/s/finish", {"reason": {"type": "success"}}).status == 200
    tick(served)
    assert not (served.config.data_dir / str(mine.folder)).exists()
    assert (served.config.data_dir / str(other.folder)).exists()
    left = served.run(served.service.db(served.store.samplers_of_session, "s"))
    assert [sampler.id for sampler in left] == ["s:sample:9"]
    served.clock.advance(601)
    tick(served)
    assert not (served.config.data_dir / str(other.folder)).exists()


def test_a_loop_with_a_sampler_per_step_is_not_above_its_quota_for_good(serve: Callable[..., Served]) -> None:
    """Unnamed samplers count, their owner cannot delete them, and they stayed until the session was over."""
    served = serve(tenant_quota_gb=0.001)
    service = served.service
    sample_for_real(served)
    served.session("s", seen_at=served.clock.wall() + 10_000)  # its heartbeats go on
    served.training_run("s:train:0")
    rows = []
    for number in range(40):
        rows.append(ephemeral(served, "s:train:0", number))
        (served.config.data_dir / str(rows[-1].folder) / "adapter_model.safetensors").write_bytes(bytes(27_000))
        served.clock.advance(1)
    with pytest.raises(QuotaExceeded, match="unnamed samplers"):
        served.run(service.quotas.reserve("next", "local", 27_000))
    tick(served)
    assert all((served.config.data_dir / str(row.folder)).exists() for row in rows), "all are new"
    served.clock.advance(601)
    served.run(service.sampling.sampler("local", rows[1].id))
    job = SampleJob("local", SampleTarget(service.catalog.find("tiny")), cast(Any, None), lambda event: None)
    service.sampling._samples["sample-1"] = PolledSample("sample-1", "local", rows[2].id, job, 1)
    tick(served)
    left = [number for number, row in enumerate(rows) if (served.config.data_dir / str(row.folder)).exists()]
    assert left == [1, 2, *range(8, 40)], "those in use, and the newest 32"
    served.run(service.quotas.reserve("next", "local", 27_000))


@pytest.mark.parametrize("given", [{}, {"tenant_quota_gb": 1, "node_url": "http://10.0.0.5:8642"}])
def test_samplers_stay_with_their_session_without_a_quota_or_in_a_cluster(
    serve: Callable[..., Served], given: dict[str, Any]
) -> None:
    """In a cluster another server may be drawing from them, which this one does not know."""
    served = serve(**given)
    sample_for_real(served)
    served.session("s", seen_at=served.clock.wall() + 10_000)
    served.training_run("s:train:0")
    rows = [ephemeral(served, "s:train:0", number) for number in range(40)]
    served.clock.advance(601)
    tick(served)
    assert all((served.config.data_dir / str(row.folder)).exists() for row in rows)


def test_no_session_is_idle_because_the_service_was_down(served: Served) -> None:
    served.session("s")
    served.training_run("s:train:0")
    served.worker.held = ["s:train:0"]
    sampler = ephemeral(served, "s:train:0")
    served.clock.advance(3600)  # the service is down all the while, and no heartbeat reaches it
    janitor = Janitor(served.service, lambda folder: 10**12)
    served.run(janitor.tick())
    served.clock.advance(599)
    served.run(janitor.tick())
    assert (served.config.data_dir / str(sampler.folder)).exists()
    assert served.worker.evicted == []
    served.clock.advance(2)
    served.run(janitor.tick())
    assert not (served.config.data_dir / str(sampler.folder)).exists()
    assert served.worker.evicted == ["s:train:0"]


def test_unreferenced_folders_are_deleted_after_an_hour(served: Served) -> None:
    data = served.config.data_dir
    saved = served.checkpoint(run := served.training_run())
    (data / saved.folder / "inner").mkdir()
    (data / saved.folder / "inner" / "x").write_text("part of a checkpoint")
    (data / "checkpoints" / run.id / "stray").write_text("beside folders that rows name")
    crashed = data / "checkpoints" / run.id / "weights" / "crashed"
    lone = data / "checkpoints" / "nobody" / "weights" / "0001"
    snapshot = data / "journal" / "snapshots" / "old"
    foreign = data / "models" / "mine"
    for folder in (crashed, lone, snapshot, foreign):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    age(served, data, MIN_ORPHAN_AGE_S + 5)
    fresh = data / "checkpoints" / "another:train:0" / "weights" / "in-the-making"
    fresh.mkdir(parents=True)
    age(served, data / "checkpoints" / "another:train:0", MIN_ORPHAN_AGE_S + 5)
    os.utime(fresh, (served.clock.wall(), served.clock.wall()))
    janitor = Janitor(served.service, lambda folder: 10**12, started_at=0.0)
    served.run(janitor.tick())
    assert all(folder.exists() for folder in (crashed, lone, snapshot))  # the time of day may have jumped
    served.clock.advance(MIN_ORPHAN_SEEN_S)
    os.utime(fresh, (served.clock.wall(), served.clock.wall()))
    served.run(janitor.tick())
    assert not any(folder.exists() for folder in (crashed, lone, lone.parent.parent, snapshot))
    assert fresh.exists()
    assert foreign.exists()
    assert (data / saved.folder / "inner" / "x").exists()


def test_a_full_disk_pauses_training_until_there_is_room(served: Served) -> None:
    tick(served, MIN_FREE_BYTES - 1)
    assert "disk has 200 MB left" in served.worker.paused[DISK_PAUSE]
    tick(served, MIN_FREE_BYTES)
    assert served.worker.paused == {}


def test_one_failing_step_does_not_stop_the_others(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.session("done", finished={"reason": {"type": "success"}, "detail": None})
    served.training_run("done:train:0")
    served.worker.held = ["done:train:0"]

    async def broken(run_id: str) -> bool:
        raise RuntimeError("evicting failed")

    served.worker.evict = broken  # type: ignore[method-assign]
    tick(served, 0)
    assert "evict_idle_runs failed" in caplog.text
    assert DISK_PAUSE in served.worker.paused


def test_the_janitor_runs_periodically(served: Served) -> None:
    ticked = []

    def free(folder: Path) -> int:
        ticked.append(folder)
        return 10**12

    async def run_thrice() -> None:
        task = asyncio.create_task(Janitor(served.service, free).run())
        for _ in range(2):
            while not served.clock.sleepers:
                await asyncio.sleep(0.001)
            served.clock.advance(TICK_S)
            await asyncio.sleep(0.001)
        while not served.clock.sleepers:
            await asyncio.sleep(0.001)
        task.cancel()

    served.run(run_thrice())
    assert len(ticked) == 3
