"""The two ways of writing the same request, and the two signs by which a service shows which one it speaks."""

from __future__ import annotations

import enum


class Dialect(enum.Enum):
    """What the official clients send: the JSON of 0.4.1 … 0.24, or the mixture of 0.25 … 0.36."""

    JSON = "json"
    """A field is sent if and only if it was given; an explicit None is null; no `type` words; training data as JSON."""

    PROTO = "proto"
    """Defaults and `type` words are sent, None never is; training data as protobuf, everything else as JSON."""


def learned_from_config(status: int) -> Dialect:
    """What the answer to `client/config` tells: a service that has no such call is of the older kind."""
    return Dialect.JSON if status == 404 else Dialect.PROTO


def learned_from_first_protobuf(status: int) -> Dialect:
    """What the answer to the first protobuf body tells; a JSON service is then sent the same operation as JSON."""
    return Dialect.JSON if status in (400, 415, 422) else Dialect.PROTO
