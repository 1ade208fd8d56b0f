"""`tinkex gc` and `tinkex backup` on a data folder with rows and files, while a server uses it and while none does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.bucket_server import BucketServer
from tinkex.clock import REAL
from tinkex.errors import TinkexError
from tinkex.home.lock import FileLock
from tinkex.store.backup import back_up
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.payloads import MAX_INLINE_BYTES
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SessionRecord
from tinkex.store.store import Store

from .conftest import Tinkex

HOUR = 3600.0


class Data:
    """A service's data folder with one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.now = REAL.wall()
        self.store = Store.open(f"sqlite:///{folder / 'tinkex.db'}", folder)
        self.store.add_session(SessionRecord(id="s", tenant="local", created_at=self.now, seen_at=self.now))
        run: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True, "seed": 0, "rank": 4}
        times: dict[str, Any] = {"created_at": self.now, "last_request_at": self.now}
        self.run = RunRecord(id="s:train:0", tenant="local", session_id="s", base_model="tinkex/tiny", **run, **times)
        creation = OperationRecord(
            request_id="r0", run_id=self.run.id, tenant="local", seq_id=0, kind="create", digest="0"
        )
        self.store.add_run(self.run, creation, b"create")

    def folder_with(self, name: str, content: bytes = b"weights") -> str:
        (self.folder / name).mkdir(parents=True)
        (self.folder / name / "adapter_model.safetensors").write_bytes(content)
        return name

    def checkpoint(self, name: str, expires_at: float | None = None) -> CheckpointRecord:
        folder = self.folder_with(f"checkpoints/s:train:0/weights/{name}")
        saved = CheckpointRecord(
            path=f"tinker://s:train:0/weights/{name}", tenant="local", run_id=self.run.id, kind="weights", name=name,
            folder=folder, base_model="tinkex/tiny", rank=4, train_attn=True, train_mlp=True, train_unembed=True,
            created_at=self.now, size_bytes=7, files={}, expires_at=expires_at,
        )  # fmt: skip
        self.store.add_checkpoint(saved)
        return saved

    def operation(self, seq_id: int, command: bytes) -> None:
        row = OperationRecord(
            request_id=f"r{seq_id}", run_id=self.run.id, tenant="local", seq_id=seq_id, kind="optim_step", digest="1"
        )
        self.store.add_operation(row, command)

    def age(self, name: str, seconds: float) -> None:
        for path in ((self.folder / name), *(self.folder / name).rglob("*")):
            os.utime(path, (self.now - seconds, self.now - seconds))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Data]:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    made = Data(tmp_path / "data")
    yield made
    made.store.close()


# -- gc ---------------------------------------------------------------------------------------------------------------


def test_gc_deletes_expired_and_unreferenced_files_only(run: Tinkex, data: Data) -> None:
    kept = data.checkpoint("kept", expires_at=data.now + HOUR)
    gone = data.checkpoint("gone", expires_at=data.now - 1)
    rubbish = data.folder_with("checkpoints/s:train:0/weights/crashed.partial", b"x" * 1000)
    data.age(rubbish, 10)
    ran = run("gc", "-o", "json")
    assert {entry["what"] for entry in ran.json["removed"]} == {gone.path, rubbish}
    assert ran.json["size_bytes"] == 1007
    assert (data.folder / kept.folder).is_dir()
    assert not (data.folder / gone.folder).exists() and not (data.folder / rubbish).exists()
    assert data.store.get_checkpoint(gone.path) is None
    assert data.store.get_checkpoint(kept.path) == kept
    assert run("gc", "-o", "json").json["removed"] == []


def test_gc_dry_run_deletes_nothing(run: Tinkex, data: Data) -> None:
    gone = data.checkpoint("gone", expires_at=data.now - 1)
    ran = run("gc", "--dry-run")
    assert gone.path in ran.out and "Would delete" in ran.err
    assert data.store.get_checkpoint(gone.path) == gone
    assert (data.folder / gone.folder).is_dir()


