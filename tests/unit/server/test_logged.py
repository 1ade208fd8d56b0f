"""Metrics and samples of a program: stored once, bounded, each tenant's own, gone with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import new_run, running, scenario
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import logged
from tinkex.server.service import Service
from tinkex.store.runs import logged_store
from tinkex.store.runs.logged_store import delete_logged


async def ask(
    service: Service, name: str, run_id: str, body: Any = None, *, tenant: str = "t", query: str = "", key: str = ""
) -> dict[str, Any]:
    content = b"" if body is None else orjson.dumps(body)
    scope = {
        "type": "http",
        "method": "POST" if body is not None else "GET",
        "path": "/",
        "query_string": query.encode(),
    }
    headers = [(b"x-idempotency-key", key.encode())] if key else []
    state = {"app": make_app(service), "state": {"tenant": tenant}, "path_params": {"run_id": run_id}}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    request = ApiRequest({**scope, "headers": headers, **state}, receive)
    answer: dict[str, Any] = orjson.loads((await getattr(logged, name)(request)).body)
    return answer


def entry(**metrics: float | None) -> dict[str, Any]:
    return {"step": 1, "seq_id": 2, "time": 1000.5, "metrics": metrics}


@scenario
async def test_a_retried_request_adds_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        run_id = (await new_run(service)).run.id
        body = {"entries": [entry(reward=0.5), entry(reward=None)], "samples": [{"prompt": "p", "text": "t"}]}
        for _ in range(2):
            assert await ask(service, "log_metrics", run_id, body, key="k") == {"entries": 2, "samples": 1}
        await ask(service, "log_metrics", run_id, {"entries": [entry(reward=1.0)]}, key="another")
        told = await ask(service, "run_metrics", run_id)
        assert [(row["number"], row["metrics"]["reward"]) for row in told["entries"]] == [(1, 0.5), (2, None), (3, 1.0)]
        assert (told["entries"][0]["step"], told["entries"][0]["seq_id"], told["next"]) == (1, 2, 3)
        assert [
            row["number"] for row in (await ask(service, "run_metrics", run_id, query="after=1&most=1"))["entries"]
        ] == [2]
        assert (await ask(service, "run_metrics", run_id, query="after=9"))["next"] == 9
        assert len((await ask(service, "run_samples", run_id))["samples"]) == 1


@scenario
async def test_a_page_has_so_many_bytes_at_most_and_none_is_skipped(tmp_path: Path) -> None:
    """Ten thousand entries of five hundred numbers would be hundreds of megabytes of objects at once."""
    async with running(tmp_path, FakeEngine()) as service:
        run_id = (await new_run(service)).run.id
        await ask(service, "log_metrics", run_id, {"entries": [entry(**{"x" * 200: step}) for step in range(7)]})
        after, pages = 0, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logged_store, "PAGE_BYTES", 700)
            while page := (await ask(service, "run_metrics", run_id, query=f"after={after}"))["entries"]:
                pages.append([row["number"] for row in page])
                after = page[-1]["number"]
            assert [number for page in pages for number in page] == list(range(1, 8))
            assert 1 < max(map(len, pages)) < 7
            patch.setattr(logged_store, "PAGE_BYTES", 1)
            assert len((await ask(service, "run_metrics", run_id))["entries"]) == 1, "one in any case"


@scenario
async def test_other_tenants_find_no_such_run(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        run_id = (await new_run(service)).run.id
        for name, body in (("log_metrics", {"entries": [entry(a=1.0)]}), ("run_metrics", None), ("run_samples", None)):
            with pytest.raises(RequestRejected, match="not known"):
                await ask(service, name, run_id, body, tenant="stranger")
        with pytest.raises(RequestRejected, match="not known"):
            await ask(service, "run_history", run_id, tenant="stranger")


@scenario
async def test_a_run_that_would_have_too_much_is_told_and_keeps_what_it_has(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), max_run_metric_bytes=1024, max_run_sample_bytes=1024) as service:
        run_id = (await new_run(service)).run.id
        await ask(service, "log_metrics", run_id, {"entries": [entry(a=1.0)]})
        with pytest.raises(RequestRejected, match="max-run-metric-bytes"):
            await ask(service, "log_metrics", run_id, {"entries": [entry(a=1.0)] * 20}, key="k")
        with pytest.raises(RequestRejected, match="max-run-sample-bytes"):
            await ask(service, "log_metrics", run_id, {"samples": [{"prompt": "x" * 2000}]})
        assert len((await ask(service, "run_metrics", run_id))["entries"]) == 1
        assert await ask(service, "log_metrics", run_id, {"entries": [entry(a=1.0)]}, key="k") == {
            "entries": 1, "samples": 0,
        }  # fmt: skip


NO_RECORDS: list[Any] = [
    {"entries": {}}, {"entries": [1]}, {"entries": [{}]}, {"entries": [entry()]}, {"entries": [entry()] * 1001},
    {"entries": [{"metrics": {"a": "1"}}]}, {"entries": [{"metrics": {"a": True}}]}, {"samples": [{"text": 1}]},
    {"entries": [{**entry(a=1.0), "step": -1}]}, {"entries": [{**entry(a=1.0), "seq_id": 1.5}]},
    {"entries": [{**entry(a=1.0), "time": "now"}]}, {"samples": [{"metadata": []}]}, {"samples": [{"reward": "x"}]},
    {"entries": [{"metrics": {"x" * 201: 1.0}}]}, {"entries": [{"metrics": {f"m{n}": 1 for n in range(501)}}]},
    {"entries": [entry(a=1.0)], "samples": [1]},
]  # fmt: skip


@scenario
async def test_what_is_no_record_is_rejected_and_nothing_is_stored(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        run_id = (await new_run(service)).run.id
        for body in NO_RECORDS:
            with pytest.raises(RequestRejected) as caught:
                await ask(service, "log_metrics", run_id, body)
            assert caught.value.status == 400, body
        assert (await ask(service, "run_metrics", run_id))["entries"] == []


@scenario
async def test_what_was_logged_goes_with_its_run(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        run_id, other = (await new_run(service)).run.id, (await new_run(service, "o")).run.id
        for each in (run_id, other):
            await ask(service, "log_metrics", each, {"entries": [entry(a=1.0)], "samples": [{"text": "t"}]})
        with service.store._write() as connection:
            delete_logged(connection, run_id)
        assert (await ask(service, "run_metrics", run_id))["entries"] == []
        assert (await ask(service, "run_samples", run_id))["samples"] == []
        assert len((await ask(service, "run_metrics", other))["entries"]) == 1
