"""How commands reach the service: through settings alone, with a command's patience, saying what they wait for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tinkex.cli.output import remark

if TYPE_CHECKING:
    import argparse

    from tinkex.client.rest import RestClient
    from tinkex.settings import Config

PATIENCE = {"max_retries": 5, "unreachable_s": 60.0}
"""Somebody sits in front of a command: it gives up sooner than a training run, unless settings say otherwise."""


def config_for(args: argparse.Namespace) -> Config:
    """The settings of this invocation."""
    from tinkex import settings

    given = {"base_url": args.base_url, "api_key": args.api_key}
    sources = settings.sources(**given)
    patience: dict[str, Any] = {name: value for name, value in PATIENCE.items() if sources[name] == "default"}
    return settings.resolve(**given, **patience)


def rest_client(args: argparse.Namespace) -> RestClient:
    """A client for reading and tidying. It opens no session."""
    from tinkex.client._session import Session
    from tinkex.client.rest import RestClient

    announce_retries()
    return RestClient(Session(config_for(args)))


@functools.cache
def announce_retries() -> None:
    """Say on stderr why a command is taking its time. Once per process, however often `main` is called."""
    from tinkex import events
    from tinkex.client._redact import redact

    events.on("retry", lambda retry: remark(f"Trying again in {retry.delay_s:.1f} s: {redact(retry.reason)}"))
