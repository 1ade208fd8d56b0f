"""The losses: which inputs and settings each one takes, and whether a datum has what its loss needs.

The formulas are the engine's (`engine/training/losses.py`). `check_datum` lets a loss that is not in the table pass,
because another service may offer it; `check_loss_name` says what ours offers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from operator import gt
from typing import Final

from tinkex.errors import ValidationError
from tinkex.rules.ranges import MAX_TARGETS, check_length, reject
from tinkex.types.packed import first_not_finite, has_negative
from tinkex.types.tensor import TensorData

TARGETS: Final = "target_tokens"


@dataclass(frozen=True, slots=True)
class LossRule:
    """What one loss takes. All inputs have the shape of the targets, [T] or [T, K], and `INPUT_DTYPES` has dtypes."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    """Its settings and their defaults."""
    takes_2d: bool = False
    """Whether a position may have several targets."""
    weighs_positions: bool = False
    """Whether weights may be given as [T] for targets [T, K]."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY: Final = (TARGETS, "logprobs", "advantages")

LOSSES: Final[Mapping[str, LossRule]] = {
    "cross_entropy": LossRule((TARGETS,), ("weights",), takes_2d=True),
    "importance_sampling": LossRule(_POLICY),
    "ppo": LossRule(_POLICY, tuple(_CLIP), _CLIP),
    "cispo": LossRule(_POLICY, tuple(_CLIP), _CLIP),
    "dro": LossRule(_POLICY, config={"beta": 0.05}),
    "gspo": LossRule(_POLICY, (*_CLIP, "sequence_ratio_mask"), _CLIP),
    "kl_divergence": LossRule((TARGETS, "logprobs"), ("weights",), takes_2d=True, weighs_positions=True),
}
"""Every loss that has a formula here."""

NOT_OFFERED: Final = {
    "stable_reinforce": "its formula is not public, and it needs information that only the hosted sampler records. "
    "importance_sampling and ppo are close",
    "custom": "custom losses do not run on the service. Use forward_backward_custom, which computes them in your "
    "program",
}
"""Losses of the hosted service that ours lacks, and why."""

EMPTY_MASK: Final = "sequence_ratio_mask is 0 everywhere, but gspo's ratio is a mean over the masked tokens."

CALLERS_FUNCTION: Final = "a custom loss"
"""Stands for a function of the caller, which runs in the caller's process: a service sees only targets and weights."""

_KNOWN: Final = {name: frozenset(rule.inputs) for name, rule in LOSSES.items()}
_SENT_FOR_FUNCTION: Final = (TARGETS, "weights")


def check_loss_name(loss_fn: object) -> str:
    """Return the name of a loss that our service offers."""
    if loss_fn == "":
        reject("loss_fn", "is missing. Name a loss, for example cross_entropy.", "no_loss")
    if isinstance(loss_fn, str) and loss_fn in LOSSES:
        return loss_fn
    if isinstance(loss_fn, str) and loss_fn in NOT_OFFERED:
        raise ValidationError(f"The loss {loss_fn!r} is not offered: {NOT_OFFERED[loss_fn]}.", "unknown_loss")
    known = ", ".join(sorted(LOSSES))
    raise ValidationError(f"There is no loss {str(loss_fn)[:100]!r}. Known: {known}.", "unknown_loss")


def check_config(loss_fn: str, config: Mapping[str, object], *, allows_unknown: bool = False) -> dict[str, float]:
    """Return the settings of a known loss with its defaults filled in.

    Only services know what they will accept tomorrow, so a client passes `allows_unknown` and sends what it does not
    know; a service rejects it, because a setting that does nothing misleads.
    """
    settings = dict(LOSSES[loss_fn].config)
    for key, value in config.items():
        if key in settings or isinstance(value, float):
            check_setting(key, value)
        if key in settings:
            settings[key] = float(value)  # type: ignore[arg-type]  # it is a number by now
        elif not allows_unknown:
            takes = f"It takes {' and '.join(settings)}." if settings else "It takes none."
            raise ValidationError(
                f"{loss_fn} has no setting {str(key)[:100]!r} in loss_fn_config. {takes}", "bad_loss_config"
            )
    check_thresholds(settings)
    return settings


