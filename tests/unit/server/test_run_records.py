"""Endpoints for runs as people see them: lists with filters, find, rename, tag, archive, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from tests.unit.server.conftest import Served
from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.live import checkpoint
from tests.unit.server.test_worker import backward, done, new_run, running, scenario, step
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import runs
from tinkex.server.service import Service
from tinkex.server.training.residency import NOTES
from tinkex.server.training.steps import last_loss
from tinkex.store.journal import EndedStep
from tinkex.store.records import Home, OperationRecord

RETURNED = {"loss": 0.25, "metrics": {}}
ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789"


@pytest.fixture
def named(served: Served) -> Served:
    served.session()
    for number, (name, tags) in enumerate((("first try", ["dpo"]), ("second try", []), (None, ["dpo", "keep"]))):
        at = served.clock.wall() + number
        served.training_run(f"abcd{number}:train:0", name=name, tags=tags, created_at=at, last_request_at=at)
    return served


def ids(answer: Any) -> list[str]:
    return [run["training_run_id"][4] for run in answer.json["training_runs"]]


def test_a_run_is_listed_with_what_people_look_for(named: Served) -> None:
    run = named.ask("GET", "training_runs?q=first").json["training_runs"][0]
    wanted = {"name": "first try", "tags": ["dpo"], "status": "idle", "steps": 0, "loss": None, "archived_at": None}
    assert {key: run[key] for key in wanted} == wanted
    assert run["created_at"].endswith("Z")


def test_lists_are_searched_filtered_sorted_and_paged_with_their_total(named: Served) -> None:
    assert ids(named.ask("GET", "training_runs")) == ["2", "1", "0"]
    assert ids(named.ask("GET", "training_runs?q=TRY")) == ["1", "0"]
    assert ids(named.ask("GET", "training_runs?tag=dpo&order=-created")) == ["0", "2"]
    assert ids(named.ask("GET", "training_runs?order=name&base_model=tinkex/tiny")) == ["0", "1", "2"]
    assert ids(named.ask("GET", "training_runs?status=failed")) == []
    page = named.ask("GET", "training_runs?status=idle&limit=1&offset=1").json
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 3} and len(page["training_runs"]) == 1
    for query in ("status=happy", "archived=maybe", "order=color", "order=--created"):
        answer = named.ask("GET", f"training_runs?{query}")
        assert answer.status == 400 and "is one of" in answer.json["detail"]


def test_a_brief_list_leaves_out_what_may_be_large(named: Served) -> None:
    whole = named.ask("GET", "training_runs?q=first").json["training_runs"][0]
    [brief] = named.ask("GET", "training_runs?q=first&brief=true").json["training_runs"]
    assert brief == {name: value for name, value in whole.items() if name not in runs.LARGE_FIELDS}
    assert whole.keys() > runs.LARGE_FIELDS and whole["lora_config"]["rank"] == whole["lora_rank"]


def find(served: Served, text: str) -> Any:
    return served.ask("GET", f"training_runs/find?run={quote(text, safe='')}")


@pytest.mark.parametrize(
    "text", ["abcd1:train:0", "abcd1", "abcd1:0", "second try", "tinker://abcd1:train:0/weights/0001"]
)
def test_a_run_is_found_by_whatever_names_it(named: Served, text: str) -> None:
    assert find(named, text).json["training_run_id"] == "abcd1:train:0"


def test_latest_is_the_run_that_was_used_last(named: Served) -> None:
    assert find(named, "latest").json["training_run_id"] == "abcd2:train:0"


def test_a_beginning_of_several_ids_lists_the_candidates(named: Served) -> None:
    answer = find(named, "abcd")
    assert (answer.status, answer.json["code"]) == (400, "ambiguous_run")
    for text in ("abcd0:train:0 (first try)", "abcd1:train:0 (second try)", "abcd2:train:0"):
        assert text in answer.json["detail"]


@pytest.mark.parametrize("text", ["nothing", "abc", "", "%", "ABCD1", "\x00", "tinker://other:train:0/weights/a"])
def test_an_unknown_name_is_404_and_says_how_runs_are_named(named: Served, text: str) -> None:
    answer = find(named, text)
    assert answer.status == 404 and "is not known: no run has this id or name" in answer.json["detail"]


def test_there_is_no_latest_run_yet(served: Served) -> None:
    assert find(served, "latest").json["detail"] == "There is no training run yet."


def test_a_run_is_renamed_tagged_and_archived_and_that_is_in_the_audit_log(named: Served) -> None:
    path = "training_runs/abcd1:train:0"
    changed = named.ask("PATCH", path, {"name": "  the best ", "tags": ["a", "b", "a"]}).json
    assert (changed["name"], changed["tags"], changed["archived_at"]) == ("the best", ["a", "b"], None)
    assert find(named, "the best").json["training_run_id"] == "abcd1:train:0"
    archived = named.ask("PATCH", path, {"archived": True}).json
    named.clock.advance(60)
    assert named.ask("PATCH", path, {"archived": True}).json["archived_at"] == archived["archived_at"]
    assert ids(named.ask("GET", "training_runs")) == ["2", "0"]
    assert ids(named.ask("GET", "training_runs?archived=only")) == ["1"]
    assert named.ask("PATCH", path, {"archived": False, "name": ""}).json["name"] is None
    assert len(ids(named.ask("GET", "training_runs"))) == 3
    entries = named.ask("GET", "audit").json["entries"]
    assert [entry["event"] for entry in entries] == ["run.update"] * 4


@pytest.mark.parametrize(
    "body",
    [
        {"name": 5},
        {"name": "latest"},
        {"name": "tinker://x"},
        {"name": "a\nb"},
        {"name": "x" * 201},
        {"tags": "dpo"},
        {"tags": ["a,b"]},
        {"tags": [""]},
        {"tags": [f"t{n}" for n in range(33)]},
        {"archived": "yes"},
    ],
)
def test_a_bad_change_is_rejected_and_changes_nothing(named: Served, body: dict[str, object]) -> None:
    before = find(named, "abcd1").json
    answer = named.ask("PATCH", "training_runs/abcd1:train:0", {"name": "good", **body})
    assert answer.status == 400 and next(iter(body)) in answer.json["detail"]
    assert find(named, "abcd1").json == before


def test_a_tenant_finds_changes_and_deletes_no_run_of_another(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(ALICE, BOB))
    alice = served.run(served.service.access.tenant(ALICE))
    run = served.training_run(tenant=alice, name="mine")
    for text in (run.id, "mine", "s:tr", "latest"):
        assert served.ask("GET", f"training_runs/find?run={text}", key=BOB).status == 404
        assert served.ask("GET", f"training_runs/find?run={text}", key=ALICE).status == 200
    for method, query, body in (("PATCH", "", {"name": "stolen"}), ("DELETE", "?force=true", None)):
        assert served.ask(method, f"training_runs/{run.id}{query}", body, key=BOB).status == 404
    assert served.ask("GET", "training_runs?q=mine", key=BOB).json["cursor"]["total_count"] == 0
    assert served.ask("GET", f"training_runs/{run.id}", key=ALICE).json["name"] == "mine"


def test_the_loss_of_a_run_is_what_a_custom_loss_returned(named: Served) -> None:
    """Not that of the pass which carries the gradient: it was drawn rising while the program's loss fell."""
    run_id = "abcd1:train:0"
    kinds = (("forward", {"pass": "custom"}), ("forward_backward", {"pass": "custom", "custom_loss": RETURNED}))

    def train() -> None:
        for seq_id, (kind, notes) in enumerate([*kinds, ("optim_step", {})], 1):
            row = OperationRecord(
                request_id=f"op-{seq_id}", run_id=run_id, tenant="local", seq_id=seq_id, kind=kind, digest="",
                options={NOTES: notes},
            )  # fmt: skip
            named.store.add_operation(row, b"")
            metrics = {"loss:sum": -18.0, "weight:sum": 2.0}
            step = EndedStep(run_id, seq_id, last_loss) if kind == "optim_step" else None
            named.store.finish(
                row.request_id, at=1.0, result=b"{}", result_type="json", metrics=metrics, step=step
            )  # fmt: skip

    named.run(named.service.db(train))
    run = find(named, run_id).json
    assert (run["steps"], run["loss"]) == (1, 0.25)


