"""A folder that is deleted and written again: whoever asks for it later gets what is in it then."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.unit.engine.oracle import randomise
from tests.unit.engine.sampling_oracle import finish, sampled, sampler, spec
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import LoraSpec
from tinkex.engine.models.loaded_model import Model

PROMPT = range(1, 20)


def write(model: Model, folder: Path, seed: int) -> None:
    """Weights that differ with the seed, in the place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    adapter = Adapter(model, LoraSpec(rank=4, seed=seed))
    randomise(adapter, seed)
    checkpoint.save(adapter, folder, with_optimizer=False)


def test_weights_that_were_saved_again_under_one_name_are_read_again(tiny: Model, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "latest", tmp_path / "elsewhere"
    asked = spec(PROMPT, weights=str(folder), max_tokens=1, prompt_logprobs=True)
    running = sampler(tiny)
    write(tiny, folder, 1)
    first = sampled(finish(running, {1: asked}), 1)
    write(tiny, folder, 2)
    write(tiny, elsewhere, 2)
    second = sampled(finish(running, {2: asked}), 2)
    right = sampled(
        finish(sampler(tiny), {3: spec(PROMPT, weights=str(elsewhere), max_tokens=1, prompt_logprobs=True)}), 3
    )
    assert second.prompt_logprobs == right.prompt_logprobs
    assert second.prompt_logprobs != first.prompt_logprobs


def test_a_request_for_new_weights_does_not_join_a_batch_with_the_old_ones(tiny: Model, tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    asked = spec(PROMPT, weights=str(folder), max_tokens=8, temperature=0.0, prompt_logprobs=True)
    running = sampler(tiny)
    write(tiny, folder, 1)
    running.add(1, asked)
    running.step()
    write(tiny, folder, 2)
    answers = finish(running, {2: asked})
    alone = sampled(finish(sampler(tiny), {3: asked}), 3)
    assert sampled(answers, 2).prompt_logprobs == alone.prompt_logprobs
    assert sampled(answers, 1).prompt_logprobs != alone.prompt_logprobs
