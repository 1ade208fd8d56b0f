"""How much memory the engine's process takes: one large pass, every further adapter, many samples at once.

    python -m benchmarks.engine_memory [--model NAME] [--quick]     (writes benchmarks/results/engine_memory.md)

Linux only: the numbers are the kernel's, from /proc. `--quick` does less of everything and only prints.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tinkex
from benchmarks.engine_training import CACHE, MODEL, datum
from benchmarks.side_by_side import write
from tinkex.client.sampling import SamplingClient
from tinkex.client.training import TrainingClient
from tinkex.engine.models import registry
from tinkex.local_service import LocalServiceClient

TINY = "tinkex/tiny"
ENGINE = b"tinkex.engine.process.main"
RANK = 8
WAIT_S = 600.0
"""No single answer is waited for longer."""
GB, MB = 1e9, 1e6
CACHE_TOKENS = 16_384
"""For the samples: the prompts' cache, an eighth of it, is full after one burst. Rows meet max_rows first."""
STEADY_BYTES = 10 * MB
"""A guess: what the last burst may add to the highest of those before it. A leak of a sample's cache would add 25."""
OPTIMIZER = tinkex.AdamParams(learning_rate=1e-4)


@dataclass(frozen=True)
class Shape:
    """Of a base model, as its config.json says."""

    name: str
    vocabulary: int
    context: int
    adapter_numbers: int
    """Of rank 1 on attention and MLP."""
    cached_numbers: int
    """Keys and values of one token."""

    @staticmethod
    def of(name: str) -> Shape:
        config = json.loads((Path(registry.resolve(name, CACHE).folder) / "config.json").read_text(encoding="utf-8"))
        width, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        head = config.get("head_dim") or width // config["num_attention_heads"]
        queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
        attention = 2 * (width + queries) + 2 * (width + keys)  # q, o, k, v
        return Shape(
            name,
            config["vocab_size"],
            config["max_position_embeddings"],
            layers * (attention + 3 * (width + mlp)),
            layers * 2 * keys,
        )

    def fresh(self, count: int, length: int) -> list[list[int]]:
        """Random tokens that nobody has sent before: none is found in a cache."""
        most = min(self.vocabulary, 40_000) - 10  # special tokens are at the very end or at the start
        return [[random.randrange(20, most) for _ in range(length)] for _ in range(count)]

    def data(self, count: int, length: int) -> list[tinkex.Datum]:
        return [datum(row) for row in self.fresh(count, length + 1)]

    def trainer(self, service: tinkex.ServiceClient, rank: int = RANK, seed: int = 0) -> TrainingClient:
        return service.create_lora_training_client(self.name, rank=rank, seed=seed, train_unembed=False)


def engine_pid(service: LocalServiceClient) -> int:
    """The engine's process: the descendant of the server that runs `tinkex.engine.process.main`."""
    parents: dict[int, int] = {}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = _status(int(folder.name), "PPid")
            if ENGINE in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    for pid in found:
        above = pid
        while above in parents and above != service.pid:
            above = parents[above]
        if above == service.pid:
            return pid
    raise RuntimeError(f"The server {service.pid} has no engine: it ended, or its command is no longer {ENGINE!r}.")


def resident_bytes(pid: int) -> int:
    return _status(pid, "VmRSS") * 1024


def peak_bytes(pid: int) -> int:
    """Since the start or the last `forget_peak`."""
    return _status(pid, "VmHWM") * 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    """A number of /proc/PID/status; sizes are in kB, that is 1,024 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/{pid}/status has no {name}.")  # so it is of a process that has ended


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def sample_all(sampler: SamplingClient, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Send all at once and wait for all; how many gave as many tokens as they should."""
    params = tinkex.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
    futures = [sampler.sample(tinkex.ModelInput.from_ints(list(prompt)), 1, params) for prompt in prompts]
    return sum(len(future.result(WAIT_S).sequences[0].tokens) == tokens for future in futures)


