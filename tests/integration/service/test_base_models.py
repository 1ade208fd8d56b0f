"""Several base models with room for one, on a real service with the real client: the numbers are those of room for all.

And who may offer another one, and what stays of that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import tinkex
from tests.integration.service.conftest import ALICE
from tests.integration.service.live import CACHE, LiveServer
from tests.integration.service.raw import Raw
from tests.integration.service.test_numbers import data
from tests.integration.service.test_tenants import key_command
from tinkex.engine.models.registry import resolve

pytestmark = pytest.mark.slow

TINY, TWIN = "tinkex/tiny", "twin"
SIZE = 8 * resolve(TINY, CACHE).parameters
"""Bytes of a tiny model in memory, with the copy that sampling uses."""
ROOM_FOR_ONE = ("--base-model-memory-mb", str(-(-SIZE // 10**6)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`twin` has other weights than the built-in model; `holed` lacks some, so that it cannot be loaded."""
    parent = tmp_path_factory.mktemp("base-models")
    for name in ("twin", "holed"):
        folder = shutil.copytree(resolve(TINY, CACHE).folder, parent / name)
        file = folder / "model.safetensors"
        tensors = {part: values * 1.25 for part, values in load_file(file).items()}
        if name == "holed":
            del tensors[min(tensors)]
        save_file(tensors, file, metadata={"format": "pt"})
    return parent


