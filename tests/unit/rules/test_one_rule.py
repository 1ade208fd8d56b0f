"""Client, server and engine obey one rule each time: what one accepts, the others accept, and they reject in the same
words. Every test names what used to happen when the rule was written two or three times.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkex.client._calls import validate
from tinkex.client._calls.sample_call import SampleCall
from tinkex.engine.adapters.adapter import Adapter, sites_for
from tinkex.engine.adapters.optimizer import AdamW
from tinkex.engine.contract import EngineFault, LoraSpec, pass_frame
from tinkex.engine.models import loaded_model, registry
from tinkex.engine.training import datum_tensors
from tinkex.engine.training import losses as engine_losses
from tinkex.errors import ContextOverflow, ValidationError
from tinkex.events import StepEvent
from tinkex.rules import checkpoint_names, losses, ranges
from tinkex.server.http.errors import RequestRejected
from tinkex.server.routes.training import _adam
from tinkex.server.sampling.sample_queue import SampleTarget
from tinkex.server.sampling.sample_spec import spec_of
from tinkex.server.training.checks import check_data
from tinkex.server.training.steps import steps_of
from tinkex.store.records import OperationRecord
from tinkex.testing import model as scripted
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.tensor import INPUT_DTYPES, TensorData
from tinkex.types.training import AdamParams, LoraConfig, LossFnType
from tinkex.watch.tally import loss_of

CACHE = Path(__file__).parents[3] / ".cache"
POLICY: dict[str, Any] = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}


@pytest.fixture(scope="module")
def model() -> loaded_model.Model:
    return loaded_model.load(registry.resolve("tinkex/tiny", CACHE), torch.device("cpu"), torch.float32)


def words_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """What a rejection says; nothing if the call is accepted."""
    try:
        call(*args, **kwargs)
    except (ValidationError, EngineFault, RequestRejected) as error:
        return str(error)
    return ""


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".hidden", "x" * 201, "x" * 255, "a b", "", "..", "a/b", 5, None])
def test_a_checkpoint_name_is_rejected_everywhere(name: Any) -> None:
    """The client used to let `.hidden` and names of 201 to 255 characters pass; the server rejected them."""
    assert "checkpoint's name" in words_of(validate.check_name, name)
    with pytest.raises(ValidationError) as rejected:
        checkpoint_names.check_name(name)
    assert rejected.value.code == "bad_name"


@pytest.mark.parametrize("ttl", [0, -1, 1.5, True, "7d", checkpoint_names.MAX_TTL_S + 1])
def test_a_time_to_live_has_one_range(ttl: Any) -> None:
    """The client used to let more than 100 years pass; the server rejected it."""
    assert words_of(validate.check_ttl, ttl).startswith("ttl_seconds must be a whole number of seconds from 1 to")


# -- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 2e4},
        {"learning_rate": -1.0},
        {"learning_rate": math.inf},
        {"eps": 0.0},
        {"eps": 2.0},
        {"beta2": 1.0},
        {"weight_decay": 1e5},
        {"grad_clip_norm": math.nan},
        {"learning_rate": 1.0, "weight_decay": 2.0},
    ],
    ids=str,
)
def test_adamw_settings_are_rejected_in_the_same_words(settings: dict[str, float]) -> None:
    """A learning rate of 20,000 used to pass the client (any finite one) and the server (to 1e6, and so it was
    journaled), and failed in the engine (to 1e4). eps = 0 passed both, and eps = 2 the client."""
    client = words_of(validate.check_adam, AdamParams(**settings))
    assert client.startswith("AdamParams")
    assert client == words_of(_adam, {"adam_params": settings}) == words_of(AdamW.read, settings)


def test_adamw_defaults_are_the_same_on_both_sides() -> None:
    """The table of defaults was written out in the route."""
    assert _adam({}) == AdamParams().model_dump()
    assert AdamW.read(_adam({})) == AdamW()


# -- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_1_is_rejected_in_the_same_words(model: loaded_model.Model, rank: int) -> None:
    """The client used to send it."""
    info = model.info
    client = words_of(validate.check_lora, LoraConfig(rank=rank))
    assert client == f"rank is {rank}; it must be at least 1."
    assert client == words_of(ranges.check_rank, rank, info.name, info.hidden_size)
    assert client == words_of(sites_for, model, LoraSpec(rank=rank))


@pytest.mark.parametrize("rank", [513, 1024])
def test_the_route_knows_the_rank_that_the_engine_allows(model: loaded_model.Model, rank: int) -> None:
    """Ranks from 513 to 1,024 used to be accepted and journaled at the route, and failed in the engine."""
    info = model.info
    assert info.hidden_size == 64
    at_the_route = words_of(ranges.check_rank, rank, info.name, info.hidden_size)
    assert at_the_route == f"rank is {rank}; tinkex/tiny allows 1 to 512."
    assert at_the_route == words_of(sites_for, model, LoraSpec(rank=rank))
    assert not words_of(ranges.check_rank, rank, "wide", 2048)


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 101.0},
        {"frequency_penalty": -1e9},
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6},
        {"top_p": 0.0},
        {"top_k": 0},
        {"temperature": math.inf},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"stop": ["a", ""]},
        {"stop": [-1]},
    ],
    ids=str,
)
def test_sampling_parameters_are_rejected_in_the_same_words(model: loaded_model.Model, params: dict[str, Any]) -> None:
    """The client used to let any finite penalty pass; the server rejected what was beyond 100."""
    prompt, sampling = ModelInput.from_ints([1, 2]), SamplingParams(**params)
    client = words_of(validate.check_sampling, SampleCall(prompt, 1, sampling))
    request = SampleRequest(prompt=prompt, sampling_params=sampling)
    assert client and client == words_of(spec_of, request, SampleTarget(model.info))


def test_a_prompt_beyond_the_context_is_rejected_in_the_same_words(model: loaded_model.Model) -> None:
    """The sentence was written twice."""
    prompt, sampling = ModelInput.from_ints([1] * 2000), SamplingParams(max_tokens=100)
    client = words_of(validate.check_sampling, SampleCall(prompt, 1, sampling), model.info.max_context_length)
    request = SampleRequest(prompt=prompt, sampling_params=sampling)
    assert client == words_of(spec_of, request, SampleTarget(model.info)) == str(ContextOverflow(2000, 100, 2048))


# -- losses -----------------------------------------------------------------------------------------------------------


def test_there_is_one_table_of_losses() -> None:
    """Required and optional inputs stood in client/_validate, engine/losses, types/tensor and testing/model."""
    assert engine_losses.LOSSES.keys() == losses.LOSSES.keys()
    assert set(typing.get_args(LossFnType)) == {*losses.LOSSES, *losses.NOT_OFFERED}
    assert {*losses.LOSSES, "custom"} == scripted.OFFERED
    assert {key for rule in losses.LOSSES.values() for key in rule.inputs} == set(INPUT_DTYPES)


@pytest.mark.parametrize(
    ("loss_fn", "inputs"),
    [
        ("cross_entropy", {"target_tokens": [2, 3], "mask": [1.0, 1.0]}),
        ("cross_entropy", {"weights": [1.0, 1.0]}),
        ("cross_entropy", {"target_tokens": [2, 3], "weights": [1.0]}),
        ("cross_entropy", {"target_tokens": [2, 3], "weights": [1.0, math.nan]}),
        ("cross_entropy", {"target_tokens": [2]}),
        ("cross_entropy", {"target_tokens": TensorData([2.0, 3.0], "float32")}),
        ("cross_entropy", {"target_tokens": TensorData([1, 2], "int64", [2, 5], [0, 2, 2], [3, 3])}),
        ("cross_entropy", {"target_tokens": TensorData([2, 3], "int64", [2, 1, 1])}),
        ("ppo", {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0]}),
        ("ppo", {**POLICY, "weights": [1.0, 1.0]}),
        ("ppo", {"target_tokens": [[2]] * 2, "logprobs": [[-1.0]] * 2, "advantages": [[1.0]] * 2}),
        ("ppo", {**POLICY, "clip_low_threshold": [2.0, 2.0], "clip_high_threshold": [1.0, 1.0]}),
        ("kl_divergence", {"target_tokens": [[2, 3]] * 2, "logprobs": [-1.0, -1.0]}),
    ],
)  # fmt: skip
def test_data_are_rejected_in_the_same_words(model: loaded_model.Model, loss_fn: str, inputs: dict[str, Any]) -> None:
    """There were three checks with three sets of words. Several targets per position for ppo, crossed thresholds and a
    sparse entry listed twice used to pass client and server, were journaled, and failed in the engine."""
    data = [Datum(ModelInput.from_ints([1, 2]), inputs)]
    client = words_of(validate.check_data, data, loss_fn)
    assert "data[0]" in client
    assert client == words_of(check_data, data, loss_fn, None, model.info)
    frame = pass_frame("forward_backward", "a", data, loss_fn, None)
    assert client == words_of(datum_tensors.read_items, frame, Adapter(model, LoraSpec()))


def test_a_mask_that_leaves_no_token_is_rejected_before_the_journal(model: loaded_model.Model) -> None:
    """It used to be accepted and journaled, and failed in the engine."""
    data = [Datum(ModelInput.from_ints([1, 2]), {**POLICY, "sequence_ratio_mask": [0.0, 0.0]})]
    client = words_of(validate.check_data, data, "gspo")
    assert client == f"data[0]: {losses.EMPTY_MASK}" == words_of(check_data, data, "gspo", None, model.info)


@pytest.mark.parametrize(
    ("loss_fn", "config", "is_the_services_own"),
    [
        ("ppo", {"clip_low_threshold": 1.5}, False),
        ("ppo", {"clip_low_threshold": 1.5, "clip_high_threshold": 1.1}, False),
        ("dro", {"beta": math.nan}, False),
        ("dro", {"beta": "small"}, False),
        ("ppo", {"clip": 0.2}, True),
    ],
)
def test_settings_of_a_loss_are_rejected_in_the_same_words(
    model: loaded_model.Model, loss_fn: str, config: dict[str, Any], is_the_services_own: bool
) -> None:
    """A lower threshold above the default of the upper one used to pass client and server, was journaled, and failed in
    the engine. A setting that only our service lacks still passes the client: the hosted service may have it."""
    data = [Datum(ModelInput.from_ints([1, 2]), POLICY)]
    server = words_of(check_data, data, loss_fn, config, model.info)
    assert server and server == words_of(engine_losses.read_config, engine_losses.find_loss(loss_fn), config)
    assert words_of(validate.check_loss_config, config, loss_fn) == ("" if is_the_services_own else server)


@pytest.mark.parametrize("loss_fn", ["mse", "stable_reinforce", "custom"])
def test_a_loss_that_our_service_lacks_is_rejected_before_the_journal(model: loaded_model.Model, loss_fn: str) -> None:
    """It used to be accepted and journaled, and failed in the engine."""
    data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
    server = words_of(check_data, data, loss_fn, None, model.info)
    assert loss_fn in server and server == words_of(engine_losses.find_loss, loss_fn)
    assert not words_of(validate.check_data, data, loss_fn), "another service may offer it"


# -- the loss of a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "loss"),
    [
        ([{"loss:sum": 6.0, "weight:sum": 3.0}], 2.0),
        ([{"loss:sum": 6.0, "weight:sum": 3.0}, {"loss:sum": 2.0, "weight:sum": 5.0}], 1.0),
        ([{"loss:sum": 2.0, "weight:sum": 0.0}], None),
        ([{"loss:sum": 2.0, "weight:sum": -1.0}], None),
        ([{"loss:sum": 6.0}], 6.0),
        ([{"loss:sum": 6.0}, {"loss:sum": 1.0, "weight:sum": 2.0}], 7.0),
        ([{"ratio:mean": 1.0}], None),
    ],
)
def test_the_step_has_one_loss_on_the_service_and_in_the_sdk(
    passes: list[dict[str, float]], loss: float | None
) -> None:
    """For weights that sum to 0 or less, `tinkex.progress` used to show the sum and the console showed nothing."""
    events = [
        StepEvent("forward_backward", "m", 1, "r", True, 0.0, 0.0, 0.0, 0.0, 0.0, metrics=metrics) for metrics in passes
    ]
    rows = [
        OperationRecord(
            request_id=f"op-{seq_id}", run_id="r", tenant="t", seq_id=seq_id, kind=kind, digest="", state="done",
            finished_at=1.0, metrics=metrics,
        )
        for seq_id, (kind, metrics) in enumerate(
            [*(("forward_backward", metrics) for metrics in passes), ("optim_step", None)], 1
        )
    ]  # fmt: skip
    assert loss_of(events) == loss
    assert steps_of(rows)[0][0]["loss"] == loss
