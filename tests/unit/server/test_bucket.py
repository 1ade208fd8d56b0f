"""A service whose files lie in a bucket: another machine goes on, and a bucket that is away only delays."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from tests.unit.server.conftest import CONFIG, WEIGHTS, Served
from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_imports import ADAPTER, PLACE, Engine
from tests.unit.server.test_worker import backward, done, idle, new_run, running, scenario, step
from tests.unit.store.bucket_server import BucketServer
from tinkex.clock import REAL
from tinkex.engine.contract import Sampled, SampleSpec
from tinkex.engine.frames import Frame
from tinkex.server.http import links
from tinkex.server.http.errors import as_rejected
from tinkex.server.service import Service
from tinkex.server.training.run_queue import RunQueue
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.blobs.bucket_folders import FILE_LIST, BucketFolders
from tinkex.store.errors import BucketAway

LARGE = "x" * 200_000
"""More than fits into a row."""


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    global the_server
    server = the_server = BucketServer()
    yield server
    server.stop()


the_server: BucketServer


@pytest.fixture(autouse=True)
def started(server: BucketServer) -> None:
    """Scenarios get no fixtures: they use `the_server`."""


class SlowEngine(FakeEngine):
    """Every pass is worth a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_s = 1.0


def new_bucket(wait_s: float = 0.5) -> Bucket:
    return the_server.bucket(wait_s=wait_s)


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'tinkex.db'}"


async def save(service: Service, queue: RunQueue, seq_id: int, **options: Any) -> str:
    kind = options.pop("kind", "save_weights")
    return await service.intake.submit(queue, seq_id, kind, b"", options={"name": "n", **options})


async def large_step(service: Service, queue: RunQueue, seq_id: int) -> str:
    head = {"op": "forward_backward", "adapter": queue.run.id, "loss_fn": "cross_entropy", "data": [1], "text": LARGE}
    return await service.intake.submit(queue, seq_id, "forward_backward", Frame(head).encode())


@scenario
async def test_another_machine_goes_on_with_snapshot_large_commands_and_checkpoint(tmp_path: Path) -> None:
    """The data folder of the first is gone, as after the loss of its machine."""
    bucket, url = new_bucket(), database(tmp_path)
    async with running(tmp_path / "a", FakeEngine(), bucket=bucket, database_url=url) as first:
        queue = await new_run(first)
        await done(first, await step(first, queue, 1, 0.5))
        assert (await done(first, await save(first, queue, 2))).error is None
        # A load is followed by a snapshot at once; what comes after it is replayed.
        options = {"path": f"tinker://{queue.run.id}/weights/n", "optimizer": False}
        loading = await first.intake.submit(queue, 3, "load_weights", b"", options=options)
        assert (await done(first, loading)).error is None
        await done(first, await large_step(first, queue, 4))
    shutil.rmtree(tmp_path / "a")
    engine = FakeEngine()
    async with running(tmp_path / "b", engine, bucket=the_server.bucket(bucket.url), database_url=url) as second:
        queue = await second.intake.run_queue("t", queue.run.id)
        assert (await done(second, await step(second, queue, 5, 0.25))).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "step 0.5", "fb 1", "step 0.25"]
        loading = await second.intake.submit(queue, 6, "load_weights", b"", options=options)
        assert (await done(second, loading)).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "step 0.5"]


@scenario
async def test_no_row_has_a_path_of_this_machine(tmp_path: Path) -> None:
    async with running(tmp_path, SlowEngine(), bucket=new_bucket(), snapshot_every_s=0.5) as service:
        queue = await new_run(service)
        await done(service, await large_step(service, queue, 1))
        await idle(queue)
        await done(service, await save(service, queue, 2))
        unnamed = {"name": None, "sampling_session_seq_id": 0, "kind": "save_weights_for_sampler"}
        await done(service, await save(service, queue, 3, **unnamed))
        folders, files = await service.db(service.store.referenced)
        assert len(folders) == 3
        [sampler] = await service.db(service.store.samplers_with_files)
        assert sampler.size_bytes, "a quota asks no bucket"
        assert not [name for name in (*folders, *files) if str(tmp_path) in name or name.startswith("/")]