# ── Against a worker with an engine


async def ask(service: Service, handler: Any, run_id: str, query: str = "") -> Any:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": []}
    state = {"app": make_app(service), "state": {"tenant": "t"}, "path_params": {"run_id": run_id}}
    return orjson.loads((await handler(ApiRequest({**scope, **state}))).body)


@scenario
async def test_steps_loss_and_status_are_those_of_what_was_trained(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        for seq_id in (1, 3):
            await done(service, await backward(service, queue, seq_id))
            await done(service, await step(service, queue, seq_id + 1, 0.5))
        described = await ask(service, runs.get_training_run, queue.run.id)
        steps = await service.db(service.store.operations_of, queue.run.id)
        assert described["steps"] == 2 == sum(row.kind == "optim_step" for row in steps)
        assert described["status"] == "running"


@scenario
async def test_a_run_in_use_is_deleted_only_with_force_and_then_wholly(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 0.5))
        engine.gate.clear()
        running_id, waiting_id = await step(service, queue, 2, 0.5), await step(service, queue, 3, 0.5)
        with pytest.raises(RequestRejected, match=r"is being trained.*With force=true") as refused:
            await ask(service, runs.delete_training_run, queue.run.id)
        assert refused.value.status == 409
        polls = [asyncio.create_task(service.waiters.wait(name, 10)) for name in (running_id, waiting_id)]
        deleting = asyncio.create_task(ask(service, runs.delete_training_run, queue.run.id, "force=true"))
        while await service.db(service.store.get_run, queue.run.id) is not None:
            await asyncio.sleep(0.002)
        with pytest.raises(RequestRejected, match="was unloaded"):
            await step(service, queue, 4, 0.5)
        engine.gate.set()
        assert (await deleting)["operations"] == 4
        await asyncio.gather(*polls)
        assert queue.run.id not in engine.adapters and service.worker.resident() == []
        assert service.worker.queued == 0 and await service.db(service.store.queued) == []
        with pytest.raises(RequestRejected, match="is not known"):
            await service.intake.run_queue("t", queue.run.id)
        await done(service, await step(service, await new_run(service, "other"), 1, 0.5))  # the worker goes on


