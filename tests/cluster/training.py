"""A client in a process of its own: trains step by step, says when each is done, and names the digests of the files.

    python -m tests.cluster.training URL STEPS [PAUSE_S]     # the key is in TINKER_API_KEY

It prints `run ID`, then `step N` after each step, then `done {"adapter_model.safetensors": sha256, …}`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import random
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request

import tinkex

MOST_S = 300.0
PAUSE_S = 0.05
"""How long the client thinks between two steps, so that what happens to it meanwhile takes some of them."""


def batch_of(step: int) -> list[tinkex.Datum]:
    dice = random.Random(step)
    rows = [[dice.randrange(5, 250) for _ in range(dice.randrange(6, 24))] for _ in range(3)]
    return [
        tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(url: str, steps: int, key: str, pause_s: float = PAUSE_S) -> None:
    with tinkex.ServiceClient(base_url=url, api_key=key) as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=11)
        print("run", training.model_id, flush=True)
        for step in range(steps):
            passed = training.forward_backward(batch_of(step), "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result(timeout=MOST_S)
            passed.result(timeout=MOST_S)
            print("step", step, flush=True)
            time.sleep(pause_s)
        path = training.save_state("final").result(timeout=MOST_S).path
    run, checkpoint = path.removeprefix("tinker://").split("/", 1)
    address = f"{url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    with urllib.request.urlopen(urllib.request.Request(address, headers={"X-API-Key": key})) as response:
        content = response.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {file.name.rpartition("/")[2]: archive.extractfile(file) for file in archive if file.isfile()}
    digests = {
        name: hashlib.sha256(file.read()).hexdigest()
        for name, file in files.items()
        if file and name.endswith(".safetensors")
    }
    print("done", json.dumps(digests), flush=True)


class Trainer:
    """Starts the above and reads what it says."""

    def __init__(
        self, url: str, steps: int, key: str, *, prefix: tuple[str, ...] = (), pause_s: float = PAUSE_S
    ) -> None:
        words = [*prefix, sys.executable, "-m", "tests.cluster.training", url, str(steps), str(pause_s)]
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, env={**os.environ, "TINKER_API_KEY": key}, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.run_id = self._next("run ")
        self.steps_done = 0

    def wait_for_step(self, number: int, seconds: float = MOST_S) -> float:
        """Return the time at which that step was done, or the first one after."""
        while self.steps_done <= number:
            self.steps_done = int(self._next("step ", seconds)) + 1
        return time.monotonic()

    def skip_to_now(self) -> None:
        """Read what it has said already: the next step that is waited for is one that was not done yet."""
        while not self._lines.empty():
            self.steps_done = int(self._next("step ")) + 1

    def digests(self) -> dict[str, str]:
        while not (line := self._next("")).startswith("done "):
            pass
        assert self._process.wait(60) == 0
        return dict(json.loads(line.removeprefix("done ")))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("ended")

    def _next(self, start: str, seconds: float = MOST_S) -> str:
        line = self._lines.get(timeout=seconds)
        assert line.startswith(start) and line != "ended", f"the client said {line!r}"
        return line.removeprefix(start)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), os.environ["TINKER_API_KEY"], *map(float, sys.argv[3:]))
