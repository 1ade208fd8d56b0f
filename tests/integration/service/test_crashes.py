"""kill -9 of the server, of the engine, of both, at random moments: nothing is lost, nothing runs twice, to the bit."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.service.live import LiveServer

STEPS = 40
KILLS = 3
VICTIMS = ("server", "engine", "both")


def batch(step: int) -> list[tinkex.Datum]:
    dice = random.Random(step)
    rows = [[dice.randrange(5, 250) for _ in range(dice.randrange(6, 24))] for _ in range(3)]
    return [
        tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


class Killer:
    """Ends processes at moments that a seed decides, and starts the server again."""

    def __init__(self, server: LiveServer, seed: int) -> None:
        self._server, self._dice = server, random.Random(seed)
        self._at = set(self._dice.sample(range(1, STEPS), KILLS))
        self._threads: list[threading.Thread] = []
        self.victims: list[str] = []

    def tell(self, step: int) -> None:
        """The run has come so far; the blow falls a little later, in the middle of whatever happens then."""
        if step in self._at:
            victim, delay_s = self._dice.choice(VICTIMS), self._dice.random() * 0.03
            self.victims.append(victim)
            self.wait()
            self._threads.append(threading.Thread(target=self._strike, args=(victim, delay_s)))
            self._threads[-1].start()

    def _strike(self, victim: str, delay_s: float) -> None:
        time.sleep(delay_s)
        if victim in ("engine", "both"):
            self._server.kill_engine()
        if victim in ("server", "both"):
            self._server.kill()
            self._server.start(wait_s=0)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(30)


def train(server: LiveServer, killer: Killer | None) -> dict[str, bytes]:
    """Forty steps with one client object; the final adapter and optimizer, byte for byte."""
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=11)
        pending: list[tinkex.APIFuture[Any]] = []
        for step in range(STEPS):
            if killer is not None:
                killer.tell(step)
            pending.append(training.forward_backward(batch(step), "cross_entropy"))
            pending.append(training.optim_step(tinkex.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)))
            if step % 3 == 2:
                for future in pending:
                    future.result(timeout=120)
                pending.clear()
        for future in pending:
            future.result(timeout=120)
        path = training.save_state("final").result(timeout=120).path
        if killer is not None:
            killer.wait()
    run, kind, name = path.removeprefix("tinker://").split("/")
    folder = server.data_dir / "checkpoints" / run / kind / name
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with LiveServer(tmp_path_factory.mktemp("calm") / "data") as server:
        return train(server, None)


def check(seed: int, folder: Path, expected: dict[str, bytes]) -> None:
    # Every second run takes snapshots all the time, so that rebuilding from one is tried as well as from the seed.
    flags = ("--snapshot-every-s", "0") if seed % 2 else ()
    server = LiveServer(folder / "data", *flags)
    server.start()
    try:
        killer = Killer(server, seed)
        found = train(server, killer)
        assert len(killer.victims) == KILLS
        assert found.keys() == expected.keys() >= {"adapter_model.safetensors", "optimizer.safetensors"}
        different = [name for name in found if found[name] != expected[name]]
        assert not different, f"seed {seed}, victims {killer.victims}: {different} differ\n{server.log()[-2000:]}"
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_a_run_that_was_killed_ends_with_the_same_bits(
    seed: int, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    check(seed, tmp_path, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 50))
def test_fifty_runs_that_were_killed_end_with_the_same_bits(
    seed: int, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    check(seed, tmp_path, undisturbed)
