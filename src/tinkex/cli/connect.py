"""Makes the clients of commands, from the settings. They retry less than a training run, and say so when they do."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import tinkex
from tinkex.errors import ConfigError
from tinkex.redact import redact
from tinkex.terminal.output import remark

PATIENCE = {"max_retries": 5, "unreachable_s": 60.0}
"""A person waits for a command: it gives up sooner than a training run, unless the settings say otherwise."""
NO_KEY = (
    "No API key for the hosted service. Set TINKER_API_KEY. For a service on this machine (`tinkex serve`), "
    "set its address instead: export TINKER_BASE_URL=http://127.0.0.1:8642"
)


def config_for(args: argparse.Namespace) -> tinkex.Config:
    """Return the settings of this command."""
    settings = tinkex.settings
    arguments = {"base_url": args.base_url, "api_key": args.api_key}
    sources = settings.sources(**arguments)
    patience: dict[str, Any] = {name: value for name, value in PATIENCE.items() if sources[name] == "default"}
    try:
        return settings.resolve(**arguments, **patience)
    except ConfigError as error:
        if str(error).startswith("No API key") and sources["base_url"] == "default":
            # A new user most likely has no account, but a service that was started a minute ago.
            raise ConfigError(NO_KEY) from None
        raise


def rest_client(args: argparse.Namespace) -> tinkex.RestClient:
    """Return a client for runs and checkpoints. It opens no session."""
    announce_retries()
    return tinkex.RestClient(config=config_for(args))


@functools.cache
def announce_retries() -> None:
    """Print a remark before each retry. Registers once per process, however often `main` is called."""
    tinkex.on("retry", lambda retry: remark(f"Retrying in {retry.delay_s:.1f} s: {redact(retry.reason)}"))
