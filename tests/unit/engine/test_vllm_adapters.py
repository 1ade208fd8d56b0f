"""Adapters of a vLLM sampler: each is proved once, a bad one fails alone, files stay while they may be read again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tinkex.engine import proofs
from tinkex.engine.contract import EngineFault, Proof, ProofMissing, SampleSpec
from tinkex.engine.vllm import null_adapter
from tinkex.engine.vllm.adapters import CONFIG, WEIGHTS, Adapters, make_home

PROOF = Proof(tokens=(5, 6, 7), logprobs=(-1.0, -2.0))


class EngineDeadError(Exception):
    """What vLLM calls its own end."""


class Engine:
    """A loader in whose adapters every token has the log-probability that their weights file says."""

    def __init__(self) -> None:
        self.folders: dict[int, Path] = {}
        self.added: list[int] = []
        self.is_dead = False

    async def add(self, number: int, folder: Path) -> object:
        await asyncio.sleep(0)
        if self.is_dead:
            raise EngineDeadError("EngineCore encountered an issue")
        if "torn" in (folder / WEIGHTS).read_text():
            raise ValueError(f"Call to add_lora method failed: {folder} holds incomplete metadata")
        self.added.append(number)
        self.folders[number] = folder
        return number

    async def remove(self, number: int) -> None:
        await asyncio.sleep(0)
        del self.folders[number]

    async def logprobs(self, handle: object, tokens: Sequence[int]) -> list[float]:
        assert isinstance(handle, int)
        return [float(value) for value in json.loads((self.folders[handle] / WEIGHTS).read_text())]


def folder_of(root: Path, name: str, content: object = (-1.0, -2.0), proof: Proof | None = PROOF) -> Path:
    folder = root / "checkpoints" / "run-1" / "sampler_weights" / name
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / CONFIG).write_text("{}")
    if proof is not None:
        (folder / proofs.FILE).write_text(json.dumps(proofs.as_json(proof)))
    return folder


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def adapters_of(root: Path, engine: Engine, most: int = 4) -> Adapters:
    return Adapters(engine, make_home(root / "links"), most, is_exact=True)


async def use(adapters: Adapters, folder: Path, proof: Proof | None = None) -> object:
    async with adapters.use(SampleSpec(base="m", weights=str(folder), proof=proof)) as handle:
        return handle


def test_an_adapter_is_loaded_and_proved_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        adapters, folder = adapters_of(tmp_path, engine), folder_of(tmp_path, "a", (-1.0005, -2.0))
        handles = await asyncio.gather(*(use(adapters, folder) for _ in range(5)))
        assert handles == [1] * 5 and engine.added == [1] and adapters.proved == 1
        assert adapters.last_difference == pytest.approx(5e-4)
        assert await use(adapters, folder_of(tmp_path, "b")) == 2
        async with adapters.use(SampleSpec(base="m")) as base:
            assert base is None

    run(test())


def test_weights_that_vllm_sees_differently_are_removed_and_never_served(tmp_path: Path) -> None:
    """vLLM loads a file whose names it does not know without a word, and serves the base model."""

    async def test() -> None:
        engine = Engine()
        adapters = adapters_of(tmp_path, engine)
        wrong, right = folder_of(tmp_path, "wrong", (-1.0, -2.1)), folder_of(tmp_path, "right")
        for _ in range(2):
            with pytest.raises(
                EngineFault, match=r"run-1/sampler_weights/wrong are not served.* differ by 0\.1"
            ) as error:
                await use(adapters, wrong)
            assert error.value.category == "server" and str(tmp_path) not in str(error.value)
        assert engine.folders == {} and adapters.rejected == 2
        assert await use(adapters, right) == 3  # the numbers of those that were removed are not given again
        with pytest.raises(EngineFault, match="differ by inf"):
            await use(adapters, folder_of(tmp_path, "nan", "[NaN, -2.0]"))
        assert [path.name for path in adapters._home.iterdir() if path.is_dir()] == ["3"]

    run(test())


def test_a_file_that_cannot_be_loaded_fails_alone_and_names_no_path(tmp_path: Path) -> None:
    async def test() -> None:
        adapters = adapters_of(tmp_path, Engine())
        with pytest.raises(EngineFault, match="run-1/sampler_weights/bad") as error:
            await use(adapters, folder_of(tmp_path, "bad", "torn"))
        assert str(tmp_path) not in str(error.value) and "incomplete metadata" in str(error.value)
        with pytest.raises(EngineFault, match="are gone"):
            await use(adapters, tmp_path / "checkpoints" / "run-1" / "sampler_weights" / "none")
        without = folder_of(tmp_path, "without")
        (without / CONFIG).unlink()
        with pytest.raises(EngineFault, match=r"have no adapter_config\.json"):
            await use(adapters, without)
        assert await use(adapters, folder_of(tmp_path, "good")) is not None

    run(test())


def test_the_end_of_vllms_engine_is_no_fault_of_an_adapter(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.is_dead = True
        with pytest.raises(EngineDeadError):
            await use(adapters_of(tmp_path, engine), folder_of(tmp_path, "a"))

    run(test())


def test_weights_without_a_proof_ask_for_one(tmp_path: Path) -> None:
    async def test() -> None:
        adapters, folder = adapters_of(tmp_path, Engine()), folder_of(tmp_path, "old", proof=None)
        with pytest.raises(ProofMissing):
            await use(adapters, folder)
        assert await use(adapters, folder, PROOF) == 2
        (folder_of(tmp_path, "bad") / proofs.FILE).write_text("{}")
        with pytest.raises(EngineFault, match=r"tinkex_proof\.json is damaged"):
            await use(adapters, tmp_path / "checkpoints/run-1/sampler_weights/bad")

    run(test())


def test_files_stay_after_their_folder_is_deleted(tmp_path: Path) -> None:
    """vLLM may drop an adapter and read its files again: if they were gone its whole engine would end."""

    async def test() -> None:
        engine = Engine()
        adapters, folder = adapters_of(tmp_path, engine), folder_of(tmp_path, "a")
        assert await use(adapters, folder) == 1
        shutil.rmtree(folder)
        assert (engine.folders[1] / WEIGHTS).exists()
        assert await use(adapters, folder) == 1
        assert await use(adapters, folder_of(tmp_path, "a")) == 2  # written again under the same name: other weights

    run(test())


def test_the_least_recently_used_adapter_leaves_with_its_files_but_never_one_in_use(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        adapters = adapters_of(tmp_path, engine, most=2)
        folders = [folder_of(tmp_path, name) for name in "abc"]
        async with adapters.use(SampleSpec(base="m", weights=str(folders[0]))):
            for folder in folders[1:]:
                await use(adapters, folder)
            assert sorted(engine.folders) == [1, 3]
        await use(adapters, folders[1])
        assert sorted(engine.folders) == [3, 4]
        assert sorted(path.name for path in adapters._home.iterdir() if path.is_dir()) == ["3", "4"]

    run(test())


def test_the_adapter_of_the_base_model_is_a_peft_folder_of_zeros(tmp_path: Path) -> None:
    null_adapter.write(tmp_path / "base", "q_proj")
    tensors = load_file(tmp_path / "base" / WEIGHTS)
    assert len(tensors) == 2 and not any(tensor.any() for tensor in tensors.values())
    assert all(".q_proj.lora_" in name and "no_such_part" in name for name in tensors)
    assert json.loads((tmp_path / "base" / CONFIG).read_text())["r"] == null_adapter.RANK


def test_links_of_a_process_that_lives_are_left_alone(tmp_path: Path) -> None:
    first = make_home(tmp_path)
    (first / "1").mkdir()
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "in-use").touch()
    second = make_home(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first, second])
