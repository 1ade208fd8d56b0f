"""Endpoints for what the user's program logs for its run: numbers and samples. And the whole history as one file.

A retry of a request adds nothing: its response is remembered under its idempotency key, in the same transaction.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Row
from starlette.responses import Response, StreamingResponse

from tinkex.server.http import views
from tinkex.server.http.errors import RequestRejected, bad_request, json_response, not_found
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes.insight import steps_after
from tinkex.server.routes.sessions import idempotency_key
from tinkex.server.service import Service
from tinkex.server.training.intake import MAX_SEQ
from tinkex.store.records import RunRecord
from tinkex.store.runs.logged_store import NewRows

MAX_ENTRIES = 1000
"""Entries, and samples, of one request."""
MAX_METRICS = 500
"""Numbers of one entry."""
MAX_NAME = 200
MAX_PAGE = 10_000
DEFAULT_PAGE = 1000
Fields = dict[str, Any]


async def log_metrics(request: ApiRequest) -> Response:
    """Store entries and samples of a run, all or none of them."""
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    body, now = await request.read_json(), service.clock.wall()
    new = NewRows(
        [_entry(row, where, now) for where, row in _objects(body, "entries")],
        [_sample(row, where, now) for where, row in _objects(body, "samples")],
    )
    content = orjson.dumps({"entries": len(new.entries), "samples": len(new.samples)})

    def check(metric_bytes: int, sample_bytes: int) -> None:
        service.ledger.check("max_run_metric_bytes", metric_bytes, f"Run {run.id} would have {metric_bytes} bytes")
        service.ledger.check("max_run_sample_bytes", sample_bytes, f"Run {run.id} would have {sample_bytes} bytes")

    key = idempotency_key(request, f"log_metrics {run.id}")
    add = partial(service.store.add_logged, tenant=request.tenant, key=key, response=content, at=now)
    response = await service.db(add, run.id, new, check)
    if response is None:  # deleted a moment ago
        raise not_found("training run", run.id)
    return Response(response, media_type="application/json")


async def run_metrics(request: ApiRequest) -> Response:
    return await _page(request, "entries", request.service.store.run_metrics_after, _entry_view)


async def run_samples(request: ApiRequest) -> Response:
    return await _page(request, "samples", request.service.store.run_samples_after, _sample_view)


async def _page(
    request: ApiRequest, name: str, read: Callable[[str, int, int], list[Row[Any]]], view: Callable[[Row[Any]], Fields]
) -> Response:
    run = await request.find_run(request.path_params["run_id"])
    try:
        after = max(int(request.query_params.get("after", 0)), 0)
        most = int(request.query_params.get("most", DEFAULT_PAGE))
    except ValueError:
        raise bad_request("after and most must be whole numbers.", "bad_page") from None
    rows = await request.service.db(read, run.id, after, min(max(most, 1), MAX_PAGE))
    return json_response({name: [view(row) for row in rows], "next": rows[-1].number if rows else after})


def _entry_view(row: Row[Any]) -> Fields:
    return {
        "number": row.number,
        "step": row.step,
        "seq_id": row.seq_id,
        "time": views.time_text(row.at),
        "metrics": row.metrics,
    }


def _sample_view(row: Row[Any]) -> Fields:
    return {"number": row.number, "step": row.step, "time": views.time_text(row.at), **row.sample}


# -- what a request may contain ----------------------------------------------------------------------------------------


def _objects(body: Fields, name: str) -> list[tuple[str, Fields]]:
    rows = _given(body, name, [])
    if not isinstance(rows, list) or len(rows) > MAX_ENTRIES or not all(isinstance(row, dict) for row in rows):
        raise bad_request(f"{name} must be a list of at most {MAX_ENTRIES:,} objects.", f"bad_{name}")
    return [(f"{name}[{index}]", row) for index, row in enumerate(rows)]


def _entry(row: Fields, where: str, now: float) -> Fields:
    metrics = row.get("metrics")
    if not isinstance(metrics, dict) or not 0 < len(metrics) <= MAX_METRICS:
        raise _bad(f"{where}.metrics", f"an object with 1 to {MAX_METRICS} numbers")
    if any(len(name) > MAX_NAME for name in metrics):
        raise _bad(f"{where}.metrics", f"numbers by names of at most {MAX_NAME} characters")
    numbers = {name: _number(value, f"{where}.metrics[{name!r}]") for name, value in metrics.items()}
    return {
        "step": _whole(row, "step", where),
        "seq_id": _whole(row, "seq_id", where),
        "at": _time(row, where, now),
        "metrics": numbers,
    }


def _sample(row: Fields, where: str, now: float) -> Fields:
    metadata = _given(row, "metadata", {})
    if not isinstance(metadata, dict):
        raise _bad(f"{where}.metadata", "an object")
    texts = {name: _given(row, name, "") for name in ("prompt", "text")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise _bad(f"{where}.{name}", "text")
    reward = _number(row.get("reward"), f"{where}.reward")
    sample = {**texts, "reward": reward, "metadata": metadata}
    return {"step": _whole(row, "step", where), "at": _time(row, where, now), "sample": sample}


def _given(row: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field, or the default if it is absent or null."""
    value = row.get(name)
    return default if value is None else value


