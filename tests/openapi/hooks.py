"""Puts ids that exist into half of the requests that schemathesis makes: with random ones all would be 404."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis  # type: ignore[import-not-found,unused-ignore]

IDS: dict[str, Any] = json.loads(os.environ["TINKEX_IDS"])


def _with_ids(fields: Any, operation: str) -> Any:
    """The same fields with real ids. Which of them is decided by their own content, so that a failure repeats."""
    if not isinstance(fields, dict):
        return fields
    known = {**IDS["common"], **IDS["by_operation"].get(operation, {})}
    chosen = zlib.crc32(repr(sorted(fields.items(), key=repr)).encode())
    return {name: known[name] if name in known and chosen % 4 else value for name, value in fields.items()}


@schemathesis.hook  # type: ignore[untyped-decorator,unused-ignore]
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    return _with_ids(path_parameters, context.operation.definition.raw.get("operationId", ""))


@schemathesis.hook  # type: ignore[untyped-decorator,unused-ignore]
def map_body(context: Any, body: Any) -> Any:
    return _with_ids(body, context.operation.definition.raw.get("operationId", ""))
