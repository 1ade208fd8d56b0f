"""Whether training data and prompts fit the model they are for. What does not fit is named with its place.

The engine checks again what would crash it or give nonsense; here it is refused before it gets a line in the journal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from tinkex.engine.contract import ModelInfo
from tinkex.server.http.errors import bad_request
from tinkex.types.inputs import Datum, EncodedTextChunk, ModelInput

MAX_NAME = 200


def check_data(data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None, model: ModelInfo) -> int:
    """Raise for the first datum that does not fit; otherwise say how many tokens there are."""
    if not data:
        raise bad_request("There are no data in this call.", "no_data")
    if not loss_fn:
        raise bad_request("loss_fn is missing. Name one, for example cross_entropy.", "no_loss")
    for name, value in (config or {}).items():
        if not isinstance(value, str) and not isfinite(value):
            raise bad_request(f"loss_fn_config[{name!r}] is {value}; it must be a finite number.", "bad_loss_config")
    total = 0
    for index, datum in enumerate(data):
        place = f"data[{index}]"
        length = check_prompt(datum.model_input, model, f"{place}.model_input")
        total += length
        if "target_tokens" not in datum.loss_fn_inputs:
            raise bad_request(f"{place}.loss_fn_inputs has no target_tokens.", "no_targets")
        for name, tensor in datum.loss_fn_inputs.items():
            extents = tensor.shape if tensor.shape is not None else [len(tensor)]
            if name == "target_tokens" and (not extents or extents[0] != length):
                raise bad_request(
                    f"{place}: target_tokens has {extents[0] if extents else 0} entries for {length} input tokens. "
                    "Position t of model_input predicts target_tokens[t]: shift the targets by one.",
                    "bad_targets",
                )
            if tensor.dtype == "float32" and not np.isfinite(np.frombuffer(tensor.buffer, "<f4")).all():
                raise bad_request(f"{place}.loss_fn_inputs[{name!r}] holds a NaN or an infinity.", "not_finite")
            if name == "target_tokens" and tensor.dtype == "int64":
                _check_range(np.frombuffer(tensor.buffer, "<i8"), model, f"{place}.target_tokens")
    return total


def check_prompt(prompt: ModelInput, model: ModelInfo, place: str) -> int:
    """Text alone, known tokens, within the context. Says how many tokens there are."""
    for index, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            kind = type(chunk).__name__
            raise bad_request(
                f"{place}.chunks[{index}] is a {kind}: {model.name} is a text model and takes tokens only.",
                "not_text",
            )
        _check_range(np.frombuffer(chunk.packed(), "<i4"), model, f"{place}.chunks[{index}].tokens")
    length = prompt.length
    if length == 0:
        raise bad_request(f"{place} is empty: at least one token is needed.", "empty_input")
    if length > model.max_context_length:
        raise bad_request(
            f"{place} has {length} tokens; the context of {model.name} holds {model.max_context_length}.",
            "context_exceeded",
        )
    return length


def _check_range(tokens: np.ndarray, model: ModelInfo, place: str) -> None:
    if tokens.size and not 0 <= (low := int(tokens.min())) <= (high := int(tokens.max())) < model.vocab_size:
        wrong = low if low < 0 else high
        raise bad_request(
            f"{place} holds token {wrong}; {model.name} knows tokens 0 to {model.vocab_size - 1}. "
            "Was the text encoded with another model's tokenizer?",
            "unknown_token",
        )


def check_name(name: object) -> str:
    """A checkpoint's name becomes part of a path and of a URL."""
    if not isinstance(name, str) or not name:
        raise bad_request("A checkpoint needs a name (`path`).", "bad_name")
    is_plain = re.fullmatch(r"[\w.\-+=:@,~]+", name, re.ASCII) is not None
    if not is_plain or len(name) > MAX_NAME or name.startswith("."):
        raise bad_request(
            f"{name[:200]!r} cannot be a checkpoint's name: use ASCII letters, digits and _ . - + = : @ , ~ "
            f"(at most {MAX_NAME}, no dot at the beginning).",
            "bad_name",
        )
    return name
