"""`tinkex run`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tinkex
from tinkex.cli.commands import run as command
from tinkex.testing import ScriptedService

from .conftest import KEY, Saved, Tinkex


def test_list_shows_name_model_status_steps_and_age_under_a_short_id(run: Tinkex, saved: Saved) -> None:
    run("run", "rename", saved.run_id, "harbour")
    title, row = run("run", "list").out.splitlines()
    assert title.split() == ["RUN", "NAME", "MODEL", "STATUS", "STEPS", "LOSS", "AGE", "TAGS"]
    short, *rest = row.split()
    assert short == f"{saved.run_id[:8]}:0" and rest[:5] == ["harbour", "tinkex/tiny", "idle", "0", "–"]


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


def test_a_list_that_was_cut_says_so_for_people_and_programs(run: Tinkex, five_runs: list[str]) -> None:
    """`run list -o json` gave 20 of 56 runs with no total, no cursor, and nothing on stderr."""
    ran = run("run", "list", "--limit", "2")
    assert len(ran.out.splitlines()) == 3
    assert ran.err == "2 of 5 runs are listed; --all lists all, --cursor 2 the next ones.\n"
    as_json = run("run", "list", "--limit", "2", "--cursor", "2", "-o", "json")
    assert (as_json.json["total"], as_json.json["cursor"]) == (5, 4)
    assert [found["training_run_id"] for found in as_json.json["runs"]] == five_runs[2:4]
    assert as_json.err.startswith("2 of 5 runs are listed")
    rest = run("run", "list", "--cursor", "4", "-o", "json")
    assert (len(rest.json["runs"]), rest.json["cursor"], rest.err) == (1, None, "")
    assert len(run("run", "list", "--all", "--limit", "1", "-o", "json").json["runs"]) == 5


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


# ── Names


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedService]:
    """A service that keeps no names of runs, as the hosted one."""
    with ScriptedService(api_key=KEY, client_config={"tinkex": None}) as service:
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        yield service


@pytest.mark.parametrize("named", ["harbour", "latest", "the id", "its beginning", "a path"])
def test_every_command_takes_every_way_to_name_a_run(run: Tinkex, service: ScriptedService, named: str) -> None:
    """Only `run watch` knew `latest`, and no command a name or the beginning of an id."""
    with tinkex.ServiceClient(base_url=service.url, api_key=KEY, telemetry=False) as client:
        training = client.create_lora_training_client("tinkex/tiny", rank=8, name="harbour", tags=["demo", "sft"])
        state, sampler = training.save_state("a").result().path, training.save_weights_for_sampler("a").result().path
    run_id = training.model_id
    text = {"the id": run_id, "its beginning": run_id[:6], "a path": state}.get(named, named)
    assert run("run", "info", text, "-o", "json").json["training_run_id"] == run_id
    assert run("run", "info", text, "-o", "json").json["tags"] == ["demo", "sft"]
    assert run("run", "watch", text, "--until-idle", "--idle-for", "0").err.startswith(f"Run {run_id}.")
    listed = run("checkpoint", "list", text, "-o", "json").json["checkpoints"]
    assert {saved["tinker_path"] for saved in listed} == {state, sampler}
    if named != "a path":
        assert run("checkpoint", "info", text, "-o", "json").json["tinker_path"] == sampler
        assert run("sample", "-m", text, "--prompt-ids", "1,2", "--ids", "--max-tokens", "2").code == 0
        assert service.requests_to("create_sampling_session")[-1].json["model_path"] == sampler
    if named not in ("a path", "latest"):
        assert run("checkpoint", "publish", f"{text}/weights/a").out == f"{state} is public now.\n"
    assert run("run", "rename", text, "other", "-o", "json").json["name"] == "other"
    assert run("run", "rename", run_id, "harbour").out == f"{run_id} is called harbour now.\n"
    assert run("run", "tag", text, "keep", "--remove", "sft").out == f"{run_id} has the tags demo, keep.\n"
    assert "is archived" in run("run", "archive", text).out and run("run", "list", "-o", "json").json["total"] == 0
    assert run("run", "list", "--archived", "-o", "json").json["total"] == 1
    assert run("run", "archive", text, "--undo").out == f"{run_id} is listed again.\n"
    refused = run("run", "delete", text, "-y")
    assert refused.code == 1 and state in refused.err and sampler in refused.err
    assert run("run", "delete", text, "-y", "--force").out == f"Deleted {run_id} and 2 checkpoints.\n"
    assert run("run", "list", "-o", "json").json == {"runs": [], "total": 0, "cursor": None}


def test_a_beginning_of_several_ids_is_one_sentence(run: Tinkex, five_runs: list[str]) -> None:
    ran = run("run", "info", five_runs[0][:8])
    assert ran.code == 1 and f"Several training runs begin with '{five_runs[0][:8]}'" in ran.err


def test_deleting_needs_a_confirmation(run: Tinkex, saved: Saved) -> None:
    ran = run("run", "delete", saved.run_id)
    assert ran.code == 1 and "pass -y" in ran.err


def test_a_service_without_names_is_searched_here(run: Tinkex, plain: ScriptedService) -> None:
    with tinkex.ServiceClient(base_url=plain.url, api_key=KEY, telemetry=False) as client:
        first = client.create_lora_training_client("tinkex/tiny", rank=8, name="harbour", tags=["demo"])
        client.create_lora_training_client("tinkex/tiny", rank=8)
        path = first.save_weights_for_sampler("a").result().path
    assert run("run", "info", "harbour", "-o", "json").json["training_run_id"] == first.model_id
    assert run("run", "info", first.model_id, "-o", "json").json["training_run_id"] == first.model_id
    assert run("checkpoint", "info", "harbour", "-o", "json").json["tinker_path"] == path
    assert "Several training runs begin" in run("run", "info", first.model_id[:8]).err
    assert "is not known" in run("run", "info", "nothing").err
    found = run("run", "list", "HARBOUR", "--tag", "demo", "-o", "json").json
    assert [entry["training_run_id"] for entry in found["runs"]] == [first.model_id] and found["total"] == 1
    assert run("run", "list").out.splitlines()[0].split("  ")[0] == "RUN"
    for words in (("list", "--status", "running"), ("rename", "harbour", "x"), ("delete", "harbour", "-y", "--force")):
        ran = run("run", *words)
        assert ran.code == 1 and "This service" in ran.err, words
    assert not plain.requests_to("update_training_run") and not plain.requests_to("delete_training_run")
