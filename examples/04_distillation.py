"""Distillation of a prompt: the student learns to answer like a teacher that has read instructions first.

    python examples/04_distillation.py --model smollm2-135m --steps 20

The teacher is the same model with a system message. It writes answers, then reports the K most likely tokens at
each position (top-k prompt log-probabilities). These are the student's targets: not one right token per position, but K
tokens with their probabilities.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any, NamedTuple

import tinkex

K = 8
INSTRUCTIONS = "You are a parrot on a pirate ship. Answer in one short sentence and end it with Squawk!"
QUESTIONS = [
    "How are you?", "What do you eat?", "Where is the treasure?", "Who is your captain?", "Can you fly?",
    "What is the weather like?", "Do you like the sea?", "What time is it?", "What is your name?", "Are you tired?",
]  # fmt: skip


class Lesson(NamedTuple):
    datum: tinkex.Datum
    entropy: float
    """Return the loss that is left when the student agrees with the teacher entirely."""
    positions: int


def prompt_of(tokenizer: Any, question: str, instructions: str | None = None) -> list[int]:
    messages = [{"role": "user", "content": question}]
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def lessons_of(teacher: tinkex.SamplingClient, tokenizer: Any) -> list[Lesson]:
    asked = [prompt_of(tokenizer, question, INSTRUCTIONS) for question in QUESTIONS]
    params = tinkex.SamplingParams(max_tokens=24, temperature=0.7, seed=1, stop=[tokenizer.eos_token_id])
    written = [teacher.sample(tinkex.ModelInput.from_ints(prompt), 1, params) for prompt in asked]
    answers = [future.result().sequences[0].tokens for future in written]
    read = [
        teacher.sample(
            tinkex.ModelInput.from_ints(prompt + answer),
            1,
            tinkex.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=K,
        )
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    lessons: list[Lesson] = []
    for question, answer, future in zip(QUESTIONS, answers, read, strict=True):
        rows = future.result().topk_prompt_logprobs or []
        lessons.append(lesson_of(prompt_of(tokenizer, question), answer, rows[len(rows) - len(answer) :]))
    return lessons


def lesson_of(prompt: list[int], answer: list[int], rows: list[list[tuple[int, float]] | None]) -> Lesson:
    """Return targets and weights with K columns. The prompt has weight 0; the K weights sum to 1 per position."""
    tokens = prompt + answer
    targets = [[token] + [0] * (K - 1) for token in prompt[1:]]
    weights = [[0.0] * K for _ in prompt[1:]]
    entropy = 0.0
    for row in rows:
        likeliest = row or []
        mass = math.fsum(math.exp(logprob) for _, logprob in likeliest)
        shares = [math.exp(logprob) / mass for _, logprob in likeliest]
        entropy -= math.fsum(share * math.log(share) for share in shares if share > 0)
        targets.append([token for token, _ in likeliest] + [0] * (K - len(likeliest)))
        weights.append(shares + [0.0] * (K - len(likeliest)))
    datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets, "weights": weights})
    return Lesson(datum, entropy, len(answer))


def say(sampler: tinkex.SamplingClient, tokenizer: Any, name: str, prompt: list[int]) -> None:
    params = tinkex.SamplingParams(max_tokens=24, temperature=0.0, stop=[tokenizer.eos_token_id])
    tokens = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens
    print(f"{name}: {tokenizer.decode(tokens, skip_special_tokens=True)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(arguments.model) as service:
        teacher = service.create_sampling_client(base_model=arguments.model)
        training = service.create_lora_training_client(arguments.model, rank=16)
        tokenizer = training.get_tokenizer()
        lessons = lessons_of(teacher, tokenizer)
        positions = sum(lesson.positions for lesson in lessons)
        entropy = math.fsum(lesson.entropy for lesson in lessons)

        progress = tinkex.progress(training, steps=arguments.steps)
        for _ in progress:
            forward_backward = training.forward_backward([lesson.datum for lesson in lessons], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
            loss = forward_backward.result().metrics["loss:sum"]
            # Cross-entropy minus entropy is the Kullback-Leibler divergence: 0 when the student agrees entirely.
            progress.note(divergence=(loss - entropy) / positions)
        print(progress.curve("divergence"))

        question = "What do you see?"
        say(teacher, tokenizer, "teacher, instructed", prompt_of(tokenizer, question, INSTRUCTIONS))
        say(teacher, tokenizer, "not instructed", prompt_of(tokenizer, question))
        student = training.save_weights_and_get_sampling_client()
        say(student, tokenizer, "student, not instructed", prompt_of(tokenizer, question))


if __name__ == "__main__":
    main()
