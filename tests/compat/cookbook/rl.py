"""Reinforcement learning as the cookbook's users write it: its own loop over a small environment that needs no hub.

One turn: the model answers a question, and the reward is the share of small letters in the answer, so that every group
has good and bad answers, whatever the model. Run by `environment.run`, as `supervised.py` is.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import chz
import tinker
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.base import get_text_content
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "role_colon"
STEPS = 3
QUESTIONS = ("What is your name?", "Where do cats sleep?", "What is rain?", "Who are you?", "What is bread made of?")


@dataclass(frozen=True)
class SmallLetters(Env):
    renderer: Renderer
    question: str

    async def initial_observation(self) -> tuple[Observation, list[str] | list[int]]:
        convo = [{"role": "user", "content": self.question}]
        return self.renderer.build_generation_prompt(convo), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        text = get_text_content(message)
        return StepResult(
            reward=sum(letter.isascii() and letter.islower() for letter in text) / max(len(text), 1),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics={"is_clean": float(termination.is_clean), "characters": float(len(text))},
        )


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    renderer: Renderer
    question: str
    size: int

    async def make_envs(self) -> Sequence[Env]:
        return [SmallLetters(self.renderer, self.question) for _ in range(self.size)]

    def logging_tags(self) -> list[str]:
        return ["small_letters"]


@dataclass(frozen=True)
class Questions(RLDataset):
    renderer: Renderer
    group_size: int
    groups_per_batch: int
    batches: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        first = index * self.groups_per_batch
        places = range(first, first + self.groups_per_batch)
        return [Group(self.renderer, QUESTIONS[place % len(QUESTIONS)], self.group_size) for place in places]

    def __len__(self) -> int:
        return self.batches


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    model_name: str
    group_size: int
    groups_per_batch: int

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = get_renderer(RENDERER, get_tokenizer(self.model_name))
        training = Questions(renderer, self.group_size, self.groups_per_batch, STEPS)
        return training, Questions(renderer, 1, 2, 1)


def config(arguments: argparse.Namespace) -> train.Config:
    per_batch = arguments.groups_per_batch
    stream = train.StreamMinibatchConfig(groups_per_batch=per_batch, num_minibatches=2)
    off_policy = train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=per_batch)
    return train.Config(
        learning_rate=arguments.learning_rate,
        dataset_builder=QuestionsBuilder(
            model_name=arguments.model, group_size=arguments.group_size, groups_per_batch=per_batch
        ),
        model_name=arguments.model,
        recipe_name="recipe_rl_basic",
        renderer_name=RENDERER,
        max_tokens=arguments.max_tokens,
        log_path=arguments.log_path,
        eval_every=1,
        save_every=STEPS,
        rolling_save_every=1,
        ttl_seconds=3600,
        lora_rank=8,
        loss_fn=arguments.loss,
        kl_penalty_coef=0.01,
        kl_reference_config=train.KLReferenceConfig(base_model=arguments.model),
        compute_post_kl=True,
        stream_minibatch_config=stream if arguments.mode == "stream" else None,
        async_config=off_policy if arguments.mode == "async" else None,
        max_steps=STEPS,
        session_name="cookbook rl",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("log_path")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--groups-per-batch", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--loss", default="importance_sampling")
    parser.add_argument("--mode", choices=["sync", "stream", "async"], default="sync")
    asyncio.run(train.main(config(parser.parse_args())))
