"""Bodies: three states per field, three ways to address a sample, images as JSON, a prompt encoded once.

That the bytes are those of the official clients is held against recordings in tests/compat/golden/test_bodies_match.py.
"""

from __future__ import annotations

import datetime as dt
import json
import struct
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.types import (
    AdamParams,
    CopyWeightsRequest,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    EncodedTextChunk,
    ForwardBackwardRequest,
    ForwardRequest,
    GenericEvent,
    ImageAssetPointerChunk,
    ImageChunk,
    JoinSamplingSessionRequest,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    PromptProvenanceSpan,
    SampleRequest,
    SamplingParams,
    SessionHeartbeatRequest,
    SessionSearchRequest,
    TensorData,
    UnloadModelRequest,
)
from tinkex.wire import proto_codec, requests
from tinkex.wire.body import JSON, PROTOBUF, Body
from tinkex.wire.dialect import Dialect

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=5)
BEAT = SessionHeartbeatRequest(session_id="s")
IDS: dict[str, Any] = {"sampling_session_id": "s:sample:0", "seq_id": 4}


def fields(body: Body) -> Any:
    assert (body.content_type, body.content_encoding) == (JSON, None)
    return json.loads(body.content)


def sample(dialect: Dialect, prompt: ModelInput = PROMPT, params: SamplingParams = PARAMS, **options: Any) -> Any:
    return fields(requests.asample(prompt, 1, params, **IDS, **options, dialect=dialect))


# ── What is sent and what is not


def test_each_field_has_three_states_in_the_json_dialect() -> None:
    some_fields: dict[str, Any]
    for some_fields in ({}, {"seed": None}, {"seed": 7}, {"stop": None}, {"stop": []}, {"temperature": 1}):
        assert sample(Dialect.JSON, params=SamplingParams(**some_fields))["sampling_params"] == some_fields


def test_none_is_dropped_and_defaults_are_floats_in_the_proto_dialect() -> None:
    body = requests.asample(PROMPT, 1, SamplingParams(seed=None), **IDS, dialect=Dialect.PROTO)
    assert b'"sampling_params":{"temperature":1.0,"top_k":-1,"top_p":1.0}' in body.content


def test_an_empty_stop_list_is_not_dropped_in_either_dialect() -> None:
    for dialect in Dialect:
        assert sample(dialect, params=SamplingParams(stop=[]))["sampling_params"]["stop"] == []


def test_a_sample_is_addressed_in_three_ways() -> None:
    ways: list[dict[str, Any]] = [
        {"sampling_session_id": "s", "seq_id": 3},
        {"base_model": "b"},
        {"model_path": "tinker://r/sampler_weights/a"},
    ]
    for way in ways:
        request = SampleRequest(prompt=PROMPT, sampling_params=PARAMS, **way)
        for dialect in Dialect:
            sent = fields(requests.request(request, dialect))
            addresses = {"sampling_session_id", "seq_id", "base_model", "model_path"} & sent.keys()
            assert {name: sent[name] for name in addresses} == way


def test_options_newer_than_the_json_dialect_travel_there_only_when_used() -> None:
    newer = {"topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"}
    assert not newer & sample(Dialect.JSON).keys()
    targets = TensorData([[5], [6]], "int64")
    options: dict[str, Any] = {"topk_sample_logprobs": 1, "prompt_alt_tokens_k": 2, "prompt_logprobs_last_n": 1}
    sent = sample(Dialect.JSON, **options, target_prompt_logprobs=targets)
    assert newer <= sent.keys()
    assert sent["target_prompt_logprobs"] == {"data": [5, 6], "dtype": "int64", "shape": [2, 1]}


def test_prompt_logprobs_keep_their_third_state() -> None:
    states = [sample(Dialect.JSON, prompt_logprobs=state)["prompt_logprobs"] for state in (None, False, True)]
    assert states == [None, False, True]
    assert "prompt_logprobs" not in sample(Dialect.PROTO, prompt_logprobs=None)


