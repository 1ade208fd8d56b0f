"""Behaviour that all values share, and the words and defaults of single ones."""

from __future__ import annotations

import copy
import datetime as dt
import doctest
import importlib
import pickle
import struct
import warnings
from typing import Any

import numpy as np
import pydantic
import pytest

import tinkex.types as types
from tinkex.errors import RequestErrorCategory, ValidationError
from tinkex.types import (
    AdamParams,
    AuthTokenResponse,
    Checkpoint,
    CheckpointArchiveUrlResponse,
    ClientConfigResponse,
    CreateModelRequest,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    GenericEvent,
    GetInfoResponse,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    OptimParamsBase,
    OptimStepRequest,
    ParsedCheckpointTinkerPath,
    RequestFailedResponse,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SessionEndEvent,
    TelemetrySendRequest,
    TensorData,
    TopkLogprobs,
)
from tinkex.types.base import Value, field

PROMPT = ModelInput.from_ints([1, 2, 3])
RUN_PATH = "tinker://run:train:0/weights/0001"


class Example(Value):
    name: str
    count: int = 3
    parts: list[str] = field(default_factory=list)
    note: str | None = None


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("stop", "stop"),
        ("stop_sequence", "stop"),
        ("eos", "stop"),
        ("a_word_from_the_future", "stop"),
    ],
)
def test_every_servers_stop_reason_is_read_and_its_own_word_is_kept(word: str, meaning: str) -> None:
    listed = SampledSequence.model_validate({"stop_reason": word, "tokens": [1]})
    packed = SampledSequence.from_buffers(word, struct.pack("<i", 1))
    for sequence in (listed, packed, *pickle.loads(pickle.dumps([listed, packed]))):
        assert (sequence.stop_reason, sequence.raw_stop_reason) == (meaning, word)


@pytest.mark.parametrize("word", ["user", "User", "USER"])
def test_an_error_category_is_read_in_any_casing(word: str) -> None:
    assert RequestFailedResponse.model_validate({"error": "x", "category": word}).category is RequestErrorCategory.User


@pytest.mark.parametrize("word", ["transient", "", None, 5])
def test_an_unknown_error_category_is_unknown_and_never_an_error(word: Any) -> None:
    assert RequestErrorCategory.parse(word) is RequestErrorCategory.Unknown
    failed = RequestFailedResponse.model_validate({"error": "x", "category": word})
    assert failed.category is types.RequestErrorCategory.Unknown


def test_the_loss_is_derived_from_the_metric_and_is_no_field() -> None:
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": TensorData([0.5], "float32")}], {"loss:sum": 2.5})
    assert output.loss == 2.5
    assert list(output.model_dump()) == ["loss_fn_output_type", "loss_fn_outputs", "metrics"]
    assert ForwardBackwardOutput("ArrayRecord", [], {"loss:mean": 1.0}).loss is None


def test_any_loss_name_is_accepted() -> None:
    datum = Datum(PROMPT, {"target_tokens": [1, 2, 3]})
    for name in ("cross_entropy", "kl_divergence", "a_loss_of_tomorrow"):
        assert ForwardBackwardInput([datum], name, {"epsilon": 1, "mode": "x"}).loss_fn == name


def test_adam_has_the_official_defaults() -> None:
    assert AdamParams().model_dump() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


def test_a_field_is_absent_null_or_a_value() -> None:
    def body(**prompt_logprobs: bool | None) -> dict[str, Any]:
        request = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(max_tokens=5), **prompt_logprobs)  # type: ignore[arg-type]
        return request.model_dump(exclude_unset=True)

    assert "prompt_logprobs" not in body()
    assert body(prompt_logprobs=None)["prompt_logprobs"] is None
    assert body(prompt_logprobs=False)["prompt_logprobs"] is False
    assert body()["sampling_params"] == {"max_tokens": 5}
    assert AdamParams().model_dump(exclude_unset=True) == {}


def test_defaults_can_be_sent_and_nulls_dropped_as_later_releases_do() -> None:
    request = CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="m", lora_config=LoraConfig(rank=8, seed=None)
    )
    assert request.model_dump(exclude_none=True) == {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "m",
        "lora_config": {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }


def test_the_public_answer_of_a_sampler_save_has_only_a_path() -> None:
    answer = SaveWeightsForSamplerResponse.model_validate({"path": RUN_PATH, "sampling_session_id": "secret"})
    assert answer.model_dump(exclude_none=True) == {"path": RUN_PATH}
    assert types.SaveWeightsForSamplerResponseInternal(sampling_session_id="s").path is None


@pytest.mark.parametrize("mode", [{"sampling_session_id": "s", "seq_id": 0}, {"base_model": "m"}, {"model_path": "p"}])
def test_a_sample_request_can_name_its_model_in_three_ways(mode: dict[str, Any]) -> None:
    request = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(), **mode)
    assert {"prompt", "sampling_params", *mode} == request.model_fields_set


