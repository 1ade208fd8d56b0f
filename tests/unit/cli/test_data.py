"""`tinkex gc` and `tinkex backup` on a data folder with rows and files, while a server uses it and while none does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkex.clock import REAL
from tinkex.errors import TinkexError
from tinkex.store.backup import back_up
from tinkex.store.lock import DataLock
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


def test_gc_removes_what_expired_and_what_nothing_names_and_keeps_the_rest(run: Tinkex, data: Data) -> None:
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


def test_gc_dry_run_says_what_would_go_and_removes_nothing(run: Tinkex, data: Data) -> None:
    gone = data.checkpoint("gone", expires_at=data.now - 1)
    ran = run("gc", "--dry-run")
    assert gone.path in ran.out and "Would delete" in ran.err
    assert data.store.get_checkpoint(gone.path) == gone
    assert (data.folder / gone.folder).is_dir()


def test_gc_beside_a_server_leaves_what_may_be_in_the_making(run: Tinkex, data: Data) -> None:
    data.checkpoint("kept")
    young = data.folder_with("checkpoints/s:train:0/weights/young.partial")
    old = data.folder_with("checkpoints/s:train:0/weights/old.partial")
    data.age(young, 60)
    data.age(old, 2 * HOUR)
    with DataLock(data.folder):
        assert [entry["what"] for entry in run("gc", "-o", "json").json["removed"]] == [old]
    assert (data.folder / young).is_dir()
    assert [entry["what"] for entry in run("gc", "-o", "json").json["removed"]] == [young]


def test_gc_leaves_a_journal_that_is_still_needed_whole(run: Tinkex, data: Data) -> None:
    data.operation(1, b"c" * (MAX_INLINE_BYTES + 1))
    (data.folder / "journal" / "ab").mkdir(exist_ok=True)
    (data.folder / "journal" / "ab" / "abandoned.part").write_bytes(b"half")
    assert run("gc", "-o", "json").json["files"] == 1
    assert data.store.command("r1") == b"c" * (MAX_INLINE_BYTES + 1)


# -- backup -----------------------------------------------------------------------------------------------------------


def restored(folder: Path) -> Store:
    return Store.open(f"sqlite:///{folder / 'tinkex.db'}", folder)


def test_a_backup_holds_what_the_database_names_and_nothing_else(run: Tinkex, data: Data, tmp_path: Path) -> None:
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
    assert (tmp_path / "copy" / "private.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.glob("*.partial"))


def after_each_copy_of_the_database(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """Lets the service do something between the copy of the database and that of the files, once each."""
    left, copy_database = list(steps), Store.backup

    def copy(store: Store, target: Path) -> None:
        copy_database(store, target)
        if left:
            left.pop(0)()

    monkeypatch.setattr(Store, "backup", copy)


def test_what_changes_while_the_backup_runs_is_fetched_again(
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


def test_a_backup_that_cannot_be_whole_is_none(data: Data, tmp_path: Path) -> None:
    saved = data.checkpoint("damaged")
    shutil.rmtree(data.folder / saved.folder)
    with pytest.raises(TinkexError, match="damaged"):
        back_up(data.store, data.folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob("*.partial"))


def test_a_backup_never_writes_over_anything(run: Tinkex, data: Data, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").write_text("precious")
    assert run("backup", str(tmp_path / "copy")).code == 1
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["mine"]


def test_a_disk_that_fails_is_not_taken_for_a_file_that_went(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.checkpoint("kept")

    def full(source: Path, target: Path) -> None:
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(shutil.Error, match="No space left"):
        back_up(data.store, data.folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