@pytest.fixture(scope="module")
def narrow(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    assert int(ROOM_FOR_ONE[1]) * 10**6 < 2 * SIZE
    folder = tmp_path_factory.mktemp("narrow") / "data"
    with LiveServer(folder, *ROOM_FOR_ONE, models=(TINY, str(folders / TWIN))) as server:
        yield server


def client_of(server: LiveServer) -> tinkex.ServiceClient:
    return tinkex.ServiceClient(base_url=server.url, api_key="tml-test")


def steps(training: tinkex.TrainingClient, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        passed = training.forward_backward(data(seed), "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=2e-3)).result(timeout=120)
        losses.append(passed.result(timeout=120).metrics["loss:sum"])
    return losses


def work(server: LiveServer, kill: bool = False) -> list[object]:
    """Train on one model, train on and sample from the other, and go back; every number that comes."""
    found: list[object] = []
    with client_of(server) as service:
        first = service.create_lora_training_client(TINY, rank=4, seed=1)
        found += steps(first, 1, 2)
        second = service.create_lora_training_client(TWIN, rank=4, seed=1)
        found += steps(second, 1)
        if kill:
            server.kill_engine()
        found += steps(first, 3)
        sampler = second.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=8, seed=7)
        sample = sampler.sample(tinkex.ModelInput.from_ints([5, 6, 7]), 1, params).result(timeout=120).sequences[0]
        found += [sample.tokens, sample.logprobs]
        found += steps(first, 4) + steps(second, 5)
    return found


def test_with_room_for_one_model_the_numbers_are_those_of_a_service_with_both(
    narrow: LiveServer, folders: Path, tmp_path: Path
) -> None:
    with LiveServer(tmp_path / "data", models=(TINY, str(folders / TWIN))) as wide:
        expected = work(wide)
        assert state_of(wide) == {TINY: True, TWIN: True}
    assert work(narrow) == expected
    assert "unloaded base model twin" in narrow.log() and "unloaded base model tinkex/tiny" in narrow.log()
    assert sum(state_of(narrow).values()) == 1
    assert work(narrow, kill=True) == expected
    page = Raw(narrow).get("/metrics").content.decode()
    gauges = {line.rpartition(" ")[0]: float(line.split()[-1]) for line in page.splitlines() if line[0] != "#"}
    assert gauges['tinkex_base_model_bytes{base_model="twin"}'] == SIZE
    assert gauges[f'tinkex_base_model_loaded{{base_model="{TINY}"}}'] == 0


def state_of(server: LiveServer) -> dict[str, bool]:
    with tinkex.RestClient(base_url=server.url, api_key="tml-test") as rest:
        return {model.model_name: model.is_loaded for model in rest.get_service_state().result(20).base_models}


def test_a_model_that_cannot_be_loaded_fails_what_asks_for_it(narrow: LiveServer, folders: Path) -> None:
    with client_of(narrow) as service:
        rest = service.create_rest_client()
        offered = rest.offer_model(str(folders / "holed")).result(60)
        assert (offered.model_name, offered.is_loaded) == ("holed", False)
        with pytest.raises(tinkex.TinkexError, match=r"Base model holed could not be loaded.*weights are missing"):
            service.create_lora_training_client("holed", rank=4)
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        assert len(steps(training, 1)) == 1
        rest.withdraw_model("holed").result(60)
        with pytest.raises(tinkex.TinkexError, match="not served here"):
            service.create_lora_training_client("holed", rank=4)


def test_what_was_offered_is_offered_after_a_restart_until_it_is_withdrawn(folders: Path, tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", *ROOM_FOR_ONE)
    folder = shutil.copytree(folders / TWIN, tmp_path / TWIN)
    with server:
        added = tinkex_command(server, "models", "add", str(folder))
        assert (added["model_name"], added["is_loaded"]) == (TWIN, False)
        with client_of(server) as service:
            training = service.create_lora_training_client(TWIN, rank=4, seed=1)
            path, first = training.save_state("state").result(timeout=60).path, steps(training, 1)
    with server, client_of(server) as service:
        names = [model.model_name for model in service.get_server_capabilities().supported_models]
        assert TWIN in names
        assert TWIN in [row["id"] for row in Raw(server).get("/v1/models").json["data"]]
        assert steps(service.create_training_client_from_state_with_optimizer(path), 1) == first
        assert tinkex_command(server, "models", "rm", TWIN) == {"withdrawn": TWIN}
        assert TWIN not in state_of(server)
        tinkex_command(server, "models", "add", str(folder))
    shutil.rmtree(folder)
    with server:
        assert state_of(server) == {TINY: True}
        assert "base model twin, which was offered before, is not offered now" in server.log()


def tinkex_command(server: LiveServer, *words: str) -> Any:
    flags = ("--base-url", server.url, "--api-key", "tml-test", "-o", "json")
    command = [sys.executable, "-m", "tinkex", *words, *flags]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_only_the_owner_offers_and_withdraws_models(keyed: LiveServer, folders: Path) -> None:
    owner, alice = Raw(keyed, key_command(keyed, "create", "me", "--tenant", "local")["key"]), Raw(keyed, ALICE)
    body = {"name": str(folders / TWIN)}
    for answer in (alice.post("models", body), alice.ask("DELETE", f"models/{TINY}")):
        assert (answer.status, answer.json["code"]) == (403, "not_owner")
    assert owner.post("models", body).json["model_name"] == TWIN
    assert owner.ask("DELETE", f"models/{TWIN}").status == 200
    assert owner.ask("DELETE", f"models/{TWIN}").status == 404


def test_without_keys_a_caller_behind_a_proxy_is_not_the_owner(narrow: LiveServer, folders: Path) -> None:
    stranger, body = Raw(narrow), {"name": str(folders / "holed")}
    answer = stranger.post("models", body, headers={"x-forwarded-for": "203.0.113.7"})
    assert (answer.status, answer.json["code"]) == (403, "not_owner")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nobody/nothing", "not on this machine. Fetch it first: tinkex models pull nobody/nothing"),
        ("./somewhere", "Give the whole path of the folder"),
        ("/nowhere", "is neither a folder nor a model name"),
    ],
)
def test_a_model_that_is_not_there_is_told_in_a_sentence(narrow: LiveServer, name: str, told: str) -> None:
    answer = Raw(narrow).post("models", {"name": name})
    assert answer.status == 400 and told in answer.text


def test_another_model_of_the_same_name_is_rejected(narrow: LiveServer, folders: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folders / TWIN, tmp_path / TWIN)
    answer = Raw(narrow).post("models", {"name": str(other)})
    assert (answer.status, answer.json["code"]) == (400, "name_taken")
