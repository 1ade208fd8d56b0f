"""The arithmetic of `forward_backward_custom`: a custom loss in torch, with the model on the service.

Two calls do it. A forward gives the log-probabilities of the targets; the caller's function makes a loss of them here;
a cross-entropy backward with `weights = -d loss / d logprobs` has the same gradient. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.errors import APIResponseValidationError, MissingExtra, ValidationError
from tinkex.types.coerce import describe
from tinkex.types.inputs import Datum
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

CustomLossFn = Callable[[list[Datum], list["torch.Tensor"]], "tuple[torch.Tensor, Mapping[str, float]]"]
"""Takes the data, with all their `loss_fn_inputs`, and the log-probabilities of each, shaped like its target_tokens."""


class Surrogate(NamedTuple):
    """What the caller's function led to: the data of the second call, the loss, and the caller's metrics."""

    data: list[Datum]
    loss: float
    metrics: dict[str, float]


def for_forward(datum: Datum) -> Datum:
    """Return the datum of the first call: targets and weights only, as cross-entropy knows no other inputs.

    The caller's weights if they fit, else zeros: a forward pass needs some, but no gradient comes of them.
    """
    targets = datum.loss_fn_inputs["target_tokens"]
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None or weights.size != targets.size:
        crow, col = targets.sparse_crow_indices, targets.sparse_col_indices
        weights = TensorData.from_buffer(bytes(4 * len(targets)), "float32", targets.shape, crow, col)
    return _reduced(datum, weights)


def surrogate(data: Sequence[Datum], forward: ForwardBackwardOutput, loss_fn: CustomLossFn) -> Surrogate:
    """Run the caller's function and its backward pass. Takes as long as they do: not for the thread that does I/O."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("forward_backward_custom()", "torch") from None
    logprobs = _leaves(data, forward)
    with torch.enable_grad():
        loss, metrics = _unpack(torch, loss_fn(list(data), logprobs))
        loss.backward()
    weighted = [
        _reduced(datum, -_gradient(torch, index, leaf))
        for index, (datum, leaf) in enumerate(zip(data, logprobs, strict=True))
    ]
    return Surrogate(weighted, float(loss.detach()), metrics)


def with_metrics(backward: ForwardBackwardOutput, surrogate: Surrogate) -> ForwardBackwardOutput:
    """Return the result of the whole call. `loss:sum` is the caller's; the service's becomes `surrogate_loss:sum`.

    The weights of the second pass are gradients: their sum is left out.
    """
    service = {name: value for name, value in backward.metrics.items() if name != "weight:sum"}
    metrics = {**service, **surrogate.metrics, "loss:sum": surrogate.loss}
    if "loss:sum" in backward.metrics:
        metrics["surrogate_loss:sum"] = backward.metrics["loss:sum"]
    return ForwardBackwardOutput.model_construct(
        loss_fn_output_type=backward.loss_fn_output_type, loss_fn_outputs=backward.loss_fn_outputs, metrics=metrics
    )


def _reduced(datum: Datum, weights: Any) -> Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weights}
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)


def _leaves(data: Sequence[Datum], forward: ForwardBackwardOutput) -> list[torch.Tensor]:
    if len(forward.loss_fn_outputs) != len(data):
        raise APIResponseValidationError(
            message=f"The service returned {len(forward.loss_fn_outputs)} outputs for {len(data)} datums."
        )
    leaves = []
    for index, (datum, output) in enumerate(zip(data, forward.loss_fn_outputs, strict=True)):
        targets = datum.loss_fn_inputs["target_tokens"]
        logprobs = output.get("logprobs")
        if logprobs is None:
            raise APIResponseValidationError(
                message=f"The service's output for data[{index}] has no 'logprobs', only {sorted(output)}. "
                "A custom loss needs them."
            )
        if targets.is_sparse and not logprobs.is_sparse and len(logprobs) == len(targets) != targets.size:
            # One log-probability for each stored target: they lie where the targets lie.
            crow, col = targets.sparse_crow_indices, targets.sparse_col_indices
            logprobs = TensorData.from_buffer(logprobs.buffer, "float32", targets.shape, crow, col)
        if logprobs.size != targets.size:
            raise APIResponseValidationError(
                message=f"The service returned {logprobs.size} log-probabilities for the {targets.size} targets of "
                f"data[{index}]."
            )
        leaf = logprobs.to_torch().float()
        leaves.append(leaf.reshape(targets.shape if targets.shape is not None else [-1]).requires_grad_())
    return leaves


def _unpack(torch: Any, returned: Any) -> tuple[Any, dict[str, float]]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValidationError(f"The custom loss must return (loss, metrics), got {describe(returned)}.")
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else describe(loss)
        raise ValidationError(f"The custom loss must return one torch number as its loss, got {got}. Use .sum().")
    if not loss.requires_grad:
        raise ValidationError(
            "The custom loss does not depend on the log-probabilities, so there is no gradient. Compute it from the "
            "tensors in the second argument, without .item(), .detach(), .tolist() or torch.no_grad()."
        )
    return loss, _numbers(metrics)


def _numbers(metrics: Any) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValidationError(f"The custom loss must return its metrics as a dict, got {describe(metrics)}.")
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        value = value.detach() if hasattr(value, "detach") else value
        try:
            numbers[key] = value if type(value) in (int, float) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValidationError(f"The custom loss's metric {key!r} is not a number: {describe(value)}.") from None
    return numbers


def _gradient(torch: Any, index: int, leaf: torch.Tensor) -> torch.Tensor:
    if leaf.grad is None:
        raise ValidationError(
            f"The custom loss does not depend on the log-probabilities of data[{index}]. Leave that datum out, or add "
            "its log-probabilities times 0 to the loss."
        )
    if not bool(torch.isfinite(leaf.grad).all()):
        raise ValidationError(
            f"The custom loss's gradient for data[{index}] is not finite. Look for a division by zero, or the log or "
            "square root of zero, in the loss."
        )
    return leaf.grad
