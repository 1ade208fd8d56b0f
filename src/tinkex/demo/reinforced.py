"""The second demo: a model learns from rewards to answer in one word (reinforcement learning). It sees no examples."""

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
"""Number of first and last steps whose mean rewards are compared."""


def run(stage: Stage) -> tuple[float, float]:
    """Run the demo; return the mean reward of the first steps and of the last."""
    state = stage.state
    say(f"tinkex demo: {state.model} learns from rewards to name opposites in one word, on this machine.\n")
    with stage.service() as service:
        training, start, is_open = stage.training(service, RANK)
        del state.rewards[start:]  # rewards of a step that was sampled but not trained
        tokenizer = training.get_tokenizer()
        if not start:
            say("Before:")
            show(service.create_sampling_client(base_model=state.model), tokenizer)
        say(
            f"\nTraining: {state.steps} steps, {QUESTIONS} questions with {GROUP} completions each. A completion that "
            "is better than the mean of its group is reinforced. Ctrl-C pauses; run the command again to continue."
        )
        with progress(training, state.steps, start=start) as shown:
            for step in shown:
                sampler = training.save_weights_and_get_sampling_client()
                data, rewards = play(sampler, tokenizer, state.seed, step)
                state.rewards.append(sum(rewards) / len(rewards))
                shown.note(reward=state.rewards[-1])
                # There is nothing to learn if all completions of every group have the same reward. After a stop between
                # the two calls, the gradient is already there.
                if data and (step > start or not is_open):
                    training.forward_backward(data, "importance_sampling")
                training.optim_step(AdamParams(learning_rate=RATE)).result()
                stage.save_state()
        say("\n" + draw(state.rewards, "mean reward"))
        path = stage.save_adapter(service, training)
        say("\nAfter:")
        show(service.create_sampling_client(model_path=path), tokenizer)
    stage.clear_state()
    ends = state.rewards[:COMPARED], state.rewards[-COMPARED:]
    before, after = (sum(rewards) / len(rewards) for rewards in ends)
    say(f"\nMean reward {before:.2f} in the first {COMPARED} steps, {after:.2f} in the last.")
    stage.print_next_steps(path)
    return before, after


def play(sampler: SamplingClient, tokenizer: Any, seed: int, step: int) -> tuple[list[Datum], list[float]]:
    """Sample several completions of every question; return the data of one training step, and all rewards."""
    data: list[Datum] = []
    rewards: list[float] = []
    calls = []
    for number, (text, expected) in enumerate(opposites.questions(seed, step, QUESTIONS)):
        prompt = tokenizer.encode(text)
        params = SamplingParams(
            max_tokens=opposites.MOST_TOKENS,
            temperature=1.0,
            stop=[opposites.STOP],
            seed=(seed * 1_000 + step) * 100 + number,
        )
        calls.append((prompt, expected, sampler.sample(ModelInput.from_ints(prompt), GROUP, params)))
    for prompt, expected, future in calls:
        sequences = future.result().sequences
        group = [opposites.reward(tokenizer.decode(sequence.tokens), expected) for sequence in sequences]
        rewards += group
        mean = sum(group) / len(group)
        if max(group) > min(group):
            data += [datum(prompt, each, reward - mean) for each, reward in zip(sequences, group, strict=True)]
    return data, rewards


def datum(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """Return a completion with its log-probabilities as sampled, and its advantage over the mean of its group."""
    completion, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
    tokens, before = prompt + completion, len(prompt) - 1
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [advantage] * len(completion),
        },
    )


def show(sampler: SamplingClient, tokenizer: Any) -> None:
    """Print the most likely completion of a few questions."""
    params = SamplingParams(max_tokens=opposites.MOST_TOKENS, temperature=0.0, stop=[opposites.STOP])
    questions = opposites.questions(0, -1, SHOWN)
    futures = [sampler.sample(ModelInput.from_ints(tokenizer.encode(text)), 1, params) for text, _ in questions]
    for (text, _), future in zip(questions, futures, strict=True):
        completion = tokenizer.decode(future.result().sequences[0].tokens).removesuffix("<|im_end|>")
        say(f"  {text} … {' '.join(completion.split())}")
