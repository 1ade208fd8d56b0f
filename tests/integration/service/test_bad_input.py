"""Training requests that the SDK would reject, sent without it: the service rejects each with a clear message.

After each case the same run continues with the same weights and no gradient, and so does another tenant's run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.service.raw import (
    INF,
    NAN,
    TOKENS,
    Answer,
    Raw,
    Run,
    batch,
    check_no_gradient,
    check_refused,
    check_unharmed,
    datum,
    floats,
    message,
    packed,
    policy_datum,
    post_message,
    tensor,
    text,
)
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import PROTOBUF

Send = Callable[[Run], Answer]
"""Sends something wrong to a run, under its next number if it has one."""


@pytest.fixture(scope="module")
def run(alice: Raw) -> Run:
    return alice.run()


@pytest.fixture(scope="module")
def bobs(bob: Raw) -> Run:
    return bob.run()


@pytest.fixture(autouse=True)
def unharmed(run: Run, bobs: Run) -> Iterator[None]:
    """Around every case. The first time finds out what the weights are."""
    if run.first_loss is None:
        check_unharmed(run, bobs)
    yield
    check_unharmed(run, bobs)


# ── Training data

CROSS_ENTROPY: dict[str, tuple[object, str]] = {
    "no data": ([], r"no data"),
    "data null": (None, r"data"),
    "data text": ("rows", r"data"),
    "data an object": (datum(), r"data"),
    "datum null": ([None], r"data\[0\]"),
    "datum a list": ([[1, 2]], r"data\[0\]"),
    "second datum wrong": ([datum(), datum(weights=floats(1.0))], r"data\[1\].*weights"),
    "no model input": ([{"loss_fn_inputs": {}}], r"model_input"),
    "model input null": ([{**datum(), "model_input": None}], r"model_input"),
    "no chunks": ([datum({})], r"chunks"),
    "chunks text": ([datum({"chunks": "abc"})], r"chunks"),
    "chunk null": ([datum({"chunks": [None]})], r"chunks\[0\]"),
    "chunk without content": ([datum({"chunks": [{}]})], r"chunks\[0\]"),
    "chunk of unknown kind": ([datum({"chunks": [{"type": "video", "frames": []}]})], r"chunks\[0\]"),
    "chunk of no kind at all": ([datum({"chunks": [{"type": {}, "tokens": [1]}]})], r"chunks\[0\]"),
    "empty input": ([datum({"chunks": []})], r"model_input.*empty"),
    "empty chunk": ([datum(text([]))], r"model_input.*empty"),
    "empty everything": ([datum(text([]), target_tokens=tensor([]), weights=floats())], r"model_input.*empty"),
    "token negative": ([datum(text([10, -1, 30]))], r"tokens?\b.*-1"),
    "token beyond the vocabulary": ([datum(text([10, 99_999, 30]))], r"token 99999"),
    "token beyond 32 bits": ([datum(text([10, 2**31, 30]))], r"2147483648"),
    "token beyond 64 bits": ([datum(text([10, 2**70, 30]))], r"token"),
    "token a float": ([datum(text([10, 20.5, 30]))], r"20\.5"),
    "token text": ([datum(text([10, "20", 30]))], r"token.*'20'"),
    "token null": ([datum(text([10, None, 30]))], r"token.*None"),
    "token a bool": ([datum(text([10, True, 30]))], r"token.*True"),
    "tokens nested": ([datum(text([[10, 20, 30]]))], r"token"),
    "tokens text": ([datum(text("abc"))], r"tokens"),
    "tokens a number": ([datum(text(5))], r"tokens"),
    "tokens beyond the context": (
        [datum(text([1] * 9000), target_tokens=tensor([1] * 9000), weights=None)],
        r"9000 tokens.*context",
    ),
    "no inputs": ([{"model_input": text(TOKENS)}], r"target_tokens"),
    "inputs a list": ([{**datum(), "loss_fn_inputs": [1]}], r"loss_fn_inputs"),
    "no targets": ([datum(target_tokens=None)], r"target_tokens"),
    "targets null": ([{**datum(), "loss_fn_inputs": {"target_tokens": None}}], r"target_tokens"),
    "targets too short": ([datum(target_tokens=tensor([20, 30]))], r"target_tokens.*2.*3"),
    "targets too long": ([datum(target_tokens=tensor([20, 30, 40, 50]))], r"target_tokens.*4.*3"),
    "targets empty": ([datum(target_tokens=tensor([]))], r"target_tokens"),
    "targets floats": ([datum(target_tokens=floats(20, 30, 40))], r"target_tokens.*(float32|integer)"),
    "targets fractional": ([datum(target_tokens=tensor([20, 30.5, 40]))], r"30\.5"),
    "target negative": ([datum(target_tokens=tensor([20, -100, 40]))], r"target_tokens.*-100"),
    "target beyond the vocabulary": ([datum(target_tokens=tensor([20, 99_999, 40]))], r"target_tokens.*99999"),
    "target beyond 64 bits": ([datum(target_tokens=tensor([20, 2**63, 40]))], r"9223372036854775808|int64"),
    "target text": ([datum(target_tokens=tensor([20, "thirty", 40]))], r"thirty"),
    "target null": ([datum(target_tokens=tensor([20, None, 40]))], r"None"),
    "targets ragged": ([datum(target_tokens=tensor([[20], [30, 40], [50]]))], r"target_tokens|ragged|length|rows?"),
    "targets in three axes": ([datum(target_tokens=tensor([20, 30, 40], shape=[3, 1, 1]))], r"target_tokens.*shape"),
    "targets a text": ([datum(target_tokens="20 30 40")], r"target_tokens"),
    "targets a number": ([datum(target_tokens=20)], r"target_tokens"),
    "weights too short": ([datum(weights=floats(1.0))], r"weights.*1.*3"),
    "weights empty": ([datum(weights=floats())], r"weights"),
    "weights NaN": ([datum(weights=floats(1.0, NAN, 1.0))], r"weights.*NaN"),
    "weights infinite": ([datum(weights=floats(1.0, -INF, 1.0))], r"weights.*infinity"),
    "weights beyond float32": ([datum(weights=floats(1.0, 1e39, 1.0))], r"1e\+39"),
    "weights text": ([datum(weights=floats("a", "b", "c"))], r"'a'"),
    "weights null inside": ([datum(weights=floats(1.0, None, 1.0))], r"None"),
    "weights in two axes": ([datum(weights=tensor([1.0] * 6, "float32", shape=[3, 2]))], r"weights.*\[3, 2\].*\[3\]"),
    "weights for other targets": (
        [datum(target_tokens=tensor([1] * 6, shape=[3, 2]), weights=tensor([1.0] * 9, "float32", shape=[3, 3]))],
        r"weights.*\[3, 3\].*\[3, 2\]",
    ),
    "weights too large for a gradient": ([datum(weights=floats(3e38, 3e38, 3e38))], r"weights"),
    "dtype unknown": ([datum(weights=tensor([1, 1, 1], "float16"))], r"float16"),
    "dtype a number": ([datum(weights=tensor([1, 1, 1], 5))], r"dtype|5"),
    "data of a tensor missing": ([datum(weights={"dtype": "float32"})], r"data|weights"),
    "shape does not fit": ([datum(weights=tensor([1, 1, 1], "float32", shape=[2]))], r"shape \[2\].*3"),
    "shape negative": ([datum(weights=tensor([1, 1, 1], "float32", shape=[-3]))], r"-3"),
    "shape text": ([datum(weights=tensor([1, 1, 1], "float32", shape="3"))], r"shape"),
    "shape of texts": ([datum(weights=tensor([1, 1, 1], "float32", shape=["a"]))], r"shape"),
    "shape of too many digits": ([datum(weights=tensor([1, 1, 1], "float32", shape=["9" * 5000]))], r"shape"),
    "shape of nulls": ([datum(weights=tensor([1, 1, 1], "float32", shape=[None]))], r"shape"),
    "shape fractional": ([datum(weights=tensor([1, 1, 1], "float32", shape=[3.5]))], r"shape"),
    "shape a number": ([datum(weights=tensor([1, 1, 1], "float32", shape=3))], r"shape"),
    "shape of nothing": ([datum(weights=tensor([], "float32", shape=[0, 2**70]))], r"shape"),
    "shape huge": ([datum(weights=tensor([1, 1, 1], "float32", shape=[2**62, 2**62]))], r"shape"),
    "image": ([datum({"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]})], r"ImageChunk.*text model"),
    "image in broken base64": ([datum({"chunks": [{"type": "image", "data": "a", "format": "png"}]})], r"base64"),
    "image of no known format": ([datum({"chunks": [{"data": "aGk=", "format": "exe"}]})], r"exe|image"),
    "asset pointer": (
        [datum({"chunks": [{"type": "image_asset_pointer", "location": "/etc/passwd", "format": "png"}]})],
        r"AssetPointer.*text model",
    ),
    "audio": ([datum({"chunks": [{"type": "dmel", "dmel": "aGk="}]})], r"DmelChunk.*text model"),
    "an input of no use": ([datum(advantages=floats(1, 1, 1))], r"cross_entropy.*advantages|advantages.*cross_entropy"),
}


def sparse(crow: object, col: object, values: object = (20, 30, 40), shape: object = (3, 2)) -> dict[str, object]:
    """Targets in CSR form."""
    return datum(
        target_tokens=tensor(values, shape=shape, sparse_crow_indices=crow, sparse_col_indices=col), weights=None
    )


CROSS_ENTROPY |= {
    f"sparse, {name}": ([row], says)
    for name, row, says in (
        ("too few rows", sparse([0, 1, 3], [0, 0, 1]), r"sparse_crow_indices"),
        ("rows not from 0", sparse([1, 1, 2, 3], [0, 0, 1]), r"sparse_crow_indices"),
        ("rows that fall", sparse([0, 2, 1, 3], [0, 0, 1]), r"sparse_crow_indices"),
        ("rows beyond the end", sparse([0, 1, 2, 9], [0, 0, 1]), r"sparse_crow_indices"),
        ("rows of texts", sparse([0, "a", 2, 3], [0, 0, 1]), r"sparse_crow_indices"),
        ("rows text", sparse("0123", [0, 0, 1]), r"sparse_crow_indices"),
        ("rows beyond 64 bits", sparse([0, 1, 2**70, 3], [0, 0, 1]), r"sparse_crow_indices"),
        ("no columns", sparse([0, 1, 2, 3], None), r"sparse_col_indices"),
        ("too few columns", sparse([0, 1, 2, 2], [0, 0]), r"column indices"),
        ("columns out of range", sparse([0, 1, 2, 3], [0, 0, 2]), r"column indices.*0 and 1"),
        ("columns negative", sparse([0, 1, 2, 3], [0, -1, 1]), r"column indices.*0 and 1"),
        ("columns of texts", sparse([0, 1, 2, 3], [0, "x", 1]), r"sparse_col_indices"),
        ("columns fractional", sparse([0, 1, 2, 3], [0, 0.5, 1]), r"sparse_col_indices"),
        ("no shape", sparse([0, 1, 2, 3], [0, 0, 1], shape=None), r"shape"),
        ("three axes", sparse([0, 1, 2, 3], [0, 0, 1], shape=(3, 2, 1)), r"shape"),
        ("other rows than the input", sparse([0, 1, 3], [0, 0, 1], shape=(2, 2)), r"target_tokens.*2.*3"),
        ("a place twice", sparse([0, 2, 3, 3], [0, 0, 1]), r"twice"),
        ("huge", sparse([0, 1, 2, 3], [0, 0, 1], shape=(3, 10**12)), r"target_tokens|entries"),
        ("beyond 64 bits", sparse([0, 1, 2, 3], [0, 0, 1], shape=(3, 2**70)), r"shape.*64 bits"),
        ("token out of range", sparse([0, 1, 2, 3], [0, 0, 1], (20, 99_999, 40)), r"target_tokens.*99999"),
    )
}


@pytest.mark.parametrize("case", CROSS_ENTROPY)
def test_invalid_training_data_is_rejected_by_field(alice: Raw, run: Run, case: str) -> None:
    data, says = CROSS_ENTROPY[case]
    body = {**batch(), "data": data}
    check_refused(alice, alice.post("forward_backward", run.named(forward_backward_input=body)), says)
    check_no_gradient(run)


@pytest.mark.parametrize("case", ["no data", "token a float", "targets too short", "weights NaN", "image"])
def test_the_forward_call_is_as_strict(alice: Raw, run: Run, case: str) -> None:
    data, says = CROSS_ENTROPY[case]
    check_refused(alice, alice.post("forward", run.named(forward_input={**batch(), "data": data})), says)


def test_a_forward_pass_may_carry_inputs_of_the_clients_own_loss(alice: Raw, run: Run) -> None:
    """Early official clients send them all when they only want log-probabilities."""
    rows = [datum(advantages=floats(1, 1, 1), chosen=tensor([1]))]
    assert run.done("forward", forward_input=batch(rows))["metrics"]["loss:sum"] == run.first_loss


LOSSES: dict[str, tuple[object, str]] = {
    "unknown loss": (batch(loss_fn="mse"), r"'mse'.*cross_entropy"),
    "no loss": ({"data": [datum()]}, r"loss_fn"),
    "loss empty": (batch(loss_fn=""), r"loss_fn"),
    "loss a number": (batch(loss_fn=5), r"loss_fn"),
    "loss a list": (batch(loss_fn=["ppo"]), r"loss_fn"),
    "loss not offered": (batch(loss_fn="stable_reinforce"), r"stable_reinforce.*not offered"),
    "loss on the service": (batch(loss_fn="custom"), r"custom.*forward_backward_custom"),
    "no advantages": (batch([policy_datum(advantages=None)], "importance_sampling"), r"advantages.*importance_sampl"),
    "no logprobs": (batch([policy_datum(logprobs=None)], "ppo"), r"logprobs.*ppo"),
    "cispo without all": (batch([datum(weights=None)], "cispo"), r"logprobs.*cispo"),
    "dro without all": (batch([datum(weights=None)], "dro"), r"logprobs.*dro"),
    "gspo without all": (batch([datum(weights=None)], "gspo"), r"logprobs.*gspo"),
    "kl without reference": (batch([datum()], "kl_divergence"), r"logprobs.*kl_divergence"),
    "weights for ppo": (batch([policy_datum(weights=floats(1, 1, 1))], "ppo"), r"ppo.*weights|weights.*ppo"),
    "advantages NaN": (batch([policy_datum(advantages=floats(1, NAN, 1))], "ppo"), r"advantages.*NaN"),
    "advantages short": (batch([policy_datum(advantages=floats(1))], "ppo"), r"advantages.*1.*3"),
    "ratio overflows": (batch([policy_datum(logprobs=floats(-1, -1e30, -1))], "importance_sampling"), r"logprobs"),
    "clips crossed per token": (
        batch([policy_datum(clip_low_threshold=floats(2, 2, 2), clip_high_threshold=floats(1, 1, 1))], "ppo"),
        r"clip_low_threshold.*above",
    ),
    "mask nowhere": (batch([policy_datum(sequence_ratio_mask=floats(0, 0, 0))], "gspo"), r"sequence_ratio_mask"),
    "two targets for ppo": (
        batch(
            [
                policy_datum(
                    target_tokens=tensor([1] * 6, shape=[3, 2]),
                    logprobs=tensor([-1.0] * 6, "float32", shape=[3, 2]),
                    advantages=tensor([1.0] * 6, "float32", shape=[3, 2]),
                )
            ],
            "ppo",
        ),
        r"ppo takes one target",
    ),
    "unknown setting": (batch([policy_datum()], "ppo", {"clip": 0.2}), r"'clip'.*clip_low_threshold"),
    "setting for a loss without any": (batch(config={"beta": 0.1}), r"'beta'"),
    "setting NaN": (batch([policy_datum()], "dro", {"beta": NAN}), r"beta.*nan"),
    "setting infinite": (batch([policy_datum()], "dro", {"beta": INF}), r"beta.*inf"),
    "setting text": (batch([policy_datum()], "dro", {"beta": "small"}), r"beta.*small"),
    "setting a list": (batch([policy_datum()], "ppo", {"clip_low_threshold": [0.8, 0.9]}), r"clip_low_threshold"),
    "setting a bool": (batch([policy_datum()], "dro", {"beta": True}), r"beta"),
    "setting null": (batch([policy_datum()], "dro", {"beta": None}), r"beta"),
    "setting an object": (batch([policy_datum()], "dro", {"beta": {}}), r"beta"),
    "settings a list": (batch(config=[1]), r"loss_fn_config"),
    "settings text": (batch(config="beta"), r"loss_fn_config"),
    "clips crossed": (
        batch([policy_datum()], "ppo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}),
        r"clip_low_threshold 1\.2.*above",
    ),
    "no input at all": (None, r"forward_backward_input"),
    "input a list": ([1, 2], r"forward_backward_input"),
    "input text": ("x", r"forward_backward_input"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_be_computed_is_rejected_by_name(alice: Raw, run: Run, case: str) -> None:
    body, says = LOSSES[case]
    check_refused(alice, alice.post("forward_backward", run.named(forward_backward_input=body)), says)
    check_no_gradient(run)


# ── The same as protobuf


def spoilt(change: Callable[[Any], object]) -> Send:
    """A message that is right but for one change, under the run's next number."""

    def send(run: Run) -> Answer:
        request = message(run, run.take())
        change(request)
        return post_message(run.client, request)

    return send


