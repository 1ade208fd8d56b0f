"""The models of an engine come and go while it runs: nothing of one that left is kept, and nothing in use leaves."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.unit.engine.sampling_oracle import finish, sampled
from tinkex.engine.contract import EngineFault, ModelInfo, SampleSpec, is_out_of_memory
from tinkex.engine.frames import Frame
from tinkex.engine.models import loaded_model
from tinkex.engine.process.loaded_models import LoadedModels
from tinkex.engine.runner_choice import choose_decoder, choose_runner
from tinkex.engine.sampling.sampler import Sampler
from tinkex.engine.training.trainer import Trainer

PROMPT = tuple(range(5, 40))
"""Long enough for the prefix cache."""


class Engine:
    def __init__(self) -> None:
        self.trainer = Trainer({}, choose_runner=choose_runner)
        self.sampler = Sampler({}, choose_decoder=choose_decoder)
        load = partial(loaded_model.load, device=torch.device("cpu"), dtype=torch.float32)
        self.models = LoadedModels(load, self.trainer, self.sampler)

    def drawn(self, base: str = "tinkex/tiny") -> tuple[list[int], list[float]]:
        spec = SampleSpec(base=base, prompt=PROMPT, max_tokens=4, seed=1)
        [row] = sampled(finish(self.sampler, {1: spec}), 1).sequences
        return row.tokens, row.logprobs


@pytest.fixture
def twin(tiny_info: ModelInfo, tmp_path: Path) -> ModelInfo:
    """Another model, with the same name as the built-in one."""
    folder = shutil.copytree(tiny_info.folder, tmp_path / "twin")
    file = folder / "model.safetensors"
    save_file({name: 1.25 * values for name, values in load_file(file).items()}, file, metadata={"format": "pt"})
    return replace(tiny_info, folder=str(folder))


def test_a_model_that_left_is_gone_and_computes_the_same_when_it_is_back(tiny_info: ModelInfo, twin: ModelInfo) -> None:
    engine = Engine()
    engine.models.load(tiny_info)
    first = engine.drawn()
    model = weakref.ref(engine.trainer._models["tinkex/tiny"])
    engine.models.unload("tinkex/tiny")
    assert model() is None
    with pytest.raises(EngineFault, match="The engine has no model"):
        engine.drawn()
    engine.models.load(twin)  # prompts that were cached for the other one would show here
    alone = Engine()
    alone.models.load(twin)
    assert engine.drawn() == alone.drawn() != first
    engine.models.unload("tinkex/tiny")
    engine.models.load(tiny_info)
    assert engine.drawn() == first


def test_a_model_with_an_adapter_or_a_sample_stays(tiny_info: ModelInfo) -> None:
    engine = Engine()
    engine.models.load(tiny_info)
    engine.sampler.add(1, SampleSpec(base="tinkex/tiny", prompt=PROMPT, max_tokens=2, seed=1))
    with pytest.raises(EngineFault, match="in use"):
        engine.models.unload("tinkex/tiny")
    finish(engine.sampler)
    engine.trainer.add(1, Frame({"op": "create", "adapter": "a", "base": "tinkex/tiny", "rank": 2, "seed": 0}))
    engine.trainer.step()
    with pytest.raises(EngineFault, match="in use"):
        engine.models.unload("tinkex/tiny")
    engine.trainer.add(2, Frame({"op": "drop", "adapter": "a"}))
    engine.trainer.step()
    engine.models.unload("tinkex/tiny")
    assert engine.models.sizes == {}


def test_a_model_that_cannot_be_loaded_leaves_nothing(twin: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def fail(model: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.sampler, "_choose_decoder", fail)
    with pytest.raises(MemoryError) as failure:
        engine.models.load(twin)
    assert is_out_of_memory(failure.value)  # the server unloads others, and sends the command again
    assert not engine.trainer._models and not engine.trainer._runners and not engine.sampler._models
    monkeypatch.undo()
    engine.models.load(twin)


def test_a_models_size_counts_the_copy_that_samples_use(tiny_info: ModelInfo) -> None:
    engine = Engine()
    engine.models.load(tiny_info)
    assert engine.models.sizes == {"tinkex/tiny": 8 * tiny_info.parameters}
