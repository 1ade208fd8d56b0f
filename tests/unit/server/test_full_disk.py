"""A disk with no byte left: what makes room still works, the rest says so, and no file is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.server.conftest import Served
from tests.unit.server.test_imports import ADAPTER, PLACE, Engine
from tinkex.errors import ConfigError
from tinkex.home.lock import FileLock
from tinkex.server.http import links
from tinkex.server.upkeep.adapter_files import INCOMING
from tinkex.store.store import Store

DISK_BYTES = 24 << 20
ARCHIVE = "training_runs/s:train:0/checkpoints/weights/{}/archive"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 24 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    mounted = subprocess.run(words, check=False, capture_output=True, text=True)
    if mounted.returncode:
        assert os.environ.get("CI") != "true", f"CI must be able to mount a small disk: {mounted.stderr}"
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def served(serve: Callable[..., Served], disk: Path) -> Served:
    served = serve(data_dir=disk / "data")
    served.run(served.service.db(served.store.keep_reserve))
    return served


def fill(disk: Path) -> None:
    """Write until not a single byte more fits."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break
    assert os.statvfs(disk).f_bavail == 0


def test_a_checkpoint_can_be_deleted_at_zero_bytes_free(served: Served, disk: Path) -> None:
    run = served.training_run()
    names = [f"{number:04}" for number in range(8)]
    saved = [served.checkpoint(run, name) for name in names]
    for name, row in zip(names, saved, strict=True):
        fill(disk)  # also what the last delete gave back
        answer = served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/{name}")
        assert answer.status == 200, answer
        assert not (served.config.data_dir / row.folder).exists()
        assert served.store.get_checkpoint(row.path) is None
    entries = served.store.list_audit("local", limit=100)
    assert [entry.action for entry in entries] == ["checkpoint.delete"] * len(names)


def test_a_delete_at_zero_bytes_free_survives_a_restart(served: Served, disk: Path) -> None:
    saved = served.checkpoint(run := served.training_run())
    fill(disk)
    assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001").status == 200
    with Store.open(served.config.database_url, served.config.data_dir) as reopened:
        assert reopened.get_checkpoint(saved.path) is None


def test_a_service_can_be_started_at_zero_bytes_free(disk: Path, serve: Callable[..., Served]) -> None:
    data = disk / "data"
    first = serve(data_dir=data)
    saved = first.checkpoint(run := first.training_run())
    first.run(first.service.db(first.store.keep_reserve))
    first.run(first.service.db(first.store.close))  # SQLite deletes its log then; the next start needs room for another
    fill(disk)
    with FileLock(data):
        second = serve(data_dir=data)
        assert second.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001").status == 200
        assert second.store.get_checkpoint(saved.path) is None


def test_the_reserve_is_made_again_when_there_is_room(served: Served, disk: Path) -> None:
    reserve = served.config.data_dir / "tinkex.db-reserve"
    before = reserve.stat()
    assert before.st_mode & 0o077 == 0
    served.checkpoint(run := served.training_run())
    fill(disk)
    assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001").status == 200
    (disk / "filler").unlink()
    served.run(served.service.db(served.store.keep_reserve))
    assert reserve.stat().st_size == before.st_size


def test_an_archive_link_on_a_full_disk_is_503_and_leaves_no_file(served: Served, disk: Path) -> None:
    served.checkpoint(served.training_run())
    fill(disk)
    answer = served.ask("GET", ARCHIVE.format("0001"))
    assert (answer.status, answer.json["code"], answer.json["category"]) == (503, "store_unavailable", "server")
    assert "disk is full" in answer.json["detail"]
    assert not list(served.config.data_dir.glob(f".{links.SECRET_FILE}*"))
    (disk / "filler").unlink()
    assert served.ask("GET", ARCHIVE.format("0001")).status == 302


def test_an_import_on_a_full_disk_is_503_and_leaves_no_file(served: Served, disk: Path) -> None:
    Engine(served)
    fill(disk)
    answer = served.ask("POST", PLACE, ADAPTER)
    assert (answer.status, answer.json["code"]) == (503, "store_unavailable")
    _nothing_is_left(served)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (24 << 10))  # room for a part of it
    answer = served.ask("POST", PLACE, ADAPTER)
    assert (answer.status, answer.json["code"]) == (503, "store_unavailable")
    _nothing_is_left(served)
    (disk / "filler").unlink()
    assert served.ask("POST", PLACE, ADAPTER).status == 200


def test_a_copy_on_a_full_disk_is_503_and_leaves_no_file(served: Served, disk: Path) -> None:
    saved = served.checkpoint(served.training_run())
    folders = {path for path in (served.config.data_dir / "checkpoints").rglob("*") if path.is_dir()}
    fill(disk)
    answer = served.ask("POST", "copy_weights", {"source_path": saved.path})
    assert (answer.status, answer.json["code"]) == (503, "store_unavailable")
    left = {path for path in (served.config.data_dir / "checkpoints").rglob("*") if path.is_dir()}
    assert left == folders


def _nothing_is_left(served: Served) -> None:
    assert not list((served.config.data_dir / INCOMING).glob("*"))
    assert not list(served.config.data_dir.glob("checkpoints/**/*"))


def test_a_server_starts_on_a_full_disk(disk: Path) -> None:
    """Before: it ended with "The service's disk is full" when it took its lease (seed 957 of the fault harness)."""
    with Store.open(store_url(disk), disk) as store:
        store.keep_reserve()
        for address in ("first", "second"):
            fill(disk)
            with store.lease(address, disk) as lease:
                assert not lease.is_lost
                with (
                    Store.open(store_url(disk), disk) as other,
                    pytest.raises(ConfigError, match=address),
                    other.lease("other", disk),
                ):
                    pass


def store_url(disk: Path) -> str:
    return f"sqlite:///{disk / 'tinkex.db'}"
