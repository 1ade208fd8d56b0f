"""Runs a program of the cookbook's users against a service, with the official `tinker` or through `tinkex.as_tinker`.

The environment is that of `make cookbook`. The cookbook looks tokenizers up on the hub; what the service
hands out is laid where the hub's library keeps its downloads, so that no program has to know.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.compat.as_tinker import cookbook_imports

HERE = Path(__file__).parent
PLACE = cookbook_imports.ENVIRONMENT
CLIENTS = ("tinker 0.36.0", "tinkex")
"""The official package, and ours under its name."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


class Run(NamedTuple):
    """What a program left behind."""

    code: int
    output: str
    log_path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the cookbook logged, a record per step."""
        return _lines(self.log_path / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return _lines(self.log_path / "checkpoints.jsonl")

    def series(self, name: str) -> list[float]:
        return [record[name] for record in self.metrics if name in record]


def run(
    python: Path, client: str, script: str, url: str, model: str, folder: Path, *arguments: str, seconds: float = 900
) -> Run:
    """One program, in a process of its own. `folder` keeps its logs and its tokenizer, also for a later run."""
    log_path = folder / "log"
    words = [str(python), *([] if client == CLIENTS[0] else ["-m", "tinkex.as_tinker"])]
    words += [str(HERE / script), model, str(log_path), *arguments]
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    environ |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-cookbook", "TINKER_TELEMETRY": "0"}
    environ |= {
        "HF_HOME": str(lay_out_hub(url, model, folder / "hub")),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    environ |= {"PYTHONPATH": str(PLACE / "official")} if client == CLIENTS[0] else {}
    done = subprocess.run(
        words,
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",  # a model without training says anything
        timeout=seconds,
    )
    return Run(done.returncode, done.stdout, log_path)


def lay_out_hub(url: str, model: str, home: Path) -> Path:
    """The service's tokenizer files as the hub's library would have cached them."""
    revision = "0" * 40
    repository = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    for name in _TOKENIZER_FILES:
        with urllib.request.urlopen(f"{url}/api/v1/tokenizers/{quote(model, safe='')}/{name}", timeout=30) as answer:
            (snapshot / name).write_bytes(answer.read())
    return home


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
