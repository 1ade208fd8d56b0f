"""What a program logs reaches the service once and in order, whatever happens on the way, and never stops it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL
from tinkex.client._runtime import run_log
from tinkex.testing import Drop, ScriptedService, Status

Connect = Callable[..., tinkex.ServiceClient]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "PAUSE_S", 0.01)


def logged(client: tinkex.ServiceClient, training: tinkex.TrainingClient) -> list[dict[str, Any]]:
    entries = client.create_rest_client().get_run_metrics(training.model_id).result(20).entries
    return [entry.metrics for entry in entries]


def test_every_entry_arrives_once_and_in_order_through_faults(proto_service: ScriptedService, connect: Connect) -> None:
    proto_service.script.on("log_metrics", nth=1, do=Status(503))
    proto_service.script.on("log_metrics", nth=2, do=Drop("after_accept"))
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    for step in range(700):  # more than one request takes
        training.log_metrics({"reward": step}, step=step)
    training.flush_metrics(20)
    assert logged(client, training) == [{"reward": float(step)} for step in range(700)]


def test_closing_sends_what_was_logged_last(proto_service: ScriptedService, connect: Connect) -> None:
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    training.log_metrics({"reward": 1.0})
    client.close().result(20)
    assert logged(connect(proto_service), training) == [{"reward": 1.0}]


def test_what_an_outage_left_behind_is_sent_at_the_end(proto_service: ScriptedService, connect: Connect) -> None:
    for attempt in (1, 2):
        proto_service.script.on("log_metrics", nth=attempt, do=Status(503))
    client = connect(proto_service, max_retries=2)
    training = client.create_lora_training_client(MODEL)
    training.log_metrics({"reward": 1.0})
    training.flush_metrics(20)
    assert len(proto_service.requests_to("log_metrics")) == 2 and logged(client, training) == []
    client.close().result(20)
    assert logged(connect(proto_service), training) == [{"reward": 1.0}]


def test_a_service_that_keeps_none_is_sent_none_and_the_file_has_all(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedService(missing=["log_metrics"]) as service, caplog.at_level(logging.WARNING, "tinkex.metrics"):
        client = connect(service)
        training = client.create_lora_training_client("tinkex/tiny")
        training.log_metrics({"reward": 0.5, "kl": math.inf}, step=3)
        training.flush_metrics(20)
        training.log_sample("2+2=", "4", 1.0, step=3, metadata={"path": Path("x"), "nan": math.nan})
        training.flush_metrics(20)
        assert not service.requests_to("log_metrics")
    assert [record.getMessage().count("keeps no metrics") for record in caplog.records] == [1]
    assert training.metrics_file is not None
    rows = [json.loads(line) for line in training.metrics_file.read_text(encoding="utf-8").splitlines()]
    assert rows[0]["metrics"] == {"reward": 0.5, "kl": None} and rows[0]["step"] == 3
    assert (rows[1]["kind"], rows[1]["text"], rows[1]["metadata"]) == ("sample", "4", {"path": "x", "nan": None})


def test_a_rejected_batch_is_given_up_with_one_line_and_later_ones_go_on(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    proto_service.script.on("log_metrics", nth=1, do=Status(400, "too many metrics"))
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    with caplog.at_level(logging.WARNING, "tinkex.metrics"):
        training.log_metrics({"reward": 1.0})
        training.flush_metrics(20)
        training.log_metrics({"reward": 2.0})
        training.flush_metrics(20)
    assert logged(client, training) == [{"reward": 2.0}]
    assert [record.getMessage().count("rejected by the service") for record in caplog.records] == [1]


def test_a_service_that_is_gone_holds_up_nothing(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MAX_WAITING_BYTES", 2000)
    with ScriptedService(base_models=[MODEL]) as service:
        client = connect(service)
        training = client.create_lora_training_client(MODEL)
    for step in range(100):
        training.log_metrics({"reward": step})
    training.flush_metrics(0.05)
    assert training._log._waiting_bytes <= 2000
    assert training.metrics_file is not None
    assert len(training.metrics_file.read_text(encoding="utf-8").splitlines()) == 100


@pytest.mark.parametrize("metrics", [{}, {"reward": "high"}, {"": 1.0}, {3: 1.0}, [1.0], {"x" * 300: 1.0}])
def test_what_is_no_metric_is_rejected_before_anything_is_sent(training: tinkex.TrainingClient, metrics: Any) -> None:
    with pytest.raises(tinkex.ValidationError, match=r"[Mm]etric"):
        training.log_metrics(metrics)
    with pytest.raises(tinkex.ValidationError, match="step"):
        training.log_metrics({"reward": 1.0}, step=-1)
    with pytest.raises(tinkex.ValidationError, match="text"):
        training.log_sample("prompt", [1, 2])  # type: ignore[arg-type]


def test_a_text_that_is_no_unicode_arrives_as_one_that_is(proto_service: ScriptedService, connect: Connect) -> None:
    """A decoder of tokens leaves half a surrogate pair behind: the service would reject the whole batch."""
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    training.log_sample("\ud83d", "x" * 200_000, metadata={"\udc00": "\ud83d"})
    training.flush_metrics(20)
    [sample] = client.create_rest_client().get_run_samples(training.model_id).result(20).samples
    assert (sample.prompt, sample.metadata, len(sample.text)) == ("?", {"?": "?"}, 100_001)
    with pytest.raises(tinkex.ValidationError, match="metadata"):
        training.log_sample("", "", metadata={"x": "x" * 200_000})


def test_a_program_that_logs_for_long_is_not_said_to_wait(
    proto_service: ScriptedService, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    training = connect(proto_service, wait_line_s=0.2).create_lora_training_client(MODEL)
    with caplog.at_level(logging.WARNING, "tinkex.wait"):
        for count in range(1, 60):
            training.log_metrics({"reward": count})
            proto_service.wait_for_requests("log_metrics", count)
    assert not caplog.records
