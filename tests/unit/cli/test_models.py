"""`tinkex models`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.unit.engine import fake_hub
from tinkex.engine.models import hub, tiny
from tinkex.testing import Answer, ScriptedService

from .conftest import Tinkex

OFFERED = (
    '{"supported_models": [{"model_name": "org/big", "max_context_length": 32768, "trainable": true, '
    '"sampleable": false, "source": "hub"}, {"model_name": "big", "alias_of": "org/big"}, {"model_name": "old"}]}'
)


@pytest.fixture(autouse=True)
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub's cache of its own, and a hub that does not answer."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    hub_at(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_unreachable", {})
    return folder


def hub_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(hub, "endpoint", lambda: address)


def tiny_files(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    tiny.write(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_list_shows_the_models_of_the_service(run: Tinkex, service: ScriptedService) -> None:
    title, row = run("models", "list").out.splitlines()
    assert title.split("  ")[0] == "MODEL"
    assert row.split()[0] == "tinkex/tiny" and "train, sample" in row
    (found,) = run("models", "list", "-o", "json").json["models"]
    assert found["model_name"] == "tinkex/tiny"


def test_an_alias_is_listed_with_its_model_and_unknown_values_are_dashes(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("get_server_capabilities", do=Answer(OFFERED))
    _, big, old = run("models", "list").out.splitlines()
    assert big.split() == ["org/big", "big", "32,768", "train", "hub"]
    assert old.split() == ["old", "–", "–", "train,", "sample", "–"]


def test_a_response_without_models_is_one_sentence(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("get_server_capabilities", do=Answer("{}"))
    ran = run("models", "list")
    assert (ran.code, ran.err) == (1, "tinkex: The service did not list its models.\n")


def test_local_models_are_listed_without_a_service(run: Tinkex, hub_cache: Path, tmp_path: Path) -> None:
    snapshot = hub_cache / "models--org--model" / "snapshots" / fake_hub.COMMIT
    snapshot.mkdir(parents=True)
    for name, content in tiny_files(tmp_path / "files").items():
        (snapshot / name).write_bytes(content)
    half = hub_cache / "models--org--half" / "snapshots" / fake_hub.COMMIT
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    ran = run("models", "list", "--local")
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert ran.code == 0 and set(rows) == {"tinkex/tiny", "smollm2-135m", "org/model"}, "a half one cannot be served"
    assert rows["tinkex/tiny"].endswith("not downloaded yet")
    assert str(snapshot) in rows["org/model"] and " kB" in rows["org/model"]
    found = {model["name"]: model["folder"] for model in run("models", "list", "--local", "-o", "json").json["models"]}
    assert found == {"tinkex/tiny": None, "smollm2-135m": None, "org/model": str(snapshot)}


def test_pull_creates_a_built_in_model_once(run: Tinkex, tmp_path: Path) -> None:
    ran = run("models", "pull", "tinkex/tiny")
    folder = tmp_path / "cache" / "models" / "tinkex--tiny-1"
    assert (ran.code, ran.out) == (0, f"tinkex/tiny is ready: 471.1 kB in {folder}\n")
    assert ran.err == "To serve it: tinkex serve tinkex/tiny\n"
    made_at = folder.stat().st_mtime_ns
    again = run("models", "pull", "tinkex/tiny")
    assert again.out == f"tinkex/tiny was already here; nothing was downloaded: 471.1 kB in {folder}\n"
    assert (again.code, folder.stat().st_mtime_ns) == (0, made_at)
    assert str(folder) in run("models", "list", "--local").out


def test_pull_downloads_from_the_hub_once_and_shows_the_progress(
    run: Tinkex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub.serve(fake_hub.Hub("org/model", tiny_files(tmp_path / "files"))) as there:
        hub_at(monkeypatch, there.address)
        ran = run("models", "pull", "org/model", "-o", "json")
        assert ran.json["is_new"] is True and ran.json["folder"].endswith(fake_hub.COMMIT)
        assert "downloading org/model: " in ran.err
        assert "model.safetensors" in there.fetched
        there.asked.clear()
        again = run("models", "pull", "org/model")
        assert again.code == 0 and "was already here" in again.out
        assert there.asked == []


def test_pull_of_a_folder_downloads_nothing(run: Tinkex, tmp_path: Path) -> None:
    tiny_files(tmp_path / "mine")
    ran = run("models", "pull", str(tmp_path / "mine"))
    assert ran.code == 0 and "nothing was downloaded" in ran.out


def test_an_unknown_name_is_one_sentence(run: Tinkex) -> None:
    ran = run("models", "pull", "org/none")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("tinkex: org/none is not in the cache, and the model hub cannot be reached")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("words", [["models", "pull", "tinkex/tiny"], ["gc"], ["backup", "copy"], ["key", "list"]])
def test_without_the_extra_local_it_is_named(words: list[str]) -> None:
    code = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        f"from tinkex.cli.main import main; sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs the extra `local`" in done.stderr and "pip install -e '.[local]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_add_offers_a_folder_by_its_whole_path_and_rm_withdraws_it(
    run: Tinkex, service: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_files(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert run("models", "add", "mine").out == f"{tmp_path / 'mine'} is offered; it is loaded at its first use\n"
    assert run("models", "add", "org/big", "-o", "json").json["model_name"] == "org/big"
    assert run("models", "rm", "org/big").out == "org/big is offered no longer\n"
