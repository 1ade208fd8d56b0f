"""Supervised training as the cookbook's users write it: its own loop, renderer and example conversations.

Run by `environment.run` where `tinker` is the official package or ours; nothing here knows which.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import tinker_cookbook
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

CONVERSATIONS = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
RENDERER = "role_colon"
STEPS = 5


class PowerCut(SamplingClientEvaluator):
    """Ends the run in the middle: evaluators are called before every step."""

    def __init__(self, step: int) -> None:
        self._left = step

    async def __call__(self, sampling_client: object) -> dict[str, float]:
        if self._left == 0:
            raise SystemExit("the power is cut")
        self._left -= 1
        return {}


def config(arguments: argparse.Namespace) -> train.Config:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=arguments.model,
        renderer_name=RENDERER,
        max_length=arguments.max_length,
        batch_size=arguments.batch_size,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    cut: list[object] = [] if arguments.cut_before is None else [lambda: PowerCut(arguments.cut_before)]
    return train.Config(
        log_path=arguments.log_path,
        model_name=arguments.model,
        recipe_name="recipe_sl_basic",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(
            common_config=common, file_path=str(CONVERSATIONS), test_size=arguments.batch_size
        ),
        learning_rate=arguments.learning_rate,
        lora_rank=8,
        evaluator_builders=cut,
        eval_every=1,
        save_every=2,
        rolling_save_every=1,
        ttl_seconds=3600,
        max_steps=STEPS,
        enable_trace=True,
        session_name="cookbook supervised",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("log_path")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--cut-before", type=int)
    asyncio.run(train.main(config(parser.parse_args())))
