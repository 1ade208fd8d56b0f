"""One client at one server, asked over stdin: `{"do": "forward"}` is answered with the seconds it took.

    python peers_driver.py (tinkex | tinker) URL MODEL          (the key is in TINKER_API_KEY)
    python peers_driver.py serve-tuft PORT CONFIG FOLDER

`engine_peers` starts it, with our client in our environment or with the official one in a peer's. So it knows nothing
of this checkout, and of the clients only what both have. Below is the other end, which starts and stops processes.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

START_S, REQUEST_S, STOP_S = 180.0, 120.0, 15.0
"""A server or driver that is silent for longer is ended, and left out."""
NAMESPACE = f"tinkex-peers-{os.getpid()}"
SEQUENCES, LENGTH, PROMPT, NEW = 8, 256, 32, 64


class Works:
    """What is measured. An adapter is made at once, its sampler when it is first asked for."""

    def __init__(self, module: str, url: str, model: str) -> None:
        # Both clients have the same names: that is the point of ours.
        tinker: Any = importlib.import_module(module)
        self.types: Any = tinker.types
        service = tinker.ServiceClient(base_url=url)
        self.training: Any = service.create_lora_training_client(model, rank=8, seed=0, train_unembed=False)
        self.sampler: Any = None
        source = random.Random(0)  # every driver sends the same sequences
        self.data = [self.datum([source.randrange(100, 40_000) for _ in range(LENGTH + 1)]) for _ in range(SEQUENCES)]
        self.fresh = random.Random(module + url)

    def datum(self, row: list[int]) -> Any:
        tensor = self.types.TensorData
        inputs = {
            "target_tokens": tensor(data=row[1:], dtype="int64", shape=[LENGTH]),
            "weights": tensor(data=[1.0] * LENGTH, dtype="float32", shape=[LENGTH]),
        }
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)

    def forward_backward(self) -> dict[str, float]:
        return self.passed(self.training.forward_backward)

    def forward(self) -> dict[str, float]:
        return self.passed(self.training.forward)

    def passed(self, verb: Callable[..., Any]) -> dict[str, float]:
        began = time.perf_counter()
        output = verb(self.data, "cross_entropy").result(timeout=REQUEST_S)
        seconds = time.perf_counter() - began
        logprobs = sum(sum(row["logprobs"].data) for row in output.loss_fn_outputs)
        return {"seconds": seconds, "tokens": SEQUENCES * LENGTH, "logprobs": float(logprobs)}

    def sample(self) -> dict[str, float]:
        if self.sampler is None:
            self.sampler = self.training.save_weights_and_get_sampling_client()
        params = self.types.SamplingParams(max_tokens=NEW, temperature=1.0, stop=[])
        # Prompts that nobody has sent before: none is found in a cache.
        prompts = [[self.fresh.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(SEQUENCES)]
        inputs = [self.types.ModelInput.from_ints(prompt) for prompt in prompts]
        began = time.perf_counter()
        futures = [self.sampler.sample(prompt, 1, params) for prompt in inputs]
        answers = [future.result(timeout=REQUEST_S) for future in futures]
        seconds = time.perf_counter() - began
        # Counted, not assumed: a server may end a sequence where another goes on.
        return {"seconds": seconds, "tokens": sum(len(row.tokens) for answer in answers for row in answer.sequences)}


def drive(module: str, url: str, model: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a client prints is no answer

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    wait_for(url)
    try:
        works = Works(module, url, model)
    except Exception as problem:
        answer(told(problem))
        return
    answer({})
    for line in sys.stdin:
        try:
            answer(getattr(works, json.loads(line)["do"])())
        except Exception as problem:
            answer(told(problem))


def told(problem: Exception) -> dict[str, str]:
    return {"error": f"{type(problem).__name__}: {problem}"}


def wait_for(url: str) -> None:
    """Until the server answers. For ever: who started us has the deadline, and sees whether the server still lives."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)


def serve_tuft(port: str, config: str, folder: str) -> None:
    """TuFT on a machine without a GPU. Its actor asks Ray for one and resets the counters of CUDA at every pass."""

    def without_cuda() -> None:
        torch: Any = importlib.import_module("torch")
        torch.cuda.reset_peak_memory_stats = lambda: None

    ray: Any = importlib.import_module("ray")
    hook = {"worker_process_setup_hook": without_cuda}
    ray.init(address="local", num_gpus=1, include_dashboard=False, runtime_env=hook)
    sys.argv = ["tuft", "launch", "--host", "127.0.0.1", "--port", port, "--config", config, "--checkpoint-dir", folder]
    importlib.import_module("tuft.cli").main()


# -- the other end: what engine_peers holds ----------------------------------------------------------------------------


class Skipped(Exception):
    """Why a peer, or one of its steps, is not in the table."""


@dataclass
class Driver:
    """A client at one server, in a process that the first question starts (`drive`)."""

    client: str
    command: Sequence[str]
    environ: dict[str, str]
    server: subprocess.Popen[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None

    def ask(self, work: str) -> dict[str, Any]:
        if self.process is None:
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=nothing, env=self.environ, start_new_session=True
            )
            self.answer(START_S)
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"do": work}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Skipped("its process has ended") from None
        return self.answer(REQUEST_S)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process and self.process.stdout
        ends = time.monotonic() + timeout_s
        while not select.select([self.process.stdout], [], [], 1.0)[0]:
            if self.server and self.server.poll() is not None:
                raise Skipped(f"the server ended with code {self.server.returncode}")
            if time.monotonic() > ends:
                self.stop()
                raise Skipped(f"no answer in {timeout_s:.0f} s")
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise Skipped(" ".join(str(answer["error"]).split())[:300])
        return answer

    def stop(self) -> None:
        if self.process:
            end(self.process)


def loopback_only(stack: ExitStack) -> list[str]:
    """The words before a command that let it see no network but its own 127.0.0.1."""
    for words in (["netns", "add", NAMESPACE], ["-n", NAMESPACE, "link", "set", "lo", "up"]):
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"no network namespace for Ray: {last_line(done.stderr)}")
        if words[1] == "add":
            stack.callback(leave_loopback)
    return ["ip", "netns", "exec", NAMESPACE]


def leave_loopback() -> None:
    """Everything in the namespace was started here, Ray's own processes too: they leave their parent's group."""
    pids = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", NAMESPACE], capture_output=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: each has a process group of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def last_line(text: str) -> str:
    """The last one that speaks of an error, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:300]


if __name__ == "__main__":
    if sys.argv[1] == "serve-tuft":
        serve_tuft(*sys.argv[2:])
    else:
        drive(*sys.argv[1:])
