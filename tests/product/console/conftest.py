"""A service that has really trained, one with keys behind a prefix, and one browser for all tests of the console."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tests.product.console.browser import Browser
from tests.unit.server.conftest import serve, served  # noqa: F401 (fixtures of the tests here)

PICTURES = Path(__file__).parents[3] / "build" / "screenshots"
"""Not in the repository; to be looked at."""
ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"
PREFIX = "/lab/tinkex"
NASTY = "<img src=x onerror=\"document.title='harmed'\"><b>bold</b>"
TEXTS = ("A stitch in time saves nine.", "All that glitters is not gold.", "Still waters run deep.")
STEPS = 30


@dataclass
class Stage:
    """The service without keys, and what was done on it."""

    server: LiveServer
    service: tinkex.ServiceClient
    training: tinkex.TrainingClient
    nasty_id: str

    @property
    def url(self) -> str:
        return self.server.url

    def step(self, rate: float = 1e-3) -> float:
        """One more step. Gives its loss per token."""
        done = self.training.forward_backward(data(), "cross_entropy")
        self.training.optim_step(tinkex.AdamParams(learning_rate=rate)).result(60)
        metrics = done.result(60).metrics
        return metrics["loss:sum"] / metrics["weight:sum"]


def datum(text: str) -> tinkex.Datum:
    tokens = list(text.encode())  # the tiny model reads bytes
    weights = [1.0] * (len(tokens) - 1)
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def data() -> list[tinkex.Datum]:
    return [datum(text) for text in TEXTS]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


class Prefixed(LiveServer):
    """Behind a proxy that passes its path on."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir, "--api-key", ALICE, "--api-key", BOB)
        self.page = f"{self.url}{PREFIX}/"
        self._words += ["--public-url", self.page]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Prefixed]]:
    """Started together: each takes some seconds for itself."""
    folder = tmp_path_factory.mktemp("console")
    plain, keyed = LiveServer(folder / "plain"), Prefixed(folder / "keyed")
    for server in (plain, keyed):
        server.start(wait_s=0)
    try:
        for server in (plain, keyed):
            server.wait_until_ready()
        yield plain, keyed
    finally:
        for server in (plain, keyed):
            server.stop()


@pytest.fixture(scope="session")
def keyed(servers: tuple[LiveServer, Prefixed]) -> Prefixed:
    return servers[1]


@pytest.fixture(scope="session")
def stage(servers: tuple[LiveServer, Prefixed]) -> Iterator[Stage]:
    with tinkex.ServiceClient(base_url=servers[0].url, api_key="tml-none") as service:
        other = service.create_lora_training_client("tinkex/tiny", rank=4, user_metadata={"name": NASTY})
        for _ in range(3):
            other.forward_backward(data(), "cross_entropy")
            other.optim_step(tinkex.AdamParams(learning_rate=1e-3))
        training = service.create_lora_training_client(
            "tinkex/tiny", rank=8, user_metadata={"name": "proverbs", "task": "three proverbs"}
        )
        stage = Stage(servers[0], service, training, other.model_id)
        for number in range(STEPS):
            if number % 5 == 4:
                training.forward([datum("Better late than never.")], "cross_entropy")
            training.forward_backward(data(), "cross_entropy")
            rate = 8e-3 * min(1.0, (number + 1) / 6) * (0.5 + 0.5 * math.cos(math.pi * number / STEPS))
            last = training.optim_step(tinkex.AdamParams(learning_rate=rate))
        last.result(120)
        for name in ("first", "second"):
            training.save_state(name).result(60)
        for name in ("for-you", "to-go"):
            training.save_weights_for_sampler(name).result(60)
        with pytest.raises(tinkex.TinkexError):
            training.load_state("tinker://nobody/weights/lost").result(60)
        yield stage


def add_runs(server: LiveServer, *names: str) -> None:
    """Runs of long ago, as rows in the journal, where making them would take an hour."""
    with sqlite3.connect(server.data_dir / "tinkex.db", timeout=30) as rows:
        columns = [row[1] for row in rows.execute("PRAGMA table_info(runs)")]
        made = {"id": "?", "user_metadata": "json_object('name', ?)", "created_at": "1.0"}
        taken = ", ".join(made.get(name, name) for name in columns)
        order = sorted(("id", "user_metadata"), key=columns.index)
        for name in names:
            values = [f"{name}:train:0" if column == "id" else name for column in order]
            rows.execute(f"INSERT INTO runs SELECT {taken} FROM runs LIMIT 1", values)


def add_steps(server: LiveServer, name: str, steps: int) -> None:
    with sqlite3.connect(server.data_dir / "tinkex.db", timeout=30) as rows:
        rows.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO operations (request_id, run_id, tenant, seq_id, kind, digest, state, created_at, finished_at, "
            "cost_tokens, tokens, options, engine_s, metrics) SELECT ? || i, ?, 'local', i, "
            "CASE i % 2 WHEN 1 THEN 'forward_backward' ELSE 'optim_step' END, '', 'done', 1.8e9 + i, 1.8e9 + i, "
            "1500, 500, '{}', 0.25, "
            "CASE i % 2 WHEN 1 THEN json_object('loss:sum', 9.0 + 9000.0 / (i + 1500), 'weight:sum', 3.0) "
            "ELSE json_object('learning_rate', 1e-4) END FROM n",
            (2 * steps, f"{name}-", f"{name}:train:0"),
        )


def without_key() -> dict[str, str]:
    """The environment of a program that has yet to be told its service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