def _number(value: Any, where: str) -> float | None:
    """Return a number, or None for null: clients send null for what is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(where, "a number, or null for one that is not finite")
    return float(value)


def _whole(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEQ:
        raise _bad(f"{where}.{name}", "a whole number from 0 on, or null")
    return value


def _time(row: Mapping[str, Any], where: str, now: float) -> float:
    """Return when it was logged, in seconds since 1970; now if the client does not say."""
    value = row.get("time")
    if value is None:
        return now
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise _bad(f"{where}.time", "seconds since 1970")
    return float(value)


def _bad(where: str, rule: str) -> RequestRejected:
    return bad_request(f"{where} must be {rule}.", "bad_run_record")


# -- the history as one file -------------------------------------------------------------------------------------------


async def run_history(request: ApiRequest) -> Response:
    """Return steps and logged metrics as CSV or as lines of JSON, one step or entry each, by their numbers.

    It is read in pages and sent as it is read.
    """
    run = await request.find_run(request.path_params["run_id"])
    kind = request.query_params.get("format", "csv")
    if kind not in ("csv", "jsonl"):
        raise bad_request("format must be csv or jsonl.", "bad_format")
    rows = _history(request.service, run)
    name = f"{run.id.replace(':', '-')}.{kind}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    if kind == "jsonl":
        return StreamingResponse(_lines(rows), media_type="application/x-ndjson", headers=headers)
    columns = await _columns(request.service, run)
    return StreamingResponse(_csv(rows, columns), media_type="text/csv; charset=utf-8", headers=headers)


async def _history(service: Service, run: RunRecord) -> AsyncIterator[Fields]:
    after, count = -1, 0
    while True:
        steps, _ = await steps_after(service, run.id, after)
        for step in steps:
            count += 1
            yield {"kind": "step", "step": count, **step}
        if not steps:
            break
        after = steps[-1]["seq_id"]
    number = 0
    while entries := await service.db(service.store.run_metrics_after, run.id, number, DEFAULT_PAGE):
        for entry in entries:
            yield {"kind": "metrics", **_entry_view(entry)}
        number = entries[-1].number


async def _lines(rows: AsyncIterator[Fields]) -> AsyncIterator[bytes]:
    async for row in rows:
        yield orjson.dumps(row) + b"\n"


async def _columns(service: Service, run: RunRecord) -> list[str]:
    """Return the columns of the CSV: fixed ones, then every metric by name. It reads the history once for that."""
    fixed: dict[str, None] = {"kind": None}
    metrics: dict[str, None] = {}
    async for row in _history(service, run):
        fixed |= dict.fromkeys(name for name in row if name != "metrics")
        metrics |= dict.fromkeys(row["metrics"])
    return [*fixed, *(f"metrics.{name}" for name in sorted(metrics))]


async def _csv(rows: AsyncIterator[Fields], columns: list[str]) -> AsyncIterator[bytes]:
    yield _csv_line(columns)
    async for row in rows:
        values = {**row, **{f"metrics.{name}": value for name, value in row["metrics"].items()}}
        yield _csv_line([values.get(name) for name in columns])


def _csv_line(values: list[Any]) -> bytes:
    """Return one line. A text that a spreadsheet would run as a formula gets a quote in front."""
    text = io.StringIO(newline="")
    safe = [f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value for value in values]
    csv.writer(text).writerow(safe)
    return text.getvalue().encode()
