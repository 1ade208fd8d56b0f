"""The cache of adapter weights for sampling: read once, within its limit, and never those in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.engine.oracle import Session, datum, randomise
from tests.unit.engine.sampling_oracle import (
    finish,
    first_arguments,
    same,
    sampled,
    sampler,
    spec,
)
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, LoraSpec, Sampled
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling import adapter_cache

pytestmark = pytest.mark.usefixtures("runner", "one_thread")


def test_weights_are_read_once_cached_within_a_limit_and_outlive_their_folder(
    tiny: Model, adapter_folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one"
    checkpoint.save(randomise(Adapter(tiny, LoraSpec(rank=4))), folder, with_optimizer=False)
    running = sampler(tiny)
    first = sampled(finish(running, {1: spec(b"abc", weights=str(folder))}), 1)
    for path in folder.iterdir():
        path.unlink()
    same(sampled(finish(running, {2: spec(b"abc", weights=str(folder))}), 2), first)

    read = first_arguments(monkeypatch, adapter_cache, "read_weights")
    narrow = sampler(tiny, adapters_bytes=1)
    for weights in (0, 0, 1, 0):
        finish(narrow, {1: spec(b"abc", weights=adapter_folders[weights])})
    assert read == [adapter_folders[place] for place in (0, 1, 0)]
    assert len(narrow._adapters._weights) == 1
    # All at once they cannot be held: they run one after the other.
    results = finish(narrow, {n: spec(b"abc", weights=at, max_tokens=3) for n, at in enumerate(adapter_folders)})
    assert all(isinstance(found, Sampled) for found in results.values())


def test_sampling_leaves_the_weights_in_training_alone(tiny: Model, adapter_folders: list[str]) -> None:
    session = Session(tiny)
    adapter = randomise(session.create(rank=4))
    before = adapter.weights_P.clone()
    data = [datum(b"abcdef", target_tokens=list(b"bcdefg"))]
    numbers = session.logprobs(data)[0]
    finish(sampler(tiny), {n: spec(b"abc", weights=at, max_tokens=5) for n, at in enumerate(adapter_folders)})
    assert torch.equal(adapter.weights_P, before)
    assert torch.equal(session.logprobs(data)[0], numbers)


def test_unreadable_weights_fail_only_the_requests_that_need_them(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    good = spec(b"abc", max_tokens=5)
    results = finish(sampler(tiny), {1: good, 2: spec(b"abc", weights=str(tmp_path / "bad")), 3: good})
    fault = results[2]
    assert isinstance(fault, EngineFault)
    assert str(tmp_path) not in str(fault)
    same(sampled(results, 1), sampled(results, 3))