@scenario
async def test_a_save_waits_for_the_bucket_while_others_train(tmp_path: Path) -> None:
    bucket = new_bucket()
    async with running(tmp_path, FakeEngine(), bucket=bucket) as service:
        queue, other = await new_run(service), await new_run(service, "other")
        the_server.stop()
        try:
            saving = await save(service, queue, 1)
            for number in range(1, 6):
                assert (await done(service, await step(service, other, number, 0.1))).error is None
            while not (pending := service.worker.pending(saving)) or not pending.waits_for:
                await asyncio.sleep(0.02)
            state, reason = service.worker.queue_of(pending)
            assert (state, "bucket" in reason) == ("paused_capacity", True)
            assert service.worker.pause_reason is None, "small training goes on"
        finally:
            the_server.start()
        assert (await done(service, saving)).error is None
        saved = await service.db(service.store.get_checkpoint, f"tinker://{queue.run.id}/weights/n")
        assert saved is not None
        assert f"{saved.folder}/state.json" in the_server.keys(bucket)


@scenario
async def test_a_large_submission_is_503_while_the_bucket_is_away(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, bucket=new_bucket()) as service:
        queue = await new_run(service)
        the_server.stop()
        try:
            with pytest.raises(BucketAway) as raised:
                await large_step(service, queue, 1)
        finally:
            the_server.start()
        rejected = as_rejected(raised.value)
        assert (rejected.status, rejected.headers["retry-after"]) == (503, "5")
        assert (await done(service, await large_step(service, queue, 1))).error is None, "the client sends it again"
        assert engine.adapters[queue.run.id] == ["seed 7", "fb 1"]


@scenario
async def test_snapshots_are_postponed_while_the_bucket_is_away(tmp_path: Path) -> None:
    engine = SlowEngine()
    async with running(tmp_path, engine, bucket=new_bucket(), snapshot_every_s=0.5) as service:
        queue = await new_run(service)
        the_server.stop()
        try:
            assert (await done(service, await backward(service, queue, 1))).error is None
            await idle(queue)
        finally:
            the_server.start()
        run = await service.db(service.store.get_run, queue.run.id)
        assert run is not None and run.snapshot is None
        engine.die()
        assert (await done(service, await step(service, queue, 2, 0.5))).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "fb 1", "step 0.5"]


@scenario
async def test_a_rebuild_waits_for_its_snapshot(tmp_path: Path) -> None:
    engine, bucket = SlowEngine(), new_bucket()
    async with running(tmp_path, engine, bucket=bucket, snapshot_every_s=0.5) as service:
        queue = await new_run(service)
        await done(service, await backward(service, queue, 1))
        await idle(queue)
        run = await service.db(service.store.get_run, queue.run.id)
        assert run is not None and run.snapshot is not None
        service.store.folders.forget(run.snapshot)
        engine.die()
        the_server.stop()
        try:
            stepping = await step(service, queue, 2, 0.5)
            while not (pending := service.worker.pending(stepping)) or not pending.waits_for:
                await asyncio.sleep(0.02)
        finally:
            the_server.start()
        assert (await done(service, stepping)).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "fb 1", "step 0.5"]


@scenario
async def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    bucket = new_bucket()
    async with running(tmp_path, FakeEngine(), bucket=bucket) as service:
        queue = await new_run(service)
        await done(service, await save(service, queue, 1))
        [key] = [key for key in the_server.keys(bucket) if key.endswith("/state.json")]
        the_server.overwrite(bucket, key, b'["seed 8"]')
        service.store.folders.forget(key.rpartition("/")[0])
        options = {"path": f"tinker://{queue.run.id}/weights/n", "optimizer": False}
        outcome = await done(service, await service.intake.submit(queue, 2, "load_weights", b"", options=options))
        assert outcome.category == "server"
        assert "not what was written" in str(outcome.error)


