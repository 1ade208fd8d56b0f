"""Responses of retrieve_future: a union of five, one decoder, in JSON and in protobuf."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from tinkex.errors import APIResponseValidationError, RequestErrorCategory
from tinkex.types import ForwardBackwardOutput, OptimStepResponse, SampledSequence, SampleResponse, TensorData
from tinkex.wire import proto_codec
from tinkex.wire.envelope import Accepted, Done, Failed, Metadata, Pending, read, read_accepted

JSON = {"content-type": "application/json"}
PROTO = {"content-type": "application/x-protobuf"}


def answer(obj: Any, status: int = 200, result_type: Any = OptimStepResponse) -> Any:
    return read(status, JSON, json.dumps(obj).encode(), result_type, "r-1")


def test_a_408_is_pending_with_the_state_of_the_queue() -> None:
    body = {"queue_state": "paused_capacity", "queue_state_reason": "all GPUs busy"}
    assert answer(body, 408) == Pending("paused_capacity", "all GPUs busy")


@pytest.mark.parametrize("content", [b"", b"Request Timeout", b"[]", b"{}", b'{"queue_state": null}'])
def test_a_408_without_a_state_is_still_pending(content: bytes) -> None:
    assert read(408, {}, content, OptimStepResponse) == Pending("unknown", None)


def test_queue_states_are_read_in_any_casing_and_new_ones_are_kept() -> None:
    assert answer({"queue_state": "ACTIVE"}, 408) == Pending("active")
    assert answer({"queue_state": "paused_for_lunch"}, 408) == Pending("paused_for_lunch")


def test_try_again_carries_the_state_of_the_queue() -> None:
    body = {"type": "try_again", "request_id": "r-1", "queue_state": "active", "queue_state_reason": "warming up"}
    assert answer(body) == Pending("active", "warming up")
    assert answer({"type": "try_again"}) == Pending()


def test_metadata_tells_the_size_of_what_is_to_come() -> None:
    assert answer({"status": "complete_metadata", "response_payload_size": 100}) == Metadata(100)


@pytest.mark.parametrize("size", [None, -1, "100", True])
def test_metadata_without_a_usable_size_is_refused(size: object) -> None:
    with pytest.raises(APIResponseValidationError, match=r"response_payload_size.*\(request r-1\)"):
        answer({"status": "complete_metadata", "response_payload_size": size})


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("User", RequestErrorCategory.User),
        ("SERVER", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("transient", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_a_failure_keeps_its_text_and_category_in_any_casing(word: object, category: RequestErrorCategory) -> None:
    assert answer({"error": "out of memory", "category": word}) == Failed("out of memory", category)


def test_a_failure_without_a_category_is_a_failure() -> None:
    assert answer({"error": "boom"}) == Failed("boom", RequestErrorCategory.Unknown)


def test_a_null_error_beside_a_result_does_not_spoil_it() -> None:
    assert answer({"error": None, "metrics": {"a": 1.0}}) == Done(OptimStepResponse(metrics={"a": 1.0}))
    assert answer({"error": None, "category": "server"}) == Failed(
        "The service gave no reason.", RequestErrorCategory.Server
    )


def test_a_result_is_read_as_the_type_that_was_asked_for() -> None:
    assert answer({"metrics": None}) == Done(OptimStepResponse(metrics=None))


def test_one_match_tells_the_four_apart() -> None:
    def name(envelope: Any) -> str:
        match envelope:
            case Pending(queue_state, _):
                return f"pending {queue_state}"
            case Metadata(size):
                return f"size {size}"
            case Failed(error, category):
                return f"{category} {error}"
            case Done(value):
                return type(value).__name__
        raise AssertionError(envelope)

    bodies = [
        {"type": "try_again", "queue_state": "active"},
        {"status": "complete_metadata", "response_payload_size": 3},
        {"error": "no", "category": "user"},
        {},
    ]
    names = [name(answer({"queue_state": "active"}, 408)), *(name(answer(body)) for body in bodies)]
    assert names == ["pending active", "pending active", "size 3", "user no", "OptimStepResponse"]


SAMPLE = SampleResponse(sequences=[SampledSequence(stop_reason="stop", tokens=[1, 2], logprobs=[-0.5, -0.25])])
OUTPUT = ForwardBackwardOutput(
    loss_fn_output_type="ArrayRecord",
    loss_fn_outputs=[{"logprobs": TensorData([-0.5, -0.25], "float32", [2])}],
    metrics={"loss:sum": 0.75},
)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (SAMPLE, proto_codec.encode_sample_response(SAMPLE)),
        (OUTPUT, proto_codec.encode_forward_backward_output(OUTPUT)),
    ],
)
def test_results_are_read_from_protobuf_or_json_as_the_content_type_says(value: Any, content: bytes) -> None:
    assert read(200, PROTO, content, type(value)) == Done(value)
    assert read(200, {"content-type": "Application/X-Protobuf; v=1"}, content, type(value)) == Done(value)
    assert answer(value.model_dump(mode="json"), result_type=type(value)) == Done(value)


@pytest.mark.parametrize(
    ("headers", "content"),
    [(PROTO, proto_codec.encode_sample_response(SAMPLE)), (JSON, SAMPLE.model_dump_json(exclude_unset=True).encode())],
)
def test_sequences_are_given_the_ids_of_the_acceptance(headers: Any, content: bytes) -> None:
    envelope = read(200, headers, content, SampleResponse, "r-1", ["r-1:0"])
    assert isinstance(envelope, Done)
    assert [sequence.sequence_id for sequence in envelope.value.sequences] == ["r-1:0"]


def test_pending_failed_and_metadata_stay_json_while_protobuf_is_expected() -> None:
    assert answer({"error": "no", "category": "user"}, result_type=SampleResponse) == Failed(
        "no", RequestErrorCategory.User
    )
    body = {"status": "complete_metadata", "response_payload_size": 9}
    assert answer(body, result_type=ForwardBackwardOutput) == Metadata(9)


@pytest.mark.parametrize(
    ("headers", "content", "result_type"),
    [
        (JSON, b"<html>oops</html>", OptimStepResponse),
        (JSON, b"[1]", OptimStepResponse),
        (JSON, b'{"sequences": 5}', SampleResponse),
        (PROTO, b"\xff\xff\xff", SampleResponse),
        (PROTO, b"", OptimStepResponse),
        ({}, b"", OptimStepResponse),
    ],
)
def test_an_answer_that_fits_nothing_names_the_request(headers: Any, content: bytes, result_type: Any) -> None:
    with pytest.raises(APIResponseValidationError, match=r"\(request r-1\)") as caught:
        read(200, headers, content, result_type, "r-1")
    assert caught.value.status_code == 200
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_accepted_submission_names_its_request_and_sequences() -> None:
    content = b'{"request_id": "r-1", "sample_sequence_ids": ["a:0", "a:1"], "model_id": "m"}'
    assert read_accepted(content) == Accepted("r-1", ["a:0", "a:1"], "m")
    assert read_accepted(b'{"request_id": "r-1", "model_id": null}') == Accepted("r-1")


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"request_id": 5}',
        b'{"request_id": ""}',
        b"[]",
        b"hello",
        b'{"request_id": "r", "sample_sequence_ids": [1]}',
    ],
)
def test_an_acceptance_without_a_usable_id_is_refused(content: bytes) -> None:
    with pytest.raises(APIResponseValidationError):
        read_accepted(content)
