"""What a cluster costs beside one server: a hop, a step through a front and PostgreSQL, two engines on two cores.

    python -m benchmarks.cluster_cost [--rounds N] [hop] [step] [tenants]   (writes benchmarks/results/cluster_cost.md)

All servers of a part run at the same time and are asked in turns. PostgreSQL waits for the disk with every commit, as
in an installation. Real processes on 127.0.0.1: the network adds its own time to what is here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import tinkex
from benchmarks.client_cost import commit
from benchmarks.service_latency import DATUM, machine
from tests.integration.service.cluster import Cluster, Node
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw
from tests.unit.store.postgres import PostgresServer
from tinkex.server.tls import certificates

RESULTS = Path(__file__).parent / "results"
HOST, KEY = "127.0.0.1", "tml-bench"
SMALL, LARGE, STEPS = 200, 12, 60
"""Small requests, requests of 5 MB and steps in a round, for each way."""
LARGE_BYTES = 5_000_000
TENANTS, STEPS_EACH, DATA = 8, 3, 4
"""Tenants at once, steps of each in a round, and data of 128 tokens in a step."""
MODEL = "smollm2-135m"
PASS = tinkex.Datum(
    tinkex.ModelInput.from_ints(list(range(100, 228))), {"target_tokens": list(range(101, 229)), "weights": [1.0] * 128}
)
Times = dict[str, list[float]]
T = TypeVar("T")


class Kept:
    """One kept connection, as clients have it. A request's time does not contain that of the handshake."""

    def __init__(self, server: LiveServer) -> None:
        if server.tls is None:
            self._connection = http.client.HTTPConnection(HOST, server.port, timeout=300)
        else:
            self._connection = http.client.HTTPSConnection(HOST, server.port, timeout=300, context=server.tls)

    def post(self, path: str, body: bytes) -> bytes:
        headers = {"x-api-key": KEY, "content-type": "application/json"}
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status not in (200, 408):
            raise RuntimeError(f"{path}: {response.status} {content[:300]!r}")
        return content

    def done(self, path: str, body: bytes) -> None:
        request_id = json.loads(self.post(path, body))["request_id"]
        while json.loads(self.post("retrieve_future", _json(request_id=request_id))).get("type") == "try_again":
            pass


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def cluster_of(folder: Path, *, is_tls: bool = False, model: str = "tinkex/tiny") -> Iterator[Cluster]:
    """An empty cluster on a PostgreSQL of its own. Stops what was started in it."""
    folder.mkdir(parents=True)
    postgres = PostgresServer(is_synced=True)
    certs = None
    if is_tls:
        certs = folder / "certs"
        certificates.issue(certs, certificates.open_authority(certs), (HOST,), days=1)
    cluster = Cluster(postgres, folder, certs)
    cluster.models = (model,)
    try:
        yield cluster
    finally:
        cluster.stop()
        postgres.stop()


