"""Which engine a service gets, and what its page of metrics says about one that samples elsewhere."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from tinkex.engine.contract import EngineState, ModelInfo
from tinkex.engine.host import LocalEngine
from tinkex.engine.split import SplitEngine
from tinkex.server.main import _with_samplers
from tinkex.server.routes.metrics import sampler_metrics
from tinkex.settings import ServeConfig

MODELS = [ModelInfo(name=name, folder=f"/{name}", vocab_size=100) for name in ("m", "n")]


def test_a_service_samples_with_its_own_engine_and_loads_nothing_else_for_it() -> None:
    trainer = LocalEngine(MODELS)
    assert _with_samplers(ServeConfig(), MODELS, trainer) is trainer
    code = "import sys, tinkex.server.main; print([name for name in sys.modules if 'vllm' in name or '.split' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_service_that_samples_with_vllm_has_a_process_for_each_model(tmp_path: Path) -> None:
    config = ServeConfig(
        sampler="vllm", vllm_python=Path("/opt/vllm/bin/python"), vllm_max_rank=16, data_dir=tmp_path, threads=3
    )
    engine = _with_samplers(config, MODELS, LocalEngine(MODELS))
    assert isinstance(engine, SplitEngine) and list(engine._samplers) == ["m", "n"]
    sampler = engine._samplers["n"]
    assert isinstance(sampler, LocalEngine) and sampler._program[0] == "/opt/vllm/bin/python"
    start = sampler._start_frame.head
    assert list(sampler._models) == ["n"] and start["threads"] == 3
    assert start["vllm"]["max_rank"] == 16 and start["vllm"]["links"] == str(tmp_path / "sampled-adapters")


def test_a_node_that_only_trains_writes_proofs_if_it_is_told_to() -> None:
    engine = _with_samplers(ServeConfig(proofs=True), MODELS, LocalEngine(MODELS))
    assert isinstance(engine, SplitEngine) and not engine._samplers


def test_the_difference_to_the_trainer_is_a_metric() -> None:
    extras = {"proofs_passed": 3, "logprob_difference": 2e-6, "largest_logprob_difference": None, "adapters": 2}
    states = {"m": EngineState(is_ready=True, generation=3, extras=extras), "n": EngineState(is_ready=False)}
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for metric in sampler_metrics(states)
        for sample in metric.samples
    }
    assert values["tinkex_sampler_ready", "m"] == 1 and values["tinkex_sampler_ready", "n"] == 0
    assert values["tinkex_sampler_restarts_total", "m"] == 2
    assert values["tinkex_sampler_proofs_total", "m", "passed"] == 3
    assert values["tinkex_sampler_logprob_difference", "last", "m"] == 2e-6
    assert values["tinkex_sampler_logprob_difference", "largest", "m"] == math.inf  # JSON has no infinity
    assert values["tinkex_sampler_logprob_difference", "largest", "n"] == 0
