"""Trains a few steps, sends their numbers to one tracker, and reads back what that has stored. Prints both as JSON.

    python -m tests.unit.watch.tracker_program wandb URL FOLDER

Runs in an environment with the trackers (`python -m tests.tools trackers`). Nothing leaves this machine.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]
STEPS = 3


def trained(tracker: Any, url: str, folder: Path) -> Series:
    """Train, and return what was logged: name → (step, value)."""
    import tinkex
    from tests.unit.watch.conftest import MODEL, train

    with tinkex.ServiceClient(base_url=url, api_key="tml-tracker", telemetry=False) as service:
        training = service.create_lora_training_client(MODEL, rank=4)
        with tinkex.progress(training, STEPS, file=io.StringIO(), log_to=tracker, label="a run") as progress:
            for step in progress:
                train(training)
                progress.log({"reward/mean": step / 10}, kl=1.5 * step)
    series: Series = {name: [(point.step, point.value) for point in points] for name, points in progress.notes.items()}
    for name in ("loss", "tokens", "learning_rate"):
        series[name] = [(record.step, float(getattr(record, name))) for record in progress.history]
    if tracker == "tensorboard":
        assert progress.metrics_file is not None
        (folder / "where").write_text(str(progress.metrics_file.parent), encoding="utf-8")
    return series


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb writes: blocks of 32 KiB behind 7 bytes."""
    at, block, record = 7, 32 << 10, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no header fits into the rest of the block
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> Series:
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    series: Series = {}
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            pairs = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
            row = {name: json.loads(text) for name, text in pairs}
            for name, value in row.items():
                if name != "step" and not name.startswith("_"):
                    series.setdefault(name, []).append((row["step"], value))
    return series


def read_trackio(folder: Path) -> Series:
    series: Series = {}
    [file] = folder.rglob("tinkex.db")
    for step, text in sqlite3.connect(file).execute("SELECT step, metrics FROM metrics ORDER BY id"):
        for name, value in json.loads(text).items():
            series.setdefault(name, []).append((step, value))
    return series


def read_tensorboard(folder: Path) -> Series:
    accumulators: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator((folder / "where").read_text(encoding="utf-8")).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def read_mlflow(folder: Path) -> Series:
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tinkex")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def main(tracker: str, url: str, folder: Path) -> None:
    os.environ |= {
        "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder),
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true",
        "TINKEX_METRICS_DIR": str(folder), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    logged = trained(tracker, url, folder)
    read: Series = globals()[f"read_{tracker}"](folder)
    assert all(math.isfinite(value) for points in read.values() for _, value in points)
    print(json.dumps({"logged": logged, "read": read}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
