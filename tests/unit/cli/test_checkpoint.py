"""`tinkex checkpoint`."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.terminal.emulator import TerminalFile
from tinkex.cli.commands import checkpoint
from tinkex.testing import Answer, Drop, Hang, ScriptedService, Status

from .conftest import KEY, Saved, Tinkex, save, start


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def checkpoints(count: int, **fields: Any) -> dict[str, Any]:
    """What a service answers that has so many checkpoints."""
    made = [
        {
            "checkpoint_id": f"weights/{number}",
            "checkpoint_type": "training",
            "time": "2026-01-01T00:00:00Z",
            "tinker_path": f"tinker://r/weights/{number}",
            **fields,
        }
        for number in range(count)
    ]
    return {"checkpoints": made, "cursor": {"offset": 0, "limit": 1000, "total_count": count}}


def test_list_shows_size_type_age_expiry_and_public(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    service.checkpoints[saved.sampler].is_public = True
    title, state, sampler = run("checkpoint", "list").out.splitlines()
    assert title.split() == ["PATH", "TYPE", "SIZE", "AGE", "EXPIRES", "PUBLIC"]
    assert state.split()[:4] == [saved.state, "training", "4.1", "kB"]
    assert state.endswith("ago  in 2 d   no")
    assert sampler.endswith("ago  never    yes")


def test_a_checkpoint_of_unknown_size_is_listed_with_a_dash(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("list_user_checkpoints", do=Answer(checkpoints(1, size_bytes=None)))
    ran = run("checkpoint", "list")
    assert ran.code == 0
    assert ran.out.splitlines()[1].split()[:3] == ["tinker://r/weights/0", "training", "–"]


def test_times_without_a_zone_are_listed(run: Tinkex, service: ScriptedService) -> None:
    naive = {"time": "2026-01-01T00:00:00", "expires_at": "2026-01-02T00:00:00"}
    service.script.on("list_user_checkpoints", do=Answer(checkpoints(1, **naive)))
    ran = run("checkpoint", "list")
    assert (ran.code, ran.err) == (0, "")
    assert "expired" in ran.out


def test_list_can_be_limited_to_a_run(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    other = save(service)
    listed = run("checkpoint", "list", "--run-id", other.run_id, "-o", "json").json["checkpoints"]
    assert [found["tinker_path"] for found in listed] == [other.state, other.sampler]
    assert len(run("checkpoint", "list", "-o", "json").json["checkpoints"]) == 4


def test_list_can_be_limited_to_what_expires_soon(run: Tinkex, saved: Saved) -> None:
    def listed(within: str) -> list[str]:
        ran = run("checkpoint", "list", "--expires-within", within, "-o", "json")
        return [found["tinker_path"] for found in ran.json["checkpoints"]]

    assert listed("2d") == [saved.state]
    assert listed("172800") == [saved.state]
    assert listed("47h") == []


def test_a_limit_applies_and_the_rest_is_mentioned(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    ran = run("checkpoint", "list", "--limit", "1")
    assert len(ran.out.splitlines()) == 2
    assert ran.err == "Only the first 1 of 2 checkpoints are listed; --limit 0 lists all.\n"
    as_json = run("checkpoint", "list", "--limit", "1", "-o", "json")
    assert as_json.err == ran.err and as_json.json["total"] == 2, "programs were not told that the list was cut"
    service.requests.clear()
    run("checkpoint", "list", "--limit", "1")
    assert len(service.requests_to("list_user_checkpoints")) == 1
    assert run("checkpoint", "list", "--limit", "2").err == ""


def test_limit_0_reads_all_pages(
    run: Tinkex, service: ScriptedService, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(service)
    monkeypatch.setattr(checkpoint, "PAGE", 3)
    assert len(run("checkpoint", "list", "--limit", "0", "-o", "json").json["checkpoints"]) == 4
    asked = [request.query["offset"] for request in service.requests_to("list_user_checkpoints")]
    assert asked == ["0", "3"]


def test_info_shows_a_checkpoint_and_its_model(run: Tinkex, saved: Saved) -> None:
    shown = run("checkpoint", "info", saved.state).out
    for text in (saved.state, "4.1 kB", "in 2 d", "tinkex/tiny", "LoRA rank"):
        assert text in shown
    found = run("checkpoint", "info", saved.state, "-o", "json").json
    assert (found["tinker_path"], found["lora_rank"]) == (saved.state, 8)


def test_info_works_without_weights_info_and_without_a_size(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("list_checkpoints", do=Answer(checkpoints(1)))
    service.script.on("weights_info", do=Status(404))
    shown = run("checkpoint", "info", "tinker://r/weights/0")
    assert shown.code == 0
    assert "size     –" in shown.out


def test_info_of_an_unknown_checkpoint_says_how_to_list_them(run: Tinkex, saved: Saved) -> None:
    ran = run("checkpoint", "info", saved.state.replace("0001", "0002"))
    assert ran.code == 1
    assert f"tinkex checkpoint list --run-id {saved.run_id}" in ran.err


def test_a_bad_path_is_rejected_before_anything_is_sent(run: Tinkex, service: ScriptedService) -> None:
    for words in (["info"], ["publish"], ["delete", "-y"], ["download"]):
        ran = run("checkpoint", *words, "tinker://only-a-run")
        assert ran.code == 1
        assert "tinker://<run>/<kind>/<name>" in ran.err
    assert service.requests == []


def test_publish_and_unpublish(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    assert run("checkpoint", "publish", saved.state).out == f"{saved.state} is public now.\n"
    assert service.checkpoints[saved.state].is_public
    assert run("checkpoint", "unpublish", saved.state, "-o", "json").json == {"path": saved.state, "public": False}
    assert not service.checkpoints[saved.state].is_public


def test_set_ttl_takes_a_time_or_keep(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    assert run("checkpoint", "set-ttl", saved.sampler, "2d").out == f"{saved.sampler} expires in 2 d.\n"
    assert run("checkpoint", "set-ttl", saved.state, "keep", "-f", "json").json["ttl_seconds"] is None
    sent = [request.json for request in service.requests_to("set_checkpoint_ttl")]
    assert sent == [{"ttl_seconds": 172800}, {"ttl_seconds": None}]
    assert service.checkpoints[saved.state].expires_at is None
    assert run("checkpoint", "set-ttl", saved.state, "0").code == 1
    assert run("checkpoint", "set-ttl", saved.state, "forever").code == 2


def test_delete_takes_many_paths(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    assert run("checkpoint", "delete", "-y", saved.state, saved.sampler).out == "Deleted 2 of 2 checkpoints.\n"
    assert not service.checkpoints


def test_delete_takes_a_run(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    other = save(service)
    ran = run("checkpoint", "delete", "--run-id", saved.run_id, "--yes", "-o", "json")
    assert ran.json == {"deleted": [saved.state, saved.sampler], "failed": []}
    assert list(service.checkpoints) == [other.state, other.sampler]


def test_delete_continues_after_a_failure_and_names_it(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    gone = "tinker://nobody/weights/nothing"
    ran = run("checkpoint", "delete", "-y", gone, saved.state)
    assert ran.code == 1
    assert ran.out == "Deleted 1 of 2 checkpoints.\n"
    assert gone in ran.err
    assert list(service.checkpoints) == [saved.sampler]


@pytest.mark.parametrize("words", [[], ["tinker://r/weights/1", "--run-id", "r"]])
def test_delete_needs_paths_or_a_run(run: Tinkex, service: ScriptedService, words: list[str]) -> None:
    assert run("checkpoint", "delete", "-y", *words).code == 1
    assert service.requests == []


def test_delete_without_a_terminal_needs_a_flag(
    run: Tinkex, service: ScriptedService, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ran = run("checkpoint", "delete", saved.state)
    assert ran.code == 1
    assert "-y" in ran.err
    assert len(service.checkpoints) == 2


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("yes\n", 1), ("n\n", 2), ("\n", 2), ("", 2)])
def test_delete_asks_and_accepts_only_yes(
    run: Tinkex,
    service: ScriptedService,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    left: int,
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed(answer))
    ran = run("checkpoint", "delete", saved.state)
    assert "Delete this checkpoint? [y/N]" in ran.err
    assert saved.state in ran.err
    assert len(service.checkpoints) == left
    assert ran.code == left - 1


# -- download ---------------------------------------------------------------------------------------------------------


def test_download_creates_a_folder_and_prints_the_files(run: Tinkex, saved: Saved, tmp_path: Path) -> None:
    ran = run("checkpoint", "download", saved.state, "-d", str(tmp_path))
    assert ran.code == 0
    folder = tmp_path / f"{saved.run_id.replace(':', '_')}_weights_0001"
    assert sorted(folder.iterdir()) == [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    assert ran.out.splitlines() == [str(file) for file in sorted(folder.iterdir())]
    assert ".tar: " in ran.err


def test_download_as_json_and_with_the_archive(run: Tinkex, saved: Saved, tmp_path: Path) -> None:
    ran = run("checkpoint", "download", saved.sampler, "--dir", str(tmp_path), "--keep-archive", "-o", "json")
    files = ran.json["files"]
    assert {Path(file).suffix for file in files} == {".json", ".safetensors", ".tar"}
    assert all(Path(file).stat().st_size == size for file, size in files.items())


def test_download_draws_a_bar_on_a_terminal(
    run: Tinkex, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = TerminalFile()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert run("checkpoint", "download", saved.state, "-d", str(tmp_path)).code == 0
    assert stderr.getvalue().endswith("\rweights_0001.tar: 10.2 kB\x1b[K\n\x1b[J")


def test_ctrl_c_in_a_download_says_how_to_continue_and_deletes_the_export(
    saved: Saved, service: ScriptedService, tmp_path: Path
) -> None:
    service.script.on("checkpoint_archive", do=Status(404))
    service.script.on("file", do=Hang())
    service.script.on("delete_checkpoint", nth=1, do=Drop())  # so that it takes longer than a last breath
    running = start("checkpoint", "download", saved.state, "-d", str(tmp_path))
    service.wait_for_requests("file")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=10)
    assert running.returncode == 130
    assert out == ""
    assert "again to continue where this one stopped" in err and err.endswith("tinkex: stopped.\n")
    assert "Traceback" not in err and "Task" not in err
    assert len(service.requests_to("delete_checkpoint")) == 2
    assert sorted(service.checkpoints) == sorted([saved.state, saved.sampler])


def test_a_failed_download_is_one_sentence(run: Tinkex, service: ScriptedService, saved: Saved, tmp_path: Path) -> None:
    service.script.on("file", do=Answer(b"bent", headers={"x-checksum-sha256": "0" * 64}))
    ran = run("checkpoint", "download", saved.state, "-d", str(tmp_path))
    assert ran.code == 1
    assert "arrived damaged" in ran.err.splitlines()[-1]
    assert not list(tmp_path.rglob("*.part"))


def test_an_old_service_can_be_read_and_downloaded_from(
    run: Tinkex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ScriptedService(dialect="json", api_key=KEY) as old:
        monkeypatch.setenv("TINKER_BASE_URL", old.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        saved = save(old)
        assert saved.state in run("checkpoint", "list").out
        assert run("checkpoint", "download", saved.state, "-d", str(tmp_path)).code == 0
        files = json.loads(run("checkpoint", "download", saved.state, "-d", str(tmp_path), "-o", "json").out)["files"]
        assert len(files) == 2
        assert not old.sessions