def test_gc_keeps_new_folders_while_a_server_is_running(run: Tinkex, data: Data) -> None:
    data.checkpoint("kept")
    young = data.folder_with("checkpoints/s:train:0/weights/young.partial")
    old = data.folder_with("checkpoints/s:train:0/weights/old.partial")
    data.age(young, 60)
    data.age(old, 2 * HOUR)
    with FileLock(data.folder):
        assert [entry["what"] for entry in run("gc", "-o", "json").json["removed"]] == [old]
    assert (data.folder / young).is_dir()
    assert [entry["what"] for entry in run("gc", "-o", "json").json["removed"]] == [young]


def test_gc_keeps_a_journal_that_is_still_needed(run: Tinkex, data: Data) -> None:
    data.operation(1, b"c" * (MAX_INLINE_BYTES + 1))
    (data.folder / "journal" / "ab").mkdir(exist_ok=True)
    (data.folder / "journal" / "ab" / "abandoned.part").write_bytes(b"half")
    assert run("gc", "-o", "json").json["files"] == 1
    assert data.store.command("r1") == b"c" * (MAX_INLINE_BYTES + 1)


# -- backup -----------------------------------------------------------------------------------------------------------


def restored(folder: Path) -> Store:
    return Store.open(f"sqlite:///{folder / 'tinkex.db'}", folder)