def test_a_value_is_frozen_and_says_how_to_change_it() -> None:
    value = Example(name="a")
    with pytest.raises(AttributeError, match="model_copy"):
        value.name = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="frozen"):
        del value.name
    changed = value.model_copy(update={"count": 4})
    assert (changed.count, value.count, changed.model_fields_set) == (4, 3, {"name", "count"})
    with pytest.raises(ValidationError, match=r"Example\.count"):
        value.model_copy(update={"count": "many"})


def test_values_with_equal_fields_are_equal_and_hash_alike() -> None:
    assert Example(name="a") == Example(name="a", count=3)
    assert Example(name="a") != Example(name="b")
    assert Example(name="a") != "a"
    one = ForwardBackwardOutput("t", [], {"a:sum": 1.0, "b:sum": 2.0})
    two = ForwardBackwardOutput("t", [], {"b:sum": 2.0, "a:sum": 1.0})
    assert one == two
    assert len({one, two, Example(name="a"), Example(name="a")}) == 2


def test_defaults_are_never_shared_between_values() -> None:
    first, second = Example(name="a"), Example(name="b")
    first.parts.append("x")
    assert second.parts == [] == Example.model_construct(name="c").parts


def test_pickles_and_copies_keep_which_fields_were_passed() -> None:
    value = Example(name="a", note=None)
    for twin in (
        pickle.loads(pickle.dumps(value)),
        copy.copy(value),
        copy.deepcopy(value),
        value.model_copy(deep=True),
    ):
        assert twin == value
        assert twin.model_fields_set == {"name", "note"}


