"""Downloads: links, archives, ranges, checksums; and tokenizer files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from email.utils import parsedate_to_datetime
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


def test_a_checkpoint_whose_files_are_damaged_is_not_sent(served: Served, archive: str) -> None:
    (served.config.data_dir / "checkpoints/s:train:0/weights/0001/adapter_config.json").write_bytes(b"short")
    assert served.ask("GET", archive).status == 404


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
