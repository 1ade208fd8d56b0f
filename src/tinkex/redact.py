"""Takes secrets out of text before it leaves the process or reaches a log."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEYS = re.compile(r"\b(tml-[A-Za-z0-9_\-]{4,}|eyJ[A-Za-z0-9_\-]+\.[A-Za-z0-9_\-.]+)")
_QUERY = re.compile(r"((?:signature|token|sig|key|credential|password|secret)[\w-]*=)[^&\s\"']+", re.IGNORECASE)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with the given secrets, anything shaped like a key, and signatures in URLs replaced by stars."""
    for secret in secrets:
        if len(secret) >= 4:
            text = text.replace(secret, "***")
    return _QUERY.sub(r"\1***", _KEYS.sub("***", text))