def hop(folder: Path, rounds: int) -> list[str]:
    """The same requests to the home of a run and to a front, without and with TLS."""
    small: list[Times] = []
    large: list[Times] = []
    with ExitStack() as stack:
        ways: dict[str, tuple[Kept, str]] = {}
        for name, is_tls in (("plain", False), ("TLS", True)):
            cluster = stack.enter_context(cluster_of(folder / name, is_tls=is_tls))
            node, front = cluster.node(), cluster.front()
            cluster.wait()
            run_id = Raw(front, KEY).run().id
            ways[f"home, {name}"], ways[f"front, {name}"] = (Kept(node), run_id), (Kept(front), run_id)
        numbers = dict.fromkeys((run_id for _, run_id in ways.values()), 0)
        for number in range(rounds):
            small.append({name: [] for name in ways})
            large.append({name: [] for name in ways})
            for at in range(SMALL):
                for name, (kept, run_id) in _turned(ways, at):
                    small[-1][name].append(seconds(lambda: kept.post("get_info", _json(model_id=run_id))))  # noqa: B023
            for at in range(LARGE):
                for name, (kept, run_id) in _turned(ways, at):
                    numbers[run_id] += 1
                    body = large_pass(run_id, numbers[run_id])
                    large[-1][name].append(seconds(lambda: kept.done("forward", body)))  # noqa: B023
            say(f"hop: round {number + 1} of {rounds}")
    about = f"{SMALL} small requests (`get_info`) and {LARGE} passes of {LARGE_BYTES / 1e6:.0f} MB of JSON with their"
    lines = ["## A hop", "", f"{about} result, each way, in a round.", ""]
    lines += ["| p50 | at home | through a front | the hop | the hop, by first deciles |", "|---|---|---|---|---|"]
    for kind in ("plain", "TLS"):
        home, far = (_middles(small, f"{way}, {kind}") for way in ("home", "front"))
        more = [(two - one) * 1e3 for one, two in zip(home, far, strict=True)]
        low = statistics.median(_lows(small, f"front, {kind}")) - statistics.median(_lows(small, f"home, {kind}"))
        hop = f"**+{_spread(more, 2)} ms**; must ≤ 1"
        lines.append(f"| small, {kind} | {_ms(home)} | {_ms(far)} | {hop} | +{low * 1e3:.2f} ms |")
    for kind in ("plain", "TLS"):
        home, far = (_middles(large, f"{way}, {kind}") for way in ("home", "front"))
        ratios = [two / one for one, two in zip(home, far, strict=True)]
        low = statistics.median(_lows(large, f"front, {kind}")) / statistics.median(_lows(large, f"home, {kind}"))
        hop = f"**{_spread(ratios, 2)} ×**; must ≤ 1.3"
        lines.append(f"| 5 MB, {kind} | {_ms(home)} | {_ms(far)} | {hop} | {low:.2f} × |")
    return [*lines, "", load(), ""]


def large_pass(run_id: str, number: int) -> bytes:
    """One pass of 5 MB that is little work for the engine: a field that nobody reads takes the room."""
    inputs = {
        "target_tokens": {"data": [20, 30, 40], "dtype": "int64"},
        "weights": {"data": [1.0] * 3, "dtype": "float32"},
    }
    chunk = {"type": "encoded_text", "tokens": [10, 20, 30]}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs, "x": "y" * 9_600}
    data = [datum] * (LARGE_BYTES // len(json.dumps(datum)))
    return _json(model_id=run_id, seq_id=number, forward_input={"data": data, "loss_fn": "cross_entropy"})


def step(folder: Path, rounds: int) -> list[str]:
    """`optim_step` with our client: one server on SQLite beside a front and a node on PostgreSQL."""
    found: list[Times] = []
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        single = stack.enter_context(LiveServer(folder / "single"))
        plain, encrypted = (
            stack.enter_context(cluster_of(folder / name, is_tls=name == "tls")) for name in ("plain", "tls")
        )
        for cluster in (plain, encrypted):
            cluster.node(), cluster.front()
            cluster.wait()
        servers: dict[str, LiveServer] = {
            "one server, SQLite": single,
            "a node, PostgreSQL": plain.servers[0],
            "front → node, PostgreSQL": plain.servers[1],
            "front → node, PostgreSQL, TLS": encrypted.servers[1],
        }
        trainers = {}
        for name, server in servers.items():
            client = stack.enter_context(tinkex.ServiceClient(base_url=server.url, api_key=KEY))
            trainers[name] = client.create_lora_training_client(base_model="tinkex/tiny", rank=8)
        params = tinkex.AdamParams(learning_rate=1e-3)
        for number in range(rounds):
            found.append({name: [] for name in servers})
            for at in range(STEPS):
                for name, trainer in _turned(trainers, at):
                    trainer.forward_backward([DATUM], "cross_entropy").result()
                    found[-1][name].append(seconds(lambda: trainer.optim_step(params).result()))  # noqa: B023
            say(f"step: round {number + 1} of {rounds}")
    about = f"Our client, one call at a time, tiny model, {STEPS} steps each way in a round."
    lines = ["## optim_step", "", about, "", "| | p50 | p10 | p95 |", "|---|---|---|---|"]
    for name in servers:
        high = [sorted(times[name])[int(0.95 * STEPS)] for times in found]
        must = "; must ≤ 20" if name.startswith("front") else ""
        lines.append(f"| {name} | **{_ms(_middles(found, name))}**{must} | {_ms(_lows(found, name))} | {_ms(high)} |")
    return [*lines, "", load(), ""]


def tenants(folder: Path, rounds: int) -> list[str]:
    """Eight tenants at once: two nodes with a core each behind a front, and one server with both cores."""
    keys = folder / "keys"
    folder.mkdir(parents=True)
    names = [f"tml-tenant-{number:02d}" for number in range(TENANTS)]
    keys.write_text("\n".join(names))
    found: list[Times] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(folder / "cluster", model=MODEL))
        shared = ("--keys-file", str(keys))
        nodes = [cluster.node("--threads", "1", *shared) for _ in range(2)]
        front = cluster.front(*shared)
        for core, node in enumerate(nodes):
            pin(node, core)
        cluster.wait()
        single = stack.enter_context(LiveServer(folder / "single", "--threads", "2", *shared, models=(MODEL,)))
        work = {}
        for name, server in (("two engines × one core", front), ("one engine × two cores", single)):
            work[name] = [
                stack.enter_context(tinkex.ServiceClient(base_url=server.url, api_key=key)).create_lora_training_client(
                    base_model=MODEL, rank=8
                )
                for key in names
            ]
        spread = [cluster.home_of(trainer.model_id).url for trainer in work["two engines × one core"]]
        pool = stack.enter_context(ThreadPoolExecutor(TENANTS))
        for trainers in work.values():
            list(pool.map(one_step, trainers))  # the first pass lays the weights out
        for number in range(rounds):
            found.append({name: [] for name in work})
            for name, trainers in _turned(work, number):
                found[-1][name].append(seconds(lambda: list(pool.map(some_steps, trainers))))  # noqa: B023
            say(f"tenants: round {number + 1} of {rounds}: {found[-1]}")
    tokens = STEPS_EACH * TENANTS * DATA * 128
    ratios = [times["one engine × two cores"][0] / times["two engines × one core"][0] for times in found]
    homes = " and ".join(str(spread.count(url)) for url in sorted(set(spread)))
    work_of_one = f"{STEPS_EACH} steps each, forward_backward {DATA}×128 and optim_step"
    about = f"{TENANTS} tenants at once, {work_of_one}, {MODEL}."
    lines = ["## Many tenants", "", f"{about} The nodes have {homes} of the runs.", "", "| | tokens/s |", "|---|---|"]
    lines += [f"| {name} | {_spread([tokens / times[name][0] for times in found], 0)} |" for name in work]
    return [*lines, "", f"Two engines against one: **{_spread(ratios, 2)} ×**.", "", load(), ""]


