"""What a client costs beside the official ones: CPU, wall time and memory for the same work, in one run.

    make bench          (about ten minutes; official packages go into throw-away environments)

Runs `../shared/bench/client_cost.py` against `../shared/bench/stub_server.py`, the clients taking turns, and writes the
medians and spreads to `benchmarks/results/client_cost.md`. A bare aiohttp loop (encode, post, read, nothing else) runs
in the same rounds: it is the floor that a client is measured against. `--before FOLDER` adds an older checkout of this
project to the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "bench"
RESULT = ROOT / "benchmarks" / "results" / "client_cost.md"
FIGURES = (
    "import_cpu_s", "import_rss_mb", "first_use_cpu_s", "sample_cpu_ms_each", "sample_wall_s", "datum_build_cpu_s",
    "fwdbwd_cpu_s", "train_cpu_s", "fwdbwd_wall_s", "peak_rss_mb",
)  # fmt: skip

BARS = {
    "sample_cpu_ms_each": "≥ 5", "sample_wall_s": "≥ 5", "import_cpu_s": "≥ 5", "import_rss_mb": "> 2",
    "train_cpu_s": "≥ 1",
}  # fmt: skip
BEFORE = "tinkex before"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--samples", type=int, default=2000)
    options.add_argument("--official", nargs="*", default=["0.36.0"], help="releases to compare with")
    options.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout of tinkex to compare with")
    options.add_argument("--keep", help="folder for the throw-away environments, to use them again")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.keep or temporary)
        pythons = {release: environment(folder, release) for release in chosen.official}
        # The stub runs where uvicorn is: in the first official environment, outside of what is measured.
        port, stub = start_stub(next(iter(pythons.values())))
        try:
            rounds = [one_round(pythons, port, chosen) for _ in range(chosen.rounds)]
            scale = growth(port)
        finally:
            stub.terminate()
            stub.wait(10)
    RESULT.write_text(report(rounds, scale, chosen, pythons))
    print(RESULT.read_text())


def environment(folder: Path, release: str) -> str:
    """A throw-away environment with one official release, and uvicorn for the stub."""
    place = folder / f"tinker-{release}"
    python = place / "bin" / "python"
    if not python.exists():
        print(f"installing tinker=={release} …", flush=True)
        venv.create(place, with_pip=True)
        wanted = [f"tinker=={release}", "uvicorn[standard]", "aiohttp", "--constraint", str(ROOT / "constraints.txt")]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *wanted], check=True)
    return str(python)


def start_stub(python: str) -> tuple[int, subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stub = subprocess.Popen([python, str(SHARED / "stub_server.py"), str(port)])
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/stats", timeout=1).read()
            return port, stub
        except OSError:
            time.sleep(0.1)
    stub.terminate()
    raise SystemExit("The stub server did not start.")


def one_round(pythons: dict[str, str], port: int, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    samples, costs = chosen.samples, {}
    for release, python in pythons.items():
        costs[f"tinker {release}"] = cost(python, "tinker", port, samples)
    if chosen.before is not None:
        costs[BEFORE] = cost(sys.executable, "tinkex", port, samples, chosen.before / "src")
    costs["tinkex"] = cost(sys.executable, "tinkex", port, samples, ROOT / "src") | {"first_use_cpu_s": first_use()}
    costs["bare loop"] = bare(next(iter(pythons.values())), port, samples)
    print({name: row.get("sample_cpu_ms_each") for name, row in costs.items()}, flush=True)
    return costs


def cost(python: str, module: str, port: int, samples: int, source: Path | None = None) -> dict[str, float]:
    command = [python, str(SHARED / "client_cost.py"), module, str(port), str(samples)]
    environ = quiet() if source is None else quiet() | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)
    if done.returncode:
        raise SystemExit(f"{module} failed: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def first_use() -> float:
    """Import moves cost to first use: so count that too (all public names and a client object)."""
    code = (
        "import time; c = time.process_time(); import tinkex;"
        "[getattr(tinkex, name) for name in tinkex.__all__];"
        "tinkex.ServiceClient(base_url='http://127.0.0.1:9'); print(time.process_time() - c)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def bare(python: str, port: int, samples: int) -> dict[str, float]:
    command = [python, str(ROOT / "benchmarks" / "bare_loop.py"), str(port), str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return dict(json.loads(done.stdout))


def growth(port: int) -> dict[int, float]:
    """CPU per sample with 1,000 and with 10,000 in flight."""
    runs: dict[int, list[float]] = {1000: [], 10000: []}
    for _ in range(3):
        for n, row in runs.items():
            row.append(cost(sys.executable, "tinkex", port, n, ROOT / "src")["sample_cpu_ms_each"])
    return {n: statistics.median(row) for n, row in runs.items()}


def quiet() -> dict[str, str]:
    return {**os.environ, "TINKER_API_KEY": "tml-stub", "TINKER_TELEMETRY": "0"}


def report(
    rounds: list[dict[str, dict[str, float]]],
    scale: dict[int, float],
    chosen: argparse.Namespace,
    pythons: dict[str, str],
) -> str:
    names = list(rounds[0])
    lines = [
        "# What the client costs",
        "",
        f"Generated by `make bench` on {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, {cpu_model()},",
        f"Python {platform.python_version()}, commit {commit()}; {chosen.rounds} interleaved rounds,",
        f"{chosen.samples} samples",
        "(1,000-token prompt, 100 tokens back) and 256 datums × 2,048 tokens. Median (smallest … largest).",
        "",
        "| figure | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for figure in FIGURES:
        cells = []
        for name in names:
            values = [row[name][figure] for row in rounds if figure in row[name]]
            cells.append(f"{statistics.median(values):.3g} ({min(values):.3g} … {max(values):.3g})" if values else "–")
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    lines += ["", "| ratio to tinkex, in the same round | median | bar |", "|---|---|---|"]
    others = [f"tinker {release}" for release in chosen.official] + [BEFORE] * (chosen.before is not None)
    for name in others:
        for figure, bar in BARS.items():
            # Imports are measured in whole milliseconds: ours, if it takes less, counts as one.
            ratios = [row[name][figure] / max(row["tinkex"][figure], 0.001) for row in rounds]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
            lines.append(f"| {name}: {figure} | {spread} | {'about 1' if name == BEFORE else bar} |")
    floor = [row["tinkex"]["sample_cpu_ms_each"] / row["bare loop"]["sample_cpu_ms_each"] for row in rounds]
    lines += [
        "",
        f"CPU per sample against the bare loop: {statistics.median(floor):.2f} times (aim: 2).",
        f"CPU per sample with 10,000 in flight against 1,000: {scale[10000] / scale[1000]:.2f} times "
        f"({scale[10000]:.3f} against {scale[1000]:.3f} ms; bar: 1.3).",
        "",
    ]
    return "\n".join(lines)


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")


def commit(folder: Path = ROOT) -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=folder)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
