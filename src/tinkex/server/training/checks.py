"""Whether training data and prompts fit the model they are for: checked before an operation is journaled.

The rules are `tinkex.rules`; here they meet the model's vocabulary and context, which only the server knows. The engine
checks again only what would crash it or give wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinkex.engine.contract import ModelInfo
from tinkex.rules import losses, ranges
from tinkex.server.http.errors import bad_request
from tinkex.types.inputs import Datum, EncodedTextChunk, ModelInput


def check_data(
    data: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    model: ModelInfo,
    *,
    is_forward: bool = False,
) -> int:
    """Raise for the first datum that does not fit; otherwise return how many tokens there are."""
    if not data:
        raise losses.no_data_error()
    if len(data) > ranges.MAX_DATUMS:
        raise bad_request(f"The call has {len(data)} datums; at most {ranges.MAX_DATUMS} go into one.", "too_many")
    losses.check_loss_name(loss_fn)
    total = targets = 0
    for index, datum in enumerate(data):
        prompt, where = datum.model_input, f"data[{index}].model_input"
        check_text(prompt, model, where)
        length = prompt.length
        ranges.check_length(where, length, model.name, model.max_context_length)
        total += length
        losses.check_datum(index, length, datum.loss_fn_inputs, loss_fn, allows_extra=is_forward)
        tensor = datum.loss_fn_inputs[losses.TARGETS]
        where = losses.place(index, losses.TARGETS)
        losses.check_targets_per_position(where, tensor.shape or (), model.name, model.vocab_size)
        _check_range(np.frombuffer(tensor.buffer, "<i8"), model, where)
        targets += tensor.size
        losses.check_total_targets(index, targets)
    losses.check_config(loss_fn, config or {})
    return total


def count_targets(data: Sequence[Datum]) -> int:
    """Return how many log-probabilities a checked call returns: positions times targets per position."""
    return sum(datum.loss_fn_inputs[losses.TARGETS].size for datum in data)


def check_text(prompt: ModelInput, model: ModelInfo, where: str) -> None:
    """Reject images, audio, and tokens that the model does not have."""
    for index, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            kind = type(chunk).__name__
            raise bad_request(
                f"{where}.chunks[{index}] is a {kind}: {model.name} is a text model and takes tokens only.",
                "not_text",
            )
        _check_range(np.frombuffer(chunk.packed(), "<i4"), model, f"{where}.chunks[{index}].tokens")


def _check_range(tokens: np.ndarray, model: ModelInfo, where: str) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < model.vocab_size:
        position = int(np.flatnonzero((tokens < 0) | (tokens >= model.vocab_size))[0])
        raise ranges.unknown_token_error(where, position, int(tokens[position]), model.name, model.vocab_size)
