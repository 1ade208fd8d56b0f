"""The second demo: a model learns by trial and error to answer in one word. It is shown nothing, only given points."""

from __future__ import annotations

from typing import Any

from tinkex.client.sampling import SamplingClient
from tinkex.demo import opposites
from tinkex.demo.stage import Stage, draw, say
from tinkex.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
from tinkex.watch.progress import progress

STEPS, QUESTIONS, GROUP, RANK = 20, 8, 8, 16
RATE = 2e-4
SHOWN = 4
COMPARED = 5
"""Steps at either end whose mean reward is compared."""


def run(stage: Stage) -> tuple[float, float]:
    """The whole demo. The mean reward of the first steps, and of the last."""
    memory = stage.memory
    say(f"tinkex demo: {memory.model} learns by trial and error to name opposites in one word, on this machine.\n")
    with stage.service() as service:
        training, start, is_open = stage.training(service, RANK)
        del memory.rewards[start:]  # those of a step that was sampled and not trained
        tokenizer = training.get_tokenizer()
        if not start:
            say("Before:")
            show(service.create_sampling_client(base_model=memory.model), tokenizer)
        say(
            f"\nTraining: {memory.steps} steps, {QUESTIONS} questions with {GROUP} answers each. An answer counts by "
            "how much better than its group it is. Ctrl-C pauses; run again, it goes on."
        )
        with progress(training, memory.steps, start=start) as shown:
            for step in shown:
                sampler = training.save_weights_and_get_sampling_client()
                data, rewards = play(sampler, tokenizer, memory.seed, step)
                memory.rewards.append(sum(rewards) / len(rewards))
                shown.note(reward=memory.rewards[-1])
                # Nothing to learn from if all answers of every group are alike; nothing to send if the stop came
                # between the two calls and the gradient is there.
                if data and (step > start or not is_open):
                    training.forward_backward(data, "importance_sampling")
                training.optim_step(AdamParams(learning_rate=RATE)).result()
                stage.remember()
        say("\n" + draw(memory.rewards, "mean reward"))
        path = stage.keep(service, training)
        say("\nAfter:")
        show(service.create_sampling_client(model_path=path), tokenizer)
    stage.forget()
    ends = memory.rewards[:COMPARED], memory.rewards[-COMPARED:]
    before, after = (sum(rewards) / len(rewards) for rewards in ends)
    say(f"\nMean reward {before:.2f} in the first {COMPARED} steps, {after:.2f} in the last.")
    stage.closing_words(path)
    return before, after


def play(sampler: SamplingClient, tokenizer: Any, seed: int, step: int) -> tuple[list[Datum], list[float]]:
    """Have every question answered several times; the data of one training step, and every answer's reward."""
    data: list[Datum] = []
    rewards: list[float] = []
    asked = []
    for number, (text, wanted) in enumerate(opposites.questions(seed, step, QUESTIONS)):
        prompt = tokenizer.encode(text)
        params = SamplingParams(
            max_tokens=opposites.MOST_TOKENS,
            temperature=1.0,
            stop=[opposites.STOP],
            seed=(seed * 1_000 + step) * 100 + number,
        )
        asked.append((prompt, wanted, sampler.sample(ModelInput.from_ints(prompt), GROUP, params)))
    for prompt, wanted, answer in asked:
        sequences = answer.result().sequences
        group = [opposites.reward(tokenizer.decode(sequence.tokens), wanted) for sequence in sequences]
        rewards += group
        mean = sum(group) / len(group)
        if max(group) > min(group):
            data += [datum(prompt, each, reward - mean) for each, reward in zip(sequences, group, strict=True)]
    return data, rewards


def datum(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """An answer with the log-probabilities it was drawn with, and how much better than its group it was."""
    answer, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
    tokens, before = prompt + answer, len(prompt) - 1
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [advantage] * len(answer),
        },
    )


def show(sampler: SamplingClient, tokenizer: Any) -> None:
    params = SamplingParams(max_tokens=opposites.MOST_TOKENS, temperature=0.0, stop=[opposites.STOP])
    asked = opposites.questions(0, -1, SHOWN)
    answers = [sampler.sample(ModelInput.from_ints(tokenizer.encode(text)), 1, params) for text, _ in asked]
    for (text, _), answer in zip(asked, answers, strict=True):
        said = tokenizer.decode(answer.result().sequences[0].tokens).removesuffix("<|im_end|>")
        say(f"  {text} … {' '.join(said.split())}")
