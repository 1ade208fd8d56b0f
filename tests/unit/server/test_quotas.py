"""Quotas: checked when something is accepted that will be stored. Who is over one is told, and nobody else pays."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.conftest import Served
from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_imports import ADAPTER, PLACE, Engine
from tests.unit.server.test_worker import done, new_run, running, scenario, step
from tinkex.server.http.errors import RequestRejected
from tinkex.server.service import Service
from tinkex.server.training.run_queue import RunQueue
from tinkex.store.blobs.data_folder import DataFolder
from tinkex.store.records import CheckpointRecord

MEGABYTE = 0.001
"""The smallest quota, in GB."""
SAVED = 300_000
ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"


class HeavyEngine(FakeEngine):
    """Every checkpoint has 300,000 bytes, and its size is known before it is written, as in the real engine."""

    def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
        if head["op"] == "size":
            return {"size_bytes": SAVED}
        reply = super()._reply(head)
        if head["op"] == "save":
            (Path(head["folder"]) / "state.json").write_bytes(bytes(SAVED))
            reply["size_bytes"] = SAVED
        return reply


async def save(service: Service, queue: RunQueue, seq_id: int, name: str | None = None, **options: Any) -> str:
    kind = "save_weights" if name is not None else "save_weights_for_sampler"
    chosen = {"name": name} if name is not None else {"sampling_session_seq_id": seq_id}
    return await service.intake.submit(queue, seq_id, kind, b"", options={**chosen, **options})


def files_bytes(service: Service) -> int:
    return sum(file.stat().st_size for file in (service.config.data_dir / "checkpoints").rglob("*") if file.is_file())


@scenario
async def test_a_burst_of_saves_cannot_write_beyond_the_quota_before_the_next_tick(tmp_path: Path) -> None:
    async with running(tmp_path, HeavyEngine(), tenant_quota_gb=MEGABYTE) as service:
        queue = await new_run(service)
        assert (await done(service, await save(service, queue, 1, "first"))).error is None
        burst = [save(service, queue, number, f"n{number}") for number in range(2, 30)]
        accepted = [
            result for result in await asyncio.gather(*burst, return_exceptions=True) if isinstance(result, str)
        ]
        for request_id in accepted:
            assert (await done(service, request_id)).error is None
        assert len(accepted) == 2
        assert files_bytes(service) == 3 * SAVED
        with pytest.raises(RequestRejected) as rejected:
            await save(service, queue, 30, "one more")
        assert (rejected.value.status, rejected.value.code) == (400, "quota_exceeded")
        assert "would take 0.0012 GB" in rejected.value.detail
        assert "--tenant-quota-gb" in rejected.value.detail
        # The run does not wait for the numbers that were rejected.
        assert (await done(service, await step(service, queue, 31, 1.0))).error is None


@scenario
async def test_only_the_tenant_above_its_quota_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, HeavyEngine(), quota_gb=MEGABYTE) as service:
        hungry, modest = await new_run(service, "a", "bob"), await new_run(service, "b", "alice")
        for number in (1, 2, 3):
            assert (await done(service, await save(service, hungry, number, f"n{number}"))).error is None
        with pytest.raises(RequestRejected, match="--quota-gb"):
            await save(service, hungry, 4, "n4")
        assert service.worker.pause_reason is None
        assert (await done(service, await step(service, modest, 1, 1.0))).error is None
        # Less than an even share: another tenant's checkpoints are not a reason to reject it.
        assert (await done(service, await save(service, modest, 2, "mine"))).error is None
        with pytest.raises(RequestRejected, match="--quota-gb"):
            await save(service, modest, 3, "more")


@scenario
async def test_a_first_save_of_unknown_size_is_rejected_before_it_is_written(tmp_path: Path) -> None:
    engine = HeavyEngine()
    async with running(tmp_path, engine, tenant_quota_gb=MEGABYTE) as service:
        queues = [await new_run(service, f"s{number}", "t") for number in range(5)]
        engine.gate.clear()
        requests = [await save(service, queue, 1, "first") for queue in queues]  # nobody knows how large they are
        engine.gate.set()
        results = [await done(service, request_id) for request_id in requests]
        failed = [result for result in results if result.error is not None]
        assert [result.category for result in failed] == ["user", "user"]
        assert "would take 0.0012 GB" in str(failed[0].error)
        assert files_bytes(service) == 3 * SAVED


@scenario
async def test_weights_of_samplers_without_a_name_count(tmp_path: Path) -> None:
    async with running(tmp_path, HeavyEngine(), tenant_quota_gb=MEGABYTE) as service:
        queue = await new_run(service)
        for number in (1, 2, 3):
            assert (await done(service, await save(service, queue, number))).error is None
        with pytest.raises(RequestRejected, match="--tenant-quota-gb"):
            await save(service, queue, 4)


@scenario
async def test_a_checkpoint_at_the_quota_can_be_replaced_and_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, HeavyEngine(), tenant_quota_gb=MEGABYTE) as service:
        queue = await new_run(service)
        for number in range(1, 4):
            assert (await done(service, await save(service, queue, number, f"n{number}"))).error is None
        assert (await done(service, await save(service, queue, 4, "n3"))).error is None
        with pytest.raises(RequestRejected):
            await save(service, queue, 5, "n5")
        await service.db(service.store.delete_checkpoint, f"tinker://{queue.run.id}/weights/n1")
        assert (await done(service, await save(service, queue, 5, "n5"))).error is None  # the number that was rejected


def test_a_save_after_a_slow_deletion_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a replaced checkpoint were still being deleted, and until then the new one counted twice."""
    may_remove, remove = threading.Event(), DataFolder.remove

    def slow(folders: DataFolder, folder: str) -> bool:
        may_remove.wait(10)
        return remove(folders, folder)

    monkeypatch.setattr(DataFolder, "remove", slow)

    @scenario
    async def check(data_dir: Path) -> None:
        async with running(data_dir, HeavyEngine(), tenant_quota_gb=MEGABYTE) as service:
            queue, other = await new_run(service), await new_run(service, "other")
            try:
                for number, name in enumerate(("n1", "n2", "n1"), 1):
                    assert (await done(service, await save(service, queue, number, name))).error is None
                assert (await done(service, await save(service, other, 1, "n1"))).error is None
            finally:
                may_remove.set()

    check(tmp_path)


