"""How the console copes with 1,000 runs of 1,000 steps and one run of 100,000 steps, in a real Chromium.

    python -m benchmarks.console_load [--keep FOLDER]      (writes benchmarks/results/console_load.md)

The store is filled before the service starts, through the store's own tables: training so many steps would take days.
Measured: from the address to a list that can be clicked, to a run's page with its curves drawn, and the bytes of the
requests that an open page repeats. `--keep` leaves the filled store in a folder, and uses one that is there.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client_cost import commit, cpu_model
from tests.integration.service.live import LiveServer
from tests.product.console.browser import Browser
from tinkex.store.records import RunRecord, SessionRecord
from tinkex.store.store import Store

RUNS, STEPS, LONG_STEPS = 1000, 1000, 100_000
ROUNDS = 5
POLLED_S = 8.0
BAR_MS, BAR_BYTES = 1000, 50_000
RESULTS = Path(__file__).parent / "results"
LONG = "long:train:0"
DATABASE = "tinkex.db"
BEGIN_S = 1_700_000_000.0

ADD_OPERATIONS = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :operations)
INSERT INTO operations (request_id, run_id, tenant, seq_id, kind, digest, state, created_at, finished_at, cost_tokens,
    tokens, options, engine_s, metrics)
SELECT runs.id || '-' || i, runs.id, 'local', i, CASE i % 2 WHEN 1 THEN 'forward_backward' ELSE 'optim_step' END,
    '0123456789abcdef0123456789abcdef', 'done', runs.created_at + i, runs.created_at + i + 0.5, 1536 * (i % 2),
    512 * (i % 2), '{}', 0.25,
    CASE i % 2 WHEN 1 THEN '{"loss:sum":' || round(512.0 * (0.3 + 6.0 / (1 + i * 0.01)) + abs(random() % 100), 4)
        || ',"weight:sum":512.0,"sampler_kl:mean":' || round(0.02 + abs(random() % 100) / 9000.0, 6)
        || ',"ratio:mean":' || round(1 + (random() % 100) / 5000.0, 6) || ',"clipped:mean":0.0125}'
    ELSE '{"learning_rate":0.0001,"step:max":' || (i / 2) || ',"grad_norm:max":'
        || round(3 + abs(random() % 100) / 60.0, 6) || ',"update_norm:max":0.0213,"weight_norm:max":'
        || round(9 + i * 0.0001, 6) || '}' END
FROM runs, n WHERE runs.id {which} :long
"""

COUNT_STEPS = """
UPDATE runs SET steps = (SELECT count(*) FROM operations WHERE run_id = runs.id AND kind = 'optim_step'),
    loss = (SELECT json_extract(metrics, '$."loss:sum"') / 512 FROM operations
            WHERE run_id = runs.id AND kind = 'forward_backward' ORDER BY seq_id DESC LIMIT 1)
"""


