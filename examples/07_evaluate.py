"""Evaluation while training: held-out loss and exact match every few steps, while training continues.

    python examples/07_evaluate.py --model smollm2-135m --steps 24

Operations of a training client run in the order they were called. A `forward` or a sampler that is requested after step
8 has the weights of step 8, whatever is called after it, so no step has to wait for an evaluation.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any, NamedTuple

import tinkex

EVERY = 8


class Question(NamedTuple):
    prompt: list[int]
    answer: str
    datum: tinkex.Datum


class Score(NamedTuple):
    step: int
    loss: float
    exact: float


def question_of(tokenizer: Any, number: int) -> Question:
    messages = [{"role": "user", "content": f"Is {number} even or odd?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    answer = "odd" if number % 2 else "even"
    reply: list[int] = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
    datum = tinkex.Datum(
        tinkex.ModelInput.from_ints((prompt + reply)[:-1]),
        {"target_tokens": (prompt + reply)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply)},
    )
    return Question(prompt, answer, datum)


def evaluation(
    step: int, training: tinkex.TrainingClient, tokenizer: Any, held_out: list[Question]
) -> asyncio.Task[Score]:
    """Send an evaluation between two steps, without waiting: the order of the calls determines its weights."""
    forward = training.forward([question.datum for question in held_out], "cross_entropy")
    saved = training.save_weights_and_get_sampling_client_submit()
    return asyncio.create_task(score_of(step, tokenizer, held_out, forward, saved))


async def score_of(
    step: int,
    tokenizer: Any,
    held_out: list[Question],
    forward: tinkex.APIFuture[tinkex.ForwardBackwardOutput],
    saved: tinkex.APIFuture[tinkex.SamplingClient],
) -> Score:
    """Wait, sample and compare concurrently with the loop."""
    weight = sum(sum(question.datum.loss_fn_inputs["weights"].tolist()) for question in held_out)
    loss = (await forward).metrics["loss:sum"] / weight
    sampler = await saved
    params = tinkex.SamplingParams(max_tokens=8, temperature=0.0, stop=[tokenizer.eos_token_id])
    drawn = await asyncio.gather(
        *(sampler.sample_async(tinkex.ModelInput.from_ints(question.prompt), 1, params) for question in held_out)
    )
    said = [tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True).strip() for answer in drawn]
    right = [text == question.answer for text, question in zip(said, held_out, strict=True)]
    return Score(step, loss, sum(right) / len(right))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    model, steps = arguments.model, arguments.steps

    async with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        training = await service.create_lora_training_client_async(model, rank=16)
        tokenizer = training.get_tokenizer()
        dice = random.Random(0)
        numbers = dice.sample(range(10, 1000), 264)
        held_out = [question_of(tokenizer, number) for number in numbers[:24]]
        learned = [question_of(tokenizer, number) for number in numbers[24:]]

        evaluations = [evaluation(0, training, tokenizer, held_out)]
        passes: list[tinkex.APIFuture[tinkex.ForwardBackwardOutput]] = []
        async with tinkex.progress(training, steps=steps) as progress:
            for step in progress:
                batch = [question.datum for question in dice.sample(learned, 16)]
                passes.append(training.forward_backward(batch, "cross_entropy"))
                training.optim_step(tinkex.AdamParams(learning_rate=2e-3))
                if (step + 1) % EVERY == 0:
                    evaluations.append(evaluation(step + 1, training, tokenizer, held_out))
                if step > 0:
                    await passes[step - 1]  # one step ahead is enough to keep the service busy
        scores = await asyncio.gather(*evaluations)
        for score in scores:
            print(f"after step {score.step}: held-out loss {score.loss:.3f}, exact match {score.exact:.2f}")
        best = max(scores, key=lambda score: (score.exact, -score.loss))
        print(f"best after step {best.step}: {best.exact:.0%} of {len(held_out)} held-out questions")


if __name__ == "__main__":
    asyncio.run(main())
