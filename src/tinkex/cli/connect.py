"""Makes the clients of commands, from the settings. They retry less than a training run, and say so when they do."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.terminal.output import remark

if TYPE_CHECKING:
    import argparse

    from tinkex.client.rest import RestClient
    from tinkex.settings import Config
    from tinkex.wire.endpoints import Endpoint

PATIENCE = {"max_retries": 5, "unreachable_s": 60.0}
"""A person waits for a command: it gives up sooner than a training run, unless the settings say otherwise."""
NO_KEY = (
    "No API key for the hosted service. Set TINKER_API_KEY. For a service on this machine (`tinkex serve`), "
    "set its address instead: export TINKER_BASE_URL=http://127.0.0.1:8642"
)


def config_for(args: argparse.Namespace) -> Config:
    """Return the settings of this command."""
    from tinkex import settings

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


def rest_client(args: argparse.Namespace) -> RestClient:
    """Return a client for runs and checkpoints. It opens no session."""
    from tinkex.client.rest import RestClient

    announce_retries()
    return RestClient(config=config_for(args))


def ask(args: argparse.Namespace, endpoint: Endpoint) -> Any:
    """Return the JSON of one response as it came: our own service sends more fields than the official types have."""
    from tinkex.client.diagnose import fetch_json

    announce_retries()
    return fetch_json(config_for(args), endpoint)


@functools.cache
def announce_retries() -> None:
    """Print a remark before each retry. Registers once per process, however often `main` is called."""
    from tinkex import events
    from tinkex.redact import redact

    events.on("retry", lambda retry: remark(f"Retrying in {retry.delay_s:.1f} s: {redact(retry.reason)}"))
