"""Makes the clients of commands: finds the service, sees that it is up, and retries less than a training run does."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tinkex
from tinkex.errors import ConfigError, TinkexError
from tinkex.home.users import UserLock
from tinkex.redact import redact
from tinkex.terminal.output import remark

PATIENCE = {"max_retries": 5, "unreachable_s": 60.0}
"""A person waits for a command: it gives up sooner than a training run, unless the settings say otherwise."""
CONNECT_S = 0.9
"""How long a host may take to accept a connection before the command tries it the usual, patient way."""
OF_THE_HOME = "the service on this machine"
"""Where an address comes from that no setting names."""
NO_SERVICE = (
    "No service: no setting names one, and none runs on this machine's data folder ({folder}). Start one with "
    "`tinkex serve`, or set TINKER_BASE_URL (for the hosted service: TINKER_API_KEY)."
)


class Located(NamedTuple):
    """The arguments for `settings.resolve` that lead to a service, and where its address comes from."""

    arguments: dict[str, Any]
    origin: str


def locate(base_url: str | None, api_key: str | None) -> Located | None:
    """Find the service: the argument, environment and file, else the one that runs on the home. None: there is none.

    A key without an address belongs to the hosted service, as for the official client.
    """
    settings = tinkex.settings
    given: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    sources = settings.sources(**given)
    if sources["base_url"] != "default" or sources["api_key"] != "default":
        return Located(given, sources["base_url"])
    return locate_home()


def locate_home() -> Located | None:
    """Return the service that runs on the home, with the key of its owner."""
    found = tinkex.settings.service_of_home()
    return None if found is None else Located(tinkex.settings.client_arguments(*found), OF_THE_HOME)


def config_for(args: argparse.Namespace) -> tinkex.Config:
    """Return the settings of this command. Raises at once, with what to do, if no service listens there."""
    located = locate(args.base_url, args.api_key)
    if located is None:
        raise _no_service()
    return patient_config(located)


@contextmanager
def service_for(args: argparse.Namespace, model: str | None) -> Iterator[None]:
    """Keep the service of the home alive for a conversation; start it if there is none and a model was named."""
    located = locate(args.base_url, args.api_key)
    if located is not None and located.origin != OF_THE_HOME:
        yield
        return
    if located is not None:
        user = UserLock(tinkex.settings.home())
        try:
            yield
        finally:
            user.release()
        return
    from tinkex.local_service import NEEDS, shared_config
    from tinkex.local_service.shared import SharedServer

    if model is None or not all(map(importlib.util.find_spec, NEEDS)):
        raise _no_service()
    usual = tinkex.settings.resolve_serve().base_models
    # A run or a checkpoint is on the base model that it was trained on; the usual ones are the best guess.
    is_base_model = "://" not in model and (model in usual or "/" in model)
    server = SharedServer(shared_config((model,) if is_base_model else usual), who="tinkex")
    try:
        yield
    finally:
        server.stop()


def patient_config(located: Located) -> tinkex.Config:
    """Return the settings of a command for a service that was found."""
    settings = tinkex.settings
    sources = settings.sources(**located.arguments)
    patience: dict[str, Any] = {name: value for name, value in PATIENCE.items() if sources[name] == "default"}
    config = settings.resolve(**located.arguments, **patience)
    check_up(config, located.origin)
    return config


def check_up(config: tinkex.Config, origin: str) -> None:
    """Raise if nothing listens at the service's address. What is only slow is left to the retries."""
    import socket  # not at the top: `--help` must be fast
    from urllib.parse import urlsplit

    target = urlsplit(tinkex.settings.proxy_for(config.base_url, config) or config.base_url)
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        socket.create_connection((target.hostname or "", port), CONNECT_S).close()
    except TimeoutError:
        return
    except OSError as error:
        where = "" if origin == OF_THE_HOME else f" (from {origin})"
        reason = "refuses connections" if isinstance(error, ConnectionRefusedError) else f"({error.strerror})"
        if target.hostname != urlsplit(config.base_url).hostname:
            raise TinkexError(f"The proxy {target.hostname}:{port} on the way to {config.base_url} {reason}.") from None
        local = tinkex.settings.is_loopback(config.base_url)
        start = "Start it with `tinkex serve`, or name another service" if local else "Name another service"
        raise TinkexError(
            f"No service responds at {config.base_url}{where}: {target.hostname}:{port} {reason}. "
            f"{start} with TINKER_BASE_URL."
        ) from None


def rest_client(args: argparse.Namespace) -> tinkex.RestClient:
    """Return a client for runs and checkpoints. It opens no session."""
    announce_retries()
    return tinkex.RestClient(config=config_for(args))


@functools.cache
def announce_retries() -> None:
    """Print a remark before each retry. Registers once per process, however often `main` is called."""
    tinkex.on("retry", lambda retry: remark(f"Retrying in {retry.delay_s:.1f} s: {redact(retry.reason)}"))


def _no_service() -> ConfigError:
    return ConfigError(NO_SERVICE.format(folder=tinkex.settings.home()))