def test_a_backup_contains_exactly_what_the_database_references(run: Tinkex, data: Data, tmp_path: Path) -> None:
    kept = data.checkpoint("kept")
    snapshot = data.folder_with("journal/snapshots/s_train_0-1")
    data.store.set_snapshot(data.run.id, snapshot, 0)
    data.operation(1, b"c" * (MAX_INLINE_BYTES + 1))
    data.folder_with("checkpoints/s:train:0/weights/crashed.partial")
    (data.folder / "private.key").write_text("tml-a-private-key\n")
    ran = run("backup", str(tmp_path / "copy"), "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["things"] == 3
    with restored(tmp_path / "copy") as copy:
        assert copy.get_checkpoint(kept.path) == kept
        assert copy.command("r1") == b"c" * (MAX_INLINE_BYTES + 1)
    for name in (kept.folder, snapshot):
        assert (tmp_path / "copy" / name / "adapter_model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / "copy" / "checkpoints/s:train:0/weights/crashed.partial").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_backup_and_what_a_server_writes_beside_it_is_for_its_owner_only(
    run: Tinkex, data: Data, tmp_path: Path
) -> None:
    """Before: 644 and 755 inside of a folder of 700, as the umask of most systems has it."""
    data.checkpoint("kept")
    data.operation(1, b"c" * (MAX_INLINE_BYTES + 1))
    (data.folder / "private.key").write_text("tml-a-private-key\n")
    former = os.umask(0o022)
    try:
        assert run("backup", str(tmp_path / "copy")).code == 0
        with restored(tmp_path / "copy") as copy:
            copy.add_session(SessionRecord(id="new", tenant="local", created_at=data.now, seen_at=data.now))
            paths = [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]
            modes = {path.name: oct(path.stat().st_mode & 0o777) for path in paths}
            expected = {path.name: oct(0o700 if path.is_dir() else 0o600) for path in paths}
    finally:
        os.umask(former)
    assert modes == expected
    assert {"tinkex.db", "tinkex.db-wal", "tinkex.db-shm", "private.key", "adapter_model.safetensors"} <= set(modes)


def after_each_copy_of_the_database(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """Lets the service do something between the copy of the database and that of the files, once each."""
    left, copy_database = list(steps), Store.backup

    def copy(store: Store, target: Path) -> None:
        copy_database(store, target)
        if left:
            left.pop(0)()

    monkeypatch.setattr(Store, "backup", copy)


def test_a_backup_copies_again_what_changes_meanwhile(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (data.folder_with(f"journal/snapshots/s_train_0-{n}", b"%d" % n) for n in (1, 2))
    deleted = data.checkpoint("deleted")
    replaced = data.checkpoint("replaced")
    data.store.set_snapshot(data.run.id, first, 1)

    def a_new_snapshot_replaces_the_old() -> None:
        data.store.set_snapshot(data.run.id, second, 5)
        shutil.rmtree(data.folder / first)

    def a_checkpoint_goes() -> None:
        data.store.delete_checkpoint(deleted.path)
        shutil.rmtree(data.folder / deleted.folder)

    def a_checkpoint_is_saved_again_under_its_name() -> None:
        shutil.rmtree(data.folder / replaced.folder)
        data.folder_with(replaced.folder, b"newer weights")

    steps = (a_new_snapshot_replaces_the_old, a_checkpoint_goes, a_checkpoint_is_saved_again_under_its_name)
    after_each_copy_of_the_database(monkeypatch, *steps)
    back_up(data.store, data.folder, tmp_path / "copy")
    with restored(tmp_path / "copy") as copy:
        assert copy.all_folders() == {second, replaced.folder}
        assert copy.get_checkpoint(deleted.path) is None
    files = {str(file.relative_to(tmp_path / "copy")) for file in (tmp_path / "copy").rglob("*.safetensors")}
    assert files == {f"{name}/adapter_model.safetensors" for name in (second, replaced.folder)}
    assert (tmp_path / "copy" / replaced.folder / "adapter_model.safetensors").read_bytes() == b"newer weights"


def test_an_incomplete_backup_is_discarded(data: Data, tmp_path: Path) -> None:
    saved = data.checkpoint("damaged")
    shutil.rmtree(data.folder / saved.folder)
    with pytest.raises(TinkexError, match="damaged"):
        back_up(data.store, data.folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob("*.partial"))


def test_a_backup_never_overwrites_anything(run: Tinkex, data: Data, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").write_text("precious")
    assert run("backup", str(tmp_path / "copy")).code == 1
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["mine"]


def test_a_disk_error_is_not_mistaken_for_a_deleted_file(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.checkpoint("kept")

    def full(source: Path, target: Path) -> None:
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(shutil.Error, match="No space left"):
        back_up(data.store, data.folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# -- with a bucket ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BucketServer, Bucket]]:
    server = BucketServer()
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    yield server, server.bucket()
    server.stop()


def test_gc_deletes_what_the_bucket_has_and_no_row_names(
    run: Tinkex, data: Data, bucket: tuple[BucketServer, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, objects = bucket
    kept, lost = data.checkpoint("kept"), "checkpoints/s:train:0/weights/lost.1"
    objects.put(f"{kept.folder}/weights", b"w" * 7)
    objects.put(f"{lost}/weights", b"w" * 1000)
    flags = ("gc", "--blobs", objects.url, "-o", "json")
    assert run(*flags).json["removed"] == [], "it may be waiting for its row"
    monkeypatch.setattr("tinkex.cli.service.gc.MIN_BUCKET_AGE_S", -60.0)
    ran = run(*flags)
    assert [(entry["what"], entry["size_bytes"]) for entry in ran.json["removed"]] == [(lost, 1000)]
    assert server.keys(objects) == [f"{kept.folder}/weights"]


def test_a_backup_fetches_what_lies_in_the_bucket(
    run: Tinkex, data: Data, bucket: tuple[BucketServer, Bucket], tmp_path: Path
) -> None:
    _, objects = bucket
    saved = data.checkpoint("saved")
    for file in (data.folder / saved.folder).iterdir():
        objects.put(f"{saved.folder}/{file.name}", file.read_bytes())
    files = {file.name: file.read_bytes() for file in (data.folder / saved.folder).iterdir()}
    shutil.rmtree(data.folder / saved.folder)
    ran = run("backup", str(tmp_path / "copy"), "--blobs", objects.url, "-o", "json")
    assert ran.json["things"] == 1
    assert {file.name: file.read_bytes() for file in (tmp_path / "copy" / saved.folder).iterdir()} == files