@scenario
async def test_a_copy_on_this_machine_that_is_damaged_is_fetched_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, bucket=new_bucket()) as service:
        queue = await new_run(service)
        await done(service, await save(service, queue, 1))
        saved = await service.db(service.store.get_checkpoint, f"tinker://{queue.run.id}/weights/n")
        assert saved is not None
        (service.store.folders.path(saved.folder) / "state.json").write_bytes(b'["seed 8"]')
        options = {"path": saved.path, "optimizer": False}
        outcome = await done(service, await service.intake.submit(queue, 2, "load_weights", b"", options=options))
        assert outcome.error is None
        assert engine.adapters[queue.run.id] == ["seed 7"]


@scenario
async def test_weights_that_are_sampled_stay_in_the_cache_meanwhile(tmp_path: Path) -> None:
    engine, bucket = FakeEngine(), new_bucket()
    async with running(tmp_path, engine, bucket=bucket) as service:
        folders = service.store.folders
        assert isinstance(folders, BucketFolders)
        queue = await new_run(service)
        await done(service, await save(service, queue, 1, kind="save_weights_for_sampler"))
        target = await service.sampling.open("t", model_path=f"tinker://{queue.run.id}/sampler_weights/n")
        assert target.folder is not None and target.weights is not None
        folders.forget(target.folder)
        engine.gate.clear()
        spec = SampleSpec(base="tinkex/tiny", prompt=(1,), max_tokens=2, weights=target.weights)
        stream = cast("AsyncGenerator[Any, None]", service.sampling.run("t", target, spec))
        sampling = asyncio.ensure_future(anext(stream))
        while not engine.samples:
            await asyncio.sleep(0.01)
        folders.forget(target.folder)  # as if others needed the room
        assert (Path(target.weights) / "state.json").exists(), "fetched again, and held"
        engine.gate.set()
        assert isinstance(await sampling, Sampled)
        await stream.aclose()
        folders.forget(target.folder)
        assert folders.cache.nbytes == 0, "nothing holds them any more"


@scenario
async def test_a_sample_waits_for_its_weights(tmp_path: Path) -> None:
    engine, bucket = FakeEngine(), new_bucket()
    async with running(tmp_path, engine, bucket=bucket) as service:
        queue = await new_run(service)
        await done(service, await save(service, queue, 1, kind="save_weights_for_sampler"))
        target = await service.sampling.open("t", model_path=f"tinker://{queue.run.id}/sampler_weights/n")
        assert target.folder is not None
        service.store.folders.forget(target.folder)
        the_server.stop()
        try:
            spec = SampleSpec(base="tinkex/tiny", prompt=(1,), max_tokens=2, weights=target.weights)
            stream = cast("AsyncGenerator[Any, None]", service.sampling.run("t", target, spec))
            sampling = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(1.5)  # more than one round of attempts
            assert not sampling.done() and not engine.samples
        finally:
            the_server.start()
        assert isinstance(await sampling, Sampled)
        await stream.aclose()


# ── over HTTP


def stored(served: Served, run: Any, name: str = "0001") -> Any:
    """A checkpoint that lies in the bucket, and nowhere on this machine."""
    saved = served.checkpoint(run, name)
    folders = served.store.folders
    assert isinstance(folders, BucketFolders)
    local = served.config.data_dir / saved.folder
    folders.move_in(local, saved.folder, saved.files)
    shutil.rmtree(local)
    return saved


