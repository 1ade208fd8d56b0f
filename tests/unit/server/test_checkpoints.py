"""Endpoints for checkpoints: list, describe, publish, expire, copy, delete; each tenant sees its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

import tinkex
from tests.unit.server.conftest import Served
from tests.unit.store.test_query_plans import statements
from tinkex.store.database import values_of
from tinkex.store.tables import runs

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"


@pytest.fixture
def rest(served: Served) -> tinkex.RestClient:
    return tinkex.RestClient(base_url=served.base_url, api_key="tml-anything")


def test_checkpoints_are_listed_by_run_and_by_user_in_pages(served: Served, rest: tinkex.RestClient) -> None:
    run, other = served.training_run(), served.training_run("t:train:0")
    for name in ("a", "b", "c"):
        served.checkpoint(run, name, user_metadata={"step": 3})
        served.clock.advance(1)
    served.checkpoint(other, "d", "external_weights")
    found = rest.list_checkpoints(run.id).result().checkpoints
    assert [saved.checkpoint_id for saved in found] == ["weights/c", "weights/b", "weights/a"]
    assert {saved.checkpoint_type for saved in found} == {"training"}
    assert found[0].user_metadata == {"step": "3"}
    page = rest.list_user_checkpoints(limit=2).result()
    assert [saved.checkpoint_id for saved in page.checkpoints] == ["external_weights/d", "weights/c"]
    assert page.cursor is not None
    assert page.cursor.total_count == 4


def test_old_official_clients_get_lists_without_exports(served: Served) -> None:
    run = served.training_run()
    served.checkpoint(run, "a")
    served.checkpoint(run, "e", "external_weights")

    def listed(path: str, **headers: str) -> int:
        return len(served.ask("GET", path, headers=headers).json["checkpoints"])

    for path in ("checkpoints", f"training_runs/{run.id}/checkpoints"):
        versions = ("0.4.1", "0.27.1", "0.28.0", "0.36.0", "nonsense")
        found = [listed(path, **{"x-stainless-package-version": version}) for version in versions]
        assert (found, listed(path)) == ([1, 1, 2, 2, 2], 2)


def test_a_deleted_checkpoint_is_gone_with_its_folder(served: Served, rest: tinkex.RestClient) -> None:
    saved, kept = served.checkpoint(run := served.training_run(), "a"), served.checkpoint(run, "b")
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    assert not (served.config.data_dir / saved.folder).exists()
    assert (served.config.data_dir / kept.folder / "adapter_config.json").exists()
    with pytest.raises(tinkex.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(saved.path).result()


def test_deleting_never_leaves_the_data_folder(served: Served) -> None:
    outside = served.config.data_dir.parent / "precious"
    outside.mkdir()
    run = served.training_run()
    for number, folder in enumerate(("../precious", str(outside), ".", "checkpoints/../..")):
        served.checkpoint(run, f"x{number}")
        saved = served.run(served.service.db(served.store.get_checkpoint, f"tinker://{run.id}/weights/x{number}"))
        assert saved is not None
        served.run(served.service.db(served.store.add_checkpoint, replace(saved, folder=folder)))
        assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/x{number}").status == 200
    assert outside.is_dir()
    assert (served.config.data_dir / "tinkex.db").exists()


def test_a_time_to_live_can_be_set_and_removed(served: Served, rest: tinkex.RestClient) -> None:
    saved = served.checkpoint(served.training_run())
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, 60).result()
    shown = rest.list_user_checkpoints().result().checkpoints[0]
    assert shown.expires_at is not None
    assert shown.expires_at.timestamp() == served.clock.wall() + 60
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, None).result()
    assert rest.list_user_checkpoints().result().checkpoints[0].expires_at is None


def test_no_run_begins_from_an_expired_checkpoint(served: Served) -> None:
    saved = served.checkpoint(served.training_run(), expires_at=served.clock.wall() + 5)
    served.session("s")
    served.clock.advance(5)
    body = {"session_id": "s", "model_seq_id": 1, "path": saved.path}
    response = served.ask("POST", "load_weights", body)
    assert (response.status, response.json["code"]) == (404, "unknown_checkpoint")


def test_an_expired_checkpoint_is_gone_at_once(served: Served) -> None:
    saved = served.checkpoint(run := served.training_run())
    place = f"training_runs/{run.id}/checkpoints/weights/0001"
    assert served.ask("PUT", f"{place}/ttl", {"ttl_seconds": 60}).status == 200
    served.clock.advance(60)
    assert served.ask("POST", "weights_info", {"tinker_path": saved.path}).status == 404
    assert served.ask("GET", f"{place}/archive").status == 404
    assert served.ask("DELETE", place).status == 404
    assert served.ask("GET", "checkpoints").json["checkpoints"] == []


@pytest.mark.parametrize("ttl", [0, -5, 1.5, True, "60", 10**12])
def test_an_invalid_time_to_live_is_rejected(served: Served, ttl: object) -> None:
    served.checkpoint(run := served.training_run())
    answer = served.ask("PUT", f"training_runs/{run.id}/checkpoints/weights/0001/ttl", {"ttl_seconds": ttl})
    assert (answer.status, answer.json["code"]) == (400, "bad_ttl")


def test_weights_info_tells_what_a_training_client_needs(served: Served, rest: tinkex.RestClient) -> None:
    found = rest.get_weights_info_by_tinker_path(served.checkpoint(served.training_run()).path).result()
    assert (found.base_model, found.lora_rank) == ("tinkex/tiny", 8)
    assert (found.train_attn, found.train_mlp, found.train_unembed) == (True, True, False)
    assert served.ask("POST", "weights_info", {"tinker_path": "tinker://x/y"}).status == 400
    assert served.ask("POST", "weights_info", {}).status == 400


def test_others_see_a_checkpoint_only_while_it_is_published_and_never_change_it(
    serve: Callable[..., Served],
) -> None:
    served = serve(api_keys=(ALICE, BOB))
    owner = served.run(served.service.access.tenant(ALICE))
    run = served.training_run(tenant=owner)
    saved = served.checkpoint(run)
    place = f"training_runs/{run.id}/checkpoints/weights/0001"

    def statuses(key: str) -> list[int]:
        return [
            served.ask("POST", "weights_info", {"tinker_path": saved.path}, key=key).status,
            served.ask("GET", f"{place}/archive", key=key).status,
            served.ask("GET", f"{place}/external_weights_urls", key=key).status,
        ]

    assert (statuses(ALICE), statuses(BOB)) == ([200, 302, 200], [404, 404, 404])
    assert served.ask("POST", f"{place}/publish", key=BOB).status == 404
    assert served.ask("POST", f"{place}/publish", key=ALICE).status == 200
    assert statuses(BOB) == [200, 302, 200]
    changes = [("DELETE", place), ("DELETE", f"{place}/publish"), ("PUT", f"{place}/ttl")]
    for method, path in changes:
        assert served.ask(method, path, {"ttl_seconds": 5} if method == "PUT" else None, key=BOB).status == 404
    assert served.ask("GET", f"training_runs/{run.id}", key=BOB).status == 404
    assert served.ask("GET", f"training_runs/{run.id}/checkpoints", key=BOB).status == 404
    assert served.ask("DELETE", f"{place}/publish", key=ALICE).status == 200
    assert statuses(BOB) == [404, 404, 404]


def test_checkpoints_of_others_are_reported_like_unknown_ones(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB))
    run = served.training_run(tenant=served.run(served.service.access.tenant(ALICE)))
    served.checkpoint(run)
    theirs = served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001", key=BOB)
    nobodys = served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/9999", key=BOB)
    assert theirs.status == nobodys.status == 404
    assert theirs.content.replace(b"0001", b"9999") == nobodys.content


def test_a_copy_outlives_its_source_and_belongs_to_its_creator(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB))
    alice, bob = (served.run(served.service.access.tenant(key)) for key in (ALICE, BOB))
    source = served.checkpoint(run := served.training_run(tenant=alice), is_public=True, has_optimizer=True)
    path = tinkex.RestClient(base_url=served.base_url, api_key=BOB).copy_weights(source.path, ttl_seconds=60).result()
    assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/0001", key=ALICE).status == 200
    copy = served.run(served.service.db(served.store.get_checkpoint, path))
    assert copy is not None
    assert (copy.tenant, copy.is_public, copy.has_optimizer, copy.files) == (bob, False, True, source.files)
    assert copy.expires_at == served.clock.wall() + 60
    assert (served.config.data_dir / copy.folder / "adapter_config.json").read_bytes().startswith(b"{")
    # Clients of 0.4.1 read the run to make a training client of its weights.
    shown = served.ask("GET", f"training_runs/{copy.run_id}", key=BOB).json
    assert (shown["base_model"], shown["lora_rank"]) == ("tinkex/tiny", 8)
    assert served.ask("GET", f"training_runs/{copy.run_id}", key=ALICE).status == 404


def test_a_repeated_copy_is_one_copy(served: Served) -> None:
    served.session("mine")
    source, brief = served.checkpoint(run := served.training_run()), served.checkpoint(run, "brief")
    keyed = {"x-idempotency-key": "k"}
    first = served.ask("POST", "copy_weights", {"source_path": brief.path}, headers=keyed).json
    assert served.ask("DELETE", f"training_runs/{run.id}/checkpoints/weights/brief").status == 200
    assert served.ask("POST", "copy_weights", {"source_path": brief.path}, headers=keyed).json == first
    body = {"source_path": source.path, "session_id": "mine", "model_seq_id": 4}
    placed, retried = (served.ask("POST", "copy_weights", body).json for _ in range(2))
    assert placed == retried == {"tinker_path": "tinker://mine:train:4/weights/0001"}
    assert served.ask("GET", "checkpoints").json["cursor"]["total_count"] == 3


def test_two_attempts_of_one_copy_at_once_leave_one_folder_and_delete_beside_the_database(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the slower one deleted its files on the database's thread, which a hung bucket would have kept."""
    source, folders, both = served.checkpoint(served.training_run()), served.service.store.folders, threading.Barrier(2)
    copy, remove, threads = folders.copy, folders.remove, list[str]()

    def copy_together(*args: Any) -> None:
        copy(*args)
        both.wait(10)

    def remove_noted(folder: str) -> None:
        threads.append(threading.current_thread().name)
        remove(folder)

    monkeypatch.setattr(folders, "copy", copy_together)
    monkeypatch.setattr(folders, "remove", remove_noted)
    body, keyed = {"source_path": source.path}, {"x-idempotency-key": "k"}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(served.ask, "POST", "copy_weights", body, headers=keyed) for _ in range(2)]
    first, second = (response.result() for response in asked)
    assert (first.status, second.status, first.json) == (200, 200, second.json)
    assert [name.split("_")[0] for name in threads] == ["tinkex-blobs"]
    assert served.ask("GET", "checkpoints").json["cursor"]["total_count"] == 2


