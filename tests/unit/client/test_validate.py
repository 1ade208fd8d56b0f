"""Calls that cannot succeed are rejected before anything is sent, with the position and the remedy."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinkex.client._calls import validate
from tinkex.client._calls.sample_call import SampleCall
from tinkex.client._calls.validate import (
    check_adam,
    check_data,
    check_loss_config,
    check_metadata,
    check_name,
    check_sampler_path,
    check_state_path,
    check_ttl,
    input_length,
)
from tinkex.errors import BadRequestError, ContextOverflow, TinkexError, ValidationError
from tinkex.types.inputs import Datum, DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.types.training import AdamParams, DimuonParams

THREE = ModelInput.from_ints([1, 2, 3])
GOOD = Datum(THREE, {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})
POLICY: dict[str, Any] = {"target_tokens": [2, 3, 4], "logprobs": [-1.0, -2.0, -3.0], "advantages": [1.0, 0.0, -1.0]}


def check_sampling(
    prompt: ModelInput, count: int, params: SamplingParams, max_context_length: int | None = None, **extras: Any
) -> SamplingParams:
    return validate.check_sampling(SampleCall(prompt, count, params, **extras), max_context_length).params


def refused(call: Callable[[], object], *words: str) -> None:
    """The call raises a ValidationError that says every one of these things."""
    with pytest.raises(ValidationError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def with_inputs(**inputs: Any) -> list[Datum]:
    return [GOOD, Datum(THREE, inputs)]


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "inputs"),
    [
        ("cross_entropy", {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]}),
        ("cross_entropy", {"target_tokens": [2, 3, 4]}),
        ("cross_entropy", {"target_tokens": [[2, 3]] * 3, "weights": [[0.5, 0.5]] * 3}),
        ("cross_entropy", {"target_tokens": TensorData([7, 8], "int64", [3, 9], [0, 1, 1, 2], [0, 8]),
                           "weights": TensorData([0.5], "float32", [3, 9], [0, 0, 0, 1], [8])}),
        ("importance_sampling", POLICY),
        ("ppo", {**POLICY, "clip_low_threshold": [0.8] * 3, "clip_high_threshold": [1.2] * 3}),
        ("cispo", POLICY),
        ("dro", POLICY),
        ("gspo", {**POLICY, "sequence_ratio_mask": [1.0, 1.0, 0.0]}),
        ("kl_divergence", {"target_tokens": [[2, 3]] * 3, "logprobs": [[-1.0, -2.0]] * 3, "weights": [1.0] * 3}),
        ("a_loss_of_tomorrow", {"anything": [1.0], "at_all": [[1, 2]]}),
        ("custom", {"target_tokens": [2, 3, 4], "rewards": [0.5]}),
        (None, {"target_tokens": [[2, 3]] * 3, "teacher": [[-np.inf, 0.0]] * 3, "rewards": [np.nan]}),
    ],
)  # fmt: skip
def test_good_data_pass_for_every_loss_known_or_not(loss_fn: str | None, inputs: dict[str, Any]) -> None:
    data = (Datum(THREE, inputs),)
    checked = check_data(data, loss_fn)
    assert checked == list(data) and isinstance(checked, list)


def test_empty_data_are_refused_at_the_call() -> None:
    refused(lambda: check_data([], "cross_entropy"), "data", "empty")


def test_what_is_no_list_of_datums_is_refused() -> None:
    refused(lambda: check_data(GOOD, "cross_entropy"), "[datum]")  # type: ignore[arg-type]
    refused(lambda: check_data((d for d in [GOOD]), "cross_entropy"), "generator")  # type: ignore[arg-type]
    refused(lambda: check_data([GOOD, {"model_input": 1}], "cross_entropy"), "data[1]", "Datum", "dict")  # type: ignore[list-item]


def test_a_function_as_loss_is_sent_to_the_custom_call() -> None:
    refused(lambda: check_data([GOOD], len), "loss_fn", "forward_backward_custom")  # type: ignore[arg-type]
    refused(lambda: check_data([GOOD], ""), "loss_fn", "cross_entropy")


def test_an_unknown_input_of_a_known_loss_is_named_with_those_it_takes() -> None:
    refused(
        lambda: check_data(with_inputs(target_tokens=[2, 3, 4], mask=[1, 1, 1]), "cross_entropy"),
        "data[1].loss_fn_inputs['mask']", "cross_entropy", "target_tokens, weights",
    )  # fmt: skip


def test_a_missing_input_of_a_known_loss_is_named() -> None:
    data = [Datum(THREE, POLICY), Datum(THREE, {key: POLICY[key] for key in ("target_tokens", "logprobs")})]
    refused(lambda: check_data(data, "ppo"), "data[1].loss_fn_inputs['advantages']", "missing")
    refused(lambda: check_data([Datum(THREE)], None), "target_tokens", "missing")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_or_infinity_names_the_datum_the_key_and_the_entry(value: float, position: int) -> None:
    weights = [1.0, 1.0, 1.0]
    weights[position] = value
    data = with_inputs(target_tokens=[2, 3, 4], weights=weights)
    refused(
        lambda: check_data(data, "cross_entropy"), "data[1].loss_fn_inputs['weights']", f"entry {position} is {value}"
    )


def test_nan_in_weights_of_a_custom_loss_is_refused_because_they_are_sent() -> None:
    refused(lambda: check_data(with_inputs(target_tokens=[2, 3, 4], weights=[1, 1, np.nan]), None), "weights")


def test_nan_is_refused_for_a_loss_the_client_does_not_know() -> None:
    refused(lambda: check_data([Datum(THREE, {"x": [np.nan]})], "a_loss_of_tomorrow"), "data[0].loss_fn_inputs['x']")


def test_numbers_near_the_limit_of_float32_are_finite() -> None:
    weights = [3.4e38, -3.4e38, 2.0e38]
    assert check_data([Datum(THREE, {"target_tokens": [2, 3, 4], "weights": weights})], "cross_entropy")


def test_a_tensor_over_received_bytes_is_checked_too() -> None:
    packed = memoryview(np.array([1.0, np.nan, 1.0], dtype="<f4").tobytes())
    data = with_inputs(target_tokens=[2, 3, 4], weights=TensorData.from_buffer(packed, "float32"))
    refused(lambda: check_data(data, "cross_entropy"), "entry 1 is nan")


def test_targets_that_are_no_token_ids_are_refused() -> None:
    as_floats = TensorData([2.0, 3.0, 4.0], "float32")
    refused(
        lambda: check_data(with_inputs(target_tokens=as_floats), "cross_entropy"), "target_tokens", "float32", "int64"
    )
    ignored = with_inputs(target_tokens=[2, -100, 4])
    refused(lambda: check_data(ignored, "cross_entropy"), "entry 1 is -100", "weight")


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "a_loss_of_tomorrow", "custom", None])
def test_targets_of_another_length_than_the_input_are_refused_with_the_shift_explained(loss_fn: str | None) -> None:
    refused(
        lambda: check_data(with_inputs(target_tokens=[2, 3]), loss_fn),
        "data[1].loss_fn_inputs['target_tokens']", "length 2", "3 tokens", "tokens[:-1]",
    )  # fmt: skip
    refused(lambda: check_data(with_inputs(target_tokens=[[2, 3], [4, 5]]), loss_fn), "length 2", "3 tokens")


def test_an_input_of_another_length_than_the_targets_is_refused() -> None:
    refused(
        lambda: check_data(with_inputs(target_tokens=[2, 3, 4], weights=[1.0, 1.0]), "cross_entropy"),
        "data[1].loss_fn_inputs['weights']", "shape [2]", "target_tokens has [3]",
    )  # fmt: skip
    short = [Datum(THREE, {**POLICY, "advantages": [1.0]})]
    refused(lambda: check_data(short, "importance_sampling"), "data[0].loss_fn_inputs['advantages']", "shape [1]")


def test_weights_of_another_shape_than_the_targets_are_refused() -> None:
    flat = with_inputs(target_tokens=[[2, 3]] * 3, weights=[1.0] * 3)
    refused(lambda: check_data(flat, "cross_entropy"), "data[1].loss_fn_inputs['weights']", "[3, 2]")
    wide = with_inputs(target_tokens=[2, 3, 4], weights=[[1.0, 1.0]] * 3)
    refused(lambda: check_data(wide, "cross_entropy"), "[3, 2]")
    other = [Datum(THREE, {"target_tokens": [[2, 3]] * 3, "logprobs": [[-1.0] * 3] * 3})]
    refused(lambda: check_data(other, "kl_divergence"), "data[0].loss_fn_inputs['logprobs']", "[3, 3]", "[3, 2]")


def test_an_empty_model_input_is_refused() -> None:
    refused(lambda: check_data([GOOD, Datum(ModelInput.empty())], "a_loss_of_tomorrow"), "data[1].model_input", "empty")


def test_images_count_their_tokens_and_unknown_sizes_are_left_to_the_service() -> None:
    text = EncodedTextChunk(tokens=[1, 2])
    known = ModelInput(chunks=[text, ImageChunk(data=b"x", format="png", expected_tokens=3)])
    older = ModelInput(chunks=[ImageAssetPointerChunk(format="png", location="a", tokens=4), text])
    unknown = ModelInput(chunks=[text, ImageChunk(data=b"x", format="png")])
    audio = ModelInput(chunks=[text, DmelChunk(dmel=b"x")])
    assert [input_length(prompt) for prompt in (known, older, unknown, audio)] == [5, 6, None, None]
    refused(lambda: check_data([Datum(known, {"target_tokens": [1, 2]})], "cross_entropy"), "5 tokens")
    assert check_data([Datum(unknown, {"target_tokens": [1] * 9})], "cross_entropy")


@pytest.mark.timing
def test_checking_a_large_batch_costs_little() -> None:
    tokens = list(range(2048))
    prompt = ModelInput.from_ints(tokens)
    data = [Datum(prompt, {"target_tokens": tokens, "weights": [1.0] * 2048}) for _ in range(256)]
    check_data(data, "cross_entropy")
    fastest = min(_seconds(lambda: check_data(data, "cross_entropy")) for _ in range(5))
    assert fastest < 0.010, "256 datums of 2,048 tokens take a few milliseconds"


# -- loss settings ----------------------------------------------------------------------------------------------------


def test_plain_numbers_and_texts_are_loss_settings() -> None:
    assert check_loss_config(None) is None
    given = {"clip_low_threshold": 0.8, "beta": 1, "loss_id": "abc", "scalar": np.float32(0.5)}
    assert check_loss_config(given) == {"clip_low_threshold": 0.8, "beta": 1.0, "loss_id": "abc", "scalar": 0.5}


@pytest.mark.parametrize("value", [TensorData([0.8]), np.ones(3), [0.8], None, {"a": 1.0}, TensorData([0.8, 0.9])])
def test_a_tensor_in_the_loss_settings_is_refused_at_once(value: Any) -> None:
    refused(
        lambda: check_loss_config({"clip_low_threshold": value}),
        "loss_fn_config['clip_low_threshold']", "number", "loss_fn_inputs",
    )  # fmt: skip


def test_senseless_loss_settings_are_refused() -> None:
    refused(lambda: check_loss_config({"beta": np.nan}), "loss_fn_config['beta']", "finite")
    refused(lambda: check_loss_config({1: 2.0}), "loss_fn_config", "str keys")  # type: ignore[dict-item]
    refused(lambda: check_loss_config([0.8]), "loss_fn_config", "list")  # type: ignore[arg-type]
    refused(lambda: check_loss_config({"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}), "1.2", "0.8")


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 1, "temperature": 0, "top_k": 1, "top_p": 0.1, "seed": -(2**63)},
        {"stop": []}, {"stop": ["a", "b"]}, {"stop": "a"}, {"stop": [0, 5]},
        {"min_p": 0.0, "repetition_penalty": 1.1, "presence_penalty": -2.0, "frequency_penalty": 0.0},
    ],
)  # fmt: skip
def test_good_sampling_parameters_pass_also_as_a_mapping(params: dict[str, Any]) -> None:
    assert check_sampling(THREE, 1, SamplingParams(**params)) == check_sampling(THREE, 1, params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"temperature": float("inf")}, ["temperature"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_p": float("nan")}, ["top_p"]),
        ({"top_k": 0}, ["top_k", "-1 for no limit"]),
        ({"top_k": -2}, ["top_k"]),
        ({"seed": 2**63}, ["seed", "64 bits"]),
        ({"stop": ["a", ""]}, ["stop", "empty"]),
        ({"stop": ""}, ["stop", "empty"]),
        ({"stop": [5, -1]}, ["stop", "-1"]),
        ({"min_p": 1.1}, ["min_p"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty"]),
        ({"frequency_penalty": float("inf")}, ["frequency_penalty"]),
    ],
)
def test_bad_sampling_parameters_are_refused_by_name(params: dict[str, Any], words: list[str]) -> None:
    refused(lambda: check_sampling(THREE, 1, SamplingParams(**params)), *words)


def test_a_prompt_that_is_no_model_input_is_refused_with_the_way_to_make_one() -> None:
    refused(lambda: check_sampling("hello", 1, SamplingParams()), "ModelInput.from_text")  # type: ignore[arg-type]
    refused(lambda: check_sampling([1, 2], 1, SamplingParams()), "ModelInput.from_ints")  # type: ignore[arg-type]
    refused(lambda: check_sampling(ModelInput.empty(), 1, SamplingParams()), "prompt", "empty")
    refused(lambda: check_sampling(THREE, 1, 5), "sampling_params", "int")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, "2"])
def test_a_senseless_number_of_samples_is_refused(count: Any) -> None:
    refused(lambda: check_sampling(THREE, count, SamplingParams()), "num_samples")


def test_extras_of_a_sample_are_checked() -> None:
    def sample(**extras: Any) -> Callable[[], object]:
        return lambda: check_sampling(THREE, 1, SamplingParams(), **extras)

    targets = TensorData([[1, 2], [3, 4]])
    sample(topk_prompt_logprobs=5, topk_sample_logprobs=2, target_prompt_logprobs=targets)()
    sample(include_prompt_logprobs=True, prompt_logprobs_last_n=2, prompt_alt_tokens_k=1)()
    refused(sample(topk_prompt_logprobs=-1), "topk_prompt_logprobs")
    refused(sample(topk_sample_logprobs=1.5), "topk_sample_logprobs")
    refused(sample(prompt_alt_tokens_k=-1), "prompt_alt_tokens_k")
    refused(sample(prompt_logprobs_last_n=0, include_prompt_logprobs=True), "prompt_logprobs_last_n")
    refused(sample(prompt_logprobs_last_n=2), "include_prompt_logprobs=True")
    refused(sample(target_prompt_logprobs=TensorData([[1], [2], [3]])), "target_prompt_logprobs", "len(prompt) - 1 = 2")
    refused(sample(target_prompt_logprobs=TensorData([1, 2])), "2-D")
    refused(sample(target_prompt_logprobs=TensorData([[1.0], [2.0]])), "int64")


# The two texts by which the cookbook's proxy (tinker-cookbook 0.5.8) tells an overflow from other bad requests.
OVERFLOW = (r"prompt length plus max_tokens exceeds", r"\d+\s*prompt tokens\s*\+\s*\d+\s*max_tokens\s*>\s*\d+")


def test_a_prompt_too_long_for_the_context_is_refused_in_the_services_own_words() -> None:
    prompt = ModelInput.from_ints(range(100))
    assert check_sampling(prompt, 1, SamplingParams(max_tokens=28), 128)
    with pytest.raises(ContextOverflow) as raised:
        check_sampling(prompt, 1, SamplingParams(max_tokens=29), 128)
    text = str(raised.value)
    assert all(re.search(pattern, text, re.IGNORECASE) for pattern in OVERFLOW)
    assert "100 prompt tokens + 29 max_tokens > 128" in text and "at most 28" in text


def test_programs_that_catch_a_bad_request_also_catch_the_overflow() -> None:
    with pytest.raises(BadRequestError) as raised:
        check_sampling(THREE, 1, SamplingParams(max_tokens=126), 128)
    error = raised.value
    assert isinstance(error, ValidationError) and isinstance(error, ValueError) and isinstance(error, TinkexError)
    assert error.status_code == 400 and not error.retryable
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.status_code, type(copy)) == (str(error), 400, ContextOverflow)


def test_without_max_tokens_there_must_be_room_for_one_token() -> None:
    assert check_sampling(THREE, 1, SamplingParams(), 4)
    with pytest.raises(ContextOverflow):
        check_sampling(THREE, 1, SamplingParams(), 3)


def test_a_prompt_of_unknown_length_is_left_to_the_service() -> None:
    image = ModelInput(chunks=[ImageChunk(data=b"x", format="png")])
    assert check_sampling(image, 1, SamplingParams(max_tokens=10**6), 128)


@pytest.mark.timing
def test_checking_a_sample_takes_microseconds() -> None:
    prompt, params = ModelInput.from_ints(range(512)), SamplingParams(max_tokens=64, temperature=0.7)

    def thousand() -> None:
        for _ in range(1000):
            check_sampling(prompt, 1, params, 32768)

    assert min(_seconds(thousand) for _ in range(5)) < 0.005, "5 µs each"


# -- names, paths, settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["final", "000100", "step-1_2.3", "a=b+c", "x" * 200])
def test_good_checkpoint_names_pass(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\n", "é", "a?b", "a%b", ".hidden", "x" * 201, None, 7])
def test_names_that_cannot_be_part_of_a_path_are_refused(name: Any) -> None:
    refused(lambda: check_name(name), "name")


def test_a_training_checkpoint_where_a_sampler_is_needed_names_the_way_to_make_one() -> None:
    check_sampler_path("tinker://run:train:0/sampler_weights/final")
    refused(
        lambda: check_sampler_path("tinker://run:train:0/weights/final"),
        "tinker://run:train:0/weights/final", "sampler_weights/", "save_weights_for_sampler",
    )  # fmt: skip
    refused(lambda: check_sampler_path("tinker://run/external_weights/final"), "sampler_weights/")


def test_a_sampler_where_a_training_checkpoint_is_needed_is_refused() -> None:
    check_state_path("tinker://run:train:0/weights/final")
    refused(lambda: check_state_path("tinker://run:train:0/sampler_weights/final"), "weights/", "save_state")


def test_other_services_may_leave_the_kind_out_of_a_path() -> None:
    check_sampler_path("tinker://model_5987ddb1/000005")


@pytest.mark.parametrize(
    "path", ["", "final", "weights/final", "tinker://", "tinker://run", "tinker:///weights/a", "http://x/a", None]
)
@pytest.mark.parametrize("check", [check_sampler_path, check_state_path])
def test_what_is_no_checkpoint_path_is_refused(check: Callable[[Any], None], path: Any) -> None:
    refused(lambda: check(path), "path")


def test_optimizer_settings_pass_also_as_a_plain_dict() -> None:
    assert check_adam({"learning_rate": 1e-3}) == AdamParams(learning_rate=1e-3)
    assert check_adam({"type": "dimuon", "learning_rate": 1e-3}) == DimuonParams(learning_rate=1e-3)
    params = AdamParams(learning_rate=0.0)
    assert check_adam(params) is params, "a rate of 0 discards a gradient"
    unknown: Any = check_adam({"type": "new", "learning_rate": "fast"})
    assert unknown.type == "new" and unknown.learning_rate == "fast"


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", -1e-4), ("learning_rate", float("nan")), ("learning_rate", float("inf")), ("beta1", 1.0),
     ("beta2", -0.1), ("eps", -1.0), ("weight_decay", -0.1), ("grad_clip_norm", float("nan"))],
)  # fmt: skip
def test_optimizer_settings_that_destroy_the_weights_are_refused(field: str, value: float) -> None:
    refused(lambda: check_adam(AdamParams(**{field: value})), f"AdamParams.{field}", str(value))


def test_a_misspelt_or_missing_optimizer_setting_is_refused() -> None:
    refused(lambda: check_adam({"lr": 1e-3}), "lr", "learning_rate")
    refused(lambda: check_adam(1e-3), "AdamParams(learning_rate=")  # type: ignore[arg-type]


def test_a_time_to_live_is_a_positive_number_of_seconds_or_none() -> None:
    check_ttl(None)
    check_ttl(3600)
    for wrong in (0, -5, 1.5, True, "7d"):
        refused(lambda wrong=wrong: check_ttl(wrong), "ttl_seconds")  # type: ignore[misc]


def test_metadata_are_texts() -> None:
    check_metadata(None)
    check_metadata({"a": "b"})
    refused(lambda: check_metadata({"step": 5}), "user_metadata['step']", "str(")  # type: ignore[dict-item]
    refused(lambda: check_metadata({5: "a"}), "user_metadata[5]")  # type: ignore[dict-item]
    refused(lambda: check_metadata(["a"]), "user_metadata", "list")  # type: ignore[arg-type]


def _seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread: other work on the machine does not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started
