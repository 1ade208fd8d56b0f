"""Downloads: links, archives, ranges, checksums; and tokenizer files."""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import generate_latest

import tinkex
from tests.unit.server.conftest import CONFIG, WEIGHTS, Answer, Served
from tinkex.client.download import download_checkpoint
from tinkex.server.http import links
from tinkex.server.http.downloads import parse_range


@pytest.fixture
def rest(served: Served) -> tinkex.RestClient:
    return tinkex.RestClient(base_url=served.base_url, api_key="tml-anything")


@pytest.fixture
def archive(served: Served) -> str:
    """The path of an archive's address."""
    run = served.training_run()
    served.checkpoint(run)
    answer = served.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive")
    assert answer.status == 302
    assert parsedate_to_datetime(answer.headers["expires"]).timestamp() == served.clock.wall() + links.LINK_LIFE_S
    assert answer.headers["location"].startswith(served.base_url)
    return urlsplit(answer.headers["location"]).path


def members(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def test_a_row_that_names_a_folder_elsewhere_gives_nothing_away(served: Served) -> None:
    run = served.training_run()
    elsewhere = served.config.data_dir.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "adapter_config.json").write_bytes(CONFIG)
    saved = served.checkpoint(run)
    files = {"adapter_config.json": saved.files["adapter_config.json"]}
    moved = replace(saved, folder="../elsewhere", files=files)
    served.run(served.service.db(served.store.add_checkpoint, moved))
    link = served.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive").headers["location"]
    assert served.ask("GET", urlsplit(link).path).status == 500


def test_an_archive_is_a_tar_of_all_files_with_its_checksum(served: Served, archive: str) -> None:
    answer = served.ask("GET", archive)
    assert members(answer.content) == {"adapter_model.safetensors": WEIGHTS, "adapter_config.json": CONFIG}
    assert answer.headers["x-checksum-sha256"] == hashlib.sha256(answer.content).hexdigest()
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_the_ranges_of_an_archive_make_the_whole(served: Served, archive: str) -> None:
    whole = served.ask("GET", archive).content
    pieces, first = [], 0
    while first < len(whole):
        answer = served.ask("GET", archive, headers={"range": f"bytes={first}-{first + 699}"})
        assert answer.status == 206
        assert answer.headers["content-range"] == f"bytes {first}-{min(first + 699, len(whole) - 1)}/{len(whole)}"
        pieces.append(answer.content)
        first += 700
    assert b"".join(pieces) == whole


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        (None, None),
        ("bytes=0-", (0, 99)),
        ("bytes=10-19", (10, 19)),
        ("bytes=10-500", (10, 99)),
        ("bytes=-5", (95, 99)),
        ("bytes=-500", (0, 99)),
        ("bytes=-", None),
        ("bytes=5-2", None),
        ("bytes=0-1,3-4", None),
        ("lines=1-2", None),
    ],
)
def test_ranges_are_parsed_as_rfc_9110_says(asked: str | None, span: tuple[int, int] | None) -> None:
    assert parse_range(asked, None, '"t"', 100) == span


def test_a_range_beyond_the_end_is_416_and_one_of_another_version_gives_everything(
    served: Served, archive: str
) -> None:
    whole = served.ask("GET", archive)
    beyond = served.ask("GET", archive, headers={"range": f"bytes={len(whole.content)}-"})
    assert (beyond.status, beyond.headers["content-range"]) == (416, f"bytes */{len(whole.content)}")
    changed = served.ask("GET", archive, headers={"range": "bytes=5-", "if-range": '"another"'})
    assert (changed.status, changed.content) == (200, whole.content)
    same = served.ask("GET", archive, headers={"range": "bytes=5-", "if-range": whole.headers["etag"]})
    assert (same.status, same.content) == (206, whole.content[5:])


