"""`tinkex key`: made once, shown once, kept as a hash, revoked for good; beside a running server too."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tinkex.store.access import hash_key
from tinkex.store.store import Store

from .conftest import Tinkex


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def empty_database(folder: Path) -> None:
    folder.mkdir()
    Store.open(f"sqlite:///{folder / 'tinkex.db'}", folder).close()


def test_a_key_is_printed_once_and_only_its_hash_is_stored(run: Tinkex, data_dir: Path) -> None:
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


def test_keys_are_listed_without_their_secrets(run: Tinkex) -> None:
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
    assert again.err == f"tinkex: The key {made['id']} (alice) was revoked before.\n"


def test_an_unknown_id_is_told_from_a_revoked_one_with_what_an_id_looks_like(run: Tinkex) -> None:
    run("key", "create", "alice")
    unknown = run("key", "revoke", "alice")
    assert unknown.code == 1
    assert unknown.err.startswith("tinkex: No key has the id 'alice'. Ids look like k-")
    assert "live" in run("key", "list").out


def test_a_second_key_of_a_name_is_made_and_said_to_be_the_second(run: Tinkex) -> None:
    first = run("key", "create", "alice", "-o", "json").json
    second = run("key", "create", "alice")
    assert second.code == 0 and second.out.startswith("tml-")
    assert f"The name alice has another live key already ({first['id']})" in second.err
    assert "first key" not in second.err
    other = run("key", "create", "bob")
    assert "another live key" not in other.err
    run("key", "revoke", first["id"])
    third = run("key", "create", "alice")
    assert first["id"] not in third.err, "it is not live"


def test_an_empty_list_of_keys_says_what_that_means(run: Tinkex, data_dir: Path) -> None:
    empty_database(data_dir)
    ran = run("key", "list")
    assert ran.code == 0 and ran.out == "" and "every client" in ran.err
    assert "Unless the service was started with --api-key or --keys-file" in ran.err
    assert run("key", "list", "-o", "json").json == {"keys": []}


def test_keys_of_the_configuration_are_counted_and_nobody_is_said_to_get_in_without_one(
    run: Tinkex, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "every client on this machine is accepted", though the service asked all of them for a key."""
    empty_database(data_dir)
    (tmp_path / "keys.txt").write_text("tml-a-key-of-a-file-1\n# a comment\ntml-a-key-of-a-file-2\n")
    monkeypatch.setenv("TINKEX_KEYS_FILE", str(tmp_path / "keys.txt"))
    ran = run("key", "list")
    assert ran.code == 0 and ran.out == ""
    assert "2 from the configuration" in ran.err and "every client" not in ran.err
    assert "a-key-of-a-file" not in ran.err
    assert "first key" not in run("key", "create", "alice").err
    listed = run("key", "list")
    assert "alice" in listed.out and "2 from the configuration" in listed.err


def test_listing_keys_creates_no_folder(run: Tinkex, data_dir: Path) -> None:
    ran = run("key", "list")
    assert ran.code == 1
    assert "--data-dir" in ran.err
    assert not data_dir.exists()


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "naïve", "a/b"])
def test_an_invalid_name_is_rejected(run: Tinkex, name: str, data_dir: Path) -> None:
    assert run("key", "create", f"--tenant={name}", "alice").code == 2
    assert not data_dir.exists()


def test_keys_can_be_created_while_a_server_uses_the_database(run: Tinkex, data_dir: Path) -> None:
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