def test_archives_files_and_ranges_come_from_the_bucket(serve: Callable[..., Served]) -> None:
    served = serve(bucket=new_bucket())
    run = served.training_run()
    stored(served, run)
    answer = served.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive")
    link = urlsplit(answer.headers["location"])
    assert f"{link.scheme}://{link.netloc}" == served.base_url, "never to the bucket"
    whole = served.ask("GET", link.path)
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as opened:
        read = {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]
    assert read == {"adapter_model.safetensors": WEIGHTS, "adapter_config.json": CONFIG}
    part = served.ask("GET", link.path, headers={"range": "bytes=1000-1999"})
    assert (part.status, part.content) == (206, whole.content[1000:2000])
    folders = served.store.folders
    assert isinstance(folders, BucketFolders)
    assert folders.cache.nbytes > 0
    deadline_s = REAL.now() + 10
    while folders.cache.nbytes and REAL.now() < deadline_s:  # the client has the last byte before the server has ended
        folders.forget(f"checkpoints/{run.id}/weights/0001")
        REAL.pause(0.01)
    assert folders.cache.nbytes == 0, "nothing holds it any more"


def test_an_uploaded_adapter_lies_in_the_bucket_only(serve: Callable[..., Served]) -> None:
    bucket = new_bucket()
    served = serve(bucket=bucket)
    Engine(served)
    answer = served.ask("POST", PLACE, ADAPTER)
    assert answer.status == 200, answer.content
    assert [key.rpartition("/")[2] for key in the_server.keys(bucket)] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        FILE_LIST,
    ]
    assert not list(served.config.data_dir.rglob("*.safetensors"))
    the_server.stop()
    try:
        answer = served.ask("POST", PLACE.replace("mine", "later"), ADAPTER)
    finally:
        the_server.start()
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert len(served.ask("GET", "checkpoints").json["checkpoints"]) == 1


def test_a_download_is_503_while_the_bucket_is_away(serve: Callable[..., Served]) -> None:
    served = serve(bucket=new_bucket())
    run = served.training_run()
    stored(served, run)
    link = urlsplit(served.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive").headers["location"])
    the_server.stop()
    try:
        answer = served.ask("GET", link.path)
    finally:
        the_server.start()
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert served.ask("GET", link.path).status == 200


def test_copies_are_made_in_the_bucket_and_deletes_empty_it(serve: Callable[..., Served]) -> None:
    bucket = new_bucket()
    served = serve(bucket=bucket)
    run = served.training_run()
    saved = stored(served, run)
    answer = served.ask("POST", "copy_weights", {"source_path": saved.path})
    assert answer.status == 200, answer.content
    assert len(the_server.keys(bucket)) == 6
    assert not list((served.config.data_dir / "checkpoints").rglob("*.safetensors"))
    assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001").status == 200
    copied = urlsplit(answer.json["tinker_path"])
    assert served.ask("DELETE", f"training_runs/{copied.netloc}/checkpoints{copied.path}").status == 200
    assert the_server.keys(bucket) == []


def test_a_delete_does_not_wait_for_the_bucket_for_long(serve: Callable[..., Served]) -> None:
    bucket = new_bucket()
    served = serve(bucket=bucket)
    run = served.training_run()
    stored(served, run)
    the_server.stop()
    try:
        assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001").status == 200
    finally:
        the_server.start()
    assert len(the_server.keys(bucket)) == 3, "the janitor's work"
    served.store.remove_orphans(served.run(served.service.db(served.store.referenced)), 4e9)
    assert the_server.keys(bucket) == []


def test_a_link_of_one_server_is_accepted_by_another(serve: Callable[..., Served], tmp_path: Path) -> None:
    bucket, url = new_bucket(), database(tmp_path)
    first, second = (serve(bucket=bucket, database_url=url) for _ in range(2))
    run = first.training_run()
    saved = stored(first, run)
    for served in (first, second):
        links.prepare_secret(served.config.data_dir)
        links.share_secret(served.config.data_dir, served.store)
    token = links.sign(first.config.data_dir, "local", saved.path, int(first.clock.wall()) + 60)
    assert second.ask("GET", f"files/{token}/archive.tar").status == 200