def chunk(**fields: Any) -> Callable[[Any], object]:
    return lambda request: request.data[0].model_input[0].CopyFrom(pb.Chunk(**fields))


def given(name: str, **fields: Any) -> Callable[[Any], object]:
    return lambda request: request.data[0].loss_fn_inputs[name].CopyFrom(pb.Tensor(**fields))


def csr(crow: list[int], col: list[int], shape: list[int]) -> Callable[[Any], object]:
    values = pb.SparseCsr(
        values=packed("q", [20, 30, 40]), crow_indices=packed("q", crow), col_indices=packed("q", col)
    )
    return given("target_tokens", sparse_csr=values, dtype=pb.DTYPE_INT64, shape=shape)


def span(offset: int, sequence_id: str = "s") -> Callable[[Any], object]:
    def change(request: Any) -> None:
        for spans in (request.data[0].model_input_spans, request.data[0].loss_fn_input_spans):
            spans.add().prompt_tokens.CopyFrom(
                pb.PromptProvenanceSpan(sequence_id=sequence_id, offset=offset, length=3)
            )

    return change


FLOAT, INT = pb.DTYPE_FLOAT32, pb.DTYPE_INT64
MESSAGES: dict[str, tuple[Send, str]] = {
    "no data": (spoilt(lambda request: request.ClearField("data")), r"no data"),
    "no chunks": (spoilt(lambda request: request.data[0].ClearField("model_input")), r"model_input.*empty"),
    "an empty chunk": (spoilt(chunk()), r"data\[0\].*chunk"),
    "no tokens": (spoilt(chunk(encoded_text=pb.EncodedTextChunk())), r"model_input.*empty"),
    "half a token": (spoilt(chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0"))), r"data\[0\].*3 bytes"),
    "token negative": (spoilt(chunk(encoded_text=pb.EncodedTextChunk(tokens=packed("i", [1, -2, 3])))), r"-2"),
    "token out of range": (spoilt(chunk(encoded_text=pb.EncodedTextChunk(tokens=packed("i", [1, 999, 3])))), r"999"),
    "image": (spoilt(chunk(image=pb.ImageChunk(data=b"x", format="png"))), r"ImageChunk.*text model"),
    "audio": (spoilt(chunk(dmel=pb.DmelChunk(dmel=b"x"))), r"DmelChunk.*text model"),
    "no targets": (spoilt(lambda request: request.data[0].loss_fn_inputs.clear()), r"target_tokens"),
    "no dtype": (spoilt(given("weights", dense=packed("f", [1, 1, 1]))), r"data\[0\].*dtype 0"),
    "dtype of the future": (spoilt(given("weights", dense=packed("f", [1, 1, 1]), dtype=77)), r"data\[0\].*dtype 77"),
    "half a number": (spoilt(given("weights", dense=b"\0" * 11, dtype=FLOAT)), r"data\[0\].*11 bytes"),
    "weights short": (spoilt(given("weights", dense=packed("f", [1]), dtype=FLOAT)), r"weights.*\[1\].*\[3\]"),
    "weights NaN": (spoilt(given("weights", dense=packed("f", [1, NAN, 1]), dtype=FLOAT)), r"weights.*NaN"),
    "bfloat16 infinite": (
        spoilt(given("weights", dense=b"\x80\x7f" * 3, dtype=pb.DTYPE_BFLOAT16)),
        r"weights.*infinity",
    ),
    "shape does not fit": (
        spoilt(given("weights", dense=packed("f", [1, 1, 1]), dtype=FLOAT, shape=[2, 2])),
        r"data\[0\].*\[2, 2\]",
    ),
    "shape negative": (
        spoilt(given("weights", dense=packed("f", [1, 1, 1]), dtype=FLOAT, shape=[-3])),
        r"data\[0\].*-3",
    ),
    "targets short": (spoilt(given("target_tokens", dense=packed("q", [1]), dtype=INT)), r"target_tokens.*1.*3"),
    "targets as floats": (
        spoilt(given("target_tokens", dense=packed("f", [1, 2, 3]), dtype=FLOAT)),
        r"target_tokens.*float32",
    ),
    "target negative": (
        spoilt(given("target_tokens", dense=packed("i", [1, -5, 3]), dtype=pb.DTYPE_INT32)),
        r"target_tokens.*-5",
    ),
    "sparse rows fall": (spoilt(csr([0, 2, 1, 3], [0, 0, 1], [3, 2])), r"data\[0\].*crow"),
    "sparse columns out": (spoilt(csr([0, 1, 2, 3], [0, 0, 7], [3, 2])), r"data\[0\].*column"),
    "sparse without shape": (spoilt(csr([0, 1, 2, 3], [0, 0, 1], [])), r"data\[0\].*shape"),
    "sparse huge": (spoilt(csr([0, 1, 2, 3], [0, 0, 1], [3, 2**61])), r"target_tokens|entries"),
    "span negative": (spoilt(span(-1)), r"offset -1"),
    "span of nothing": (spoilt(span(0, "")), r"sequence_id"),
    "no loss": (spoilt(lambda request: setattr(request, "loss_fn", "")), r"loss_fn"),
    "unknown loss": (spoilt(lambda request: setattr(request, "loss_fn", "mse")), r"mse"),
    "setting NaN": (spoilt(lambda request: request.loss_fn_config.update({"beta": NAN})), r"beta.*nan"),
    "unknown setting": (spoilt(lambda request: request.loss_fn_config.update({"zeta": 1.0})), r"zeta"),
    "setting text": (spoilt(lambda request: request.loss_fn_config_v2["beta"].__setattr__("text", "x")), r"beta"),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_invalid_protobuf_is_rejected_by_field(alice: Raw, run: Run, case: str) -> None:
    send, says = MESSAGES[case]
    check_refused(alice, send(run), says)
    check_no_gradient(run)


def cut(run: Run) -> Answer:
    return post_message(run.client, message(run, run.upcoming).SerializeToString()[:-9])


def mislabelled(run: Run) -> Answer:
    return run.client.post(
        "forward_backward",
        json.dumps({"model_id": run.id, "seq_id": run.upcoming, "forward_backward_input": batch()}).encode(),
        headers={"content-type": PROTOBUF},
    )


def unlabelled(run: Run) -> Answer:
    return run.client.post("forward_backward", message(run, run.upcoming).SerializeToString())


UNREADABLE: dict[str, tuple[Send, str]] = {
    "cut off": (cut, r"not a ForwardBackwardRequest"),
    "no protobuf": (lambda run: post_message(run.client, b"\xff" * 50), r"not a ForwardBackwardRequest"),
    "JSON called protobuf": (mislabelled, r"not a ForwardBackwardRequest"),
    "protobuf called nothing": (unlabelled, r"not JSON"),
    "empty": (lambda run: post_message(run.client, b""), r"model_id is missing"),
    "model id not UTF-8": (lambda run: post_message(run.client, b"\x0a\x03\xff\xfe\xfd"), r"ForwardBackwardRequest"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_body_without_a_run_is_rejected(alice: Raw, run: Run, case: str) -> None:
    send, says = UNREADABLE[case]
    check_refused(alice, send(run), says)


# ── Which run, which number

NO_RUNS = [None, 5, True, [], {}, "", "nobody:train:0", "../../etc/passwd", "a\0b", "x" * 10_000, "%s%n", "ü"]
CALLS: dict[str, dict[str, object]] = {
    "forward": {"forward_input": batch()},
    "forward_backward": {"forward_backward_input": batch()},
    "optim_step": {"adam_params": {}},
    "save_weights": {"path": "never"},
    "save_weights_for_sampler": {"path": "never"},
    "save_weights_external": {"path": "never"},
    "load_weights": {"path": "tinker://a/weights/b", "optimizer": True},
    "unload_model": {},
}


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_run_is_404_for_every_call(alice: Raw, bobs: Run, call: str) -> None:
    bodies = [{"model_id": name, "seq_id": 1, **CALLS[call]} for name in (*NO_RUNS, bobs.id)]
    for body in (*bodies, {"seq_id": 1, **CALLS[call]}):
        answer = check_refused(alice, alice.post(call, body), r"model .* is not known|model_id")
        is_text = isinstance(body.get("model_id"), str) and body["model_id"] != ""
        assert answer.status == (404 if is_text else 400)


NUMBERS = [-1, 0, 1.5, "1", "one", 2**31, 2**40, 2**70, True, [], {}, NAN]


@pytest.mark.parametrize("call", [call for call in CALLS if call != "unload_model"])
def test_an_invalid_sequence_number_is_rejected(alice: Raw, run: Run, call: str) -> None:
    for number in NUMBERS:
        answer = alice.post(call, {"model_id": run.id, "seq_id": number, **CALLS[call]})
        check_refused(alice, answer, r"seq_id")


@pytest.mark.parametrize("number", [0, -1, -(2**31)])
def test_an_invalid_sequence_number_is_rejected_in_protobuf_too(alice: Raw, run: Run, number: int) -> None:
    check_refused(alice, post_message(alice, message(run, number)), r"seq_id")


def test_an_operation_without_a_number_goes_to_the_end(alice: Raw, run: Run) -> None:
    body = {"model_id": run.id, "forward_input": batch()}
    assert alice.done("forward", body)["metrics"]["loss:sum"] == run.first_loss
    run.take()


def test_a_used_sequence_number_is_rejected_with_other_content(alice: Raw, run: Run) -> None:
    body = run.named(forward_input=batch())
    first = alice.post("forward", body).json["request_id"]
    assert alice.post("forward", body).json["request_id"] == first
    other = {**body, "forward_input": batch([datum(weights=floats(2, 2, 2))])}
    check_refused(alice, alice.post("forward", other), rf"operation {body['seq_id']} with different content")
    check_refused(alice, alice.post("optim_step", {**body, "adam_params": {}}), r"different content")
    assert alice.poll(first).json["metrics"]["loss:sum"] == run.first_loss


def test_a_rejected_sequence_number_may_be_sent_again(alice: Raw, run: Run) -> None:
    body = run.named(forward_input=batch([]))
    check_refused(alice, alice.post("forward", body), "no data")
    check_refused(alice, alice.post("forward", body), "no data")
    assert alice.done("forward", {**body, "forward_input": batch()})["metrics"]["loss:sum"] == run.first_loss


def test_a_sequence_number_that_comes_too_late_fails_with_the_reason(alice: Raw, run: Run) -> None:
    refused = run.named(forward_input=batch([]))
    check_refused(alice, alice.post("forward", refused), "no data")
    check_unharmed(run)
    late = alice.post("forward", {**refused, "forward_input": batch()})
    check_refused(alice, late, rf"operation {refused['seq_id']} .* arrived after")


# ── Optimizer

ADAM: dict[str, tuple[dict[str, Any], str]] = {
    f"{name} {value}": ({"adam_params": {name: value}}, rf"{name}.*")
    for name, values in {
        "learning_rate": (-1e-4, NAN, INF, "fast", [1e-3], True, 1e30, {}),
        "beta1": (1, 1.0, 1.5, -0.1, NAN, "x"),
        "beta2": (1, -1, "x"),
        "eps": (-1, NAN, 2.0),
        "weight_decay": (-0.1, INF, "x"),
        "grad_clip_norm": (-1, NAN, "x"),
    }.items()
    for value in values
} | {
    "params a list": ({"adam_params": [1]}, r"adam_params"),
    "params text": ({"adam_params": "default"}, r"adam_params"),
    "dimuon": ({"optimizer_params": {"type": "dimuon", "learning_rate": 1e-3}}, r"dimuon.*not offered"),
    "unknown optimizer": ({"optimizer_params": {"type": "sgd"}}, r"sgd.*not offered"),
    "optimizer a list": ({"optimizer_params": []}, r"optimizer_params"),
    "optimizer's type a list": ({"optimizer_params": {"type": ["adamw"]}}, r"not offered"),
    "decay above 1": ({"adam_params": {"learning_rate": 100.0, "weight_decay": 1.0}}, r"learning_rate.*weight_decay"),
}


@pytest.mark.parametrize("case", ADAM)
def test_an_optimizer_step_that_would_ruin_the_weights_is_rejected(alice: Raw, run: Run, case: str) -> None:
    body, says = ADAM[case]
    check_refused(alice, alice.post("optim_step", run.named(**body)), says)


# ── Models

ETC = ["/etc", "/etc/passwd", "../x", "tinkex/../tiny", "./tiny", "tinkex/tiny/", "file:///etc", "http://x/y", "a\0b"]
MODELS: dict[str, tuple[dict[str, object], str]] = {
    **{f"base model {name!r}": ({"base_model": name}, r"base model .* not served.*tinkex/tiny") for name in ETC},
    **{f"base model {name}": ({"base_model": name}, r"base model") for name in (None, 5, [], {}, "", "x" * 5000)},
    **{f"rank {rank}": ({"lora_config": {"rank": rank}}, r"rank") for rank in (0, -1, 1025, 10**9, 8.5, "many", [8])},
    **{f"rank {rank}": ({"lora_config": {"rank": rank}}, r"rank") for rank in (True, None, NAN, INF, 2**70, "9" * 99)},
    **{f"seed {seed}": ({"lora_config": {"seed": seed}}, r"seed") for seed in ("abc", 1.5, [], NAN)},
    "no flags": (
        {"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}},
        r"train_attn, train_mlp or train_unembed",
    ),
    "flag text": ({"lora_config": {"train_mlp": "maybe"}}, r"train_mlp"),
    "lora a list": ({"lora_config": [8]}, r"lora_config"),
    "lora text": ({"lora_config": "rank 8"}, r"lora_config"),
    "dimuon": ({"optimizer_config": {"type": "dimuon", "version": 1}}, r"dimuon.*not offered"),
    "optimizer a list": ({"optimizer_config": []}, r"optimizer_config"),
    **{
        f"number {number}": ({"model_seq_id": number}, r"model_seq_id")
        for number in (-1, "0", 1.5, None, True, 2**40, 2**70, [])
    },
    **{
        f"session {name!r:.20}": ({"session_id": name}, r"session .* is not known|session_id is missing")
        for name in (None, 5, [], "", "nobody", "a\0b", "../x", "x" * 10_000)
    },
    "metadata a list": ({"user_metadata": [1]}, r"user_metadata"),
    "metadata text": ({"user_metadata": "x"}, r"user_metadata"),
    "metadata huge": ({"user_metadata": {"a": "x" * 200_000}}, r"user_metadata"),
}


@pytest.fixture(scope="module")
def session(alice: Raw) -> str:
    return alice.session()


def wanted(session: str, **changes: object) -> dict[str, object]:
    lora = {"rank": 4, "seed": None, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body: dict[str, Any] = {"session_id": session, "model_seq_id": 7, "base_model": "tinkex/tiny", **changes}
    changed = changes.get("lora_config", {})
    body["lora_config"] = {**lora, **changed} if isinstance(changed, dict) else changed
    return body


@pytest.mark.parametrize("case", MODELS)
def test_an_invalid_model_is_not_created(alice: Raw, session: str, case: str) -> None:
    changes, says = MODELS[case]
    check_refused(alice, alice.post("create_model", wanted(session, **changes)), says)
    assert alice.get(f"sessions/{session}").json["training_run_ids"] == []


def test_metadata_comes_back_as_text(alice: Raw) -> None:
    """Official clients send any values and read nothing but texts."""
    body = wanted(alice.session(), user_metadata={"epoch": 5, "tags": ["a"], "none": None, "text": "x"})
    made = alice.done("create_model", body)["model_id"]
    kept = alice.get(f"training_runs/{made}").json["user_metadata"]
    assert kept == {"epoch": "5", "tags": '["a"]', "none": "null", "text": "x"}


def test_a_models_number_cannot_be_reused(alice: Raw) -> None:
    body = wanted(alice.session())
    made = alice.done("create_model", body)["model_id"]
    assert alice.done("create_model", body)["model_id"] == made
    other = wanted(str(body["session_id"]), lora_config={"rank": 8})
    check_refused(alice, alice.post("create_model", other), r"different content")