def some_steps(trainer: tinkex.TrainingClient) -> None:
    for _ in range(STEPS_EACH):
        one_step(trainer)


def one_step(trainer: tinkex.TrainingClient) -> None:
    passed = trainer.forward_backward([PASS] * DATA, "cross_entropy")
    trainer.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result(600)
    passed.result(600)


def pin(node: Node, core: int) -> None:
    """Keep a node and what it starts on one core."""
    assert node.process is not None
    node.wait_until_ready()
    for pid in (node.process.pid, node.engine_pid()):
        subprocess.run(["taskset", "-a", "-c", "-p", str(core), str(pid)], check=True, capture_output=True)


def _turned(ways: Mapping[str, T], at: int) -> Iterator[tuple[str, T]]:
    return iter(list(ways.items())[:: 1 if at % 2 else -1])


def _middles(rounds: Sequence[Times], name: str) -> list[float]:
    return [statistics.median(times[name]) for times in rounds]


def _lows(rounds: Sequence[Times], name: str) -> list[float]:
    """The first decile: what a neighbour on the machine disturbs least."""
    return [sorted(times[name])[len(times[name]) // 10] for times in rounds]


def _ms(values: Sequence[float]) -> str:
    return f"{_spread([value * 1e3 for value in values], 2)} ms"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def load() -> str:
    return f"Load of the machine at the end of this part: {os.getloadavg()[0]:.1f} (one minute)."


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


PARTS = {"hop": hop, "step": step, "tenants": tenants}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    if wrong := set(chosen.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(wrong)}")
    lines = ["# What a cluster costs", "", f"Written by `python -m benchmarks.cluster_cost` on {machine(commit())}"]
    lines += [f"{chosen.rounds} rounds; medians of a round, then their median (smallest … largest).", ""]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.parts or PARTS:
            lines += PARTS[name](Path(folder) / name, chosen.rounds)
    text = "\n".join(lines).rstrip() + "\n"
    if not chosen.parts:
        (RESULTS / "cluster_cost.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