def test_head_tells_the_size_and_sends_nothing(served: Served, archive: str) -> None:
    answer = served.ask("HEAD", archive)
    assert (answer.status, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(served.ask("GET", archive).content)


def test_downloads_are_counted_by_name_and_not_by_link(served: Served, archive: str) -> None:
    assert served.ask("GET", archive).status == 200
    page = generate_latest(served.service.metrics.registry).decode()
    assert 'tinkex_requests_total{endpoint="download_file",status="200"} 1.0' in page
    assert archive.split("/")[-2] not in page


def test_a_link_expires_and_cannot_be_altered(served: Served, archive: str) -> None:
    *_, token, name = archive.split("/")
    text, signature = token.split(".")

    def get(token: str) -> Answer:
        return served.ask("GET", f"files/{token}/{name}")

    flipped = ("B" if signature[0] == "A" else "A") + signature[1:]
    for bad in (f"{text}.{flipped}", f"{text}x.{signature}", text, "x.y", "..", "%00.%00", f"{text}.{signature}.a"):
        assert get(bad).status == 403, bad
    assert get(token).status == 200
    served.clock.advance(links.LINK_LIFE_S)
    assert (get(token).status, get(token).json["code"]) == (403, "expired_link")


def test_a_link_serves_the_files_of_its_checkpoint_only(served: Served, archive: str) -> None:
    base = archive.rpartition("/")[0]
    assert served.ask("GET", f"{base}/adapter_config.json").content == CONFIG
    for name in ("..%2f0001%2fadapter_config.json", "%2e%2e", "tinkex.db", "adapter_config.json%00"):
        assert served.ask("GET", f"{base}/{name}").status == 404, name


def test_a_link_to_a_checkpoint_that_was_deleted_is_404(served: Served, archive: str) -> None:
    assert served.ask("DELETE", "training_runs/s:train:0/checkpoints/weights/0001").status == 200
    assert served.ask("GET", archive).status == 404


@pytest.mark.parametrize("content", [b"short", CONFIG.replace(b"8", b"9")], ids=["shorter", "one bit"])
def test_a_checkpoint_whose_files_are_damaged_is_not_sent(served: Served, archive: str, content: bytes) -> None:
    file = served.config.data_dir / "checkpoints/s:train:0/weights/0001/adapter_config.json"
    assert served.ask("GET", archive).status == 200
    file.write_bytes(content)
    for url in (archive, archive.replace("archive.tar", "adapter_config.json")):
        answer = served.ask("GET", url)
        assert (answer.status, answer.json["code"], answer.json["category"]) == (500, "damaged_checkpoint", "server")
        assert (
            "adapter_config.json of tinker://s:train:0/weights/0001 was damaged on the service's disk"
            in (answer.json["detail"])
        )
        assert answer.headers["x-should-retry"] == "false"


def test_links_need_no_key_and_survive_a_restart(serve: Callable[..., Served], tmp_path: Path) -> None:
    key = "tml-0123456789abcdef"
    first = serve(api_keys=(key,), data_dir=tmp_path / "shared")
    run = first.training_run(tenant=first.run(first.service.access.tenant(key)))
    first.checkpoint(run)
    answer = first.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive", key=key)
    assert first.ask("GET", f"training_runs/{run.id}/checkpoints/weights/0001/archive").status == 401
    place = urlsplit(answer.headers["location"]).path
    assert first.ask("GET", place).status == 200
    links._secret.cache_clear()
    second = serve(api_keys=(key,), data_dir=tmp_path / "shared")
    assert second.ask("GET", place).status == 200
    assert (tmp_path / "shared" / links.SECRET_FILE).stat().st_mode & 0o077 == 0
    stranger = serve(api_keys=(key,))
    assert stranger.ask("GET", place).status == 403


def test_a_link_to_a_published_checkpoint_ends_when_it_is_unpublished(serve: Callable[..., Served]) -> None:
    alice, bob = "tml-alice-0123456789", "tml-bob-0123456789ab"
    served = serve(api_keys=(alice, bob))
    run = served.training_run(tenant=served.run(served.service.access.tenant(alice)))
    served.checkpoint(run, is_public=True)
    place = f"training_runs/{run.id}/checkpoints/weights/0001"
    own, other = (
        urlsplit(served.ask("GET", f"{place}/archive", key=key).headers["location"]).path for key in (alice, bob)
    )
    assert (served.ask("GET", own).status, served.ask("GET", other).status) == (200, 200)
    assert served.ask("DELETE", f"{place}/publish", key=alice).status == 200
    assert (served.ask("GET", own).status, served.ask("GET", other).status) == (200, 404)


@pytest.mark.parametrize("damage", [b"", b"ab" * 31, b"ab" * 33, b"no hex" * 11, b"\xff" * 64], ids=repr)
def test_a_link_signed_with_a_damaged_secret_is_rejected(served: Served, archive: str, damage: bytes) -> None:
    """An empty secret was accepted, and anybody could sign with it."""
    secret = served.config.data_dir / links.SECRET_FILE
    secret.write_bytes(damage)
    links._secret.cache_clear()
    token = archive.split("/")[-2]
    text = token.partition(".")[0]
    known = b"" if damage != b"ab" * 31 else bytes.fromhex("ab" * 31)
    signature = hmac.new(known, links._decode(text), hashlib.sha256).digest()
    assert served.ask("GET", f"files/{text}.{links._encode(signature)}/archive.tar").status == 403
    assert len(bytes.fromhex(secret.read_text())) == links.SECRET_BYTES
    assert secret.stat().st_mode & 0o077 == 0
    answer = served.ask("GET", "training_runs/s:train:0/checkpoints/weights/0001/archive")
    assert served.ask("GET", urlsplit(answer.headers["location"]).path).status == 200
    assert not list(served.config.data_dir.glob(".link-secret*"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which file a descriptor is")
@pytest.mark.parametrize("damage", [None, b""], ids=["new", "replaced"])
def test_a_link_secret_is_on_the_disk_before_it_has_its_name_and_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    """After a power cut, the name must not be that of an empty file."""
    secret = tmp_path / links.SECRET_FILE
    if damage is not None:
        secret.write_bytes(damage)
    steps: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def note_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        steps.append("folder" if path == tmp_path else f"content of {path.stat().st_size} bytes")
        fsync(fd)

    def note_name(give_name: Callable[[Path, Path], None], part: Path, target: Path) -> None:
        steps.append("name")
        assert target == secret
        give_name(part, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", partial(note_name, link))
    monkeypatch.setattr(os, "replace", partial(note_name, replace))
    links.prepare_secret(tmp_path)
    assert steps == [f"content of {2 * links.SECRET_BYTES} bytes", "name", "folder"]


def test_links_lead_to_the_public_address(serve: Callable[..., Served]) -> None:
    served = serve(public_url="https://tinkex.example.org/prefix")
    served.checkpoint(run := served.training_run(), "e", "external_weights")
    found = served.ask("GET", f"training_runs/{run.id}/checkpoints/external_weights/e/external_weights_urls").json
    assert set(found["urls"]) == {"adapter_model.safetensors", "adapter_config.json"}
    assert all(url.startswith("https://tinkex.example.org/prefix/api/v1/files/") for url in found["urls"].values())


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_our_client_downloads_a_checkpoint_of_each_kind(
    served: Served, rest: tinkex.RestClient, tmp_path: Path, kind: str
) -> None:
    saved = served.checkpoint(served.training_run(), "x", kind)  # type: ignore[arg-type]
    files = download_checkpoint(rest, saved.path, tmp_path / "here").result()
    assert {file.name: file.read_bytes() for file in files} == {
        "adapter_model.safetensors": WEIGHTS,
        "adapter_config.json": CONFIG,
    }


def test_only_tokenizer_files_of_served_models_can_be_read(served: Served) -> None:
    assert served.ask("GET", "tokenizers/tinkex/tiny/tokenizer.json").content == b'{"version": "1.0"}'
    assert served.ask("GET", "tokenizers/tiny/tokenizer.json").status == 200
    for path in (
        "tokenizers/tinkex/tiny/model.safetensors",
        "tokenizers/tinkex/tiny/chat_template.jinja",
        "tokenizers/another/model/tokenizer.json",
        "tokenizers/tinkex/tiny/..%2f..%2ftinkex.db",
        "tokenizers/../data0/tinkex.db",
        "tokenizers/%2fetc/passwd",
    ):
        assert served.ask("GET", path).status == 404, path
