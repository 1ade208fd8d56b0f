"""Files in a bucket: complete before a row names them, compared with their checksums, and read from elsewhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.store.bucket_server import ACCESS, BucketServer
from tests.unit.store.conftest import LARGE, checkpoint, operation, run
from tinkex.clock import REAL
from tinkex.errors import ConfigError, MissingExtra, TinkexError
from tinkex.store.backup import back_up
from tinkex.store.blobs.bucket import PIECE_BYTES, Bucket
from tinkex.store.blobs.bucket_folders import CACHE, FILE_LIST, BucketFolders
from tinkex.store.blobs.folder_cache import FolderCache
from tinkex.store.errors import BucketAway, DamagedBlob, Duplicate
from tinkex.store.store import Store

FOLDER = "checkpoints/s:train:0/weights/step+1=a@b,c~d.0123abcd"
"""Every character that a name may have."""


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    server = BucketServer()
    yield server
    server.stop()


@pytest.fixture
def bucket(server: BucketServer) -> Bucket:
    return server.bucket(wait_s=1.0)


def written(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def kept(folders: BucketFolders, name: str = FOLDER, **files: bytes) -> str:
    """Keep a folder as a save does: written to its path first."""
    written(folders.path(name), **files)
    folders.keep(name)
    return name


# ── objects


def test_objects_come_back_whole_and_in_ranges_under_any_name(bucket: Bucket, server: BucketServer) -> None:
    bucket.put(f"{FOLDER}/a", b"0123456789")
    bucket.put("other/b", b"")
    assert bucket.get(f"{FOLDER}/a") == b"0123456789"
    assert bucket.get_range(f"{FOLDER}/a", 3, 4) == b"3456"
    assert server.keys(bucket) == [f"{FOLDER}/a", "other/b"]
    assert [(row.key, row.size) for row in bucket.list("checkpoints")] == [(f"{FOLDER}/a", 10)]
    bucket.copy("other/b", "other/c")
    bucket.delete([f"{FOLDER}/a", "other/b", "never/there"])
    assert server.keys(bucket) == ["other/c"]
    with pytest.raises(FileNotFoundError):
        bucket.get("other/b")


def test_a_large_file_travels_in_pieces_and_is_compared_with_its_checksum(bucket: Bucket, tmp_path: Path) -> None:
    content = os.urandom(2 * PIECE_BYTES + 17)
    (tmp_path / "sent").write_bytes(content)
    bucket.put("large", tmp_path / "sent")
    bucket.fetch("large", tmp_path / "fetched", len(content), hashlib.sha256(content).hexdigest())
    assert (tmp_path / "fetched").read_bytes() == content


@pytest.mark.parametrize("damage", [b"0123456X89", b"01234", b"0123456789more"])
def test_an_object_that_is_not_what_was_written_is_no_file(
    bucket: Bucket, server: BucketServer, tmp_path: Path, damage: bytes
) -> None:
    bucket.put("object", b"0123456789")
    server.overwrite(bucket, "object", damage)
    digest = hashlib.sha256(b"0123456789").hexdigest()
    with pytest.raises(DamagedBlob, match="not what was written"):
        bucket.fetch("object", tmp_path / "fetched", 10, digest)
    assert not (tmp_path / "fetched").exists()
    with pytest.raises(DamagedBlob):
        bucket.get("object", digest)


def test_a_bucket_that_comes_back_in_time_is_only_a_delay(
    server: BucketServer, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = server.bucket(wait_s=20.0)
    bucket.put("before", b"x")
    server.stop()
    back = threading.Timer(1.0, server.start)
    back.start()
    bucket.put("meanwhile", b"y")
    back.join()
    assert (bucket.get("before"), bucket.get("meanwhile")) == (b"x", b"y")
    assert "does not respond" in caplog.text and ACCESS["secret_access_key"] not in caplog.text


def test_a_bucket_that_stays_away_is_reported_in_time_and_without_secrets(
    server: BucketServer, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    began = REAL.now()
    try:
        with pytest.raises(BucketAway, match="does not respond") as raised:
            bucket.get("anything")
    finally:
        server.start()
    assert REAL.now() - began < 5.0
    assert ACCESS["secret_access_key"] not in f"{raised.value}{caplog.text}"


def test_a_bucket_that_does_not_exist_is_reported_at_the_start(server: BucketServer) -> None:
    with pytest.raises(ConfigError, match="There is no bucket s3://no-such-bucket/x"):
        server.bucket("s3://no-such-bucket/x", wait_s=0.1).check()
    bucket = server.bucket()
    bucket.check()
    assert server.keys(bucket) == []


def test_a_service_starts_while_its_bucket_is_away(
    server: BucketServer, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    try:
        bucket.check()
    finally:
        server.start()
    assert "saves and large calls wait for it" in caplog.text


def test_rejected_credentials_are_reported_at_once(tmp_path: Path) -> None:
    """S3 would log a stranger's attempts; and nothing gets better by waiting."""

    class Denying(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Denying) as denying:
        threading.Thread(target=denying.serve_forever).start()
        access = {**ACCESS, "endpoint": f"http://127.0.0.1:{denying.server_port}"}
        began = REAL.now()
        try:
            with pytest.raises(ConfigError, match="rejects the credentials") as raised:
                Bucket("s3://tinkex-test/x", access, wait_s=60.0).check()
        finally:
            denying.shutdown()
    assert REAL.now() - began < 10.0
    assert ACCESS["secret_access_key"] not in str(raised.value)