def test_a_copy_does_not_replace_an_existing_run(served: Served) -> None:
    run = served.training_run()
    source = served.checkpoint(run)
    served.session("s")
    body = {"source_path": source.path, "session_id": "s", "model_seq_id": 0}
    assert served.ask("POST", "copy_weights", body).json == {"tinker_path": source.path}  # it is there already
    other = served.checkpoint(served.training_run("t:train:0"), "another")
    assert served.ask("POST", "copy_weights", {**body, "source_path": other.path}).json["code"] == "run_exists"
    assert served.ask("POST", "copy_weights", {**body, "session_id": "nobody"}).status == 404
    assert served.ask("POST", "copy_weights", {**body, "model_seq_id": None}).status == 400


def test_a_copy_is_put_into_the_requested_project(served: Served, rest: tinkex.RestClient) -> None:
    source = served.checkpoint(served.training_run())
    path = rest.copy_weights(source.path, "project-1").result()
    runs = rest.list_training_runs(project_id="project-1").result().training_runs
    assert [run.training_run_id for run in runs] == [path.removeprefix("tinker://").partition("/")[0]]
    usage = tinkex.AdminClient(base_url=served.base_url, api_key="tml-x").get_current_checkpoint_storage_usage
    assert usage("project-1").result().data[0].checkpoint_count == 1
    assert usage().result().data[0].checkpoint_count == 2
    assert usage().result().data[0].size_bytes == 2 * source.size_bytes


