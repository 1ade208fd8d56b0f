"""Several adapters at once: a sweep over learning rates and ranks, all trained concurrently.

    python examples/05_many_adapters.py --model smollm2-135m --steps 10

Each adapter has its own training client and its own order of operations; the service alternates between them.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, NamedTuple

import tinkex

TEXTS = [
    "Red sky at night, sailor's delight.",
    "Red sky in the morning, sailor's warning.",
    "A smooth sea never made a skilled sailor.",
]
RATES = [3e-4, 1e-3, 3e-3]
RANKS = [4, 16]


class Outcome(NamedTuple):
    rank: int
    learning_rate: float
    first: float
    last: float


def datum_of(tokenizer: Any, text: str) -> tinkex.Datum:
    tokens: list[int] = tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


async def train(service: tinkex.ServiceClient, model: str, steps: int, rank: int, learning_rate: float) -> Outcome:
    training = await service.create_lora_training_client_async(model, rank=rank, seed=0)
    data = [datum_of(training.get_tokenizer(), text) for text in TEXTS]
    tokens = sum(datum.model_input.length for datum in data)
    passes: list[tinkex.APIFuture[tinkex.ForwardBackwardOutput]] = []
    async with tinkex.progress(training, steps, label=f"rank {rank}, rate {learning_rate:.0e}") as progress:
        for _ in progress:
            passes.append(training.forward_backward(data, "cross_entropy"))
            training.optim_step(tinkex.AdamParams(learning_rate=learning_rate))
    losses = [(await done).metrics["loss:sum"] / tokens for done in passes]
    await training.unload_model()  # frees the adapter; nothing of it was saved
    return Outcome(rank, learning_rate, losses[0], losses[-1])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    model, steps = arguments.model, arguments.steps

    async with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        outcomes = await asyncio.gather(*(train(service, model, steps, rank, rate) for rank in RANKS for rate in RATES))

    print("rank  learning rate  first loss  last loss")
    for outcome in sorted(outcomes, key=lambda outcome: outcome.last):
        print(f"{outcome.rank:4}  {outcome.learning_rate:13.0e}  {outcome.first:10.3f}  {outcome.last:9.3f}")


if __name__ == "__main__":
    asyncio.run(main())
