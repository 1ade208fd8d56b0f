"""Which HTTP library should the SDK stand on? CPU and wall time of one sample through each candidate.

One sample is what the sampler sends: POST asample (1,000-token JSON prompt), POST retrieve_future (protobuf answer).
Each measurement runs in a fresh interpreter, candidates take turns, the median of the rounds counts. What is not
installed is left out; `bare` (asyncio and the httptools parser, no error handling) is a lower bound, not a candidate.

Run:  python benchmarks/http_library.py [--stub PATH] [--stub-python PYTHON] [--out benchmarks/results/http_library.md]
Needs uvicorn[standard] for the stub, and any of aiohttp, pyqwest, pyreqwest, httpx2, niquests, httptools, uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Post = Callable[[str, bytes, dict[str, str]], Awaitable[bytes]]
Rows = dict[tuple[str, str, str], list[dict[str, float]]]  # (library, loop, case) -> one row per round

HERE = Path(__file__).resolve().parent
HEADERS = {"x-api-key": "tml-stub", "user-agent": "tinkex/bench", "x-idempotency-key": "0" * 32}
JSON_BODY = HEADERS | {"content-type": "application/json"}
POLL = JSON_BODY | {"accept": "application/x-protobuf, application/json"}
PROTO_BODY = HEADERS | {"content-type": "application/x-protobuf"}
PROMPT = json.dumps(
    {
        "sampling_session_id": "s:sample:0",
        "seq_id": 1,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(1000))}]},
        "sampling_params": {"max_tokens": 100},
    },
    separators=(",", ":"),
).encode()
BIG = 4 * 2**20
BIG_DATUMS = b"\x1a\x00" * 512  # 512 empty datums: the stub answers each with 2,048 float32, 4 MiB in all
CONCURRENCY = (100, 400, 2000)


@asynccontextmanager
async def aiohttp_client(base: str, limit: int) -> AsyncIterator[Post]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=limit)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
            async with session.post(base + path, data=body, headers=headers) as response:
                return await response.read()

        yield post


@asynccontextmanager
async def pyqwest_client(base: str, limit: int) -> AsyncIterator[Post]:
    import pyqwest

    async with pyqwest.HTTPTransport(
        timeout=60, pool_max_idle_per_host=limit, max_connections_per_address=limit, enable_otel=False
    ) as transport:
        client = pyqwest.Client(transport)

        async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
            return (await client.post(base + path, headers=headers, content=body)).content

        yield post


@asynccontextmanager
async def pyreqwest_client(base: str, limit: int) -> AsyncIterator[Post]:
    from pyreqwest.client import ClientBuilder

    builder = ClientBuilder().max_connections(limit).pool_max_idle_per_host(limit)
    async with builder.timeout(datetime.timedelta(seconds=60)).build() as client:

        async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
            response = await client.post(base + path).headers(headers).body_bytes(body).build().send()
            return (await response.bytes()).to_bytes()

        yield post


@asynccontextmanager
async def httpx2_client(base: str, limit: int) -> AsyncIterator[Post]:
    import httpx2

    limits = httpx2.Limits(max_connections=limit, max_keepalive_connections=limit)
    async with httpx2.AsyncClient(limits=limits, timeout=60) as client:

        async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
            return (await client.post(base + path, content=body, headers=headers)).content

        yield post


@asynccontextmanager
async def niquests_client(base: str, limit: int) -> AsyncIterator[Post]:
    import niquests

    async with niquests.AsyncSession(pool_connections=1, pool_maxsize=limit) as session:

        async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
            return (await session.post(base + path, data=body, headers=headers, timeout=60)).content or b""

        yield post


@asynccontextmanager
async def bare_client(base: str, limit: int) -> AsyncIterator[Post]:
    import httptools

    host, port = base.removeprefix("http://").split("/")[0].split(":")
    prefix = base.removeprefix(f"http://{host}:{port}")

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def send(self, request: bytes) -> asyncio.Future[bytes]:
            self.parser = httptools.HttpResponseParser(self)
            self.parts: list[bytes] = []
            self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self.transport.write(request)
            return self.done

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_body(self, data: bytes) -> None:
            self.parts.append(data)

        def on_message_complete(self) -> None:
            self.done.set_result(b"".join(self.parts))

    idle: list[Connection] = []
    room = asyncio.Semaphore(limit)

    async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {prefix}{path} HTTP/1.1\r\nhost: {host}\r\n{lines}content-length: {len(body)}\r\n\r\n"
        async with room:
            connection = idle.pop() if idle else None
            if connection is None:
                _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
            answer = await connection.send(head.encode() + body)
            idle.append(connection)
        return answer

    yield post
    for connection in idle:
        connection.transport.close()


@asynccontextmanager
async def tinkex_client(base: str, limit: int) -> AsyncIterator[Post]:
    """What was built after the first run: httptools and h2 under pools of our own."""
    from tinkex.client._http.transport import Transport
    from tinkex.settings import Config
    from tinkex.wire.endpoints import Pool

    transport = Transport(Config(base_url=base, api_key="tml-stub", pools={kind.value: limit for kind in Pool}))

    async def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
        return (await transport.send(Pool.SAMPLE, "POST", base + path, headers, body, 60)).content

    yield post


# name -> (distribution, module whose import is timed, client)
CANDIDATES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "bare": ("httptools", "httptools", bare_client),
    "tinkex": ("tinkex", "tinkex.client._http.transport", tinkex_client),
    "pyqwest": ("pyqwest", "pyqwest", pyqwest_client),
    "pyreqwest": ("pyreqwest", "pyreqwest.client", pyreqwest_client),
    "aiohttp": ("aiohttp", "aiohttp", aiohttp_client),
    "httpx2": ("httpx2", "httpx2", httpx2_client),
    "niquests": ("niquests", "niquests", niquests_client),
}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # all threads of this process
    return usage.ru_utime + usage.ru_stime


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def one_sample(post: Post) -> None:
    request_id = json.loads(await post("asample", PROMPT, JSON_BODY))["request_id"]
    answer = await post("retrieve_future", b'{"request_id":"%s"}' % request_id.encode(), POLL)
    assert len(answer) > 800


async def samples(post: Post, count: int, concurrency: int) -> int:
    """Run `count` samples; returns how many had to be repeated because a request failed."""
    todo = iter(range(count))
    failed = 0

    async def worker() -> None:
        nonlocal failed
        for _ in todo:
            while True:
                try:
                    await one_sample(post)
                    break
                except Exception:  # each library has its own error tree
                    failed += 1
                    if failed > count:
                        raise

    await asyncio.gather(*(worker() for _ in range(min(concurrency, count))))
    return failed


async def big_request(post: Post) -> None:
    await post("no_such_path", bytes(BIG), PROTO_BODY)  # 404, after the stub has read it all


async def big_answer(post: Post) -> None:
    request_id = json.loads(await post("forward_backward", BIG_DATUMS, PROTO_BODY))["request_id"]
    assert len(await post("retrieve_future", b'{"request_id":"%s"}' % request_id.encode(), POLL)) > BIG


async def measure(name: str, base: str, case: str, count: int) -> dict[str, float]:
    """CPU milliseconds and wall milliseconds each, for `count` repetitions of a case ('100' is a concurrency)."""
    big = {"big_request": big_request, "big_answer": big_answer}.get(case)
    async with CANDIDATES[name][2](base, 1 if big else int(case)) as post:
        await (big(post) if big else samples(post, 50, 10))  # warm up
        wall, cpu, failed = time.perf_counter(), cpu_s(), 0
        if big:
            for _ in range(count):
                await big(post)
        else:
            failed = await samples(post, count, int(case))
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
        return {"cpu_ms": cpu / count * 1000, "wall_ms": wall / count * 1000, "failed": failed}


def child(name: str, loop: str, base: str, case: str, count: int) -> None:
    rss, cpu = rss_mb(), cpu_s()
    importlib.import_module(CANDIDATES[name][1])
    out = {"import_ms": (cpu_s() - cpu) * 1000, "import_mb": rss_mb() - rss}
    if case != "import":
        if loop == "uvloop":
            import uvloop

            out |= uvloop.run(measure(name, base, case, count))
        else:
            out |= asyncio.run(measure(name, base, case, count))
    print(json.dumps(out | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)


def run_child(name: str, loop: str, base: str, case: str, count: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, loop, base, case, str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not result.stdout:
        raise SystemExit(f"{name} {loop} {case} failed:\n{result.stderr[-2000:]}")
    # The work was done and printed; a bad exit code now means that the interpreter did not end cleanly.
    return dict(json.loads(result.stdout)) | {"aborted": int(result.returncode != 0)}


def start_stub(python: str, stub: str) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([python, stub, str(port)])
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, f"http://127.0.0.1:{port}/api/v1/"
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise SystemExit("the stub does not listen")


def spread(values: list[float], digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return f"## {title}\n" + "\n".join(lines) + "\n"


def report(names: list[str], loops: list[str], got: Rows, args: Any) -> str:
    def column(name: str, loop: str, case: str, key: str, digits: int = 3) -> str:
        return spread([row[key] for row in got[name, loop, case]], digits)

    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpuinfo if "model name" in line), "unknown CPU")
    libraries = sorted({CANDIDATES[name][0] for name in names} | {"uvloop"} & set(loops))
    versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library in libraries)
    parts = [
        "# Cost of one sample by HTTP library\n",
        "Written by `benchmarks/http_library.py`; read with `docs/decisions/http-library.md`.\n",
        f"* Hardware: {model}, {os.cpu_count()} cores (the stub service runs on the same machine)\n"
        f"* Versions: Python {platform.python_version()}, {platform.system()} {platform.release()}; {versions}\n"
        f"* Command: `python benchmarks/http_library.py --samples {args.samples} --rounds {args.rounds}`\n"
        f"* Date: {datetime.date.today()}\n"
        f"* Median (least to most) of {args.rounds} interleaved rounds, {args.samples} samples of two requests each\n",
    ]
    for key, title in (("cpu_ms", "CPU of the client"), ("wall_ms", "Wall time (bounded by the stub's own CPU)")):
        header = ["ms per sample", "loop", *(f"{c} at once" for c in CONCURRENCY)]
        rows = [[n, loop, *(column(n, loop, str(c), key) for c in CONCURRENCY)] for loop in loops for n in names]
        parts.append(table(title, header, rows))
    header = ["library", "import CPU ms", "import MB", "peak MB, 2000 at once", "4 MiB request CPU ms"]
    header += ["4 MiB answer CPU ms", "failed samples", "aborted at exit"]
    rows = []
    for name in names:
        weight = [column(name, "asyncio", "import", key, 1) for key in ("import_ms", "import_mb")]
        big = [column(name, "asyncio", case, "cpu_ms", 1) for case in ("big_request", "big_answer")]
        runs = [row for (who, _, case), runs_ in got.items() if who == name and case != "import" for row in runs_]
        ends = [f"{sum(row['failed'] for row in runs)}", f"{sum(row['aborted'] for row in runs)} of {len(runs)} runs"]
        rows.append([name, *weight, column(name, "asyncio", "2000", "peak_mb", 0), *big, *ends])
    parts.append(table("Weight, large bodies, faults (asyncio loop; import after `asyncio` is loaded)", header, rows))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", default=str(HERE.parent / "../shared/bench/stub_server.py"))
    parser.add_argument("--stub-python", default=sys.executable)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--out", default=str(HERE / "results/http_library.md"))
    args = parser.parse_args()
    names = [name for name in args.only if importlib.util.find_spec(CANDIDATES[name][0])]
    loops = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
    cases = [(loop, str(c), args.samples) for loop in loops for c in CONCURRENCY]
    cases += [("asyncio", "import", 0), ("asyncio", "big_request", 20), ("asyncio", "big_answer", 20)]
    got: Rows = {}
    stub, base = start_stub(args.stub_python, args.stub)
    try:
        for round_no in range(args.rounds):
            for loop, case, count in cases:
                turn = round_no % len(names)
                for name in names[turn:] + names[:turn]:
                    row = run_child(name, loop, base, case, count)
                    got.setdefault((name, loop, case), []).append(row)
                    print(round_no, name, loop, case, row, file=sys.stderr, flush=True)
    finally:
        stub.terminate()
        stub.wait()
    Path(args.out).write_text(report(names, loops, got, args))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, name, loop, base, case, count = sys.argv
        child(name, loop, base, case, int(count))
    else:
        main()
