"""`tinkex demo` as a user runs it: with the tiny model here, with the real one in `make test-full`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.cli.main import main
from tinkex.demo import reinforced, stage, supervised
from tinkex.demo.stage import Stage
from tinkex.errors import TinkexError


def command(folder: Path, *flags: str, model: str = "tinkex/tiny") -> list[str]:
    return [sys.executable, "-m", "tinkex", "demo", "--model", model, "--folder", str(folder), *flags]


def run(folder: Path, *flags: str) -> str:
    done = subprocess.run(command(folder, *flags), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def interrupted(folder: Path, after: str, *flags: str) -> str:
    """Start it, wait for a line on stderr that holds `after`, press Ctrl-C as a terminal does: to all its processes."""
    process = subprocess.Popen(
        command(folder, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if after in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    said, more = process.communicate(timeout=60)
    assert process.returncode == 130, said + more
    assert "again to continue" in more and "Traceback" not in more
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a demo; its service ends with the test."""
    yield tmp_path / "demo"
    assert main(["stop", "--data-dir", str(tmp_path / "demo" / "service")]) == 0


@pytest.mark.slow
def test_the_demo_trains_draws_a_curve_saves_the_adapter_and_its_run_is_where_all_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: the run was in a folder of the demo, which no other command looked at."""
    home = tmp_path / "home"
    monkeypatch.setenv("TINKEX_DATA_DIR", str(home))
    demo = [sys.executable, "-m", "tinkex", "demo", "--model", "tinkex/tiny", "--steps", "3"]
    done = subprocess.run(demo, capture_output=True, text=True, timeout=240)
    said = done.stdout
    assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    assert "3 steps of 8 examples" in said and "loss per token" in said
    assert re.search(r"\d+ of 20 right before, \d+ of 20 after", said)
    assert (home / "demo" / "adapter" / "adapter_model.safetensors").is_file()
    assert f"tinkex export {home}/demo/adapter --out my-model --merge" in said
    assert "tinkex demo --console" in said and 'tinkex.local("tinkex/tiny")' in said
    assert not (home / "demo" / "demo.json").exists()
    assert main(["run", "list", "-o", "json"]) == 0  # the service stays for some seconds
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert run["training_run_id"] in said
    assert main(["stop"]) == 0


@pytest.mark.slow
def test_after_ctrl_c_the_next_demo_continues_the_run(folder: Path) -> None:
    interrupted(folder, "step ", "--steps", "60")
    run_id = json.loads((folder / "demo.json").read_text())["run_id"]
    said = run(folder, "--steps", "60")
    assert (found := re.search(r"Continuing after step (\d+)", said)) and 0 < int(found[1]) <= 60
    assert run_id in said


@pytest.mark.full
def test_the_second_demo_learns_from_rewards_and_continues_after_ctrl_c(folder: Path) -> None:
    interrupted(folder, "step ", "--rl", "--steps", "40")
    said = run(folder, "--rl", "--steps", "40")
    assert "Continuing after step" in said and "mean reward" in said
    assert re.search(r"Mean reward \d\.\d\d in the first 5 steps", said)


def test_a_full_disk_is_one_sentence_before_any_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "NEEDED_BYTES", 10**18)
    with pytest.raises(TinkexError, match=r"GB left and the demo needs .* --folder"):
        supervised.run(Stage(tmp_path, "tinkex/tiny", 0, 1))


def test_a_folder_that_cannot_be_created_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TinkexError, match="--folder"):
        supervised.run(Stage(tmp_path / "file" / "demo", "tinkex/tiny", 0, 1))


def test_state_of_other_settings_or_of_another_release_is_not_used(tmp_path: Path) -> None:
    first = Stage(tmp_path, "tinkex/tiny", 0, 5)
    first.state.run_id = "r"
    first.save_state()
    assert Stage(tmp_path, "tinkex/tiny", 0, 5).state.run_id == "r"
    assert Stage(tmp_path, "tinkex/tiny", 0, 6).state.run_id == ""
    assert Stage(tmp_path, "tinkex/tiny", 0, 5, is_fresh=True).state.run_id == ""
    (tmp_path / "demo.json").write_text('{"something": "else"}')
    assert Stage(tmp_path, "tinkex/tiny", 0, 5).state.run_id == ""


@pytest.mark.full
def test_smollm2_generalises_to_unseen_orders(tmp_path: Path) -> None:
    before, after = supervised.run(Stage(tmp_path, "smollm2-135m", 0, supervised.STEPS, data_dir=tmp_path / "data"))
    assert before <= 0.1 * supervised.EXAM and after >= 0.8 * supervised.EXAM


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_smollm2s_reward_rises(seed: int, tmp_path: Path) -> None:
    before, after = reinforced.run(Stage(tmp_path, "smollm2-135m", seed, reinforced.STEPS, data_dir=tmp_path / "data"))
    assert after - before >= 0.3
