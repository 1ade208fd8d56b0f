"""Turns an error into one sentence for the user of a command: what happened, and what to do next."""

from __future__ import annotations

import re

from tinkex.errors import APIConnectionError, APIStatusError, ConfigError, TinkexError
from tinkex.redact import redact


def describe(error: Exception) -> str:
    """Return one sentence without secrets, for a reader who does not know the code."""
    text = str(error) or type(error).__name__
    if isinstance(error, APIStatusError):
        text = _describe_status(error)
    elif isinstance(error, APIConnectionError):
        text = f"{text.rstrip('.')}. Run `tinkex doctor` to find out why."
    elif isinstance(error, OSError) and not isinstance(error, TinkexError) and error.filename:
        text = f"{error.filename}: {error.strerror}."
    elif not isinstance(error, (TinkexError, OSError)):
        text = f"{type(error).__name__}: {text} (this is a bug in tinkex: run it again with --debug and report it)"
    text = " ".join(text.split())
    # Our own messages about settings contain no secrets, but examples that look like one.
    return text if isinstance(error, ConfigError) else redact(text)


def _describe_status(error: APIStatusError) -> str:
    body = error.body
    detail = body.get("detail") if isinstance(body, dict) else body
    if isinstance(body, dict) and isinstance(body.get("error"), dict):  # OpenAI's form
        detail = body["error"].get("message")
    status = f"HTTP {error.status_code}" + (f": {str(detail).rstrip('.')}" if detail else "")
    if error.status_code == 401 and str(detail).startswith("No API key"):
        return f"The service needs an API key, and none is set ({status}). Set TINKER_API_KEY."
    if error.status_code == 401:
        return (
            f"The service rejected the API key ({status}). Set TINKER_API_KEY; `tinkex doctor` shows which key is used."
        )
    if gave_up := re.match(r"(.*)\. Last (?:problem|error):", error.message):  # says how many attempts there were
        reason = gave_up[1]
    else:
        reasons = {402: "The account cannot pay", 403: "Not allowed", 404: "Not found"}
        default = "The service failed" if error.status_code >= 500 else "The service rejected the request"
        reason = reasons.get(error.status_code, default)
    return f"{reason} ({status})."