def check_setting(key: str, value: object) -> None:
    """Reject a setting that is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        shown = str(value)[:100]
        reject(f"loss_fn_config[{key!r}]", f"is {shown!r}; it must be a finite number.", "bad_loss_config")


def check_thresholds(settings: Mapping[str, object]) -> None:
    """Reject a lower clip threshold above the upper one."""
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValidationError(
            f"clip_low_threshold {low} is above clip_high_threshold {high}. Swap them.", "bad_loss_config"
        )


def no_data_error() -> ValidationError:
    """Make the error for a call without any datum."""
    return ValidationError("data is empty. There is no data to compute on; pass at least one Datum.", "no_data")


def check_total_targets(index: int, total: int) -> None:
    """Reject a call whose targets up to this datum are more than our service returns log-probabilities for."""
    if total > MAX_TARGETS:
        raise ValidationError(
            f"The targets of data[0] to data[{index}] have {total:,} entries, more than {MAX_TARGETS:,} for one call. "
            "Send fewer datums at once, or fewer targets per position.",
            "too_many_targets",
        )


def check_targets_per_position(where: str, shape: Sequence[int], model: str, vocab_size: int) -> None:
    """Reject more targets at one position than the model has tokens: each can be asked for once."""
    if len(shape) == 2 and shape[1] > vocab_size:
        reject(
            where,
            f"has shape {list(shape)}: {shape[1]:,} targets per position, and {model} has {vocab_size:,} tokens. Ask "
            "for each token once.",
            "too_many_targets",
        )


def place(index: int, key: str) -> str:
    """Return how messages name an input of a datum."""
    return f"data[{index}].loss_fn_inputs[{key!r}]"


def check_datum(
    index: int,
    tokens: int | None,
    inputs: Mapping[str, TensorData],
    loss_fn: str,
    *,
    allows_extra: bool = False,
) -> None:
    """Reject a datum from which its loss cannot be computed.

    `tokens` is the length of the model input, None if only the service knows it. `allows_extra` lets inputs pass that
    the loss does not take, unread: early clients send those of a custom loss along with a forward pass.
    """
    check_length(f"data[{index}].model_input", tokens)
    check_input_names(index, inputs.keys(), loss_fn, allows_extra=allows_extra)
    rule = LOSSES.get(loss_fn)
    # In the rule's order: protobuf hands out maps in any order, and client and service shall name the same input.
    names = _SENT_FOR_FUNCTION if loss_fn == CALLERS_FUNCTION else sorted(inputs) if rule is None else rule.inputs
    for key in names:
        tensor = inputs.get(key)
        if tensor is None:
            continue  # what is no input of the loss may be anything: a function of the caller may want an infinity
        if tensor.dtype == "float32":
            position = first_not_finite(_bytes(tensor))
            if position is not None:
                raise not_finite_error(place(index, key), position, tensor.data[position])
        if tensor.sparse_crow_indices is not None:
            _check_listed_once(place(index, key), tensor)
    targets = inputs.get(TARGETS)
    if targets is None:
        return
    _check_targets(index, tokens, targets, loss_fn)
    if rule is None:
        return  # any shape may be right for a loss that is not known here
    shape = _shape(targets)
    for key in rule.inputs:
        if key != TARGETS and key in inputs:
            check_shape(place(index, key), _shape(inputs[key]), shape, is_per_position(rule, key))
    if "clip_low_threshold" in inputs and "clip_high_threshold" in inputs and "clip_low_threshold" in rule.optional:
        _check_token_thresholds(index, inputs)
    mask = inputs.get("sequence_ratio_mask") if "sequence_ratio_mask" in rule.optional else None
    # A mask that leaves no token has no mean; without advantages it does not matter.
    if mask is not None and not any(mask.data) and any(inputs["advantages"].data):
        raise ValidationError(f"data[{index}]: {EMPTY_MASK}", "bad_mask")


def check_input_names(index: int, names: Set[str], loss_fn: str, *, allows_extra: bool = False) -> None:
    """Reject an input that a known loss does not take, and the lack of one that it needs."""
    known = _KNOWN.get(loss_fn)
    if known is not None and not allows_extra and not names <= known:
        unknown = min(names - known)
        reject(
            place(index, unknown),
            f"is no input of {loss_fn}, which takes: {', '.join(sorted(known))}. Remove the key; extra inputs are for "
            "forward_backward_custom.",
            "unknown_input",
        )
    if known is not None:
        required = LOSSES[loss_fn].required
    else:
        required = (TARGETS,) if loss_fn in (CALLERS_FUNCTION, "custom") else ()
    for key in required:
        if key not in names:
            code = "no_targets" if key == TARGETS else "missing_input"
            reject(place(index, key), f"is missing: {loss_fn} needs {', '.join(required)}.", code)


def check_target_dtype(where: str, dtype: str) -> None:
    """Reject targets that are no integers."""
    if dtype != "int64":
        reject(where, f"is {dtype}; token ids are integers. Pass int64.", "bad_targets")


def check_target_shape(where: str, shape: Sequence[int], tokens: int, loss_fn: str) -> None:
    """Reject targets of a known loss that are not [T], or [T, K] where the loss takes several per position."""
    if len(shape) not in (1, 2) or shape[0] != tokens or not math.prod(shape):
        raise _shift_error(where, shape, tokens)
    if len(shape) == 2 and not LOSSES[loss_fn].takes_2d:
        several = " and ".join(name for name, rule in LOSSES.items() if rule.takes_2d)
        reject(
            where,
            f"has shape {list(shape)}, but {loss_fn} takes one target per position. Several are for {several}.",
            "bad_targets",
        )


def check_shape(where: str, shape: Sequence[int], targets: Sequence[int], per_position: bool = False) -> None:
    """Reject an input that does not have the shape of the targets.

    A flat input of the right size is accepted: early clients send 2-D weights flat.
    """
    if per_position and len(targets) == 2 and list(shape) == list(targets[:1]):
        return
    if math.prod(shape) != math.prod(targets) or (len(shape) > 1 and list(shape) != list(targets)):
        reject(
            where,
            f"has shape {list(shape)}, but target_tokens has {list(targets)}. Give both the same shape.",
            "bad_shape",
        )


def is_per_position(rule: LossRule, key: str) -> bool:
    """Return whether this input may have one entry per position where there are several targets."""
    return rule.weighs_positions and key == "weights"


def not_finite_error(where: str, position: int, value: float) -> ValidationError:
    """Make the error for a NaN or an infinity among the inputs."""
    return ValidationError(
        f"{where}: entry {position} is {value}. Replace or drop it: a loss cannot use NaN or infinity.", "not_finite"
    )


def crossed_thresholds_error(index: int) -> ValidationError:
    """Make the error for thresholds per token of which a lower one is above the upper one."""
    return ValidationError(
        f"{place(index, 'clip_low_threshold')} is above clip_high_threshold at some positions. Swap them.",
        "bad_thresholds",
    )


def listed_twice_error(where: str) -> ValidationError:
    """Make the error for a sparse tensor that stores two values for one entry."""
    return ValidationError(
        f"{where} lists an entry twice in its sparse indices. List each entry once.", "bad_sparse_indices"
    )


def _check_targets(index: int, tokens: int | None, targets: TensorData, loss_fn: str) -> None:
    where = place(index, TARGETS)
    check_target_dtype(where, targets.dtype)
    if has_negative(_bytes(targets), 8):
        position = next(position for position, token in enumerate(targets.data) if token < 0)
        raise ValidationError(
            f"{where}: entry {position} is {targets.data[position]}; token ids are not negative. To leave a position "
            "out of the loss give it any token and weight (or advantage) 0.",
            "unknown_token",
        )
    shape = _shape(targets)
    if loss_fn in LOSSES:
        check_target_shape(where, shape, shape[0] if tokens is None and shape else tokens or 0, loss_fn)
    elif tokens is not None and (not shape or shape[0] != tokens):
        raise _shift_error(where, shape, tokens)


def _shift_error(where: str, shape: Sequence[int], tokens: int) -> ValidationError:
    length = shape[0] if shape else 0
    return ValidationError(
        f"{where} has shape {list(shape)} (length {length}), but the model input has {tokens} tokens. Position t of "
        "the input predicts target t: use model_input = tokens[:-1] and target_tokens = tokens[1:].",
        "bad_targets",
    )


def _check_listed_once(where: str, tensor: TensorData) -> None:
    bounds, columns = tensor.sparse_crow_indices or [], tensor.sparse_col_indices or []
    for start, stop in pairwise(bounds):
        if len(set(columns[start:stop])) != stop - start:
            raise listed_twice_error(where)


def _check_token_thresholds(index: int, inputs: Mapping[str, TensorData]) -> None:
    low, high = inputs["clip_low_threshold"], inputs["clip_high_threshold"]
    if low.is_sparse or high.is_sparse:
        return  # the engine has them as dense tensors and compares those
    if any(map(gt, low.data, high.data)):
        raise crossed_thresholds_error(index)


def _shape(tensor: TensorData) -> list[int]:
    return [len(tensor)] if tensor.shape is None else tensor.shape


def _bytes(tensor: TensorData) -> bytes:
    return tensor.buffer if isinstance(tensor.buffer, bytes) else bytes(tensor.buffer)
