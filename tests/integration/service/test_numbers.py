"""The right numbers as a client sees them, over HTTP: alone or interleaved, resumed or not, sampled or trained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tinkex.client.download import download_checkpoint

RATE = tinkex.AdamParams(learning_rate=2e-3, weight_decay=0.01, grad_clip_norm=5.0)


def data(seed: int, rows: int = 4) -> list[tinkex.Datum]:
    dice = random.Random(seed)
    sequences = [[dice.randrange(5, 250) for _ in range(dice.randrange(6, 30))] for _ in range(rows)]
    return [
        tinkex.Datum(
            tinkex.ModelInput.from_ints(row[:-1]),
            {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in sequences
    ]


def new_run(service: tinkex.ServiceClient, seed: int, rank: int = 4) -> tinkex.TrainingClient:
    return service.create_lora_training_client(base_model="tinkex/tiny", rank=rank, seed=seed)


def step(training: tinkex.TrainingClient, seed: int) -> None:
    training.forward_backward(data(seed), "cross_entropy")
    training.optim_step(RATE)


def saved(live: LiveServer, training: tinkex.TrainingClient, name: str) -> dict[str, bytes]:
    """The files of the run's weights and moments, byte for byte."""
    path = training.save_state(name).result(timeout=60).path
    run, kind, leaf = path.removeprefix("tinker://").split("/")
    folder = live.data_dir / "checkpoints" / run / kind / leaf
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_interleaving_two_models_equals_training_each_alone(live: LiveServer, service: tinkex.ServiceClient) -> None:
    alone = []
    for seed, rank in ((1, 4), (2, 6)):
        run = new_run(service, seed, rank)
        for number in range(5):
            step(run, 10 * seed + number)
        alone.append(saved(live, run, "alone"))
    pair = [new_run(service, 1, 4), new_run(service, 2, 6)]
    for number in range(5):
        for seed, run in zip((1, 2), pair, strict=True):
            step(run, 10 * seed + number)
    assert [saved(live, run, "mixed") for run in pair] == alone


def test_a_resumed_run_equals_one_that_never_stopped(live: LiveServer, service: tinkex.ServiceClient) -> None:
    whole = new_run(service, 3)
    for number in range(6):
        step(whole, number)
    first = new_run(service, 3)
    for number in range(3):
        step(first, number)
    path = first.save_state("half").result(timeout=60).path
    second = service.create_training_client_from_state_with_optimizer(path)
    for number in range(3, 6):
        step(second, number)
    assert saved(live, second, "end") == saved(live, whole, "end")


def test_a_second_client_goes_on_with_a_live_run(live: LiveServer, service: tinkex.ServiceClient) -> None:
    whole = new_run(service, 4)
    for number in range(4):
        step(whole, number)
    first = new_run(service, 4)
    step(first, 0)
    first.forward_backward(data(1), "cross_entropy").result(timeout=60)  # a gradient waits; nothing was saved
    with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as another:
        second = another.create_training_client_from_run(first.model_id)
        second.optim_step(RATE)
        for number in (2, 3):
            step(second, number)
        assert saved(live, second, "end") == saved(live, whole, "end")


def test_a_client_that_goes_on_with_a_run_gets_samplers_of_its_own(live: LiveServer) -> None:
    prompt, greedy = tinkex.ModelInput.from_ints([5, 6, 7]), tinkex.SamplingParams(max_tokens=4, temperature=0.0)
    with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as service:
        first = new_run(service, 4)
        early = first.save_weights_and_get_sampling_client()
        with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as another:
            second = another.create_training_client_from_run(first.model_id)
            for number in range(3):
                step(second, number)
            late = second.save_weights_and_get_sampling_client()
            logprobs = [sampler.compute_logprobs(prompt).result(60) for sampler in (early, late)]
            assert logprobs[0] != logprobs[1]
            assert late.sample(prompt, 1, greedy).result(60).sequences


def test_the_same_program_without_a_seed_gives_the_same_numbers_twice(live: LiveServer) -> None:
    found = []
    for _ in range(2):
        with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as service:
            runs = [service.create_lora_training_client(base_model="tinkex/tiny", rank=4) for _ in range(2)]
            for run in runs:
                step(run, 0)
            found.append([saved(live, run, "end") for run in runs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "runs of one session begin differently"


def test_the_samplers_log_probabilities_are_the_trainers(service: tinkex.ServiceClient) -> None:
    run = new_run(service, 5)
    for number in range(4):
        step(run, number)
    sampler = run.save_weights_and_get_sampling_client()
    worst = 0.0
    for datum in data(9):
        targets = datum.loss_fn_inputs["target_tokens"].tolist()
        tokens = [*datum.model_input.to_ints(), targets[-1]]
        trained = run.forward([datum], "cross_entropy").result(timeout=60).loss_fn_outputs[0]["logprobs"].tolist()
        sampled = sampler.compute_logprobs(tinkex.ModelInput.from_ints(tokens)).result(timeout=60)
        assert sampled[0] is None
        worst = max(worst, *(abs(a - b) for a, b in zip(sampled[1:], trained, strict=True) if a is not None))
    assert worst < 1e-3


def test_sampler_weights_stay_as_they_were_saved(service: tinkex.ServiceClient) -> None:
    run = new_run(service, 6)
    step(run, 0)
    path = run.save_weights_for_sampler("kept").result(timeout=60).path
    prompt, greedy = tinkex.ModelInput.from_ints([7, 8, 9]), tinkex.SamplingParams(max_tokens=12, temperature=0)

    def tokens() -> list[int]:
        sampler = service.create_sampling_client(model_path=path)
        return sampler.sample(prompt, 1, greedy).result(timeout=60).sequences[0].tokens

    before = tokens()
    for number in range(1, 6):
        step(run, number)
    run.forward(data(0), "cross_entropy").result(timeout=60)
    assert tokens() == before


def test_a_sampler_keeps_its_weights_when_its_name_is_saved_again(service: tinkex.ServiceClient) -> None:
    run = new_run(service, 8)
    step(run, 0)
    path = run.save_weights_for_sampler("latest").result(timeout=60).path
    prompt = tinkex.ModelInput.from_ints([7, 8, 9, 10])

    def score(sampler: tinkex.SamplingClient) -> list[float | None]:
        return sampler.compute_logprobs(prompt).result(timeout=60)

    old = service.create_sampling_client(model_path=path)
    before = score(old)
    for number in range(1, 6):
        step(run, number)
    assert run.save_weights_for_sampler("latest").result(timeout=60).path == path
    assert score(service.create_sampling_client(model_path=path)) != before
    assert score(old) == before


@pytest.mark.slow
def test_an_adapter_loaded_in_peft_generates_the_same_greedy_text(
    live: LiveServer, service: tinkex.ServiceClient, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tinkex.engine.models.registry import resolve

    run = new_run(service, 7)
    for number in range(6):
        step(run, number)
    path = run.save_weights_for_sampler("peft").result(timeout=60).path
    prompt = [11, 12, 13, 14]
    sampler = service.create_sampling_client(model_path=path)
    params = tinkex.SamplingParams(max_tokens=16, temperature=0, stop=[])
    ours = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params).result(timeout=60).sequences[0].tokens

    files = download_checkpoint(service.create_rest_client(), path, tmp_path / "adapter").result(timeout=60)
    base = AutoModelForCausalLM.from_pretrained(resolve("tinkex/tiny", live.cache).folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(files[0].parent))
    with torch.inference_mode():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert found[0, len(prompt) :].tolist() == ours
