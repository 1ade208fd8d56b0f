"""Data of a service as a release wrote it, for later releases to open: how it is made, and what is measured on it.

A fixture is a folder with `data.tar.gz` (a SQLite file, and the checkpoints and the journal that its rows name),
`postgres.sql` (the same rows) and `expected.json` (what the release that wrote it measured itself).
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, select

from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, batch
from tests.unit.store.postgres import PostgresServer
from tinkex.store.store import Store
from tinkex.store.tables import metadata, schema_version

FIXTURES = Path(__file__).parents[2] / "fixtures" / "upgrades"
ARCHIVE = "data.tar.gz"
FOLDERS = ("checkpoints", "journal")
STEP = {"learning_rate": 0.01, "grad_clip_norm": 1.0}
QUEUED_WITHIN_S = 10.0


def write_fixture(folder: Path) -> None:
    """Run this release on a new data folder and keep what it wrote; then measure a copy of that."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="tinkex-fixture-") as scratch:
        data_dir = Path(scratch) / "data"
        known = _write_data(data_dir)
        copy = Path(scratch) / "tinkex.db"
        with Store.open(f"sqlite:///{data_dir / 'tinkex.db'}", data_dir) as store:
            store.backup(copy)
        with tarfile.open(folder / ARCHIVE, "w:gz") as archive:
            archive.add(copy, copy.name)
            for name in FOLDERS:
                archive.add(data_dir / name, name)
        (folder / "postgres.sql").write_text(_as_postgres(copy))
        with LiveServer(unpack(folder, Path(scratch) / "copy")) as server:
            measured = measure(server, known)
    (folder / "expected.json").write_text(json.dumps({**known, "measured": measured}, indent=1) + "\n")


def unpack(fixture: Path, data_dir: Path) -> Path:
    """Copy a fixture to where a server may change it."""
    data_dir.mkdir(parents=True, mode=0o700)
    with tarfile.open(fixture / ARCHIVE) as archive:
        archive.extractall(data_dir, filter="data")
    return data_dir


def measure(server: LiveServer, known: dict[str, Any]) -> dict[str, Any]:
    """Return what a service on the data says: its lists, the results of what was queued, losses after loading."""
    client = Raw(server)
    queued = [client.poll(request_id).json for request_id in known["queued"]]
    listed = client.get("training_runs").json["training_runs"]
    checkpoints = client.get(f"training_runs/{known['run_id']}/checkpoints").json["checkpoints"]
    fresh = client.run(rank=1)
    fresh.done("load_weights", path=known["checkpoint"], optimizer=True)
    old = {"model_id": known["run_id"], "seq_id": known["next_seq"]}
    return {
        "runs": sorted(run["training_run_id"] for run in listed),
        "checkpoints": sorted(saved["tinker_path"] for saved in checkpoints),
        "queued": [result.get("metrics", result) for result in queued],
        "loss_of_run": client.done("forward", {**old, "forward_input": batch()})["metrics"]["loss:sum"],
        "loss_of_checkpoint": fresh.done("forward", forward_input=batch())["metrics"]["loss:sum"],
    }


def _write_data(data_dir: Path) -> dict[str, Any]:
    """Train, save and load; then kill the server while two operations wait in its journal."""
    server = LiveServer(data_dir)
    server.start()
    engine = server.engine_pid()
    assert engine is not None
    try:
        client = Raw(server)
        run = client.run(rank=1)
        run.done("forward_backward", forward_backward_input=batch())
        run.done("optim_step", adam_params=STEP)
        path = run.saved("save_weights", "kept")
        run.saved("save_weights_for_sampler", "kept")
        run.done("load_weights", path=path, optimizer=True)  # writes a snapshot
        run.done("forward_backward", forward_backward_input=batch())
        run.done("optim_step", adam_params=STEP)
        os.kill(engine, signal.SIGSTOP)
        queued = [
            client.post("forward_backward", run.named(forward_backward_input=batch())).json["request_id"],
            client.post("optim_step", run.named(adam_params=STEP)).json["request_id"],
        ]
        _wait_until_queued(data_dir / "tinkex.db", len(queued))
    finally:
        server.kill()
        os.kill(engine, signal.SIGKILL)
    return {"run_id": run.id, "checkpoint": path, "queued": queued, "next_seq": run.upcoming}


def _wait_until_queued(database: Path, count: int) -> None:
    end = time.monotonic() + QUEUED_WITHIN_S
    while time.monotonic() < end:
        with sqlite3.connect(database) as connection:
            if connection.execute("SELECT count(*) FROM operations WHERE state = 'queued'").fetchone() == (count,):
                return
        time.sleep(0.02)
    raise AssertionError("the operations are not in the journal")


def _as_postgres(database: Path) -> str:
    """Return the rows of a SQLite file, and the tables of this release, as SQL for PostgreSQL."""
    postgres = PostgresServer()
    try:
        Store.open(postgres.url(), database.parent).close()
        source = create_engine(f"sqlite:///{database}")
        target = create_engine(postgres.url().replace("postgresql:", "postgresql+psycopg:", 1))
        with source.connect() as rows, target.begin() as connection:
            for table in metadata.tables.values():
                values = [dict(row._mapping) for row in rows.execute(select(table))]
                if values and table.name != schema_version.name:
                    connection.execute(table.insert(), values)
        source.dispose()
        target.dispose()
        return postgres.dump()
    finally:
        postgres.stop()
