"""Large payloads are files: written before a row refers to them, deleted when none does."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.unit.store.conftest import LARGE, Add, Place, operation, run, sampler
from tinkex.errors import ValidationError
from tinkex.store.errors import DiskFull, Duplicate
from tinkex.store.payloads import MAX_INLINE_BYTES, Payloads, StoredPayload
from tinkex.store.store import Store


@contextmanager
def no_file_longer_than(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1, 3_000_000])
@pytest.mark.parametrize("is_synced", [False, True])
def test_bytes_come_back_as_they_were(tmp_path: Path, size: int, is_synced: bool) -> None:
    payloads = Payloads(tmp_path, is_synced=is_synced)
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    kept = payloads.write(content)
    assert (kept.file is None) == (size <= MAX_INLINE_BYTES)
    assert Payloads(tmp_path, is_synced=False).read(kept) == content


def test_a_payload_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, is_synced=False)
    with no_file_longer_than(MAX_INLINE_BYTES), pytest.raises(OSError):
        payloads.write(LARGE)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_sweep_removes_exactly_the_unreferenced_files(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, is_synced=False)
    named, orphan = payloads.write(LARGE), payloads.write(LARGE + b"!")
    assert named.file is not None and orphan.file is not None
    unfinished = tmp_path / "ab" / "abcd.part"
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.write_bytes(b"half")
    assert payloads.sweep({named.file}) == 2
    assert payloads.read(named) == LARGE
    assert not unfinished.exists()


def test_removing_a_payload_twice_is_not_an_error(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, is_synced=False)
    kept = payloads.write(LARGE)
    payloads.remove([kept.file, None])
    payloads.remove([kept.file])
    assert payloads.sweep(set()) == 0
    assert payloads.read(StoredPayload(b"in the row", None)) == b"in the row"


def test_large_commands_and_results_survive_a_restart(place: Place, started: Store, add: Add) -> None:
    added = add(1, LARGE)
    started.finish(added.request_id, at=20.0, result=LARGE[::-1], result_type="proto")
    started.close()
    again = place.open()
    assert again.command(added.request_id) == LARGE
    assert again.result(added.request_id) == LARGE[::-1]
    assert len(place.files()) == 2


def test_a_snapshot_removes_the_files_of_the_commands_inside_it(place: Place, started: Store, add: Add) -> None:
    for seq_id in (1, 2, 3):
        started.finish(add(seq_id, LARGE).request_id, at=20.0, result=b"", result_type="json")
    started.set_snapshot("s:train:0", "snapshots/1", 2)
    assert len(place.files()) == 1
    assert started.command("s:train:0/3") == LARGE


def test_expired_results_take_their_files_with_them(place: Place, started: Store, add: Add) -> None:
    started.finish(add(1, b"small").request_id, at=20.0, result=LARGE, result_type="json")
    assert started.expire_results(before=21.0) == 2
    assert place.files() == []


def test_a_duplicate_leaves_no_file(place: Place, started: Store, add: Add) -> None:
    add(1, LARGE)
    with pytest.raises(Duplicate):
        started.add_operation(replace(operation(1), request_id="other"), LARGE)
    with pytest.raises(Duplicate):
        started.add_run(run(), operation(0, request_id="third"), LARGE)
    assert len(place.files()) == 1


def test_a_finish_that_fails_leaves_no_file(place: Place, started: Store, add: Add) -> None:
    started.add_sampler(sampler())
    with pytest.raises(ValidationError):
        started.finish(add(1).request_id, at=20.0, result=LARGE, result_type="json", sampler=sampler())
    assert place.files() == []


def test_replacing_a_refused_operation_removes_its_file(place: Place, started: Store, add: Add) -> None:
    add(1, LARGE, state="refused")
    add(1, b"small", request_id="second")
    assert place.files() == []
    assert started.command("second") == b"small"


def test_a_sweep_of_the_store_keeps_every_payload_in_use(place: Place, started: Store, add: Add) -> None:
    add(1, LARGE)
    orphan = place.data_dir / "journal" / "ff" / ("f" * 32)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left by a crash")
    assert started.sweep() == 1
    assert started.command("s:train:0/1") == LARGE


def test_a_full_disk_for_a_payload_is_reported_and_rolled_back(place: Place, started: Store, add: Add) -> None:
    with no_file_longer_than(MAX_INLINE_BYTES), pytest.raises(DiskFull, match=r"disk is full.*tinkex gc"):
        add(1, LARGE + LARGE)
    assert started.get_operation("s:train:0/1") is None
    assert place.files() == []
    add(1, LARGE + LARGE)
    assert started.command("s:train:0/1") == LARGE + LARGE


def test_a_full_disk_for_sqlite_is_reported_and_the_store_recovers(sqlite_place: Place) -> None:
    store = sqlite_place.open()
    store.add_run(run(), operation(0), b"create")
    with store._read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(DiskFull):
        store.add_operation(operation(1), b"x" * MAX_INLINE_BYTES)
    assert store.get_operation("s:train:0/1") is None
    with store._read() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 100000")
    store.add_operation(operation(1), b"x" * MAX_INLINE_BYTES)
    assert store.command("s:train:0/1") == b"x" * MAX_INLINE_BYTES


def test_the_store_may_be_opened_used_and_closed_by_different_threads(sqlite_place: Place) -> None:
    store = sqlite_place.open()
    seen: list[str] = []

    def use() -> None:
        store.add_run(run(), operation(0), LARGE)
        seen.extend(store.runs_of_session("s"))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    store.close()
    assert seen == ["s:train:0"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which file a descriptor is")
def test_a_payload_is_on_the_disk_before_its_row_where_power_cuts_are_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path)
        steps.append(path.suffix or str(path))
        fsync(fd)

    def note_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace_file(source, target)

    with Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path, durability="full") as store:
        with store._read() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL: every commit is synced
        store.add_run(run(), operation(0), b"")
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_replace)
        event.listen(store._engine, "before_cursor_execute", lambda *args: steps.append("row"))
        store.add_operation(operation(1), LARGE)
    folder = next((tmp_path / "journal").iterdir()).relative_to(tmp_path)
    assert steps[: steps.index("row")] == [".part", "rename", str(folder), "journal", "."]
