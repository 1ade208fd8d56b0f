"""How commands reach the service: through settings alone, with a command's patience, saying what they wait for."""

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
"""Somebody sits in front of a command: it gives up sooner than a training run, unless settings say otherwise."""
NO_KEY = (
    "No API key for the hosted service. Set TINKER_API_KEY; or, for a service of your own (`tinkex serve`), "
    "its address: export TINKER_BASE_URL=http://127.0.0.1:8642"
)


def config_for(args: argparse.Namespace) -> Config:
    """The settings of this invocation."""
    from tinkex import settings

    given = {"base_url": args.base_url, "api_key": args.api_key}
    sources = settings.sources(**given)
    patience: dict[str, Any] = {name: value for name, value in PATIENCE.items() if sources[name] == "default"}
    try:
        return settings.resolve(**given, **patience)
    except ConfigError as problem:
        if str(problem).startswith("No API key") and sources["base_url"] == "default":
            # Somebody new most likely has no account, but a service that was started a minute ago.
            raise ConfigError(NO_KEY) from None
        raise


def rest_client(args: argparse.Namespace) -> RestClient:
    """A client for reading and tidying. It opens no session."""
    from tinkex.client.rest import RestClient

    announce_retries()
    return RestClient(config=config_for(args))


def ask(args: argparse.Namespace, endpoint: Endpoint) -> Any:
    """The JSON that one call answers, as it came: our own service says more than the official types hold."""
    from tinkex.client.diagnose import fetch_json

    announce_retries()
    return fetch_json(config_for(args), endpoint)


@functools.cache
def announce_retries() -> None:
    """Say on stderr why a command is taking its time. Once per process, however often `main` is called."""
    from tinkex import events
    from tinkex.redact import redact

    events.on("retry", lambda retry: remark(f"Trying again in {retry.delay_s:.1f} s: {redact(retry.reason)}"))
