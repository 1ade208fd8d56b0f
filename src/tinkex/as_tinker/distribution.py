"""What `importlib.metadata` tells about `tinker` while the alias is installed."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from tinkex._version import PROTOCOL_VERSION


class TinkerDistribution(Distribution):
    """Name and version, and nothing else: there are no files to list."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: tinker\nVersion: {PROTOCOL_VERSION}\nSummary: served by tinkex\n"

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.joinpath(str(path))
