"""`tinkex run`."""

from __future__ import annotations

import pytest

import tinkex
from tinkex.cli.commands import run as command
from tinkex.testing import ScriptedService

from .conftest import KEY, Saved, Tinkex


def test_list_shows_runs(run: Tinkex, saved: Saved) -> None:
    title, row = run("run", "list").out.splitlines()
    assert title.split("  ")[0] == "RUN"
    assert row.split()[:3] == [saved.run_id, "tinkex/tiny", "8"]
    assert row.endswith("ok")


def test_list_as_json_has_the_fields_of_the_service(run: Tinkex, saved: Saved) -> None:
    (found,) = run("run", "list", "-o", "json").json["runs"]
    assert found["training_run_id"] == saved.run_id
    assert found["last_checkpoint"]["tinker_path"] == saved.state


@pytest.fixture
def five_runs(service: ScriptedService) -> list[str]:
    with tinkex.ServiceClient(base_url=service.url, api_key=KEY, telemetry=False) as client:
        ids = [client.create_lora_training_client("tinkex/tiny", rank=1).model_id for _ in range(5)]
    service.requests.clear()
    return ids


def test_a_limit_applies_and_the_rest_is_mentioned(run: Tinkex, five_runs: list[str]) -> None:
    ran = run("run", "list", "--limit", "2")
    assert len(ran.out.splitlines()) == 3
    assert ran.err == "2 of 5 runs; --limit 0 shows all.\n"


def test_limit_0_reads_all_pages(
    run: Tinkex, service: ScriptedService, five_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PAGE", 2)
    ran = run("run", "list", "--limit", "0", "-o", "json")
    assert [found["training_run_id"] for found in ran.json["runs"]] == five_runs
    asked = [request.query for request in service.requests_to("list_training_runs")]
    assert [(query["limit"], query["offset"]) for query in asked] == [("2", "0"), ("2", "2"), ("2", "4")]


def test_no_runs_is_an_empty_table(run: Tinkex, service: ScriptedService) -> None:
    ran = run("run", "list")
    assert (ran.code, len(ran.out.splitlines())) == (0, 1)


def test_info_takes_an_id_or_a_path(run: Tinkex, saved: Saved) -> None:
    shown = run("run", "info", saved.run_id)
    assert shown.code == 0
    for text in (saved.run_id, "tinkex/tiny", saved.state, saved.sampler, "metadata team  blue"):
        assert text in shown.out
    assert run("run", "info", saved.sampler).out.splitlines()[0] == shown.out.splitlines()[0]
    assert run("-o", "json", "run", "info", saved.run_id).json["user_metadata"] == {"team": "blue"}
