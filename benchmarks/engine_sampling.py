"""How fast the service samples, beside `generate` of transformers + PEFT on the same cores.

    python -m benchmarks.engine_sampling [rounds]          (writes benchmarks/results/engine_sampling.md)

SmolLM2-135M in float32, adapters of rank 8 on attention and MLP, prompts of 32 tokens, through HTTP with our client.
"""

from __future__ import annotations

import random
import statistics
import sys

import tinkex
from benchmarks.engine_training import CACHE, MODEL, rows_of
from benchmarks.plain_loop import PlainLoop
from benchmarks.side_by_side import Question, run, table, write
from tinkex.engine.models import registry


def main(rounds: int = 5) -> None:
    plain = PlainLoop(registry.resolve(MODEL, CACHE).folder)
    source = random.Random(2)
    with tinkex.local(MODEL, ephemeral=True) as service:
        samplers = []
        for seed in range(8):
            training = service.create_lora_training_client(MODEL, rank=8, seed=seed, train_unembed=False)
            samplers.append(training.save_weights_and_get_sampling_client())
        fixed = rows_of([31] * 8)

        def sample(prompts: list[list[int]], tokens: int, count: int = 1, adapters: int = 1) -> None:
            params = tinkex.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
            futures = [
                samplers[number % adapters].sample(tinkex.ModelInput.from_ints(prompt), count, params)
                for number, prompt in enumerate(prompts)
            ]
            assert all(len(row.tokens) == tokens for future in futures for row in future.result().sequences)

        def fresh(count: int, length: int) -> list[list[int]]:
            """Prompts that nobody has sent before: none is found in a cache."""
            return [[source.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]

        eight = Question(
            "8 concurrent samples × 64 (plain: batch 8)",
            512,
            lambda: sample(fresh(8, 32), 64),
            lambda: plain.generate(fixed, 64),
            2.2,
            3.3,
        )
        adapters = Question(
            "the same with eight adapters (plain: one adapter)",
            512,
            lambda: sample(fresh(8, 32), 64, adapters=8),
            lambda: plain.generate(fixed, 64),
            2.0,
            2.7,
        )
        questions = [
            eight,
            adapters,
            Question(
                "single stream × 64 (plain: batch 1)",
                64,
                lambda: sample(fresh(1, 32), 64),
                lambda: plain.generate(fixed[:1], 64),
                1.4,
                2.0,
            ),
            Question(
                "16 samples of one 512-token prompt × 32",
                512,
                lambda: sample(fresh(1, 512), 32, 16),
                lambda: plain.generate(fresh(1, 512), 32, 16),
                5.0,
                7.5,
            ),
        ]
        run(questions, rounds)
    own = [one / many for (one, _), (many, _) in zip(eight.seconds, adapters.seconds, strict=True)]
    body = table(questions) + (
        f"\n\nEight adapters beside one, of our own rate: {statistics.median(own):.2f} "
        f"({min(own):.2f} … {max(own):.2f}); must 0.75, aim 0.9."
    )
    write("engine_sampling", "How fast the service samples", "engine_sampling", body)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
