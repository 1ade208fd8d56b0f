"""The metadata of `tinker` that `importlib.metadata` finds while the alias is installed."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from tinkex._version import PROTOCOL_VERSION


class TinkerDistribution(Distribution):
    """Has a name and a version, and no files."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: tinker\nVersion: {PROTOCOL_VERSION}\nSummary: served by tinkex\n"

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.joinpath(str(path))