def verdict(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def one_pass(shape: Shape, rows: int, length: int) -> list[str]:
    with tinkex.local(shape.name, ephemeral=True) as service:
        trainer, pid = shape.trainer(service), engine_pid(service)
        start, before = peak_bytes(pid), resident_bytes(pid)
        forget_peak(pid)
        trainer.forward_backward(shape.data(rows, length), "cross_entropy").result(WAIT_S)
        peak = peak_bytes(pid)
    say(f"forward_backward {rows}×{length}: {peak / GB:.2f} GB")
    return [
        f"## One forward_backward of {rows}×{length:,} tokens",
        "",
        "| engine's process | GB |",
        "|---|---|",
        f"| peak while it started | {start / GB:.2f} |",
        f"| before the pass | {before / GB:.2f} |",
        f"| **peak during the pass** | **{peak / GB:.2f}** |",
        "",
        f"Must 6 GB: {verdict(max(start, peak) <= 6 * GB)}; aim 4 GB: {verdict(max(start, peak) <= 4 * GB)}. "
        "The plain loop on SmolLM2-135M and 8×1,024: above 19.7 GB, then out of memory (measured earlier, not here).",
        "",
    ]


def adapters(shape: Shape, counts: Sequence[int]) -> list[str]:
    """One after another, so that passes never share a batch: what grows is adapters, not activations."""
    needed = 4 * RANK * shape.adapter_numbers * 4
    resident: dict[int, int] = {}
    with tinkex.local(shape.name, ephemeral=True) as service:
        pid = engine_pid(service)
        kept = []  # who lets go of a client unloads nothing, but the point is that all are there
        for number in range(1, max(counts) + 1):
            kept.append(trainer := shape.trainer(service, seed=number))
            trainer.forward_backward(shape.data(1, 32), "cross_entropy").result(WAIT_S)
            trainer.optim_step(OPTIMIZER).result(WAIT_S)
            if number in counts:
                resident[number] = resident_bytes(pid)
                say(f"{number} adapters: {resident[number] / GB:.3f} GB")
    lines = [
        f"## Every further adapter (rank {RANK}, attention and MLP, after a pass of 1×32 and an optim_step)",
        "",
        "| adapters | engine, GB | each further one, MB | of what its numbers take |",
        "|---|---|---|---|",
        f"| {counts[0]} | {resident[counts[0]] / GB:.3f} | | |",
    ]

    def each(few: int, many: int) -> float:
        return (resident[many] - resident[few]) / (many - few)

    for few, many in pairwise(counts):
        extra = each(few, many)
        lines.append(f"| {many} | {resident[many] / GB:.3f} | {extra / MB:.2f} | {extra / needed:.2f} |")
    overall = each(counts[0], counts[-1]) / needed
    return [
        *lines,
        "",
        f"Weights, gradient and two moments of {RANK * shape.adapter_numbers:,} float32 numbers take "
        f"{needed / MB:.2f} MB. From {counts[0]} to {counts[-1]} adapters each takes **{overall:.2f}** of that; "
        f"must 1.2: {verdict(overall <= 1.2)}.",
        "",
    ]


def samples(count: int, bursts: int) -> list[str]:
    shape = Shape.of(TINY)
    answered, resident, peaks = [], [], []
    with tinkex.local(TINY, max_cache_tokens=CACHE_TOKENS, ephemeral=True) as service:
        sampler = shape.trainer(service).save_weights_and_get_sampling_client()
        pid = engine_pid(service)
        sample_all(sampler, shape.fresh(64, 32), 32)
        before = resident_bytes(pid)
        for number in range(bursts):
            forget_peak(pid)
            began = time.perf_counter()
            answered.append(sample_all(sampler, shape.fresh(count, 32), 64))
            peaks.append(peak_bytes(pid))
            resident.append(resident_bytes(pid))
            say(f"burst {number + 1} of {bursts}: {answered[-1]} answered in {time.perf_counter() - began:.1f} s")
    # Prompts have a cache of their own, an eighth as large.
    caches = CACHE_TOKENS * 9 / 8 * shape.cached_numbers * 4
    added = peaks[-1] - max(peaks[:-1])
    lines = [
        f"## {count} samples at once on the tiny model (prompt 32, 64 new tokens, max_cache_tokens={CACHE_TOKENS})",
        "",
        "| burst | answered in full | engine's peak, MB | after it, MB |",
        "|---|---|---|---|",
        f"| before (64 samples) | | | {before / MB:.0f} |",
    ]
    for number, (good, peak, after) in enumerate(zip(answered, peaks, resident, strict=True), 1):
        lines.append(f"| {number} | {good} of {count} | {peak / MB:.0f} | {after / MB:.0f} |")
    return [
        *lines,
        "",
        f"All answered: {verdict(all(good == count for good in answered))}. The last burst adds {added / MB:.0f} MB to "
        f"the highest peak before it; must be within {STEADY_BYTES / MB:.0f} MB: {verdict(added <= STEADY_BYTES)}. "
        f"All of it is {(max(peaks) - before) / MB:.0f} MB above before, where full caches take {caches / MB:.0f} MB.",
    ]


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--quick", action="store_true", help="do less of everything, print it and write no file")
    return parser.parse_args()


def report(name: str, title: str, lines: Sequence[str], *, quick: bool) -> None:
    """A quick run is no result: it is printed only."""
    body = "\n".join(lines)
    if quick:
        print(body)
    else:
        write(name, title, name, body)


def main() -> None:
    given = arguments(__doc__)
    shape = Shape.of(given.model)
    lines = [
        f"Model `{given.model}` in float32, through HTTP with our client. Resident memory of the engine alone.",
        "",
    ]
    lines += one_pass(shape, 8, 128 if given.quick else 1024)
    lines += adapters(shape, (1, 4, 16) if given.quick else (1, 16, 64))
    lines += samples(512, 2 if given.quick else 6)
    report("engine_memory", "How much memory the engine takes", lines, quick=given.quick)


if __name__ == "__main__":
    main()