@scenario
async def test_a_long_journal_is_deleted_in_pieces_between_which_others_use_the_store(tmp_path: Path) -> None:
    """100,000 operations in one transaction took four seconds, on the one thread that the store has."""
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        for seq_id in range(1, 6):
            await done(service, await step(service, queue, seq_id, 0.5))
        sizes, whole = [], service.store.delete_ended_operations

        def counted(run_id: str, most: int, home: Home | None) -> int:
            sizes.append(whole(run_id, 4, home))
            return sizes[-1]

        service.store.delete_ended_operations = counted  # type: ignore[method-assign, assignment]
        assert (await ask(service, runs.delete_training_run, queue.run.id))["operations"] == 6
        assert sizes == [4, 2, 0] and await service.db(service.store.operations_of, queue.run.id) == []


@scenario
async def test_a_run_with_checkpoints_names_them_and_takes_their_files_along(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)

        saved = checkpoint(f"tinker://{queue.run.id}/weights/0001", "t")
        folder = tmp_path / saved.folder
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        await service.db(service.store.add_checkpoint, saved)
        with pytest.raises(RequestRejected, match=rf"has 1 checkpoint: {saved.path}"):
            await ask(service, runs.delete_training_run, queue.run.id)
        assert folder.exists()
        deleted = await ask(service, runs.delete_training_run, queue.run.id, "force=true")
        assert deleted["checkpoints"] == [saved.path] and not folder.exists()
