"""`tinker.auth`: finds the API key, and checks that the service accepts it."""

from __future__ import annotations

from tinkex import settings
from tinkex.client.service import ServiceClient
from tinkex.errors import ConfigError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """Return the key that is set or stored, or None. Does not run TINKER_CREDENTIAL_CMD."""
    try:
        if _comes_from_command():
            return None
        key = settings.resolve().api_key
    except ConfigError:
        return None
    return None if key == settings.KEYLESS else key


def tinker_has_credentials() -> bool:
    """Return whether a client would find a key or needs none (a local service). Runs no command, sends nothing."""
    try:
        return _comes_from_command() or bool(settings.resolve().api_key)
    except ConfigError:
        return False


def raise_if_tinker_not_accessible() -> None:
    """Send one request without retries: returns if the service accepts the key, else raises a `TinkerError`."""
    with ServiceClient(max_retries=0, telemetry=False) as service:
        service.get_server_capabilities()


def _comes_from_command() -> bool:
    return settings.sources()["api_key"] == settings.ENVIRONMENT["credential_cmd"]
