"""The two ways of writing the same request."""

from __future__ import annotations

import enum


class Dialect(enum.Enum):
    """How the official clients write requests: the JSON of 0.4.1 … 0.24, or the mixture of 0.25 … 0.36."""

    JSON = "json"
    """A field is sent if and only if it was given; an explicit None is null; no `type` words; training data as JSON."""

    PROTO = "proto"
    """Defaults and `type` words are sent, None never is; training data as protobuf, everything else as JSON."""
