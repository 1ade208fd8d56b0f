"""Reinforcement learning with a reward that can be computed: sums, answered with a number and nothing else.

    python examples/02_reinforcement.py --model smollm2-135m --steps 15 --loss ppo

Each step samples a group of answers to each question, scores them, and makes the answers more likely that scored above
the mean of their group.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any, NamedTuple

import tinkex


class Rollout(NamedTuple):
    prompt: list[int]
    sequence: tinkex.SampledSequence
    reward: float


def reward_of(answer: str, right: int) -> float:
    """Return half a point for the share of digits in the answer and half for the right number; no model judges it."""
    digits = sum(letter.isascii() and letter.isdigit() for letter in answer)
    return 0.5 * digits / max(len(answer), 1) + 0.5 * (answer.strip() == str(right))


def draw(
    sampler: tinkex.SamplingClient, tokenizer: Any, questions: list[tuple[int, int]], size: int, seed: int
) -> list[list[Rollout]]:
    """Return a group of answers to each question. All are requested before the first is waited for."""
    params = tinkex.SamplingParams(max_tokens=8, temperature=1.0, seed=seed, stop=[tokenizer.eos_token_id])
    prompts: list[list[int]] = []
    for a, b in questions:
        messages = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    futures = [sampler.sample(tinkex.ModelInput.from_ints(prompt), size, params) for prompt in prompts]
    groups: list[list[Rollout]] = []
    for (a, b), prompt, future in zip(questions, prompts, futures, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        rewards = [reward_of(text, a + b) for text in texts]
        groups.append([Rollout(prompt, *pair) for pair in zip(sequences, rewards, strict=True)])
    return groups


def datum_of(rollout: Rollout, advantage: float) -> tinkex.Datum:
    """Return an answer with the log-probabilities it was sampled with. The prompt has no advantage."""
    tokens = rollout.prompt + rollout.sequence.tokens
    before = [0.0] * (len(rollout.prompt) - 1)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": before + (rollout.sequence.logprobs or []),
            "advantages": before + [advantage] * len(rollout.sequence.tokens),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--loss", choices=["importance_sampling", "ppo"], default="importance_sampling")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    arguments = parser.parse_args()

    dice = random.Random(0)
    questions: list[tuple[int, int]] = []
    # importance_sampling uses its samples for one step. ppo may use them for two: it clips tokens that moved too far.
    passes = 2 if arguments.loss == "ppo" else 1
    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(arguments.model) as service:
        training = service.create_lora_training_client(arguments.model, rank=16)
        tokenizer = training.get_tokenizer()
        progress = tinkex.progress(training, steps=arguments.steps)
        for step in progress:
            sampler = training.save_weights_and_get_sampling_client()  # with the current weights
            questions = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(8)]
            groups = draw(sampler, tokenizer, questions, size=8, seed=step)

            data: list[tinkex.Datum] = []
            for group in groups:
                mean = sum(rollout.reward for rollout in group) / len(group)
                # A group of equal rewards teaches nothing: all its advantages are 0.
                data += [datum_of(each, each.reward - mean) for each in group if each.reward != mean]
            for _ in range(passes if data else 0):
                training.forward_backward(data, arguments.loss)
                training.optim_step(tinkex.AdamParams(learning_rate=arguments.learning_rate))

            rewards = [rollout.reward for group in groups for rollout in group]
            progress.note(reward=sum(rewards) / len(rewards))
        print(progress.curve("reward"))

        sampler = training.save_weights_and_get_sampling_client()
        for (a, b), group in zip(questions, draw(sampler, tokenizer, questions, size=1, seed=0), strict=True):
            answer = tokenizer.decode(group[0].sequence.tokens, skip_special_tokens=True)
            print(f"{a} + {b} = {answer!r}, reward {group[0].reward:.2f}")


if __name__ == "__main__":
    main()