def test_load_weights_leaves_the_optimizer_to_a_json_service_unless_told() -> None:
    load = requests.load_weights
    path = "tinker://r/weights/a"
    assert list(fields(load("m", 1, path, dialect=Dialect.JSON))) == ["model_id", "path", "seq_id"]
    assert fields(load("m", 1, path, False, dialect=Dialect.JSON))["optimizer"] is False
    assert fields(load("m", 1, path, dialect=Dialect.PROTO))["optimizer"] is False
    assert fields(load("m", 1, path, True, dialect=Dialect.PROTO))["optimizer"] is True


def test_another_optimizer_names_itself_in_both_dialects() -> None:
    config = {"type": "dimuon", "version": 1}
    for dialect in Dialect:
        step = fields(requests.optim_step("m", 1, DimuonParams(learning_rate=0.5), dialect=dialect))
        assert step["optimizer_params"]["type"] == "dimuon"
        assert "adam_params" not in step
        model = requests.create_model("s", 0, "b", LoraConfig(rank=1), None, DimuonOptimizerConfig(), dialect=dialect)
        assert fields(model)["optimizer_config"] == config


def test_a_null_that_means_something_is_always_sent() -> None:
    assert requests.set_checkpoint_ttl(None).content == b'{"ttl_seconds":null}'
    assert requests.finish_session("success", None).content == b'{"reason":{"type":"success"},"detail":null}'


def test_a_session_without_metadata_sends_an_empty_object() -> None:
    for dialect in Dialect:
        assert fields(requests.create_session((), None, "0.36.0", dialect=dialect))["user_metadata"] == {}


def test_telemetry_names_the_process_only_where_that_is_known() -> None:
    moment = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    event = GenericEvent(
        event="GENERIC_EVENT", event_id="e", event_name="n", event_session_index=0, severity="INFO", timestamp=moment
    )
    send = requests.telemetry
    assert list(fields(send([event], "Linux", "1", "s", "p", dialect=Dialect.PROTO)))[-1] == "process_uuid"
    old = fields(send([event], "Linux", "1", "s", "p", dialect=Dialect.JSON))
    assert list(old) == ["events", "platform", "sdk_version", "session_id"]
    assert old["events"][0]["timestamp"] == "2026-01-02T00:00:00Z"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (requests.client_config("0.36.0"), b'{"sdk_version":"0.36.0"}'),
        (requests.cancel_future("r"), b'{"request_id":"r"}'),
        (requests.retrieve_future("r", dialect=Dialect.JSON), b'{"request_id":"r"}'),
        (
            requests.retrieve_future("r", True, dialect=Dialect.PROTO),
            b'{"request_id":"r","allow_metadata_only":true}',
        ),
        (
            requests.retrieve_futures("s:sample:0", 1, ("r",)),
            b'{"target":{"type":"sampling_session","sampling_session_id":"s:sample:0","cloned_sampler_id":0},'
            b'"prev_cursor":1,"retrieved_request_ids":["r"]}',
        ),
        (
            requests.request(JoinSamplingSessionRequest(sampling_session_id="s:sample:0"), Dialect.PROTO),
            b'{"sampling_session_id":"s:sample:0","type":"join_sampling_session"}',
        ),
        (requests.request(BEAT, Dialect.JSON), b'{"session_id":"s"}'),
        (requests.request(BEAT, Dialect.PROTO), b'{"session_id":"s","type":"session_heartbeat"}'),
        (requests.request(UnloadModelRequest(model_id="m"), Dialect.JSON), b'{"model_id":"m"}'),
        (requests.set_session_project("p"), b'{"project_id":"p"}'),
        (
            requests.request(SessionSearchRequest(), Dialect.PROTO),
            b'{"user_metadata":{},"owner":{"type":"own"},"limit":50}',
        ),
        (
            requests.request(
                CopyWeightsRequest(
                    source_path="tinker://r/weights/a", destination_project_id="p", session_id=None, ttl_seconds=3600
                ),
                Dialect.PROTO,
            ),
            b'{"destination_project_id":"p","source_path":"tinker://r/weights/a","ttl_seconds":3600}',
        ),
        (
            requests.request(
                LoadWeightsRequest(
                    session_id="s",
                    model_seq_id=0,
                    path="tinker://r/weights/a",
                    optimizer=True,
                    user_metadata={"k": "v"},
                    base_model=None,
                ),
                Dialect.PROTO,
            ),
            b'{"session_id":"s","model_seq_id":0,"user_metadata":{"k":"v"},"path":"tinker://r/weights/a",'
            b'"optimizer":true,"type":"load_weights"}',
        ),
    ],
)
def test_small_bodies_are_these_bytes(body: Body, expected: bytes) -> None:
    assert body == Body(expected, JSON, None)


