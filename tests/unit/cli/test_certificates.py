"""`tinkex cluster cert`: files that openssl accepts, keys for their owner alone, nothing replaced by mistake."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path

import pytest

from tinkex.cli.main import main


def cert(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["cluster", "cert", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_an_authority_and_certificates_are_made_and_keys_are_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    names = ("--name", "node1.internal,10.0.0.6", "--name", "*.nodes.internal", "--name", "2001:db8::1")
    code, out, err = cert(capsys, str(folder), *names, "-o", "json")
    assert code == 0, err
    made = json.loads(out)
    assert made["is_new"] and [node["names"][0] for node in made["nodes"]] == [
        "node1.internal", "*.nodes.internal", "2001:db8::1",
    ]  # fmt: skip
    files = {file.name: file for file in folder.iterdir()}
    assert files.keys() == {
        "ca.crt", "ca.key", "node1.internal.crt", "node1.internal.key", "any.nodes.internal.crt",
        "any.nodes.internal.key", "2001-db8--1.crt", "2001-db8--1.key",
    }  # fmt: skip
    assert {name for name, file in files.items() if file.stat().st_mode & 0o077} == {
        name for name in files if name.endswith(".crt")
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    for file in folder.glob("*.crt"):
        words = ["openssl", "verify", "-x509_strict", "-CAfile", str(folder / "ca.crt"), str(file)]
        assert subprocess.run(words, capture_output=True).returncode == 0, file
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(files["node1.internal.crt"]), "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "DNS:node1.internal" in shown and "IP Address:10.0.0.6" in shown
    text = out + err
    assert not any(line in text for file in folder.glob("*.key") for line in file.read_text().splitlines())


def test_the_authority_is_used_again_and_renews_its_own_certificates_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert cert(capsys, str(first), "--name", "n1")[0] == cert(capsys, str(second), "--name", "n1")[0] == 0
    authority, node = (first / "ca.crt").read_bytes(), (first / "n1.crt").read_bytes()
    assert cert(capsys, str(first), "--name", "n1", "--days", "10")[0] == 0
    assert (first / "ca.crt").read_bytes() == authority and (first / "n1.crt").read_bytes() != node
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(first / "n1.crt", first / "n1.key")
    foreign = (second / "n1.crt").read_bytes()
    (first / "n1.crt").write_bytes(foreign)
    code, _, err = cert(capsys, str(first), "--name", "n1")
    assert code == 1 and "is not replaced" in err and (first / "n1.crt").read_bytes() == foreign


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--name", "a/b"), "no host name"),
        (("--name", "../../etc/passwd"), "no host name"),
        (("--name", "https://node1:8642"), "no host name"),
        (("--name", "ca"), "no host name"),
        (("--name", ","), "is empty"),
        (("--name", "n", "--name", "n"), "given twice"),
        (("--name", "n", "--days", "0"), "--days"),
    ],
)
def test_wrong_names_and_days_are_rejected_and_nothing_is_written(
    words: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cert(capsys, str(tmp_path / "x"), *words)
    assert code != 0 and reason in err
    assert not (tmp_path / "x").exists()


def test_half_an_authority_is_no_reason_for_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert(capsys, str(tmp_path / "a"))
    cert(capsys, str(tmp_path / "b"))
    key = (tmp_path / "a" / "ca.key").read_bytes()
    (tmp_path / "a" / "ca.key").unlink()
    assert "and not the other" in cert(capsys, str(tmp_path / "a"), "--name", "n")[2]
    (tmp_path / "b" / "ca.key").write_bytes(key)
    code, _, err = cert(capsys, str(tmp_path / "b"), "--name", "n")
    assert code == 1 and "is not the key of" in err
