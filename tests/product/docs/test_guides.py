"""The guides are followed word by word, against a real service: Python in this process, commands in bash.

The model is the tiny one and the address the test's own; `RUN` is the run of the page's `training`, `KEY_ID` the newest
key. What is not run says so in the page: `<!-- parsed only: why -->` above commands, which `test_blocks` then parses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tests.product.docs.pages import GUIDES, Block, blocks, mark, named
from tinkex import as_tinker

MODEL, ADDRESS = "smollm2-135m", "http://127.0.0.1:8642"
OF_CLUSTER = "from-laptop-to-cluster.md"
"""Needs several servers, a PostgreSQL and a bucket: `test_cluster_guide` follows it."""
WITH_KEYS = "many-tenants.md"
"""From the first key on, a service asks everybody for one: this guide needs a service of its own."""
NOT_RUN = ("installs", "runs until it is stopped", "opens a browser", "waits for your words")


class Reader:
    """Somebody who follows a page: a folder, an environment, and the names of the Python session."""

    def __init__(self, page: Path, folder: Path, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page, self.folder, self.server = page, folder, server
        self.space: dict[str, object] = {"__name__": "__main__"}
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        self.export(
            {
                "TINKER_BASE_URL": server.url,
                "TINKEX_DATA_DIR": str(server.data_dir),
                "TINKEX_CACHE_DIR": str(server.cache),
                "XDG_CONFIG_HOME": str(folder / "config"),
                "HF_HUB_OFFLINE": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            }
        )
        monkeypatch.delenv("TINKER_API_KEY", raising=False)

    def export(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def follow(self, block: Block) -> None:
        said = mark(self.page, block)
        text = block.text.replace(MODEL, "tinkex/tiny").replace(ADDRESS, self.server.url)
        if said.startswith("file: "):
            (self.folder / said.removeprefix("file: ")).write_text(text, encoding="utf-8")
        elif said.startswith("parsed only: "):
            assert said.endswith(NOT_RUN), f"{named(self.page)}: {said!r} is no reason not to run it"
        elif block.kind == "python":
            # With its place in the page, so that a traceback points there.
            exec(compile("\n" * block.line + text, str(self.page), "exec"), self.space)
        elif block.kind == "bash":
            self._bash(text)

    def _bash(self, text: str) -> None:
        """What it exports is there for the blocks that follow."""
        if re.search(r"\bRUN\b", text):
            training = self.space["training"]
            assert isinstance(training, tinkex.TrainingClient)
            text = re.sub(r"\bRUN\b", training.model_id, text)
        if "KEY_ID" in text:
            text = text.replace("KEY_ID", self._newest_key())
        after = self.folder / "environment"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'{text}\nenv -0 > "{after}"'],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{named(self.page)}:\n{text}\n{done.stdout}{done.stderr}"
        entries = [entry.partition("=") for entry in after.read_text().split("\0") if entry]
        after.unlink()
        self.export({name: value for name, _, value in entries if os.environ.get(name) != value})

    def _newest_key(self) -> str:
        done = subprocess.run(["tinkex", "key", "list", "-o", "json"], capture_output=True, text=True, check=True)
        return str(json.loads(done.stdout)["keys"][-1]["id"])


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LiveServer]]:
    """One service for all guides; `many-tenants.md` has its own."""
    running: dict[str, LiveServer] = {}

    def served(page: str) -> LiveServer:
        name = "with-keys" if page == WITH_KEYS else "open"
        if name not in running:
            running[name] = LiveServer(tmp_path_factory.mktemp("guides") / name, "--threads", "1")
            running[name].start()
        return running[name]

    yield served
    for server in running.values():
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if page.name != OF_CLUSTER], ids=named)
def test_a_guide_works_as_it_is_written(
    page: Path, serve: Callable[[str], LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(page, tmp_path, serve(page.name), monkeypatch)
    try:
        for block in blocks(page):
            reader.follow(block)
    finally:
        as_tinker.uninstall()


def test_every_guide_has_code_that_is_run() -> None:
    assert {page.name for page in GUIDES} >= {
        "first-fine-tune.md",
        "rl-loop.md",
        "custom-losses.md",
        "checkpoints-and-export.md",
        "running-a-service.md",
        "many-tenants.md",
        OF_CLUSTER,
        "moving-between-services.md",
        "migrating-from-tinker.md",
    }
    for page in GUIDES:
        kinds = {block.kind for block in blocks(page) if not mark(page, block).startswith("parsed only")}
        assert kinds & {"python", "bash"}, named(page)


def test_a_block_that_fails_fails_its_guide(
    serve: Callable[[str], LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "guide.md"
    page.write_text("```bash\ntinkex run info never-was\n```\n\n```python\nraise KeyError('x')\n```\n")
    monkeypatch.setattr("tests.product.docs.test_guides.named", lambda page: page.name)
    reader = Reader(page, tmp_path, serve(page.name), monkeypatch)
    command, program = blocks(page)
    with pytest.raises(AssertionError, match="never-was"):
        reader.follow(command)
    with pytest.raises(KeyError):
        reader.follow(program)
