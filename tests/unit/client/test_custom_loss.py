"""A custom loss in torch has the gradient that it would have with the model at hand."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinkex.client._calls.validate import check_data
from tinkex.client.custom_loss import Surrogate, for_forward, surrogate, with_metrics
from tinkex.errors import APIResponseValidationError, MissingExtra, ValidationError
from tinkex.types.inputs import Datum, ModelInput, PromptProvenanceSpan, ProvenanceSpans
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput


def answer(*logprobs: TensorData, **metrics: float) -> ForwardBackwardOutput:
    """What a service answers to the forward of these datums."""
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    outputs = [{"logprobs": entry} for entry in logprobs]
    return ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn", loss_fn_outputs=outputs, metrics=named)


def datum(targets: Any, **others: Any) -> Datum:
    length = len(targets) if not isinstance(targets, TensorData) else (targets.shape or [len(targets)])[0]
    return Datum(ModelInput.from_ints(range(length)), {"target_tokens": targets, **others})


def one(loss_fn: Callable[..., Any], targets: Any = (4, 5, 6), logprobs: Any = (-1.0, -2.0, -3.0)) -> Surrogate:
    return surrogate([datum(targets)], answer(TensorData(logprobs)), loss_fn)


# -- the first call ---------------------------------------------------------------------------------------------------


def test_the_forward_sends_targets_and_weights_and_drops_every_other_key() -> None:
    sent = for_forward(datum([4, 5], weights=[0.5, 1.0], advantages=[1.0, 2.0], rewards=[7.0]))
    assert {key: tensor.data for key, tensor in sent.loss_fn_inputs.items()} == {
        "target_tokens": [4, 5],
        "weights": [0.5, 1.0],
    }
    check_data([sent], "cross_entropy")


def test_the_forward_makes_weights_of_the_targets_shape_where_there_are_none_that_fit() -> None:
    assert for_forward(datum([4, 5])).loss_fn_inputs["weights"] == TensorData([0.0, 0.0], "float32", [2])
    grid = for_forward(datum([[4, 5], [6, 7]], weights=[1.0, 1.0])).loss_fn_inputs["weights"]
    assert grid.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_provenance_travels_with_both_calls() -> None:
    span: ProvenanceSpans = [PromptProvenanceSpan(sequence_id="s", length=2)]
    given = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]}, span, span)
    second = surrogate([given], answer(TensorData([-1.0, -2.0])), lambda data, lps: (lps[0].sum(), {})).data[0]
    for sent in (for_forward(given), second):
        assert sent.model_input_spans == span and sent.loss_fn_input_spans == span
        assert sent.model_input is given.model_input


# -- the caller's function --------------------------------------------------------------------------------------------


def test_the_function_sees_every_input_and_log_probabilities_shaped_like_the_targets() -> None:
    data = [datum([4, 5, 6], advantages=[1.0, 2.0, 3.0], anything=[[1, 2]]), datum([[1, 2], [3, 4]], reference=[0.5])]
    seen: list[Any] = []

    def loss_fn(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        seen.extend((data, logprobs))
        return sum(entry.sum() for entry in logprobs), {}

    surrogate(data, answer(TensorData([-1.0, -2.0, -3.0]), TensorData([-1.0, -2.0, -3.0, -4.0])), loss_fn)
    assert [sorted(entry.loss_fn_inputs) for entry in seen[0]] == [
        ["advantages", "anything", "target_tokens"],
        ["reference", "target_tokens"],
    ]
    assert [list(entry.shape) for entry in seen[1]] == [[3], [2, 2]]
    assert seen[1][1].tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert all(entry.is_leaf and entry.requires_grad and entry.dtype is torch.float32 for entry in seen[1])


def test_weights_of_the_second_call_are_minus_the_gradient() -> None:
    found = one(lambda data, lps: ((lps[0] ** 2).sum(), {}))
    assert found.loss == pytest.approx(14.0)
    assert found.data[0].loss_fn_inputs["weights"].data == pytest.approx([2.0, 4.0, 6.0])
    assert set(found.data[0].loss_fn_inputs) == {"target_tokens", "weights"}
    check_data(found.data, "cross_entropy")


@pytest.mark.parametrize("candidates", [None, 3])
def test_the_surrogate_moves_a_model_as_the_custom_loss_would(candidates: int | None) -> None:
    """The promise itself: d(cross-entropy with these weights)/d(model) equals d(custom loss)/d(model)."""
    torch.manual_seed(0)
    model = torch.randn(5, 11, requires_grad=True)
    targets = torch.randint(0, 11, (5,) if candidates is None else (5, candidates))

    def logprobs_of_model() -> Any:
        table = torch.log_softmax(model, -1)
        index = targets if candidates is not None else targets[:, None]
        return table.gather(1, index).reshape(targets.shape)

    def loss_fn(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return (logprobs[0].exp() * 3).sigmoid().sum() + logprobs[0].std(), {}

    direct, *_ = torch.autograd.grad(loss_fn([], [logprobs_of_model()])[0], model)
    forward = answer(TensorData.from_torch(logprobs_of_model().detach()))
    found = surrogate([datum(targets.tolist())], forward, loss_fn)
    weights = found.data[0].loss_fn_inputs["weights"].to_torch().reshape(targets.shape)
    through_service, *_ = torch.autograd.grad((-weights * logprobs_of_model()).sum(), model)
    # Float32 all the way; the two sums run in another order.
    torch.testing.assert_close(through_service, direct, rtol=1e-5, atol=1e-6)


def test_sparse_targets_work_whichever_way_the_service_answers() -> None:
    targets = TensorData([7, 8, 9], "int64", [2, 20], [0, 1, 3], [3, 0, 19])
    dense = torch.zeros(2, 20)
    dense[0, 3], dense[1, 0], dense[1, 19] = -1.0, -2.0, -3.0
    sparse = TensorData([-1.0, -2.0, -3.0], "float32", [2, 20], [0, 1, 3], [3, 0, 19])
    for logprobs in (TensorData.from_torch(dense), sparse, TensorData([-1.0, -2.0, -3.0])):
        seen: list[Any] = []

        def loss_fn(data: list[Datum], lps: list[Any], seen: list[Any] = seen) -> tuple[Any, dict[str, float]]:
            seen.append(lps[0].detach().clone())
            return (lps[0] ** 2).sum() / 2, {}

        found = surrogate([datum(targets)], answer(logprobs), loss_fn)
        assert torch.equal(seen[0], dense)
        assert found.data[0].loss_fn_inputs["target_tokens"] is targets
        assert torch.equal(found.data[0].loss_fn_inputs["weights"].to_torch(), -dense)
        check_data(found.data, "cross_entropy")
    forward_weights = for_forward(datum(targets)).loss_fn_inputs["weights"]
    assert forward_weights.is_sparse and forward_weights.data == [0.0, 0.0, 0.0]


def test_a_double_precision_loss_and_a_loss_of_shape_one_work() -> None:
    assert one(lambda data, lps: (lps[0].double().sum().reshape(1), {})).loss == -6.0


def test_a_service_that_labels_whole_log_probabilities_as_integers_is_understood() -> None:
    assert one(lambda data, lps: (lps[0].sum(), {}), logprobs=(-1, -2, 0)).loss == -3.0


def test_the_callers_own_parameters_get_their_gradient_too() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    one(lambda data, lps: ((lps[0] * scale).sum(), {}))
    assert scale.grad is not None and scale.grad.item() == -6.0


def test_gradients_are_on_even_where_the_caller_turned_them_off() -> None:
    with torch.no_grad():
        assert one(lambda data, lps: (lps[0].sum(), {})).loss == -6.0


# -- what may go wrong in it ------------------------------------------------------------------------------------------


def test_a_datum_the_loss_ignores_is_named() -> None:
    forward = answer(TensorData([-1.0]), TensorData([-2.0]))
    with pytest.raises(ValidationError, match=r"data\[1\]"):
        surrogate([datum([1]), datum([2])], forward, lambda data, lps: (lps[0].sum(), {}))


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda data, lps: (lps[0].detach().sum(), {}), r"does not depend on the log-probabilities.*detach"),
        (lambda data, lps: (3.0, {}), "one torch number"),
        (lambda data, lps: (lps[0], {}), r"shape \[3\].*sum"),
        (lambda data, lps: lps[0].sum(), r"must return \(loss, metrics\)"),
        (lambda data, lps: (lps[0].sum(), {}, 3), r"must return \(loss, metrics\)"),
        (lambda data, lps: (lps[0].sum(), [1.0]), "as a dict"),
        (lambda data, lps: (lps[0].sum(), {"text": "high"}), "'text' is not a number"),
        (lambda data, lps: (lps[0].sum(), {"all": lps[0]}), "'all' is not a number"),
        (lambda data, lps: ((lps[0] * 0).sqrt().sum(), {}), r"data\[0\] is not finite"),
    ],
)
def test_a_function_that_gives_no_gradient_is_refused_with_the_reason(loss_fn: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        one(loss_fn)


def test_an_exception_of_the_function_reaches_the_caller_unchanged() -> None:
    def broken(data: list[Datum], logprobs: list[Any]) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        one(broken)


def test_an_answer_that_does_not_fit_the_data_is_the_services_fault() -> None:
    def loss_fn(data: list[Datum], lps: list[Any]) -> tuple[Any, dict[str, float]]:
        return lps[0].sum(), {}

    with pytest.raises(APIResponseValidationError, match="2 outputs for 1 datums"):
        surrogate([datum([1])], answer(TensorData([-1.0]), TensorData([-1.0])), loss_fn)
    with pytest.raises(APIResponseValidationError, match=r"2 log-probabilities for the 1 targets of data\[0\]"):
        surrogate([datum([1])], answer(TensorData([-1.0, -1.0])), loss_fn)
    other = ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[{"elementwise": TensorData([1.0])}])
    with pytest.raises(APIResponseValidationError, match="no 'logprobs', only \\['elementwise'\\]"):
        surrogate([datum([1])], other, loss_fn)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"tinkex\[torch\]"):
        surrogate([datum([1])], answer(TensorData([-1.0])), lambda data, lps: (lps[0].sum(), {}))


# -- the answer -------------------------------------------------------------------------------------------------------


def test_metrics_are_merged_and_the_services_loss_becomes_the_surrogate() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of numbers that are part of a graph; the caller need not hear it
        found = one(lambda data, lps: (lps[0].sum(), {"kl:mean": torch.tensor(0.5, requires_grad=True), "count": 3}))
    whole = with_metrics(answer(TensorData([-1.0]), loss__sum=12.0, tokens__sum=3.0), found)
    assert whole.metrics == {
        "loss:sum": -6.0, "tokens:sum": 3.0, "kl:mean": 0.5, "count": 3, "surrogate_loss:sum": 12.0,
    }  # fmt: skip
    assert whole.loss == -6.0 and whole.loss_fn_output_type == "TorchLossReturn"
    assert whole.loss_fn_outputs[0]["logprobs"].data == [-1.0]


def test_asking_twice_gives_the_same_surrogate_loss() -> None:
    found = one(lambda data, lps: (lps[0].sum(), {}))
    backward = answer(TensorData([-1.0]), loss__sum=12.0)
    assert with_metrics(backward, found).metrics == with_metrics(backward, found).metrics
    assert backward.metrics == {"loss:sum": 12.0}, "the service's answer is left as it came"


def test_a_service_that_reports_no_loss_is_no_reason_to_fail() -> None:
    found = one(lambda data, lps: (lps[0].sum(), None))
    assert with_metrics(answer(TensorData([-1.0])), found).metrics == {"loss:sum": -6.0}
