"""Downloads: progress, resuming, checksums, archives that lie, and the ways services hand checkpoints out."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import tinkex
from tinkex import settings
from tinkex.client._files.archive import unpack
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.client.download import Progress, download, download_checkpoint
from tinkex.errors import APIConnectionError, APIError, NotFoundError, PermissionDeniedError, TinkexError
from tinkex.testing import Answer, Drop, FakeClock, Hang, ScriptedService, Status

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService(file_bytes=200_000) as running:
        yield running


@pytest.fixture
def link(service: ScriptedService) -> ServiceLink:
    return make_link(service)


def make_link(service: ScriptedService, **changes: Any) -> ServiceLink:
    return ServiceLink(settings.resolve(base_url=service.url, api_key="tml-test", **changes), FakeClock(auto=True))


def fetch(link: ServiceLink, url: str, target: Path, **options: Any) -> Path:
    operation = Operation("download", link.clock.now())
    return link.run(operation, lambda: download(link, url, target, **options)).result(20)


def save(service: ScriptedService, kind: str = "save_state") -> str:
    """A checkpoint on the service; its path."""
    with tinkex.ServiceClient(base_url=service.url, api_key="tml-test", telemetry=False) as client:
        training = client.create_lora_training_client("tinkex/tiny", rank=8)
        path: str = getattr(training, kind)("first").result().path
    return path


def url_of(service: ScriptedService, path: str, file: str = WEIGHTS) -> str:
    return f"{service.url}/files/{path.removeprefix('tinker://')}/{file}?signature=very-secret"


def content_of(service: ScriptedService, path: str, file: str = WEIGHTS) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url_of(service, path, file)) as answer:
        content: bytes = answer.read()
    service.requests.clear()
    return content


# -- one file ---------------------------------------------------------------------------------------------------------


def test_progress_grows_to_the_whole_file(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    path = save(service)
    steps: list[Progress] = []
    target = fetch(link, url_of(service, path), tmp_path / "deep" / "file", progress=steps.append)
    assert target.read_bytes() == content_of(service, path)
    done = [step.done_bytes for step in steps]
    assert done == sorted(done)
    assert steps[-1] == Progress("file", target.stat().st_size, target.stat().st_size)
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_a_broken_connection_is_resumed_where_it_broke(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    steps: list[Progress] = []
    target = fetch(link, url_of(service, path), tmp_path / "file", progress=steps.append)
    assert target.read_bytes() == content
    first, second = service.requests_to("file")
    assert "range" not in first.headers
    assert second.headers["range"] == f"bytes={len(content) // 2}-"
    assert second.headers["if-range"] == f'"{hashlib.sha256(content).hexdigest()}"'
    assert [step.done_bytes for step in steps] == sorted(step.done_bytes for step in steps)


def test_a_later_call_goes_on_with_what_an_earlier_one_left(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service)
    content = content_of(service, path)
    hasty = make_link(service, max_retries=1)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    with pytest.raises(APIConnectionError):
        fetch(hasty, url_of(service, path), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert fetch(hasty, url_of(service, path), tmp_path / "file").read_bytes() == content
    assert service.requests_to("file")[1].status == 206


def test_a_line_that_breaks_again_and_again_gets_there_as_long_as_it_moves(
    service: ScriptedService, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", times=6, do=Drop("mid_answer"))
    assert fetch(make_link(service, max_retries=2), url_of(service, path), tmp_path / "file").read_bytes() == content


def test_a_changed_file_starts_over(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service)
    hasty = make_link(service, max_retries=1)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    with pytest.raises(APIConnectionError):
        fetch(hasty, url_of(service, path), tmp_path / "file")
    service.checkpoints[path].size_bytes = 300_000
    assert fetch(hasty, url_of(service, path), tmp_path / "file").read_bytes() == content_of(service, path)


def test_a_changed_file_starts_over_even_if_the_service_overlooks_if_range(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    span = f"bytes {len(content) // 2}-{len(content) // 2 + 2}/{len(content)}"
    headers = {"content-range": span, "etag": '"another"'}
    service.script.on("file", nth=2, do=Answer(b"zzz", status=206, headers=headers))
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content
    assert "range" not in service.requests_to("file")[2].headers


def test_a_service_that_sends_another_span_than_asked_for_is_not_believed(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    headers = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "content-range": f"bytes 0-2/{len(content)}"}
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    service.script.on("file", nth=2, do=Answer(content[:3], status=206, headers=headers))
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content


def test_a_service_that_sends_less_than_asked_for_is_asked_for_the_rest(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    half = len(content) // 2
    span = f"bytes {half}-{half + 9}/{len(content)}"
    headers = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "content-range": span}
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    service.script.on("file", nth=2, do=Answer(content[half : half + 10], status=206, headers=headers))
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content
    assert service.requests_to("file")[2].headers["range"] == f"bytes={half + 10}-"


def test_a_file_that_became_shorter_starts_over(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    service.script.on("file", nth=2, do=Answer(b"", status=416, headers={"content-range": "bytes */10"}))
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content


def test_a_whole_part_is_not_fetched_again(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    path = save(service)
    content = content_of(service, path)
    # What a process leaves that is killed between the last byte and the renaming.
    (tmp_path / "file.part").write_bytes(content)
    (tmp_path / "file.part.tag").write_text(f'"{hashlib.sha256(content).hexdigest()}"')
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content
    assert [request.status for request in service.requests_to("file")] == [416]


def test_a_part_of_unknown_origin_is_not_gone_on_with(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    (tmp_path / "file.part").write_bytes(b"who knows")
    assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content_of(service, path)


def test_a_wrong_checksum_deletes_the_file_and_says_so(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    service.script.on("file", do=Answer(b"bent", headers={"x-checksum-sha256": "0" * 64, "etag": '"e"'}))
    with pytest.raises(TinkexError, match=r"file arrived damaged: .* announced 000000000000…\. .* deleted"):
        fetch(link, url_of(service, "tinker://r/weights/n"), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_the_callers_own_checksum_is_checked_too(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    service.script.on("file", do=Answer(b"right"))
    url = url_of(service, "tinker://r/weights/n")
    good = hashlib.sha256(b"right").hexdigest().upper()
    assert fetch(link, url, tmp_path / "file", sha256=good).read_bytes() == b"right"
    with pytest.raises(TinkexError, match="damaged"):
        fetch(link, url, tmp_path / "other", sha256="1" * 64)


def test_a_digest_header_counts_as_a_checksum(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    wrong = "sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:"
    service.script.on("file", do=Answer(b"bent", headers={"repr-digest": wrong}))
    with pytest.raises(TinkexError, match="damaged"):
        fetch(link, url_of(service, "tinker://r/weights/n"), tmp_path / "file")


def test_redirects_are_followed_and_no_key_is_sent(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", nth=1, do=Answer(b"moved", status=302, headers={"location": url_of(service, path)}))
    elsewhere = url_of(service, "tinker://r/weights/n").replace("127.0.0.1", "localhost")
    assert fetch(link, elsewhere, tmp_path / "file").read_bytes() == content
    assert all("x-api-key" not in request.headers for request in service.requests_to("file"))


def test_redirects_without_end_are_refused(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    url = url_of(service, "tinker://r/weights/n")
    service.script.on("file", do=Answer(b"", status=302, headers={"location": url}))
    with pytest.raises(TinkexError, match="redirects"):
        fetch(link, url, tmp_path / "file")


def test_a_file_longer_than_announced_does_not_fill_the_disk(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    headers = {"content-range": "bytes 0-9/10"}
    service.script.on("file", do=Answer(b"x" * 5000, "application/octet-stream", status=206, headers=headers))
    with pytest.raises(APIError, match="more than the 10 bytes of this file"):
        fetch(link, url_of(service, save(service)), tmp_path / "file")
    assert (tmp_path / "file.part").stat().st_size <= 10


def test_a_file_of_unknown_size_is_bounded_too(
    service: ScriptedService, link: ServiceLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client._files.fetch.UNANNOUNCED_BYTES", 1000)
    headers = {"content-range": "bytes 0-9/*"}
    service.script.on("file", do=Answer(b"x" * 5000, "application/octet-stream", status=206, headers=headers))
    with pytest.raises(APIError, match="more than the 1,000 bytes"):
        fetch(link, url_of(service, save(service)), tmp_path / "file")


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 19])
def test_a_range_with_absurd_numbers_is_an_error_of_ours(service: ScriptedService, tmp_path: Path, digits: str) -> None:
    headers = {"content-range": f"bytes {digits}-{digits}/{digits}"}
    service.script.on("file", do=Answer(b"x", "application/octet-stream", status=416, headers=headers))
    with pytest.raises(TinkexError):
        fetch(make_link(service, max_retries=1), url_of(service, save(service)), tmp_path / "file")


def test_a_redirect_to_what_is_no_address_is_an_error_of_ours(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    service.script.on("file", do=Answer(b"", status=302, headers={"location": "http://[half"}))
    with pytest.raises(APIError, match="no address"):
        fetch(link, url_of(service, save(service)), tmp_path / "file")


def test_no_error_holds_the_signed_address(service: ScriptedService, tmp_path: Path) -> None:
    link = make_link(service, max_retries=1)
    url = url_of(service, "tinker://r/weights/n")
    service.script.on("file", nth=1, do=Status(403))
    with pytest.raises(PermissionDeniedError) as refused:
        fetch(link, url, tmp_path / "file")
    service.script.on("file", do=Drop())
    with pytest.raises(APIConnectionError) as dropped:
        fetch(link, url, tmp_path / "file")
    service.kill()
    with pytest.raises(APIConnectionError) as dead:
        fetch(link, url, tmp_path / "file")
    for problem in (refused, dropped, dead):
        assert "very-secret" not in f"{problem.value!r} {problem.value} {vars(problem.value)}"
        assert "file" in str(problem.value)


class Elsewhere:
    """A transport with one answer to everything: a redirect, or the words of the HTTP library."""

    def __init__(self, location: str = "", problem: str = "") -> None:
        self.status, self.headers, self.problem = 302, {"location": location}, problem

    async def open(self, *request: object) -> Elsewhere:
        if self.problem:
            raise APIConnectionError(None, self.problem)
        return self

    def close(self) -> None: ...


def test_an_address_in_the_http_librarys_words_is_taken_out(service: ScriptedService, tmp_path: Path) -> None:
    link = make_link(service, max_retries=1)
    said = "Connection error: error sending request for url (https://bucket.invalid/w?sig=very-secret)"
    link.transport = Elsewhere(problem=said)  # type: ignore[assignment]
    with pytest.raises(APIConnectionError) as failed:
        fetch(link, "https://bucket.invalid/w?sig=very-secret", tmp_path / "file")
    assert str(failed.value) == "file: Connection error: error sending request for url (<address>)"


def test_a_redirect_that_gives_up_encryption_is_refused(link: ServiceLink, tmp_path: Path) -> None:
    link.transport = Elsewhere(location="http://plain.invalid/w")  # type: ignore[assignment]
    with pytest.raises(TinkexError, match="without encryption"):
        fetch(link, "https://bucket.invalid/w", tmp_path / "file")


def test_a_place_that_cannot_be_written_is_named(service: ScriptedService, link: ServiceLink, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(TinkexError, match="taken"):
        fetch(link, url_of(service, "tinker://r/weights/n"), tmp_path / "taken" / "file")


def test_a_download_gives_up_after_its_attempts_at_a_429(service: ScriptedService, tmp_path: Path) -> None:
    link = make_link(service, max_retries=3)
    path = save(service)
    service.requests.clear()
    service.script.on("file", do=Status(429, "slow down", headers={"retry-after": "1"}))
    with pytest.raises(tinkex.RateLimitError):
        fetch(link, url_of(service, path), tmp_path / "file")
    assert [request.status for request in service.requests_to("file")] == [429] * 3


def test_a_download_is_counted_and_its_retries_are_announced(
    service: ScriptedService, link: ServiceLink, tmp_path: Path
) -> None:
    path = save(service)
    content = content_of(service, path)
    service.script.on("file", nth=1, do=Status(503, "busy"))
    events: list[Any] = []
    stops = [tinkex.on(name, events.append) for name in ("request", "retry")]
    try:
        assert fetch(link, url_of(service, path), tmp_path / "file").read_bytes() == content
    finally:
        for stop in stops:
            stop()
    first, retry, second = events
    assert (first.endpoint, first.status, first.attempt) == ("download", 503, 1)
    assert (retry.endpoint, retry.attempt) == ("download", 1)
    assert "very-secret" not in retry.reason
    assert (second.endpoint, second.status, second.attempt, second.received_bytes) == ("download", 200, 2, len(content))
    counted = link.stats.snapshot()
    assert (counted["requests"], counted["retries"]) == (2, 1)
    assert counted["received_bytes"] == first.received_bytes + len(content)


# -- archives ---------------------------------------------------------------------------------------------------------


def make_tar(path: Path, *members: tarfile.TarInfo, mode: Literal["w", "w:gz", "w:bz2", "w:xz"] = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for member in members:
            member.size = 4 if member.isfile() else 0
            tar.addfile(member, io.BytesIO(b"data") if member.isfile() else None)
    return path


def tar_link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_an_archive_is_unpacked_plain_or_compressed(tmp_path: Path) -> None:
    folder = tarfile.TarInfo("sub")
    folder.type = tarfile.DIRTYPE
    for mode in ("w", "w:gz"):
        made = make_tar(tmp_path / "a.tar", folder, tarfile.TarInfo("./sub/a"), tarfile.TarInfo("b"), mode=mode)
        out = tmp_path / mode.replace(":", "")
        assert unpack(made, out) == [out / "sub" / "a", out / "b"]
        assert (out / "sub" / "a").read_bytes() == b"data"


@pytest.mark.parametrize(
    "bad",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("a/../../outside"),
        tarfile.TarInfo("/outside"),
        tarfile.TarInfo("..\\outside"),
        tarfile.TarInfo("C:\\outside"),
        tar_link("inside", "/etc/passwd", tarfile.SYMTYPE),
        tar_link("inside", "../outside", tarfile.LNKTYPE),
        tar_link("inside", "", tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name}-{member.type.decode()}",
)
def test_an_archive_that_reaches_outside_its_folder_is_refused_whole(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    made = make_tar(tmp_path / "a.tar", tarfile.TarInfo("good"), bad)
    with pytest.raises(TinkexError):
        unpack(made, tmp_path / "out")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["a.tar"]


@pytest.mark.parametrize(
    "content", [b"not a tar at all" * 100, b"", gzip.compress(b"x" * 5000)[:20]], ids=["text", "empty", "cut short"]
)
def test_a_damaged_archive_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(TinkexError, match="download again"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_an_archive_that_expands_without_end_is_rejected(tmp_path: Path) -> None:
    """Half a megabyte of gzip that becomes 512 MB."""
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 512 << 20
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(TinkexError, match="larger than"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def tar_header(size: bytes, kind: bytes = b"0", name: bytes = b"x") -> bytes:
    raw = bytearray(512)
    raw[: len(name)], raw[124:136], raw[156:157], raw[148:156] = name, size, kind, b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


NO_SIZE = b"00000000000\0"


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tar_header(NO_SIZE) + tar_header(b"\xff" * 10 + b"\xfe\0"), "not a number"),
        (tar_header(b"\x80" + b"\xff" * 11), "not a number"),
        (tar_header(NO_SIZE, b"L") * 20_000, "more than 10000 members"),
        (tar_header(NO_SIZE, b"x") * 20_000, "more than 10000 members"),
        (tar_header(b"77777777777\0", b"x"), "bytes"),
        (tar_header(b"00000000001\0", b"x") + b"9".ljust(512, b"\0"), "pax header"),
    ],
    ids=["goes back for ever", "larger than any disk", "long names", "pax headers", "8 GB of header", "damaged pax"],
)
def test_an_archive_that_would_be_read_for_ever_is_rejected_with_words(
    tmp_path: Path, content: bytes, reason: str, is_gzip: bool
) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(gzip.compress(content, 1) if is_gzip else content)
    with pytest.raises(TinkexError, match=rf"cannot be unpacked: .*{reason}.* download again"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a" * 300, "file/below", "sub"])
def test_an_archive_whose_names_the_disk_rejects_is_an_error_of_ours(tmp_path: Path, name: str) -> None:
    made = make_tar(tmp_path / "a.tar", tarfile.TarInfo("file"), tarfile.TarInfo("sub/x"), tarfile.TarInfo(name))
    with pytest.raises(TinkexError, match="cannot be unpacked"):
        unpack(made, tmp_path / "out")


def test_an_archive_that_does_not_fit_the_disk_is_rejected_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tar(tmp_path / "a.tar", tarfile.TarInfo("b"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 3})())
    with pytest.raises(TinkexError, match=r"4 bytes, and the disk has 3 free"):
        unpack(made, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_an_archive_cut_short_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    made = make_tar(tmp_path / "a.tar", tarfile.TarInfo("b"))
    made.write_bytes(made.read_bytes()[:514])
    with pytest.raises(TinkexError, match="download again"):
        unpack(made, tmp_path / "out")
    assert not (tmp_path / "out" / "b").exists()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def rest(service: ScriptedService) -> tinkex.RestClient:
    return tinkex.RestClient(base_url=service.url, api_key="tml-test")


@pytest.mark.parametrize("dialect", ["json", "proto"])
@pytest.mark.parametrize("kind", ["save_state", "save_weights_for_sampler"])
def test_a_checkpoint_comes_as_an_archive_where_the_service_has_them(dialect: Any, kind: str, tmp_path: Path) -> None:
    with ScriptedService(dialect=dialect, file_bytes=50_000) as service:
        path = save(service, kind)
        sessions = len(service.sessions)
        files = download_checkpoint(rest(service), path, tmp_path / "here").result(20)
        assert sorted(file.name for file in files) == [CONFIG, WEIGHTS]
        assert (tmp_path / "here" / WEIGHTS).read_bytes() == content_of(service, path)
        assert sorted(tmp_path.rglob("*.*")) == sorted(files)
        assert len(service.sessions) == sessions


def test_the_archive_is_kept_when_asked_for(service: ScriptedService, tmp_path: Path) -> None:
    files = download_checkpoint(rest(service), save(service), tmp_path, keep_archive=True).result(20)
    assert [file.suffix for file in files] == [".json", ".safetensors", ".tar"]
    assert all(file.exists() for file in files)


def test_a_checkpoint_is_exported_where_there_are_no_archives_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with ScriptedService(missing=("checkpoint_archive",), file_bytes=50_000) as service:
        path = save(service)
        files = download_checkpoint(rest(service), path, tmp_path).result(20)
        assert [file.name for file in files] == [CONFIG, WEIGHTS]
        assert [file.stat().st_size > 50_000 for file in files] == [False, True]
        assert list(service.checkpoints) == [path]
        assert len(service.requests_to("delete_checkpoint")) == 1
        assert all(session.finished for session in service.sessions.values())


def test_external_weights_are_fetched_without_a_session(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service, "save_weights_external")
    sessions = len(service.sessions)
    files = download_checkpoint(rest(service), path, tmp_path).result(20)
    assert files == [tmp_path / CONFIG, tmp_path / WEIGHTS]
    assert files[1].read_bytes() == content_of(service, path)
    assert len(service.sessions) == sessions


@pytest.mark.parametrize("missing", [(), ("checkpoint_archive",)])
def test_an_unknown_checkpoint_is_said_to_be_unknown_and_opens_no_session(missing: Any, tmp_path: Path) -> None:
    with ScriptedService(missing=missing) as service:
        with pytest.raises(NotFoundError):
            download_checkpoint(rest(service), "tinker://nobody/weights/nothing", tmp_path).result(20)
        assert not service.sessions


def test_sampler_weights_that_cannot_be_exported_say_what_can(tmp_path: Path) -> None:
    with ScriptedService(missing=("checkpoint_archive",)) as service:
        path = save(service, "save_weights_for_sampler")
        with pytest.raises(TinkexError, match=r"only weights/ paths"):
            download_checkpoint(rest(service), path, tmp_path).result(20)


def test_an_address_that_runs_out_on_the_way_is_asked_for_anew(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service)
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    service.script.on("file", nth=2, do=Status(403, "Request has expired"))
    files = download_checkpoint(rest(service), path, tmp_path).result(20)
    assert len(files) == 2
    assert len(service.requests_to("checkpoint_archive")) == 2
    assert service.requests_to("file")[2].status == 206


def test_an_address_that_is_refused_for_good_is_an_error(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service)
    service.script.on("file", do=Status(403))
    with pytest.raises(PermissionDeniedError):
        download_checkpoint(rest(service), path, tmp_path).result(20)
    assert len(service.requests_to("file")) == 2


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "evil\0"])
def test_a_file_name_that_reaches_outside_the_folder_is_refused(
    service: ScriptedService, tmp_path: Path, name: str
) -> None:
    answer = {"urls": {name: f"{service.url}/files/r/weights/n/x"}, "expires": "2030-01-01T00:00:00Z"}
    service.script.on("external_weights_urls", do=Answer(answer))
    with pytest.raises(TinkexError, match="Rejected"):
        download_checkpoint(rest(service), "tinker://r/external_weights/n", tmp_path / "in").result(20)
    assert list(tmp_path.iterdir()) == []
    assert not service.requests_to("file")


def test_cancelling_a_download_deletes_the_temporary_export(tmp_path: Path) -> None:
    with ScriptedService(missing=("checkpoint_archive",)) as service:
        path = save(service)
        service.script.on("file", do=Hang())
        future = download_checkpoint(rest(service), path, tmp_path)
        service.wait_for_requests("file")
        assert future.cancel()
        service.wait_for_requests("delete_checkpoint")
        service.wait_for_requests("finish_session", 2)
        assert list(service.checkpoints) == [path]


def test_a_download_that_is_waited_for_tells_how_far_it_is(service: ScriptedService, tmp_path: Path) -> None:
    path = save(service)
    service.script.on("file", nth=2, do=Hang())
    service.script.on("file", nth=1, do=Drop("mid_answer"))
    future = download_checkpoint(rest(service), path, tmp_path)
    service.wait_for_requests("file", 2)
    line = future._operation.waiting_line(future._operation.created_at + 95)
    assert line.startswith("waiting 95 s for download_checkpoint: ")
    assert " of " in line and "bytes" in line
    future.cancel()


def test_progress_that_raises_ends_the_download(service: ScriptedService, tmp_path: Path) -> None:
    def refuse(step: Progress) -> None:
        raise KeyError("enough")

    watcher: Callable[[Progress], object] = refuse
    with pytest.raises(KeyError, match="enough"):
        download_checkpoint(rest(service), save(service), tmp_path, watcher).result(20)