def test_a_wrong_call_names_the_field_the_value_and_the_fields_there_are() -> None:
    with pytest.raises(ValidationError, match=r"Example\.count: expected an int, got str 'x'"):
        Example(name="a", count="x")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"Example needs 'name'. Fields: name, count=3, parts=\[\], note=None"):
        Example()  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"Example has no 'colour'"):
        Example(name="a", colour="red")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"Example\.parts\[1\]: expected a str"):
        Example(name="a", parts=["x", 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="by position"):
        Example("a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="twice"):
        ForwardBackwardInput([], "ppo", data=[])  # type: ignore[misc]
    assert issubclass(ValidationError, ValueError)


def test_an_answer_with_unknown_fields_is_read_and_one_that_lacks_a_field_is_not() -> None:
    assert Example.model_validate({"name": "a", "new_in_v9": 1}) == Example(name="a")
    for kind in (Example, SampledSequence, Datum, TensorData):
        with pytest.raises(ValidationError, match=f"{kind.__name__} needs"):
            kind.model_validate({})
    with pytest.raises(ValidationError, match="expected a mapping"):
        Example.model_validate([1])


@pytest.mark.parametrize("wrong", [True, 1.5, "1", None, np.array([1, 2]), 1j])
def test_an_int_field_takes_no_bool_fraction_text_or_array(wrong: Any) -> None:
    with pytest.raises(ValidationError, match=r"Example\.count"):
        Example(name="a", count=wrong)


@pytest.mark.parametrize("wrong", [True, "1e-4", None, np.array([1.0, 2.0]), 10**400])
def test_a_float_field_takes_no_bool_text_or_array(wrong: Any) -> None:
    with pytest.raises(ValidationError, match=r"AdamParams\.learning_rate"):
        AdamParams(learning_rate=wrong)


def test_number_fields_take_numpy_scalars_and_whole_floats() -> None:
    params = SamplingParams(max_tokens=np.int32(5), temperature=np.float32(0.5), top_k=7.0)  # type: ignore[arg-type]
    assert [(type(n), n) for n in (params.max_tokens, params.temperature, params.top_k)] == [
        (int, 5),
        (float, 0.5),
        (int, 7),
    ]


def test_reprs_are_short_and_hide_secrets() -> None:
    assert repr(AdamParams(learning_rate=0.5)) == "AdamParams(learning_rate=0.5)"
    assert len(repr(ModelInput.from_ints(range(10_000)))) < 120
    assert "s3cret" not in repr(AuthTokenResponse(jwt="s3cret"))
    assert "s3cret" not in repr(LoadWeightsRequest(path="p", weights_access_token="s3cret"))
    assert repr(Example.__new__(Example)) == "<Example, not finished>"
    with pytest.raises(ValidationError) as refused:
        SamplingParams(max_tokens=list(range(10_000)))  # type: ignore[arg-type]
    assert str(refused.value) == "SamplingParams.max_tokens: expected an int, got list of 10000 entries"


def test_values_are_fields_of_pydantic_models() -> None:
    class Config(pydantic.BaseModel):
        adam: AdamParams
        data: list[Datum] = []

    config = Config(adam=AdamParams(beta1=0.5), data=[Datum(PROMPT, {"weights": [1, 1, 1]})])
    assert config.adam.beta1 == 0.5
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config.model_validate({"adam": {"beta1": 0.5}}).adam == config.adam
    assert "AdamParams" in str(Config.model_json_schema())
    with pytest.raises(pydantic.ValidationError, match=r"AdamParams\.beta1"):
        Config.model_validate({"adam": {"beta1": "x"}})


def test_json_mode_renders_bytes_times_and_enums() -> None:
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    url = CheckpointArchiveUrlResponse(url="u", expires=noon)
    assert url.model_dump_json() == '{"url":"u","expires":"2026-01-01T12:00:00Z"}'
    assert CheckpointArchiveUrlResponse.model_validate_json(url.model_dump_json()) == url
    failed = RequestFailedResponse(error="x", category=RequestErrorCategory.User)
    assert failed.model_dump(mode="json") == {"error": "x", "category": "user"}
    assert failed.model_dump(include={"error"}) == failed.model_dump(exclude={"category"}) == {"error": "x"}


def test_a_telemetry_event_is_told_by_its_event_word_and_loses_nothing() -> None:
    common = {"event_id": "1", "event_session_index": 0, "severity": "INFO", "timestamp": "2026-01-01T00:00:00Z"}
    events = [
        {"event": "GENERIC_EVENT", "event_name": "n", "event_data": {"a": 1}, **common},
        {"event": "SESSION_END", "duration": "0:00:01", **common},
    ]
    request = TelemetrySendRequest.model_validate(
        {"events": events, "platform": "Linux", "sdk_version": "1", "session_id": "s"}
    )
    assert [type(event) for event in request.events] == [GenericEvent, SessionEndEvent]
    assert [event.model_dump(mode="json") for event in request.events] == events


def test_a_union_reports_the_problem_of_the_member_that_was_named() -> None:
    with pytest.raises(ValidationError, match=r"DimuonParams needs 'learning_rate'"):
        OptimStepRequest.model_validate({"model_id": "m", "optim_params": {"type": "dimuon"}})


def test_optimizers_are_read_by_type_and_an_unknown_one_keeps_its_fields() -> None:
    def read(params: Any) -> Any:
        return OptimStepRequest(model_id="m", optim_params=params).optim_params

    assert read({"learning_rate": 0.5}) == AdamParams(learning_rate=0.5)
    assert read({"type": "dimuon", "learning_rate": 0.5}) == DimuonParams(learning_rate=0.5)
    other = read({"type": "sophia", "rho": 0.04})
    assert issubclass(type(other), OptimParamsBase)
    assert (other.type, other.rho, other.model_dump()) == ("sophia", 0.04, {"type": "sophia", "rho": 0.04})
    assert pickle.loads(pickle.dumps(other)) == other == other.model_copy()
    assert other != read({"type": "sophia", "rho": 0.05})
    with pytest.raises(AttributeError, match="nothing"):
        _ = other.nothing
    with pytest.raises(ValidationError, match="DimuonParams has no 'rho'"):
        DimuonParams(learning_rate=1, rho=1)  # type: ignore[call-arg]
    info = {"model_id": "m", "model_data": {}, "optimizer_config": {"type": "sophia", "version": 3}}
    optimizer = GetInfoResponse.model_validate(info).optimizer_config
    assert optimizer is not None and optimizer.model_dump() == {"type": "sophia", "version": 3}
    assert GetInfoResponse(model_id="m", model_data=types.ModelData()).optimizer_config == types.AdamOptimizerConfig()


def test_optim_step_takes_either_name_for_its_parameters() -> None:
    adam = AdamParams(learning_rate=0.5)
    old = OptimStepRequest(model_id="m", adam_params=adam)
    new = OptimStepRequest(model_id="m", optim_params=adam)
    assert old == new
    assert old.optim_params == new.adam_params == adam
    assert (old.model_fields_set, new.model_fields_set) == ({"model_id", "adam_params"}, {"model_id", "optim_params"})
    with pytest.raises(ValidationError, match="either optim_params or adam_params"):
        OptimStepRequest(model_id="m")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (DimuonParams, {"learning_rate": -1}),
        (DimuonParams, {"learning_rate": float("nan")}),
        (DimuonParams, {"learning_rate": 1, "beta1": 1}),
        (DimuonParams, {"learning_rate": 1, "grad_clip_norm": float("inf")}),
        (types.SessionSearchRequest, {"limit": 0}),
        (types.SessionSearchRequest, {"limit": 201}),
        (types.SessionSearchRequest, {"display_name": ""}),
        (types.SessionSearchRequest, {"statuses": []}),
        (types.ClientFinishedSessionStatusQuery, {"reasons": []}),
        (types.UserSearchOwner, {"owner_urns": []}),
        (types.UserSearchOwner, {"owner_urns": ["u"] * 11}),
        (types.SessionSearchCursor, {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}),
        (types.CustomLossInput, {"name": "x", "rank": 3}),
        (types.CustomLossInput, {"name": "x", "rank": True}),
        (types.HealthResponse, {"status": "sick"}),
    ],
)
def test_bounds_of_the_official_types_hold(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=kind.__name__):
        kind(**fields)


