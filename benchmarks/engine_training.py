"""How fast the service trains, beside the plain transformers + PEFT loop on the same cores.

    python -m benchmarks.engine_training [rounds]          (writes benchmarks/results/engine_training.md)

SmolLM2-135M in float32, rank 8 on attention and MLP, through HTTP with our client.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import tinkex
from benchmarks.plain_loop import PlainLoop
from benchmarks.side_by_side import Question, run, table, write
from tinkex.engine.models import registry

MODEL = "smollm2-135m"
CACHE = Path(__file__).parent.parent / ".cache"
RAGGED = [16, 24, 32, 40, 56, 64, 80, 96, 112, 128, 160, 208, 256, 304, 376, 512]


def rows_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens; one more than the length, as the first predicts the second."""
    source = random.Random(seed)
    return [[source.randrange(100, 40_000) for _ in range(length + 1)] for length in lengths]


def datum(row: Sequence[int]) -> tinkex.Datum:
    inputs = {"target_tokens": list(row[1:]), "weights": [1.0] * (len(row) - 1)}
    return tinkex.Datum(tinkex.ModelInput.from_ints(list(row[:-1])), inputs)


def main(rounds: int = 5) -> None:
    folder = registry.resolve(MODEL, CACHE).folder
    plain = PlainLoop(folder)
    with tinkex.local(MODEL, ephemeral=True) as service:
        clients = [
            service.create_lora_training_client(MODEL, rank=8, seed=seed, train_unembed=False) for seed in range(8)
        ]
        first = clients[0]
        square, ragged, short = rows_of([256] * 8), rows_of(random.Random(1).sample(RAGGED, 16)), rows_of([32] * 8)

        def tenants() -> None:
            for future in [
                client.forward_backward([datum(row)], "cross_entropy")
                for client, row in zip(clients, short, strict=True)
            ]:
                future.result()

        questions = [
            Question(
                "forward_backward 8×256",
                2048,
                lambda: first.forward_backward([datum(row) for row in square], "cross_entropy").result(),
                lambda: plain.forward_backward(square),
                1.35,
                1.7,
            ),
            Question(
                "forward 8×256",
                2048,
                lambda: first.forward([datum(row) for row in square], "cross_entropy").result(),
                lambda: plain.forward(square),
                1.05,
                1.3,
            ),
            Question(
                "ragged: 16 sequences of 16 … 512 (plain: batches of 4, padded)",
                sum(RAGGED),
                lambda: first.forward_backward([datum(row) for row in ragged], "cross_entropy").result(),
                lambda: plain.in_micro_batches(ragged, 4),
                2.5,
                3.3,
            ),
            Question(
                "eight tenants, 1×32 each (plain: one after another)",
                256,
                tenants,
                lambda: plain.in_micro_batches(short, 1),
                2.2,
                3.2,
            ),
        ]
        run(questions, rounds)
    write("engine_training", "How fast the service trains", "engine_training", table(questions))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