def seed(folder: Path) -> float:
    """Fill a new store, and return the seconds that it took."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(f"sqlite:///{folder / DATABASE}", folder)
    try:
        store.add_session(SessionRecord(id="bench", tenant="local", created_at=BEGIN_S, seen_at=BEGIN_S))
    finally:
        store.close()
    with sqlite3.connect(folder / DATABASE) as rows:
        for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -200000"):
            rows.execute(f"PRAGMA {setting}")
        for number in range(RUNS + 1):
            add_run(rows, number)
        rows.execute(ADD_OPERATIONS.replace("{which}", "<>"), {"operations": 2 * STEPS, "long": LONG})
        rows.execute(ADD_OPERATIONS.replace("{which}", "="), {"operations": 2 * LONG_STEPS, "long": LONG})
        rows.execute(COUNT_STEPS)
        rows.execute("ANALYZE")
    rows.close()
    return time.monotonic() - began


def add_run(rows: sqlite3.Connection, number: int) -> None:
    run = RunRecord(
        id=LONG if number == 0 else f"{number:08x}-5eed-4000-8000-000000000000:train:0",
        tenant="local",
        session_id="bench",
        base_model="tinkex/tiny",
        rank=8,
        seed=number,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
        created_at=BEGIN_S + 3600 * number,
        last_request_at=BEGIN_S + 3600 * number + 2 * STEPS,
    )
    values = {
        name: int(value) if isinstance(value, bool) else value
        for name in RunRecord.__slots__
        if (value := getattr(run, name)) is not None and isinstance(value, str | int | float)
    }
    values |= {"name": "long" if number == 0 else f"sweep {number}", "tags": '["seeded"]'}
    values["user_metadata"] = '{"name":"long"}' if number == 0 else f'{{"name":"sweep {number}","task":"benchmark"}}'
    places = ", ".join(f":{name}" for name in values)
    rows.execute(f"INSERT INTO runs ({', '.join(values)}) VALUES ({places})", values)


def cpu_ms() -> float:
    """The processor time of everything below this program: the service, its engine, the browser. Linux alone."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], spent[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    below, found = {os.getpid()}, 0
    while len(below) > found:
        found = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    return 1000.0 * sum(spent[pid] for pid in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """What was measured of one page."""

    ready_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    redraw_ms: list[float] = field(default_factory=list)
    first_bytes: float = 0.0
    poll_bytes: float = 0.0
    heap_mb: float = 0.0


READY = """
return new Promise((resolve) => {
    const look = () => document.querySelector(arguments[0]) && document.body.textContent.includes(arguments[1])
        ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now())))
        : setTimeout(look, 5);
    look();
});
"""
"""The time from the start of the navigation until the element is there and the browser has painted it."""
REDRAW = """
const range = document.getElementById("smooth");
if (!range) return null;
const before = performance.now();
range.value = (Number(range.value) + 1) % 5;
range.dispatchEvent(new Event("input"));
document.body.getBoundingClientRect();
return performance.now() - before;
"""
TRANSFERRED = """
const seen = performance.getEntriesByType("resource").filter((e) => e.name.includes("/api/"));
performance.clearResourceTimings();
return [seen.reduce((sum, e) => sum + e.transferSize, 0), seen.filter((e) => e.name.includes(arguments[0])).length];
"""


def measure(browser: Browser, address: str, css: str, text: str, polled: str) -> Seen:
    """`polled` is a part of the address of a request that the page makes once in each of its rounds."""
    seen = Seen()
    for _ in range(ROUNDS):
        before = cpu_ms()
        browser.open(address)
        seen.ready_ms.append(float(browser.run(READY, css, text)))
        seen.cpu_ms.append(cpu_ms() - before)
    time.sleep(4)  # what the page loads after its first view
    seen.first_bytes, _ = browser.run(TRANSFERRED, polled)
    time.sleep(POLLED_S)
    transferred, rounds = browser.run(TRANSFERRED, polled)
    seen.poll_bytes = transferred / max(rounds, 1)
    seen.heap_mb = browser.run("return performance.memory.usedJSHeapSize") / 1e6
    if browser.run("return document.getElementById('smooth') !== null"):
        seen.redraw_ms = [float(browser.run(REDRAW)) for _ in range(ROUNDS)]
    return seen


def measure_all(folder: Path, scratch: Path) -> dict[str, Seen]:
    short = f"{RUNS:08x}-5eed-4000-8000-000000000000:train:0"
    with LiveServer(folder) as server, Browser(scratch / "browser") as browser:
        run, line = f"{server.url}/#/runs", "path.line.is-loss"
        return {
            "the list of runs": measure(browser, run, "tbody a", f"sweep {RUNS}", "training_runs?"),
            "a run of 1,000 steps": measure(browser, f"{run}/{short}", line, f"sweep {RUNS}", "/steps"),
            "a run of 100,000 steps": measure(browser, f"{run}/{LONG}", line, "100,000", "/steps"),
        }


def page(found: dict[str, Seen], seed_s: float) -> str:
    rows = [
        f"| {name} | {statistics.median(seen.ready_ms):,.0f} | {max(seen.ready_ms):,.0f} | "
        f"{statistics.median(seen.cpu_ms):,.0f} | "
        f"{statistics.median(seen.redraw_ms or [0]):,.0f} | {seen.first_bytes / 1000:,.0f} | "
        f"{seen.poll_bytes / 1000:,.1f} | {seen.heap_mb:,.0f} |"
        for name, seen in found.items()
    ]
    head = f"{RUNS:,} runs of {STEPS:,} steps and one of {LONG_STEPS:,}, {platform.platform()}, {cpu_model()}"
    return "\n".join(
        [
            "# The console on a full store",
            "",
            f"{head}; commit {commit()}, {dt.datetime.now(dt.UTC):%Y-%m-%d}. Filled in {seed_s:.0f} s. `python -m "
            "benchmarks.console_load`: Chromium without a GPU, the service on the same cores, median of "
            f"{ROUNDS}. Ready: painted, and its links and plots can be used. Processor: service and browser, "
            "a new tab included. Redraw: all plots in view, at once.",
            "",
            "| page | ready, ms | slowest | processor, ms | redraw, ms | first load, kB | each poll, kB | heap, MB |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the filled store, or use the one there")
    parser.add_argument("--seed-only", action="store_true", help="fill the store and measure nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "data"
        seed_s = 0.0 if (folder / DATABASE).exists() else seed(folder)
        print(f"filled in {seed_s:.0f} s", flush=True)
        if given.seed_only:
            return 0
        found = measure_all(folder, Path(scratch))
    text = page(found, seed_s)
    print(text)
    (RESULTS / "console_load.md").write_text(text)
    slow = [name for name, seen in found.items() if statistics.median(seen.ready_ms) > BAR_MS]
    large = [name for name, seen in found.items() if seen.poll_bytes > BAR_BYTES]
    for name in slow:
        print(f"{name} took more than {BAR_MS:,} ms", file=sys.stderr)
    for name in large:
        print(f"a poll of {name} has more than {BAR_BYTES:,} bytes", file=sys.stderr)
    return 1 if slow or large else 0


if __name__ == "__main__":
    sys.exit(main())
