"""Reads prices per base model from the caller: services do not report prices.

    currency = "$"

    ["Qwen/Qwen3-8B"]
    train = 0.40
    prefill = 0.13
    sample = 0.40

Prices are per million tokens. The table may be a mapping, a TOML file or a JSON file.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tinkex.errors import ConfigError
from tinkex.events import Usage

PER = 1_000_000
CURRENCY = "$"
PriceTable = Mapping[str, Any] | str | os.PathLike[str]
"""A table of prices, or the path of a file."""


class Price(NamedTuple):
    """The prices of a million tokens of each kind."""

    train: float
    prefill: float
    sample: float

    def of(self, usage: Usage) -> float:
        cost = self.train * usage.train_tokens + self.prefill * usage.prefill_tokens
        return (cost + self.sample * usage.sampled_tokens) / PER


class Prices(NamedTuple):
    models: Mapping[str, Price]
    currency: str = CURRENCY

    def of(self, model: str) -> Price:
        """Return the price of a model."""
        if model not in self.models:
            raise ConfigError(f"The price table has no {model!r}. It has: {', '.join(sorted(self.models))}.")
        return self.models[model]


def read(source: PriceTable) -> Prices:
    """Read and check a table. Raises a ConfigError that names the file, the model and the value."""
    where = "prices" if isinstance(source, Mapping) else Path(source).name
    table = dict(source) if isinstance(source, Mapping) else _read_file(Path(source))
    currency = table.pop("currency", CURRENCY)
    if not isinstance(currency, str) or not currency.isprintable():
        raise ConfigError(f"{where}: currency is a short text such as '$' or 'EUR', got {currency!r}.")
    if not table:
        raise ConfigError(f"{where} names no model. {_FORM}")
    return Prices({model: _price(where, model, row) for model, row in table.items()}, currency)


_FORM = 'A row is {"Qwen/Qwen3-8B": {"train": 0.40, "prefill": 0.13, "sample": 0.40}}, per million tokens.'


def _price(where: str, model: str, row: Any) -> Price:
    if not isinstance(row, Mapping) or set(row) != set(Price._fields):
        actual = f"has {', '.join(map(str, row)) or 'nothing'}" if isinstance(row, Mapping) else f"is {row!r}"
        raise ConfigError(f"{where}: {model!r} needs train, prefill and sample, but {actual}. {_FORM}")
    for kind, amount in row.items():
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not is_number or not math.isfinite(amount) or amount < 0:
            raise ConfigError(f"{where}: {model!r} {kind} is {amount!r}; it must be a number from 0 up.")
    return Price(**{kind: float(amount) for kind, amount in row.items()})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"The price table {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # both parsers raise it, and so do bytes that are not UTF-8
        kind = path.suffix[1:].upper() or "TOML"
        raise ConfigError(f"The price table {path} is not valid {kind}: {error}.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"The price table {path} contains a {type(table).__name__}, not models. {_FORM}")
    return table