# ── folders


def test_a_folder_is_read_by_a_server_with_another_data_folder(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (BucketFolders(tmp_path / name, bucket, 10**6) for name in "ab")
    name = kept(first, weights=b"w" * 1000, config=b"{}")
    with second.hold(name) as path:
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {"weights": b"w" * 1000, "config": b"{}"}
        assert path.is_relative_to(tmp_path / "b")
    assert second.remove(name) is True
    with pytest.raises(FileNotFoundError):
        BucketFolders(tmp_path / "c", bucket, 10**6).hold(name)


def test_the_list_of_a_folder_is_written_last(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds it finds all files."""
    put, order = Bucket.put, []

    def noted(bucket: Bucket, key: str, content: bytes | Path) -> None:
        order.append(key)
        put(bucket, key, content)

    monkeypatch.setattr(Bucket, "put", noted)
    kept(BucketFolders(tmp_path, bucket, 0), zzz=b"1", aaa=b"2")
    assert order == [f"{FOLDER}/aaa", f"{FOLDER}/zzz", f"{FOLDER}/{FILE_LIST}"]


def test_two_servers_never_choose_one_name(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (BucketFolders(tmp_path / name, bucket, 0).new("r", "weights", "n") for name in "ab")
    assert first != second


@pytest.mark.parametrize("name", ["weights", FILE_LIST])
def test_a_damaged_folder_is_never_read(bucket: Bucket, server: BucketServer, tmp_path: Path, name: str) -> None:
    first, second = (BucketFolders(tmp_path / part, bucket, 10**6) for part in "ab")
    folder = kept(first, weights=b"w" * 1000)
    server.overwrite(bucket, f"{folder}/{name}", b"w" * 999 + b"X")
    with pytest.raises(DamagedBlob):
        second.hold(folder)
    assert not [file for file in (tmp_path / "b").rglob("*") if file.is_file()]


def test_what_the_data_folder_had_before_the_bucket_is_still_read(bucket: Bucket, tmp_path: Path) -> None:
    old = written(tmp_path / "checkpoints/r/weights/old", weights=b"old")
    folders = BucketFolders(tmp_path, bucket, 10**6)
    with folders.hold("checkpoints/r/weights/old") as path:
        assert path == old
    about = {"size_bytes": 3, "sha256": hashlib.sha256(b"old").hexdigest()}
    folders.copy("checkpoints/r/weights/old", "checkpoints/r2/weights/copy.1", {"weights": about})
    with folders.hold("checkpoints/r2/weights/copy.1") as path:
        assert (path / "weights").read_bytes() == b"old"
    assert folders.remove("checkpoints/r/weights/old") and not old.exists()


def test_a_row_that_names_a_folder_elsewhere_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    written(tmp_path / "elsewhere", weights=b"of others")
    folders = BucketFolders(tmp_path / "data", bucket, 10**6)
    for call in (folders.hold, folders.path):
        with pytest.raises(TinkexError, match="outside the data folder"):
            call("../elsewhere")
    assert folders.remove("../elsewhere") is False
    assert (tmp_path / "elsewhere/weights").exists()


def test_a_folder_that_was_copied_into_the_bucket_by_hand_is_read(bucket: Bucket, tmp_path: Path) -> None:
    """`aws s3 sync` of a data folder is all that a move needs: the keys are the same."""
    bucket.put("checkpoints/r/weights/old/weights", b"old")
    with BucketFolders(tmp_path, bucket, 10**6).hold("checkpoints/r/weights/old") as path:
        assert [file.name for file in path.iterdir()] == ["weights"]


# ── the cache


def fill(size: int) -> Callable[[Path], None]:
    def fetch(path: Path) -> None:
        (path / "file").write_bytes(b"x" * size)

    return fetch


def test_the_cache_keeps_its_limit_and_the_least_recently_used_leaves(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, 250)
    for key in ("a", "b"):
        cache.hold(key, fill(100)).release()
    cache.hold("a", fill(0)).release()
    cache.hold("c", fill(100)).release()
    assert [cache.path(key).exists() for key in "abc"] == [True, False, True]
    assert cache.nbytes == 200


def test_a_folder_in_use_does_not_leave_the_cache(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, 150)
    held = cache.hold("a", fill(100))
    cache.hold("b", fill(100)).release()
    cache.drop("a")
    assert held.path.is_dir() and not cache.path("b").exists()
    held.release()
    held.release()
    assert held.path.is_dir(), "it fits"
    cache.drop("a")
    assert not held.path.exists()


def test_two_that_want_one_folder_fetch_it_once(tmp_path: Path) -> None:
    cache, fetches, may_go_on = FolderCache(tmp_path, 10**6), [], threading.Event()

    def fetch(path: Path) -> None:
        fetches.append(path)
        may_go_on.wait(10)
        (path / "file").write_bytes(b"x")

    threads = [threading.Thread(target=lambda: cache.hold("a", fetch).release()) for _ in range(4)]
    for thread in threads:
        thread.start()
    may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(fetches) == 1


def test_a_fetch_that_fails_is_made_again_by_the_next(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, 10**6)

    def fail(path: Path) -> None:
        (path / "half").write_bytes(b"x")
        raise BucketAway("away")

    with pytest.raises(BucketAway):
        cache.hold("a", fail)
    with cache.hold("a", fill(3)) as path:
        assert [file.name for file in path.iterdir()] == ["file"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


# ── rows and what they name


def opened(tmp_path: Path, bucket: Bucket, name: str) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path / name, bucket=bucket, cache_bytes=10**6)


def test_large_payloads_are_read_by_a_store_with_another_data_folder(bucket: Bucket, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as first:
        first.add_run(run(), operation(0), b"create")
        first.add_operation(operation(1), first.put_payload(LARGE))
        first.finish("s:train:0/1", at=2.0, result=LARGE[::-1], result_type="proto")
        assert [size for _, _, size, _ in first.result_files()] == [len(LARGE)]
    assert not [file for file in (tmp_path / "a").rglob("*") if file.is_file()]
    with opened(tmp_path, bucket, "b") as second:
        assert second.command("s:train:0/1") == LARGE
        assert second.result("s:train:0/1") == LARGE[::-1]


def test_the_size_of_a_result_is_known_without_the_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polls are counted before they read (`routes.futures`)."""
    with opened(tmp_path, bucket, "a") as store:
        store.add_run(run(), operation(0), b"create")
        store.add_operation(operation(1), b"pass")
        store.finish("s:train:0/1", at=2.0, result=LARGE, result_type="proto")
        monkeypatch.delattr(Bucket, "get")
        assert store.result_size("s:train:0/1") == len(LARGE)


def test_payloads_from_before_the_bucket_are_still_read_and_deleted(bucket: Bucket, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path) as before:
        before.add_run(run(), operation(0), b"create")
        before.add_operation(operation(1), LARGE)
    with Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path, bucket=bucket) as store:
        assert store.command("s:train:0/1") == LARGE
        store.finish("s:train:0/1", at=2.0, result=b"", result_type="proto")
        store.set_snapshot("s:train:0", "journal/snapshots/x", 1)
    assert not [file for file in (tmp_path / "journal").rglob("*") if file.is_file()]


def test_payloads_without_a_row_are_deleted(bucket: Bucket, server: BucketServer, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as store:
        store.add_run(run(), operation(0), b"create")
        store.add_operation(operation(1), LARGE)
        with pytest.raises(Duplicate):
            store.add_operation(operation(1), store.put_payload(LARGE + b"!"))
        store.finish("s:train:0/1", at=2.0, result=LARGE, result_type="proto")
        store.set_snapshot("s:train:0", "journal/snapshots/x", 1)
        store.expire_results(3.0)
    assert server.keys(bucket) == [], "closing waits for the deletes"


def test_a_damaged_payload_is_reported(bucket: Bucket, server: BucketServer, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as store:
        store.add_run(run(), operation(0), LARGE)
        [key] = server.keys(bucket)
        server.overwrite(bucket, key, LARGE[:-1] + b"X")
        with pytest.raises(DamagedBlob):
            store.command("s:train:0/0")


def test_only_old_objects_that_no_row_names_are_orphans(bucket: Bucket, server: BucketServer, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as store:
        folders = store.folders
        assert isinstance(folders, BucketFolders)
        store.add_run(run(), operation(0), LARGE)
        store.add_checkpoint(checkpoint("named", folder=kept(folders, weights=b"w")))
        kept(folders, "checkpoints/s:train:0/weights/lost.1", weights=b"w")
        kept(folders, "journal/snapshots/lost", state=b"s")
        store.put_payload(LARGE)
        before, referenced = server.keys(bucket), store.referenced()
        assert store.remove_orphans(referenced, REAL.wall() - 3600) == ({}, 0), "they may be waiting for their rows"
        dry = store.remove_orphans(referenced, REAL.wall() + 60, is_dry_run=True)
        assert (sorted(dry.folders), dry.files) == (
            ["checkpoints/s:train:0/weights/lost.1", "journal/snapshots/lost"],
            1,
        )
        assert server.keys(bucket) == before
        store.remove_orphans(referenced, REAL.wall() + 60)
        left = server.keys(bucket)
        assert len(left) == 3 and sum(key.startswith(f"{FOLDER}/") for key in left) == 2
        assert store.command("s:train:0/0") == LARGE


def test_servers_of_one_database_share_a_secret(bucket: Bucket, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as first, opened(tmp_path, bucket, "b") as second:
        assert first.shared_secret("links", "one") == second.shared_secret("links", "two") == "one"


def test_a_command_beside_a_server_leaves_its_cache_alone(bucket: Bucket, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as server_store, opened(tmp_path, bucket, "a") as command:
        assert isinstance(server_store.folders, BucketFolders)
        name = kept(server_store.folders, weights=b"w")
        command.folders.remove("checkpoints/other")
        command.remove_orphans(command.referenced(), 0.0)
        assert (server_store.folders.path(name) / "weights").exists()
        assert server_store.folders.path(name).is_relative_to(tmp_path / "a" / CACHE)


def test_without_a_bucket_its_library_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tinkex.store.store import Store; import tinkex.server.main;"
        f"Store.open('sqlite:///{tmp_path}/tinkex.db', pathlib.Path('{tmp_path}')).close();"
        "print([name for name in sys.modules if name.partition('.')[0] in ('obstore', 'boto3', 'botocore')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_backup_is_whole_without_the_bucket(bucket: Bucket, server: BucketServer, tmp_path: Path) -> None:
    with opened(tmp_path, bucket, "a") as store:
        folders = store.folders
        assert isinstance(folders, BucketFolders)
        store.add_run(run(), operation(0), LARGE)
        store.add_checkpoint(checkpoint("named", folder=kept(folders, weights=b"w" * 1000)))
        old = written(tmp_path / "a/checkpoints/s:train:0/weights/old", weights=b"old")
        store.add_checkpoint(checkpoint("old", folder=str(old.relative_to(tmp_path / "a"))))
        copy = back_up(store, tmp_path / "a", tmp_path / "copy")
    assert copy.things == 3
    bucket.delete(server.keys(bucket))
    with Store.open(f"sqlite:///{tmp_path / 'copy' / 'tinkex.db'}", tmp_path / "copy") as restored:
        assert restored.command("s:train:0/0") == LARGE
        with restored.folders.hold(FOLDER) as path:
            assert {file.name: file.read_bytes() for file in path.iterdir()} == {"weights": b"w" * 1000}


def test_a_backup_of_a_bucket_that_lost_an_object_is_an_error(
    bucket: Bucket, server: BucketServer, tmp_path: Path
) -> None:
    with opened(tmp_path, bucket, "a") as store:
        store.add_run(run(), operation(0), LARGE)
        bucket.delete(server.keys(bucket))
        with pytest.raises(TinkexError, match="1 files missing"):
            back_up(store, tmp_path / "a", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtra, match=r"tinkex\[s3\]"):
        Bucket("s3://training/x")
