"""The headers by which a client says that two passes compute a custom loss, and what the caller's function returned.

Both passes carry `x-tinkex-pass: custom`. The first request of the second pass also carries `x-tinkex-custom-loss`:
JSON with the loss and the function's own metrics. They change no body, and are sent to services that announce
`run_records` only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from tinkex.errors import ValidationError

PASS_HEADER: Final = "x-tinkex-pass"
LOSS_HEADER: Final = "x-tinkex-custom-loss"
CUSTOM: Final = "custom"
MAX_BYTES: Final = 4096
"""Of the value of the second header. Proxies commonly allow 8 KiB for a line."""
MAX_NAME: Final = 200
"""Characters of the name of a metric."""

Number = float | None
"""A number, or None for one that is not finite, which JSON cannot say."""


def encode_custom_loss(loss: float, metrics: Mapping[str, float]) -> str:
    """Return the header's value: ASCII, at most MAX_BYTES long. Metrics that do not fit are left out."""
    kept = {str(name)[:MAX_NAME]: _finite(value) for name, value in metrics.items()}
    while True:
        text = json.dumps({"loss": _finite(loss), "metrics": kept}, separators=(",", ":"))
        if len(text) <= MAX_BYTES:
            return text
        kept.popitem()


def decode_custom_loss(text: str) -> dict[str, Any]:
    """Return `{"loss": Number, "metrics": {name: Number}}`. Raises ValidationError if the header has anything else."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has {len(text):,} characters; at most {MAX_BYTES:,} are allowed")
        fields = json.loads(text, parse_constant=_reject_constant)
        if (
            not isinstance(fields, dict)
            or set(fields) != {"loss", "metrics"}
            or not isinstance(fields["metrics"], dict)
        ):
            raise ValueError("it must be an object with loss and metrics")
        numbers = {"loss": fields["loss"], **fields["metrics"]}
        for name, value in numbers.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e309
            if not (value is None or is_number) or len(name) > MAX_NAME:
                raise ValueError(
                    f"{name[:50]!r} must be a number or null, with a name of at most {MAX_NAME} characters"
                )
        metrics = {name: None if value is None else float(value) for name, value in fields["metrics"].items()}
        return {"loss": None if fields["loss"] is None else float(fields["loss"]), "metrics": metrics}
    except (ValueError, RecursionError, OverflowError) as error:
        raise ValidationError(f"The header {LOSS_HEADER} cannot be read: {error}.", "bad_custom_loss") from None


def _finite(value: float) -> Number:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return number if math.isfinite(number) else None


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; write null")
