"""Data of a pass: rejected data are named by datum and key, and leave no trace."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.engine.oracle import Session, assert_equal, datum, state
from tinkex.engine.contract import EngineFault, pass_frame
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.types.inputs import Datum
from tinkex.types.tensor import TensorData

pytestmark = pytest.mark.usefixtures("runner")

BAD_DATA: dict[str, tuple[Datum, str, str]] = {
    "no tokens": (datum([], target_tokens=[]), "cross_entropy", r"data\[1\].model_input is empty"),
    "token out of range": (
        datum([1, 263], target_tokens=[1, 2]),
        "cross_entropy",
        r"data\[1\].model_input: entry 1 is token 263; tinkex/tiny has tokens 0 to 262",
    ),
    "target out of range": (
        datum([1, 2], target_tokens=[500, 2]),
        "cross_entropy",
        r"data\[1\].loss_fn_inputs\['target_tokens'\]: entry 0 is token 500",
    ),
    "negative target": (datum([1, 2], target_tokens=[-100, 2]), "cross_entropy", "entry 0 is token -100"),
    "no targets": (datum([1, 2], weights=[1, 1]), "cross_entropy", r"\['target_tokens'\] is missing"),
    "too few targets": (datum([1, 2], target_tokens=[2]), "cross_entropy", r"has shape \[1\].*has 2 tokens"),
    "float targets": (
        datum([1, 2], target_tokens=TensorData([1.0, 2.0], "float32")),
        "cross_entropy",
        "token ids are integers",
    ),
    "too long": (datum([1] * 2049, target_tokens=[1] * 2049), "cross_entropy", "2049 tokens.*at most 2048"),
    "weights too short": (
        datum([1, 2], target_tokens=[1, 2], weights=[1.0]),
        "cross_entropy",
        r"\['weights'\] has shape \[1\], but target_tokens has \[2\]",
    ),
    "nan": (
        datum([1, 2], target_tokens=[1, 2], weights=TensorData([1.0, math.nan])),
        "cross_entropy",
        r"\['weights'\]: entry 1 is nan",
    ),
    "no advantages": (
        datum([1, 2], target_tokens=[1, 2], logprobs=[-1.0, -1.0]),
        "ppo",
        r"\['advantages'\] is missing: ppo needs target_tokens, logprobs, advantages",
    ),
    "2-D for ppo": (
        datum([1], target_tokens=[[1, 2]], logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]]),
        "ppo",
        "ppo takes one target per position",
    ),
    "empty rows": (datum([1], target_tokens=TensorData([], "int64", [1, 0])), "cross_entropy", r"has shape \[1, 0\]"),
    "crossed thresholds": (
        datum(
            [1],
            target_tokens=[1],
            logprobs=[-1.0],
            advantages=[1.0],
            clip_low_threshold=[2.0],
            clip_high_threshold=[1.0],
        ),
        "ppo",
        "above clip_high_threshold",
    ),
    "far too many sparse targets": (
        datum([1], target_tokens=TensorData.from_buffer(b"", "int64", [1, 2**40], [0, 0], [])),
        "cross_entropy",
        "more than 67,108,864 for one call",
    ),
    "far too many sparse weights": (
        datum([1], target_tokens=[1], weights=TensorData.from_buffer(b"", "float32", [1, 2**40], [0, 0], [])),
        "cross_entropy",
        "more than 67,108,864 entries",
    ),
    "a place listed twice": (
        datum([1], target_tokens=TensorData.from_buffer(bytes(16), "int64", [1, 5], [0, 2], [3, 3])),
        "cross_entropy",
        "lists an entry twice",
    ),
    "gspo without a mask": (
        datum([1], target_tokens=[1], logprobs=[-1.0], advantages=[1.0], sequence_ratio_mask=[0.0]),
        "gspo",
        r"data\[1\]: sequence_ratio_mask is 0 everywhere",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_rejected_with_datum_and_key_and_change_nothing(tiny: Model, case: str) -> None:
    bad, loss_fn, words = BAD_DATA[case]
    session = Session(tiny)
    session.create()
    needed = {} if loss_fn == "cross_entropy" else {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    good = datum(range(3), target_tokens=range(1, 4), **needed)
    session.passes([good], loss_fn)
    before = state(session)
    with pytest.raises(EngineFault, match=words) as refused:
        session.passes([good, bad], loss_fn)
    assert refused.value.category == "user"
    assert_equal(state(session), before)
    session.passes([good], loss_fn)


def test_a_shape_that_does_not_match_its_values_is_rejected(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    frame = pass_frame("forward", "a", [datum([1, 2], target_tokens=[1, 2])], "cross_entropy", None)
    for shape, words in (([3], "does not hold 2 values"), ([-1, -2], "negative extent"), ([2, 2], "does not hold")):
        frame.head["data"][0]["inputs"]["target_tokens"]["shape"] = shape
        with pytest.raises(EngineFault, match=words):
            session.send(frame)


def test_invalid_sparse_indices_are_rejected(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    sparse = TensorData.from_buffer(bytes(16), "int64", [2, 5], [0, 1, 2], [3, 4])
    for key, values in (("crow", [0, 2, 1]), ("crow", [0, 2]), ("col", [3, 5]), ("col", [-1, 0]), ("col", [1])):
        frame = pass_frame("forward", "a", [datum([1, 2], target_tokens=sparse)], "cross_entropy", None)
        buffers = list(frame.buffers)
        buffers[frame.head["data"][0]["inputs"]["target_tokens"][key]] = torch.tensor(values).numpy().tobytes()
        with pytest.raises(EngineFault, match="sparse indices do not fit"):
            session.send(Frame(frame.head, buffers))


def test_unknown_inputs_are_rejected_except_in_a_forward_pass(tiny: Model) -> None:
    # The forward pass of a loss of the caller's own carries what that loss needs; early clients send it along.
    session = Session(tiny)
    session.create()
    extra = [datum(range(5), target_tokens=range(1, 6), reward=[[math.inf, 2.0]])]
    plain = session.passes([datum(range(5), target_tokens=range(1, 6))], "cross_entropy", op="forward")
    assert session.passes(extra, "cross_entropy", op="forward").head["metrics"] == plain.head["metrics"]
    with pytest.raises(EngineFault, match=r"data\[0\]\.loss_fn_inputs\['reward'\] is no input of cross_entropy"):
        session.passes(extra, "cross_entropy")


def test_weights_of_2d_targets_may_be_flat_as_early_clients_send_them(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    square = datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.1, 0.2], [0.3, 0.4]])
    flat = datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[0.1, 0.2, 0.3, 0.4])
    found = [session.passes([example], "cross_entropy").head["metrics"] for example in (square, flat)]
    assert found[0] == found[1]
