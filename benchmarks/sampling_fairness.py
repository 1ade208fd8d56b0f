"""How long one token of one tenant takes beside 1,024 × 256 tokens of another, on a real service.

    python -m benchmarks.sampling_fairness          (writes benchmarks/results/sampling_fairness.md)

The tiny model, plain HTTP. Idle and contended calls are interleaved: before every contended call the large request is
submitted, after it cancelled, so that a machine that gets slower does not look like one that is unfair.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.client_cost import commit, cpu_model
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import TOKENS, Raw, text

ROUNDS = 25
FILL_S = 0.3
"""How long the large request runs before the small one comes: all rows are taken after the first few steps."""
KEYS = ("tml-alice-0123456789", "tml-bob-0123456789ab")
RESULTS = Path(__file__).parent / "results" / "sampling_fairness.md"


def sample_ms(tenant: Raw) -> float:
    began = time.perf_counter()
    body = {"base_model": "tinkex/tiny", "prompt": text(TOKENS), "sampling_params": {"max_tokens": 1}}
    answer = tenant.poll(tenant.post("asample", body).json["request_id"])
    assert answer.status == 200, answer
    return (time.perf_counter() - began) * 1e3


def measure(server: LiveServer) -> tuple[list[float], list[float]]:
    """Milliseconds of every idle and every contended call."""
    alice, bob = (Raw(server, key) for key in KEYS)
    large = {"base_model": "tinkex/tiny", "prompt": text(TOKENS), "num_samples": 1024}
    large["sampling_params"] = {"max_tokens": 256, "stop": []}
    idle: list[float] = []
    contended: list[float] = []
    for _ in range(3):
        sample_ms(alice)
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        idle.append(sample_ms(alice))
        request = bob.post("asample", large).json["request_id"]
        time.sleep(FILL_S)
        contended.append(sample_ms(alice))
        bob.post("cancel_future", {"request_id": request})
        time.sleep(0.05)
    return idle, contended


def main() -> int:
    flags = [word for key in KEYS for word in ("--api-key", key)]
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder) / "data", *flags) as server:
        idle, contended = measure(server)
    text = "\n".join(
        [
            "# One token beside another tenant's 1,024 × 256",
            "",
            f"Written by `python -m benchmarks.sampling_fairness` on {dt.date.today()}: 2 cores, {cpu_model()}, "
            f"Python {platform.python_version()}, commit {commit()}.",
            f"Tiny model, plain HTTP, {ROUNDS} calls of each kind, interleaved. Median (smallest … largest).",
            "",
            "| | one token |",
            "|---|---|",
            f"| idle | {_spread(idle)} |",
            f"| beside 1,024 × 256 | {_spread(contended)} |",
            "",
            f"Ratio of the medians: {statistics.median(contended) / statistics.median(idle):.1f}.",
            "",
        ]
    )
    RESULTS.write_text(text)
    print(text)
    return 0


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ms ({min(values):.0f} … {max(values):.0f})"


if __name__ == "__main__":
    raise SystemExit(main())