# ── Prompts and images


def test_a_prompt_is_encoded_once_per_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    chunk_writer = requests._chunk
    monkeypatch.setattr(requests, "_chunk", lambda *call: written.append(call) or chunk_writer(*call))
    prompt = ModelInput.from_ints([1, 2, 3])
    for dialect in Dialect:
        first = requests.asample(prompt, 1, PARAMS, **IDS, dialect=dialect)
        assert all(requests.asample(prompt, 1, PARAMS, **IDS, dialect=dialect) == first for _ in range(10))
    assert len(written) == 2


def test_a_prompt_shared_by_threads_gives_each_the_same_bytes() -> None:
    prompt = ModelInput.from_ints(range(5000))
    expected = requests.asample(ModelInput.from_ints(range(5000)), 1, PARAMS, **IDS, dialect=Dialect.PROTO)
    seen: list[Body] = []
    threads = [
        threading.Thread(target=lambda: seen.append(requests.asample(prompt, 1, PARAMS, **IDS, dialect=Dialect.PROTO)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 8


@given(st.lists(st.integers(0, 2**31 - 1)), st.binary(max_size=50))
def test_a_prompt_reads_back_in_both_dialects(tokens: list[int], picture: bytes) -> None:
    image = ImageChunk(data=picture, format="png", expected_tokens=2)
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=tokens), image])
    for dialect in Dialect:
        assert ModelInput.model_validate(sample(dialect, prompt)["prompt"]) == prompt


def test_an_image_is_base64_in_json_and_its_old_fields_stay_with_the_json_dialect() -> None:
    prompt = ModelInput(chunks=[ImageChunk(data=b"\x89PNG", format="png", height=4, tokens=2, width=6)])
    assert sample(Dialect.JSON, prompt)["prompt"]["chunks"] == [
        {"data": "iVBORw==", "format": "png", "height": 4, "tokens": 2, "width": 6}
    ]
    assert sample(Dialect.PROTO, prompt)["prompt"]["chunks"] == [
        {"data": "iVBORw==", "format": "png", "expected_tokens": 2, "type": "image"}
    ]