def test_changes_of_checkpoints_are_in_the_audit_log_of_the_day(served: Served) -> None:
    saved = served.checkpoint(run := served.training_run())
    place = f"training_runs/{run.id}/checkpoints/weights/0001"
    for method, path in (("POST", "/publish"), ("GET", "/archive"), ("DELETE", "")):
        served.ask(method, place + path)
        served.clock.advance(1)
    admin = tinkex.AdminClient(base_url=served.base_url, api_key="tml-x")
    entries = admin.get_audit_log("checkpoints").result().entries
    assert [entry.event for entry in entries] == ["checkpoint.publish", "checkpoint.download", "checkpoint.delete"]
    assert (entries[0].tinker_path, entries[0].model_id) == (saved.path, run.id)
    assert admin.get_audit_log("projects").result().entries == []
    served.clock.advance(86400)
    assert admin.get_audit_log().result().entries == []
    assert len(admin.get_audit_log(day=entries[0].timestamp.date()).result().entries) == 3
    assert served.ask("GET", "audit?day=yesterday").status == 400


def test_a_list_of_a_thousand_runs_sends_a_handful_of_statements(served: Served) -> None:
    """One query per run kept every other request waiting for 8.6 s."""
    first = served.training_run()
    rows = [values_of(replace(first, id=f"s:train:{n}", created_at=float(n))) for n in range(1, 1000)]
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        sent.append(statement)

    def fill() -> None:
        with served.store._write() as connection:
            connection.execute(runs.insert(), rows)
        event.listen(served.store._engine, "before_cursor_execute", note)

    async def run_it() -> None:
        await served.service.db(fill)

    served.run(run_it())
    answer = served.ask("GET", "training_runs?limit=1000")
    assert answer.status == 200 and len(answer.json["training_runs"]) == 1000
    assert len(sent) <= 6, sent


def test_a_list_of_runs_reads_the_checkpoints_of_all_of_them_in_one_statement(served: Served) -> None:
    """One query for each run's checkpoints kept every other request waiting for 8.6 s."""
    for number in range(30):
        run = served.training_run(f"s:train:{number}")
        served.checkpoint(run, "old")
        served.clock.advance(1)
        served.checkpoint(run, "new")
    with statements(served.store) as sent:
        answer = served.ask("GET", "training_runs?limit=1000")
    assert len([statement for statement, _ in sent if "checkpoints" in statement]) == 1
    shown = [run["last_checkpoint"]["checkpoint_id"] for run in answer.json["training_runs"]]
    assert shown == ["weights/new"] * 30