def test_sampling_params_take_stop_words_or_stop_tokens() -> None:
    assert SamplingParams(stop="a").stop == "a"
    assert SamplingParams(stop=["a", "b"]).stop == ["a", "b"]
    assert SamplingParams(stop=[1, 2]).stop == [1, 2]
    assert SamplingParams(stop=[]).stop == []
    with pytest.raises(ValidationError, match=r"SamplingParams\.stop"):
        SamplingParams(stop=["a", 1])  # type: ignore[arg-type]


def test_an_unknown_sampling_parameter_is_ignored_aloud() -> None:
    with pytest.warns(UserWarning, match="ignores beams"):
        params = SamplingParams(max_tokens=5, beams=2)  # type: ignore[call-arg]
    assert params == SamplingParams(max_tokens=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            SamplingParams(min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5).min_p == 0.1
        )


TOKENS, LOGPROBS = struct.pack("<3i", 7, 8, 9), struct.pack("<3f", -0.5, -1.0, -1.5)
TOPK = TopkLogprobs([[7, 1], [8, 0], [0, 0]], [[-0.5, -2.0], [-1.0, -99999.0], [-99999.0, -99999.0]])


def test_a_sampled_sequence_makes_its_lists_on_first_use_and_keeps_them() -> None:
    sequence = SampledSequence.from_buffers("stop", memoryview(TOKENS), memoryview(LOGPROBS), "r:0", TOPK)
    assert sequence.tokens == [7, 8, 9]
    assert sequence.tokens is sequence.tokens
    assert sequence.logprobs == [-0.5, -1.0, -1.5]
    assert sequence.topk_logprobs == [[(7, -0.5), (1, -2.0)], [(8, -1.0)], None]
    assert sequence.sequence_id == "r:0"
    assert SampledSequence.from_buffers("stop", TOKENS).logprobs is None
    with pytest.raises(AttributeError):
        _ = sequence.nothing  # type: ignore[attr-defined]


def test_a_sequence_built_from_lists_or_arrays_equals_one_built_from_buffers() -> None:
    packed = SampledSequence.from_buffers("stop", TOKENS, LOGPROBS, "r:0", TOPK)
    tokens, logprobs = np.array([7, 8, 9], dtype=np.int32), np.array([-0.5, -1.0, -1.5], dtype=np.float32)
    for twin in (
        SampledSequence("stop", "r:0", tokens, logprobs, TOPK),
        SampledSequence(
            stop_reason="stop",
            sequence_id="r:0",
            tokens=[7, 8, 9],
            logprobs=[-0.5, -1.0, -1.5],
            topk_logprobs=[[(7, -0.5), (1, -2.0)], [(8, -1.0)], None],
        ),
        SampledSequence.model_validate_json(packed.model_dump_json()),
        pickle.loads(pickle.dumps(packed)),
    ):
        assert twin == packed
        assert np.array_equal(twin.tokens_np, tokens)
        assert twin.logprobs_np is not None
        assert np.array_equal(twin.logprobs_np, logprobs)
        assert twin.topk_logprobs_np == TOPK
    assert SampledSequence(stop_reason="stop", tokens=[1]).logprobs_np is None


