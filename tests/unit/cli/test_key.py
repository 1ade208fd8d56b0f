"""`tinkex key`: made once, shown once, kept as a hash, revoked for good; beside a running server too."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tinkex.store.keys import hash_key
from tinkex.store.store import Store

from .conftest import Tinkex


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_key_is_printed_once_alone_and_only_its_hash_is_kept(run: Tinkex, data_dir: Path) -> None:
    made = run("key", "create", "alice")
    key = made.out.strip()
    assert made.code == 0
    assert key.startswith("tml-") and len(key) > 40 and "\n" not in key
    assert "shown only once" in made.err and "first key" in made.err
    assert key.encode() not in b"".join(file.read_bytes() for file in data_dir.iterdir() if file.is_file())
    with Store.open(f"sqlite:///{data_dir / 'tinkex.db'}", data_dir) as store:
        found = store.get_key_by_hash(hash_key(key))
    assert found is not None
    assert (found.name, found.tenant) == ("alice", "alice")


def test_keys_are_listed_without_telling_them(run: Tinkex) -> None:
    first, second = (
        run("key", "create", *words, "-o", "json").json for words in (["alice"], ["bob", "--tenant", "alice"])
    )
    assert first["key"] != second["key"]
    shown = run("key", "list")
    assert first["id"] in shown.out and second["id"] in shown.out
    assert first["key"] not in shown.out and second["key"] not in shown.out
    listed = run("key", "list", "-o", "json").json["keys"]
    assert [(key["name"], key["tenant"], key["revoked_at"]) for key in listed] == [
        ("alice", "alice", None),
        ("bob", "alice", None),
    ]
    assert all("key" not in key and "sha256" not in key for key in listed)


def test_a_revoked_key_stays_listed_as_revoked(run: Tinkex) -> None:
    made = run("key", "create", "alice", "-o", "json").json
    gone = run("key", "revoke", made["id"])
    assert gone.code == 0 and gone.out.startswith("Revoked k-")
    assert "revoked" in run("key", "list").out
    again = run("key", "revoke", made["id"])
    assert again.code == 1
    assert again.err == f"tinkex: No live key has the id '{made['id']}'. `tinkex key list` shows all keys.\n"


def test_there_may_be_no_keys(run: Tinkex, data_dir: Path) -> None:
    data_dir.mkdir()
    ran = run("key", "list")
    assert ran.code == 0 and ran.out == "" and "every client" in ran.err
    assert run("key", "list", "-o", "json").json == {"keys": []}


def test_a_folder_that_is_none_is_not_made_by_looking(run: Tinkex, data_dir: Path) -> None:
    ran = run("key", "list")
    assert ran.code == 1
    assert "--data-dir" in ran.err
    assert not data_dir.exists()


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "naïve", "a/b"])
def test_a_name_that_cannot_be_is_refused(run: Tinkex, name: str, data_dir: Path) -> None:
    assert run("key", "create", f"--tenant={name}", "alice").code == 2
    assert not data_dir.exists()


def test_keys_can_be_made_while_a_server_holds_the_database(run: Tinkex, data_dir: Path) -> None:
    data_dir.mkdir()
    url = f"sqlite:///{data_dir / 'tinkex.db'}"
    with Store.open(url, data_dir) as server:
        assert not server.has_keys()
        assert run("key", "create", "alice").code == 0
        assert server.has_keys()


def test_a_damaged_database_is_one_sentence(run: Tinkex, data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "tinkex.db").write_bytes(b"not a database at all, " * 100)
    ran = run("key", "list")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1 and "Traceback" not in ran.err
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(data_dir / "tinkex.db").execute("select * from keys")