def test_an_asset_pointer_is_legal_in_a_prompt_and_in_json_training_data_only() -> None:
    pointer = ImageAssetPointerChunk(location="gs://a/b.png", format="png")
    prompt = ModelInput(chunks=[pointer])
    for dialect in Dialect:
        assert sample(dialect, prompt)["prompt"]["chunks"][0]["location"] == "gs://a/b.png"
    training = [Datum(prompt, {})]
    json_body = fields(requests.forward_backward("m", 1, training, "cross_entropy", dialect=Dialect.JSON))
    chunk = json_body["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]
    assert chunk == {"format": "png", "location": "gs://a/b.png"}
    with pytest.raises(ValidationError, match=r"data\[0\]\.model_input\.chunks\[0\]"):
        requests.forward_backward("m", 1, training, "cross_entropy", dialect=Dialect.PROTO)


# ── Training data


def datum(**inputs: Any) -> Datum:
    return Datum(PROMPT, inputs)


def test_forward_is_an_endpoint_of_its_own_in_json_and_a_flag_in_protobuf() -> None:
    json_body = requests.forward_backward("m", 1, [datum()], "ppo", forward_only=True, dialect=Dialect.JSON)
    assert list(fields(json_body)) == ["forward_input", "model_id", "seq_id"]
    proto_body = requests.forward_backward("m", 1, [datum()], "ppo", forward_only=True, dialect=Dialect.PROTO)
    assert proto_body.content_type == PROTOBUF
    assert isinstance(proto_codec.decode_forward_backward_request(proto_body.content), ForwardRequest)


def test_the_same_operation_can_be_said_in_either_dialect() -> None:
    data = [datum(target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.1])]
    said = [requests.forward_backward("m", 7, data, "ppo", {"beta": 1}, dialect=dialect) for dialect in Dialect]
    from_json = ForwardBackwardRequest.model_validate(fields(said[0]))
    assert proto_codec.decode_forward_backward_request(said[1].content) == from_json


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_data_in_json_are_the_float32_values(values: list[float]) -> None:
    body = requests.forward_backward("m", 1, [datum(weights=values)], "ppo", dialect=Dialect.JSON)
    sent = fields(body)["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["data"]
    assert struct.pack(f"<{len(sent)}f", *sent) == struct.pack(f"<{len(values)}f", *values)
    assert sent == values
    assert all(type(value) is float for value in sent)


def test_a_double_is_sent_as_the_float32_it_becomes() -> None:
    body = requests.forward_backward("m", 1, [datum(weights=[0.1])], "ppo", dialect=Dialect.JSON)
    assert b'"data":[0.10000000149011612]' in body.content


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_json_cannot_carry_is_refused_by_datum_and_key(bad: float) -> None:
    data = [datum(weights=[1.0]), datum(weights=[1.0, bad, float("-inf")])]
    with pytest.raises(ValidationError, match=r"data\[1\]\.loss_fn_inputs\['weights'\] holds NaN or an infinity"):
        requests.forward_backward("m", 1, data, "ppo", dialect=Dialect.JSON)


@pytest.mark.parametrize(
    "call",
    [
        lambda dialect: sample(dialect, params=SamplingParams(temperature=float("nan"))),
        lambda dialect: requests.optim_step("m", 1, AdamParams(learning_rate=float("nan")), dialect=dialect),
    ],
)
def test_a_parameter_that_json_cannot_carry_never_becomes_null(call: Any) -> None:
    for dialect in Dialect:
        with pytest.raises(ValidationError, match="is nan"):
            call(dialect)


def test_a_loss_setting_that_json_cannot_carry_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"loss_fn_config\.beta is inf"):
        requests.forward_backward("m", 1, [datum()], "ppo", {"beta": float("inf")}, dialect=Dialect.JSON)


def test_a_sparse_tensor_is_filled_up_for_services_that_know_no_sparse_ones() -> None:
    sparse = TensorData([5, 6], "int64", [2, 3], [0, 1, 2], [0, 2])
    body = fields(requests.forward_backward("m", 1, [datum(target_tokens=sparse)], "ppo", dialect=Dialect.JSON))
    tensor = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["target_tokens"]
    assert tensor == {"data": [5, 0, 0, 0, 0, 6], "dtype": "int64", "shape": [2, 3]}


def test_spans_are_left_out_where_json_has_no_field_for_them() -> None:
    span = PromptProvenanceSpan(sequence_id="r:0", length=3)
    annotated = datum().with_provenance([span], [span])
    body = fields(requests.forward_backward("m", 1, [annotated], "ppo", dialect=Dialect.JSON))
    assert list(body["forward_backward_input"]["data"][0]) == ["loss_fn_inputs", "model_input"]