def test_prompt_logprobs_have_none_where_the_wire_has_nan() -> None:
    buffer = struct.pack("<2f", float("nan"), -0.5)
    sequences = [SampledSequence.from_buffers("length", TOKENS)]
    packed = SampleResponse.from_buffers(sequences, buffer, TOPK, prompt_cache_hit_tokens=2)
    assert packed.prompt_logprobs == [None, -0.5]
    assert packed.topk_prompt_logprobs == TOPK.to_lists()
    array = np.array([np.nan, -0.5], dtype=np.float32)
    for twin in (
        SampleResponse(sequences, array, TOPK, None, 2),
        SampleResponse(
            sequences=sequences,
            prompt_logprobs=[None, -0.5],
            topk_prompt_logprobs=TOPK.to_lists(),
            prompt_cache_hit_tokens=2,
        ),
        SampleResponse.model_validate_json(packed.model_dump_json()),
        pickle.loads(pickle.dumps(packed)),
    ):
        assert twin == packed
        assert np.array_equal(twin.prompt_logprobs_np, array, equal_nan=True)  # type: ignore[arg-type]
        assert twin.topk_prompt_logprobs_np == TOPK
    bare = SampleResponse.from_buffers(sequences)
    assert (bare.prompt_logprobs, bare.prompt_logprobs_np, bare.topk_prompt_logprobs_np) == (None, None, None)


def test_topk_matrices_and_lists_say_the_same() -> None:
    rows = TOPK.to_lists()
    assert TopkLogprobs.from_lists(rows) == TOPK == pickle.loads(pickle.dumps(TOPK))
    assert TOPK.token_ids.tolist() == [[7, 1], [8, 0], [0, 0]]
    assert TOPK.logprobs.shape == (3, 2)
    assert TopkLogprobs.from_lists([]).to_lists() == []
    with pytest.raises(ValidationError, match="are not 2 x 2"):
        TopkLogprobs.from_buffers(TOKENS, LOGPROBS, 2, 2)


@pytest.mark.parametrize(
    ("kind", "meaning"), [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")]
)
def test_a_checkpoint_path_is_taken_apart(kind: str, meaning: str) -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(f"tinker://run:train:0/{kind}/0001")
    assert (parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id) == (
        "run:train:0",
        meaning,
        f"{kind}/0001",
    )


@pytest.mark.parametrize(
    "path",
    [
        "",
        "run/weights/a",
        "http://run/weights/a",
        "tinker://run/other/a",
        "tinker://run/weights/a/b",
        "tinker:///weights/a",
        "tinker://run/weights/",
        "tinker://r",
    ],
)
def test_what_is_no_checkpoint_path_is_refused_with_the_form_expected(path: str) -> None:
    with pytest.raises(ValidationError, match="tinker://<run>/<kind>/<name>"):
        ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_a_checkpoint_of_a_new_kind_and_without_a_size_is_read() -> None:
    fields = {
        "checkpoint_id": "c",
        "checkpoint_type": "merged",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": RUN_PATH,
    }
    checkpoint = Checkpoint.model_validate({**fields, "size_bytes": None})
    assert (checkpoint.checkpoint_type, checkpoint.size_bytes, checkpoint.time.tzinfo) == ("merged", None, dt.UTC)


def test_a_saved_checkpoint_knows_its_page_on_the_console() -> None:
    console = "https://tinker.thinkingmachines.ai"
    page = f"{console}/checkpoints/run%3Atrain%3A0/weights%2F0001"
    assert SaveWeightsResponse(path=RUN_PATH).get_console_url() == page
    saved = SaveWeightsForSamplerResponse(path=RUN_PATH)
    assert saved.get_console_url() == page
    assert saved.get_playground_url().endswith("checkpoint=tinker%3A%2F%2Frun%3Atrain%3A0%2Fweights%2F0001")


def test_a_service_of_our_own_announces_itself_in_the_client_config() -> None:
    assert ClientConfigResponse.model_validate({}).tinkex is None
    assert ClientConfigResponse.model_validate({"tinkex": {"stream": True}}).tinkex == {"stream": True}


@pytest.mark.parametrize("module", ["tensor", "inputs", "weights"])
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"tinkex.types.{module}"))
    assert ran.attempted > 0
    assert ran.failed == 0
