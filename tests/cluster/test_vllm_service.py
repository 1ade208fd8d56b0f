"""`tinkex serve --sampler vllm`: all samples come although its processes are killed, and training goes on."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tools
from tests.cluster.vllm_rig import small_model
from tests.integration.service.live import LiveServer
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient

pytestmark = [pytest.mark.full]

READY_S = 300.0
TOKENS = 1000
"""Of each of 24 samples: none is done when the sampler is killed, a second after it has begun."""
FLAGS = ("--sampler", "vllm", "--vllm-slots", "4", "--vllm-max-rank", "32", "--vllm-cache-gb", "1", "--threads", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    python = str(tools.make("vllm"))
    folder = tmp_path_factory.mktemp("service")
    live = LiveServer(folder / "data", *FLAGS, "--vllm-python", python, models=(str(small_model(folder)),))
    live.start(wait_s=READY_S)
    yield live
    live.stop()


@pytest.fixture
def service(server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server.url) as client:
        yield client


def family(pid: int) -> dict[int, str]:
    """Return all living descendants of a process with their command lines (Linux tells)."""
    found: dict[int, str] = {}
    for child in _children(pid):
        found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        found |= family(child)
    return found


def _children(pid: int) -> list[int]:
    numbers: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        numbers += map(int, (task / "children").read_text().split())
    return numbers


def sampler_of(server: LiveServer) -> tuple[int, list[int]]:
    """Return the process that samples, and those that vLLM has started."""
    assert server.process is not None
    own = next(pid for pid in _children(server.process.pid) if "engine.vllm.main" in _command(pid))
    return own, list(family(own))


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def metric(server: LiveServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as page:
        match = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
    assert match is not None, name
    return float(match[1])


def datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def model_of(service: ServiceClient) -> str:
    """Return the model's first name; its folder is another."""
    first = service.get_server_capabilities().supported_models[0].model_name
    assert first is not None
    return first


def trained(service: ServiceClient, rank: int = 8) -> TrainingClient:
    training = service.create_lora_training_client(model_of(service), rank=rank)
    for _ in range(3):
        training.forward_backward([datum(list(b"sampled elsewhere, trained here"))], "cross_entropy").result()
        training.optim_step(AdamParams(learning_rate=2e-3)).result()
    return training


def test_samples_have_the_trainers_numbers_and_the_page_of_metrics_says_how_near(
    server: LiveServer, service: ServiceClient
) -> None:
    training = trained(service)
    sampling = training.save_weights_and_get_sampling_client()
    prompt = list(b"sampled else")
    [row] = sampling.sample(ModelInput.from_ints(prompt), 1, SamplingParams(max_tokens=32, seed=1)).result().sequences
    scored = training.forward([datum(prompt + list(row.tokens))], "cross_entropy").result()
    expected = list(scored.loss_fn_outputs[0]["logprobs"].data)[len(prompt) - 1 :]
    assert row.logprobs is not None
    assert max(abs(a - b) for a, b in zip(expected, row.logprobs, strict=True)) <= 1e-3
    time.sleep(2.5)  # statistics come once a second
    label = f'base_model="{model_of(service)}"'
    assert metric(server, f"tinkex_sampler_ready{{{label}}}") == 1
    assert metric(server, f'tinkex_sampler_proofs_total{{{label},outcome="passed"}}') >= 1
    assert metric(server, f'tinkex_sampler_proofs_total{{{label},outcome="failed"}}') == 0
    assert 0 < metric(server, f'tinkex_sampler_logprob_difference{{{label},of="largest"}}') <= 1e-3


@pytest.mark.timing
@pytest.mark.parametrize("victim", ["the child", "VLLM::EngineCore", "VLLM::Worker"])
def test_all_samples_come_although_the_sampler_is_killed(
    server: LiveServer, service: ServiceClient, victim: str
) -> None:
    training = trained(service)
    sampling = training.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(list(b"under load"))
    params = SamplingParams(max_tokens=TOKENS, stop=[])
    sampling.sample(prompt, 1, SamplingParams(max_tokens=1)).result(timeout=READY_S)  # it may still be starting
    samples = [sampling.sample(prompt, 1, params) for _ in range(24)]
    _wait_until(lambda: metric(server, "tinkex_samples_running") > 0)
    time.sleep(1.0)
    assert not any(sample.done() for sample in samples)
    child, others = sampler_of(server)
    began = time.monotonic()
    _kill(child if victim == "the child" else next(pid for pid in others if victim in _command(pid)))
    losses = []
    while len(losses) < 3:  # while no vLLM is there
        training.forward_backward([datum(list(b"training goes on"))], "cross_entropy").result(timeout=30)
        losses.append(training.optim_step(AdamParams(learning_rate=1e-4)).result(timeout=30))
    trained_s = time.monotonic() - began
    for sample in samples:
        assert len(sample.result(timeout=READY_S).sequences[0].tokens) == TOKENS
    print(f"{victim}: three steps within {trained_s:.1f} s, all 24 samples within {time.monotonic() - began:.1f} s")
    assert _living(child, *others) == []
    assert metric(server, f'tinkex_sampler_restarts_total{{base_model="{model_of(service)}"}}') >= 1
    assert metric(server, "tinkex_engine_restarts_total") == 0


def test_nothing_of_vllm_is_left_when_the_server_is_killed(tmp_path: Path) -> None:
    python, model = str(tools.make("vllm")), str(small_model(tmp_path))
    live = LiveServer(tmp_path / "data", *FLAGS, "--vllm-python", python, models=(model,))
    live.start(wait_s=READY_S)
    with ServiceClient(base_url=live.url) as service:  # the service trains as soon as it can; vLLM takes longer
        ready = f'tinkex_sampler_ready{{base_model="{model_of(service)}"}}'
    _wait_until(lambda: metric(live, ready) == 1, READY_S)
    child, others = sampler_of(live)
    assert others
    live.kill()
    _wait_until(lambda: not _living(child, *others))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _living(*pids: int) -> list[int]:
    return [pid for pid in pids if not _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_until(is_so: object, seconds: float = 30.0) -> None:
    assert callable(is_so)
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)