@scenario
async def test_a_save_that_is_not_stored_gives_its_reservation_back(tmp_path: Path) -> None:
    async with running(tmp_path, HeavyEngine(), tenant_quota_gb=MEGABYTE) as service:
        queue = await new_run(service)
        await done(service, await save(service, queue, 1, "n1"))
        for number in range(2, 9):
            failed = await done(service, await save(service, queue, number, "n1", overwrite=False))
            assert "exists already" in str(failed.error)
        for number in (9, 10):
            assert (await done(service, await save(service, queue, number, f"n{number}"))).error is None


def large(served: Served, key: str, size: int = 600_000) -> CheckpointRecord:
    """A checkpoint whose row says that it is large."""
    tenant = served.run(served.service.access.tenant(key))
    saved = replace(served.checkpoint(served.training_run(f"{tenant}:train:0", tenant)), size_bytes=size)
    served.run(served.service.db(served.store.add_checkpoint, saved))
    return saved


def test_copies_count_although_they_are_links(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB), tenant_quota_gb=MEGABYTE)
    source = large(served, BOB)
    body = {"source_path": source.path}
    answer = served.ask("POST", "copy_weights", body, key=BOB)
    assert (answer.status, answer.json["code"], answer.json["category"]) == (400, "quota_exceeded", "user")
    assert len(served.ask("GET", "checkpoints", key=BOB).json["checkpoints"]) == 1
    assert len(list((served.config.data_dir / "checkpoints").iterdir())) == 1
    assert (
        served.ask("POST", "copy_weights", {"source_path": large(served, ALICE, 400_000).path}, key=ALICE).status == 200
    )
    assert served.ask("GET", "healthz").status == 200
    page = served.ask("GET", "/metrics", key=BOB).content
    assert b'tinkex_limit_rejections_total{limit="tenant_quota_gb"} 1.0' in page


def test_an_import_above_the_quota_is_rejected_before_its_body_is_read(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB), tenant_quota_gb=MEGABYTE)
    Engine(served)
    large(served, BOB, 995_000)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.putrequest("POST", f"/api/v1/{PLACE}")
    for name, value in {"x-api-key": BOB, "content-length": "4000000"}.items():
        connection.putheader(name, value)
    connection.endheaders()  # and not a byte of the body
    response = connection.getresponse()
    assert (response.status, b"quota_exceeded" in response.read()) == (400, True)
    connection.close()
    assert served.ask("POST", PLACE, ADAPTER, key=ALICE).status == 200
    assert served.service.quotas._reserved == {}


def test_an_import_of_unknown_size_is_411_where_there_is_a_quota(serve: Callable[..., Served]) -> None:
    for given, status in (({"tenant_quota_gb": MEGABYTE}, 411), ({}, 200)):
        served = serve(**given)
        Engine(served)
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", f"/api/v1/{PLACE}", iter([ADAPTER]), encode_chunked=True)
        assert connection.getresponse().status == status
        connection.close()
