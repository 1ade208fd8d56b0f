"""ModelInput, its chunks and Datum, and the input that is rejected at once."""

from __future__ import annotations

import pickle
import struct
import time
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.errors import ValidationError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.mark.parametrize(
    "tokens",
    [[5, 6], (5, 6), range(5, 7), iter([5, 6]), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int32(6)]],
)
def test_tokens_may_come_as_any_run_of_ints(tokens: Any) -> None:
    prompt = ModelInput.from_ints(tokens)
    assert prompt.to_ints() == [5, 6]
    assert [type(token) for token in prompt.to_ints()] == [int, int]
    assert prompt.length == 2


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1, 1.5], r"tokens\[1\]: expected a token id \(an int\), got float 1.5"),
        ([1, 2.0], r"tokens\[1\]: expected a token id"),
        ([1, True], r"tokens\[1\]: expected a token id \(an int\), got bool True"),
        ([0] * 100 + [False], r"tokens\[100\]: expected a token id"),
        ([1, -1], r"tokens\[1\]: a token id is between 0 and 2\^31 - 1, got -1"),
        ([1, 2**31], r"tokens\[1\]: a token id is between 0 and 2\^31 - 1, got 2147483648"),
        ([1, 2**70], r"tokens\[1\]: a token id is between"),
        ([1, "2"], r"tokens\[1\]: expected a token id"),
        ([1, None], r"tokens\[1\]: expected a token id"),
        ([[1, 2]], r"tokens\[0\]: expected a token id"),
        (np.array([1.5]), r"tokens\[0\]: expected a token id"),
        ("12", "expected a list"),
        (5, "expected a list"),
    ],
)
def test_a_token_that_is_none_is_refused_with_its_index(tokens: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ModelInput.from_ints(tokens)
    with pytest.raises(ValidationError, match=reason):
        EncodedTextChunk(tokens=tokens)


def test_tokens_keep_one_packed_form() -> None:
    chunk = EncodedTextChunk(tokens=[1, 2**31 - 1])
    assert chunk.packed() == struct.pack("<2i", 1, 2**31 - 1)
    assert chunk.packed() is chunk.packed()
    assert EncodedTextChunk.from_packed(chunk.packed()).tokens == [1, 2**31 - 1]
    with pytest.raises(ValidationError, match="not a whole number of int32"):
        EncodedTextChunk.from_packed(b"123")


def test_the_callers_list_may_change_afterwards() -> None:
    tokens = [1, 2]
    prompt = ModelInput.from_ints(tokens)
    tokens.append(3)
    assert prompt.to_ints() == [1, 2]
    prompt.to_ints().append(3)
    assert prompt.to_ints() == [1, 2]


def test_append_gives_a_new_input_and_leaves_the_old_one() -> None:
    longer = PROMPT.append_int(4).append(EncodedTextChunk(tokens=[5]))
    assert (PROMPT.to_ints(), longer.to_ints(), longer.length) == ([1, 2, 3], [1, 2, 3, 4, 5], 5)
    assert ModelInput.empty().append_int(1) == ModelInput.from_ints([1])
    assert ModelInput.empty().length == 0


def test_to_ints_of_an_input_with_an_image_names_the_chunk() -> None:
    prompt = PROMPT.append(ImageChunk(data=b"x", format="png", expected_tokens=4))
    assert prompt.length == 7
    with pytest.raises(ValidationError, match="chunk 1 is a ImageChunk"):
        prompt.to_ints()


def test_the_length_of_an_image_is_expected_tokens_or_the_older_tokens() -> None:
    assert ImageChunk(data=b"x", format="png", expected_tokens=4, tokens=9).length == 4
    assert ImageAssetPointerChunk(format="jpeg", location="asset://1", height=2, width=3, tokens=9).length == 9
    with pytest.raises(ValidationError, match="pass expected_tokens"):
        _ = ImageChunk(data=b"x", format="png").length


def test_an_image_has_the_fields_of_every_release_in_the_order_of_the_wire() -> None:
    chunk = ImageChunk(data=b"abc", format="png", height=1, tokens=2, width=3)
    assert chunk.model_dump(mode="json", exclude_unset=True) == {
        "data": "YWJj",
        "format": "png",
        "height": 1,
        "tokens": 2,
        "width": 3,
    }
    assert list(chunk.model_dump()) == ["data", "format", "height", "tokens", "width", "expected_tokens", "type"]
    pointer = ImageAssetPointerChunk(format="png", location="l", height=1, tokens=2, width=3)
    assert list(pointer.model_dump(exclude_unset=True)) == ["format", "height", "location", "tokens", "width"]


def test_the_length_of_audio_is_read_from_its_header() -> None:
    frames, bins = 300, 80  # 300 needs two bytes as a varint
    header = bytes([3, 2, 0x80 | (frames & 0x7F), frames >> 7, bins])
    assert DmelChunk(dmel=header + b"payload").length == frames
    assert DmelChunk(dmel=b"\xfe" + header).length == frames
    for broken in (b"", b"\xfe", b"abc", bytes([3, 2]), bytes([3, 1, 0xFF]), bytes([3, 0])):
        with pytest.raises(ValidationError):
            _ = DmelChunk(dmel=broken).length


@pytest.mark.parametrize(
    ("fields", "chunk"),
    [
        ({"tokens": [1, 2]}, EncodedTextChunk(tokens=[1, 2])),
        ({"type": "encoded_text", "tokens": [1, 2]}, EncodedTextChunk(tokens=[1, 2])),
        ({"data": "YWJj", "format": "png", "tokens": 5}, ImageChunk(data=b"abc", format="png", tokens=5)),
        ({"location": "l", "format": "png", "tokens": 5}, ImageAssetPointerChunk(location="l", format="png", tokens=5)),
        ({"dmel": "YWJj"}, DmelChunk(dmel=b"abc")),
    ],
)
def test_a_chunk_without_its_type_is_told_by_its_fields(fields: dict[str, Any], chunk: Any) -> None:
    assert ModelInput.model_validate({"chunks": [fields]}).chunks == [chunk]


@pytest.mark.parametrize("chunks", [[{"type": "video"}], [{}], [7], "ab", 7, {"tokens": [1]}, [{"tokens": [1.5]}]])
def test_what_is_no_chunk_is_refused(chunks: Any) -> None:
    with pytest.raises(ValidationError, match=r"ModelInput\.chunks"):
        ModelInput(chunks=chunks)


def test_a_prompt_is_encoded_once_for_each_name() -> None:
    prompt, made = ModelInput.from_ints([1]), []

    def make(value: ModelInput) -> bytes:
        made.append(value)
        return b"encoded"

    assert [prompt.cached("json", make) for _ in range(3)] == [b"encoded"] * 3
    prompt.cached("proto", make)
    assert made == [prompt, prompt]
    assert pickle.loads(pickle.dumps(prompt)) == prompt == ModelInput.from_ints([1])


def test_text_is_encoded_as_it_is_without_a_chat_template() -> None:
    class Encoding:
        ids = (7, 8)

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            return Encoding() if text == "fast" else [len(text), int(add_special_tokens)]

    assert ModelInput.from_text("fast", Tokenizer()).to_ints() == [7, 8]
    assert ModelInput.from_text("abc", Tokenizer(), add_special_tokens=False).to_ints() == [3, 0]


def test_a_datum_turns_lists_arrays_and_tensors_into_tensor_data_by_key() -> None:
    datum = Datum(
        model_input=PROMPT,
        loss_fn_inputs={
            "target_tokens": [2, 3, 4],
            "weights": np.array([0, 1, 1]),
            "advantages": torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64),
            "logprobs": [[0.1, 0.2], [0.3, 0.4]],
            "group": [7, 7, 7],
            "score": [1, 2.5],
            "ready": TensorData([1], "int64"),
        },
    )
    dtypes = {key: (tensor.dtype, tensor.shape) for key, tensor in datum.loss_fn_inputs.items()}
    assert dtypes == {
        "target_tokens": ("int64", [3]),
        "weights": ("float32", [3]),
        "advantages": ("float32", [3]),
        "logprobs": ("float32", [2, 2]),
        "group": ("int64", [3]),
        "score": ("float32", [2]),
        "ready": ("int64", None),
    }


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"target_tokens": [1, 1.5]}, r"Datum\.loss_fn_inputs\['target_tokens'\]\[1\]: expected a whole number"),
        ({"weights": [[1], [1, 2]]}, r"Datum\.loss_fn_inputs\['weights'\]\[1\]: ragged"),
        ({"weights": "abc"}, r"Datum\.loss_fn_inputs\['weights'\]: expected a list of numbers"),
        ({"weights": np.array(["a"])}, r"Datum\.loss_fn_inputs\['weights'\]: .*cannot be sent"),
        ({"new_key": [None]}, r"Datum\.loss_fn_inputs\['new_key'\]\[0\]: expected a number"),
        ({5: [1]}, r"a key is a str"),
        ([1], r"Datum\.loss_fn_inputs: expected a mapping"),
    ],
)
def test_a_bad_loss_input_is_refused_by_key_and_index(inputs: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Datum(model_input=PROMPT, loss_fn_inputs=inputs)


def test_padded_torch_targets_and_weights_become_sparse_and_nothing_else_does() -> None:
    padded = torch.zeros(3, 40)
    padded[1, 1] = 1
    datum = Datum(PROMPT, {"target_tokens": padded.long(), "weights": padded, "advantages": padded})
    assert [datum.loss_fn_inputs[key].is_sparse for key in ("target_tokens", "weights", "advantages")] == [
        True,
        True,
        False,
    ]
    assert not Datum(PROMPT, {"weights": padded.numpy()}).loss_fn_inputs["weights"].is_sparse
    assert torch.equal(datum.loss_fn_inputs["weights"].to_torch(), padded)


def test_a_datum_takes_its_fields_by_position_and_reads_its_own_json() -> None:
    datum = Datum(PROMPT, {"weights": [1, 2, 3]})
    assert Datum.model_validate_json(datum.model_dump_json()) == datum == pickle.loads(pickle.dumps(datum))
    assert Datum(model_input=PROMPT).loss_fn_inputs == {}
    with pytest.raises(ValidationError, match=r"Datum\.model_input: expected ModelInput"):
        Datum([1, 2, 3])  # type: ignore[arg-type]


def test_provenance_must_tile_the_input_and_the_targets() -> None:
    datum = Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    spans: list[Any] = [
        PromptProvenanceSpan(sequence_id="s", length=2),
        SampledProvenanceSpan(sequence_id="s", offset=0, length=1),
    ]
    told = datum.with_provenance(spans, spans)
    assert (told.model_input_spans, told.loss_fn_input_spans, told.model_input) == (spans, spans, PROMPT)
    assert pickle.loads(pickle.dumps(told)) == told
    with pytest.raises(ValidationError, match="cover 2 positions, but model_input has 3"):
        datum.with_provenance(spans[:1], spans)
    with pytest.raises(ValidationError, match="cover 1 positions, but target_tokens has 3"):
        datum.with_provenance(spans, spans[1:])
    with pytest.raises(ValidationError, match="or neither"):
        Datum(PROMPT, {}, spans)
    with pytest.raises(ValidationError, match=r"model_input_spans\[0\]"):
        Datum(PROMPT, {}, [1], [1])  # type: ignore[list-item]
    for bad in ({"sequence_id": "", "length": 1}, {"sequence_id": "s", "length": -1}):
        with pytest.raises(ValidationError):
            PromptProvenanceSpan.model_validate(bad)


@pytest.mark.timing
def test_256_datums_of_2048_tokens_are_built_in_a_blink() -> None:
    rows = [[(7 * row + 3 * place) % 150_000 for place in range(2048)] for row in range(256)]

    def build() -> float:
        start = time.process_time()
        for row in rows:
            Datum(ModelInput.from_ints(row), {"target_tokens": row, "weights": [1.0] * 2048})
        return time.process_time() - start

    # 25 ms where this was written; the limit leaves room for slow and busy machines, not for a loop per token.
    assert min(build() for _ in range(3)) < 0.1


@pytest.mark.parametrize("spans", [True, 7, "text", {"a": 1}])
def test_spans_that_are_no_list_are_rejected_by_name_not_a_500(spans: Any) -> None:
    """Found by schemathesis: a JSON body with `"model_input_spans": true` was a TypeError in the service."""
    body = {"model_input": {"chunks": []}, "loss_fn_inputs": {}, "model_input_spans": spans}
    with pytest.raises(ValidationError, match="model_input_spans: expected a list of spans"):
        Datum.model_validate(body)


@pytest.mark.parametrize("data", ["ü", "a", "aGVs*"])
def test_an_image_that_is_not_base64_is_rejected_by_name_not_a_500(data: str) -> None:
    """Found by schemathesis: text outside ASCII is a plain ValueError in base64, not a binascii.Error."""
    with pytest.raises(ValidationError, match=r"ImageChunk\.data"):
        ModelInput.model_validate({"chunks": [{"type": "image", "data": data, "format": "png"}]})
