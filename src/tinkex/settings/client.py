"""What a client needs to know. An explicit argument always wins.

Order: argument, environment, file (`tinkex.toml` in the user's configuration folder, or named by TINKEX_CONFIG,
table `[client]`), what other programs are told by the environment too (proxies, certificates), default. Every name
stands in one of the tables below; `docs/settings.md` is made from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tinkex.errors import ConfigError
from tinkex.settings.folders import cache_dir, config_file, config_table

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEYLESS = "tml-local"
"""Sent to a service on this machine when no key is set: official servers insist on some key with this prefix."""

ENVIRONMENT = {
    # The official package's names, read as it reads them.
    "base_url": "TINKER_BASE_URL",
    "api_key": "TINKER_API_KEY",
    "credential_cmd": "TINKER_CREDENTIAL_CMD",
    "project_id": "TINKER_PROJECT_ID",
    "tags": "TINKER_TAGS",
    "telemetry": "TINKER_TELEMETRY",
    "log": "TINKER_LOG",
    "cf_client_id": "CLOUDFLARE_ACCESS_CLIENT_ID",
    "cf_client_secret": "CLOUDFLARE_ACCESS_CLIENT_SECRET",
    # Ours.
    "timeout_s": "TINKEX_TIMEOUT_S",
    "max_retries": "TINKEX_MAX_RETRIES",
    "unreachable_s": "TINKEX_UNREACHABLE_S",
    "deadline_s": "TINKEX_DEADLINE_S",
    "proxy": "TINKEX_PROXY",
    "ca_file": "TINKEX_CA_FILE",
    "cache_dir": "TINKEX_CACHE_DIR",
    "wait_line_s": "TINKEX_WAIT_LINE_S",
}
"""Config field → environment variable."""

SHARED_ENVIRONMENT = {
    "ca_file": ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),  # SSL_CERT_FILE and SSL_CERT_DIR are read by OpenSSL itself
    "http_proxy": ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"),
    "https_proxy": ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
    "no_proxy": ("no_proxy", "NO_PROXY"),
}
"""Config field → variables that other programs read as well; the first that is set counts.

They were set with no thought of us. So an argument, TINKEX_PROXY, TINKEX_CA_FILE and our file come first, a file of
certificates that is not there is passed over, and a service on this machine is never reached through a proxy of theirs
(only through `proxy=` or TINKEX_PROXY, which hold for every address).
"""

POOL_SIZES = {"session": 4, "train": 16, "sample": 64, "retrieve": 100, "retrieve_samples": 500, "telemetry": 2}
"""HTTP/1.1 connections per kind of traffic; HTTP/2 needs few. A long poll occupies one, so `retrieve` (training) and
`retrieve_samples` are wide; all of them together stay well below the 1,024 open files that most systems allow a
process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a client needs to know, settled once and passed down."""

    base_url: str = DEFAULT_BASE_URL
    api_key: str = field(default="", repr=False)
    timeout_s: float = 60.0
    max_retries: int = 10
    unreachable_s: float = 300.0
    deadline_s: float = 7200.0
    wait_line_s: float = 60.0
    pools: Mapping[str, int] = field(default_factory=lambda: dict(POOL_SIZES), hash=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    telemetry: bool = True
    proxy: str | None = field(default=None, repr=False)
    http_proxy: str | None = field(default=None, repr=False)
    https_proxy: str | None = field(default=None, repr=False)
    no_proxy: str = ""
    ca_file: str | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    cf_client_id: str | None = field(default=None, repr=False)
    cf_client_secret: str | None = field(default=None, repr=False)
    cache_dir: str = ""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def key(self) -> tuple[str, str]:
        """What shared state is kept under: the normalised base URL and the key."""
        return self.base_url, self.api_key


def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """Settle a configuration. Arguments that are None count as not given."""
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in arguments.items() if value is not None}
    known = {entry.name for entry in fields(Config)}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"Unknown settings: {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
    shared = {name: value for name, (value, _) in _from_shared(environ).items()}
    merged = shared | _file(environ) | _from_environment(environ) | given
    command = merged.pop("credential_cmd", None)
    merged.pop("log", None)
    merged["base_url"] = normalise_url(merged.get("base_url") or DEFAULT_BASE_URL)
    if not merged.get("api_key"):
        merged["api_key"] = _key_from(command) or _stored_key() or _keyless(merged["base_url"])
    merged["pools"] = {**POOL_SIZES, **merged.get("pools", {})}
    merged.setdefault("cache_dir", str(cache_dir(environ)))
    return Config(**merged)


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """TINKER_LOG: debug or info; anything else leaves logging alone."""
    return (os.environ if environ is None else environ).get("TINKER_LOG", "").lower()


def sources(environ: Mapping[str, str] | None = None, **arguments: Any) -> dict[str, str]:
    """Where `resolve` takes each value from, in words: "argument", a variable, a file, "default"."""
    environ = os.environ if environ is None else environ
    table, variables, path = _file(environ), _from_environment(environ), config_file(environ)
    shared = _from_shared(environ)
    found = {}
    for name in (entry.name for entry in fields(Config)):
        if arguments.get(name) is not None:
            found[name] = "argument"
        elif name in variables:
            found[name] = ENVIRONMENT[name]
        elif name in table:
            found[name] = str(path)
        else:
            found[name] = shared[name][1] if name in shared else "default"
    if found["api_key"] == "default":
        if "credential_cmd" in {**table, **variables}:
            found["api_key"] = "TINKER_CREDENTIAL_CMD"
        elif _stored_key():
            found["api_key"] = "the official client's login"
    return found


def normalise_url(url: str) -> str:
    """One spelling per service, so that shared state is found: lower-case host, no final slash or usual port."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is none, half a bracket, an empty label
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url {url!r} is not an http(s) address. Example: http://127.0.0.1:8642")
    if parts.username or parts.password:
        raise ConfigError("base_url must not hold a user name or password. Pass api_key= instead.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port and port != {"http": 80, "https": 443}[parts.scheme]:
        host = f"{host}:{port}"
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))


def is_loopback(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    return host in LOOPBACK or host.startswith("127.")


def proxy_for(url: str, config: Config) -> str | None:
    """The proxy on the way to an address: `proxy` for all of them, else HTTP(S)_PROXY unless NO_PROXY names the host.

    A service on this machine is reached directly, whatever the environment says: no proxy can reach it for us.
    """
    if config.proxy:
        return _with_scheme(config.proxy)
    parts = urlsplit(url)
    found = config.https_proxy if parts.scheme == "https" else config.http_proxy
    if not found or is_loopback(url) or _is_exempt(parts.hostname or "", config.no_proxy):
        return None
    return _with_scheme(found)


def _with_scheme(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_proxy(proxy: str) -> bool:
    try:
        parts = urlsplit(_with_scheme(proxy))
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_exempt(host: str, no_proxy: str) -> bool:
    """NO_PROXY as curl reads it: hosts, domains with all below them, addresses, networks, or `*`."""
    for entry in no_proxy.lower().split(","):
        name = entry.strip().removeprefix("*.").lstrip(".")
        if name.count(":") == 1:
            name = name.partition(":")[0]  # a port; in an IPv6 address there are more colons
        if name and (name == "*" or host == name.strip("[]") or host.endswith(f".{name}") or _is_within(host, name)):
            return True
    return False


def _is_within(host: str, network: str) -> bool:
    if "/" not in network:
        return False
    import ipaddress

    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def with_overrides(config: Config, **changes: Any) -> Config:
    return replace(config, **changes)


def _check(config: Config) -> None:
    for name in ("timeout_s", "unreachable_s", "deadline_s", "wait_line_s"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{name} must be above 0 seconds, not {value!r}.")
    if not isinstance(config.max_retries, int) or config.max_retries < 0:
        raise ConfigError(f"max_retries must be 0 or more, not {config.max_retries!r}.")
    if config.proxy and not _is_proxy(config.proxy):
        # Not shown: a password may stand in it.
        raise ConfigError("Only http:// proxies are supported. Example: proxy=http://proxy.example:3128")
    for name in ("api_key", "cf_client_id", "cf_client_secret"):
        value = getattr(config, name) or ""
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name} holds a line break or a character that no key has. Copy it again, whole.")
    if unknown := sorted(set(config.pools) - set(POOL_SIZES)):
        raise ConfigError(f"Unknown pools: {', '.join(unknown)}. Known: {', '.join(POOL_SIZES)}.")
    for name, size in config.pools.items():
        if size < 1:
            raise ConfigError(f"Pool {name!r} needs at least one connection, not {size!r}.")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, variable in ENVIRONMENT.items():
        text = environ.get(variable, "").strip()
        if text:
            found[name] = _read(name, text, variable)
    return found


def _from_shared(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Config field → (value, variable)."""
    found = {}
    for name, variables in SHARED_ENVIRONMENT.items():
        for variable in variables:
            text = environ.get(variable, "").strip()
            if not text or (name == "ca_file" and not Path(text).is_file()):
                continue
            if variable == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
                continue  # under CGI this is a header that a visitor sent (httpoxy.org)
            found[name] = (text, variable)
            break
    return found


def _read(name: str, text: str, source: str) -> Any:
    if name in ("timeout_s", "unreachable_s", "deadline_s", "wait_line_s"):
        return _number(float, text, source)
    if name == "max_retries":
        return _number(int, text, source)
    if name == "telemetry":
        return text.lower() in ("1", "true", "yes", "on")
    if name == "tags":
        return tuple(tag.strip() for tag in text.split(",") if tag.strip())
    return text


def _number(kind: type, text: str, source: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{source}={text!r} is not a number.") from None


def _file(environ: Mapping[str, str]) -> dict[str, Any]:
    table = config_table(environ, "client")
    known = {entry.name for entry in fields(Config)} | {"credential_cmd"}
    if unknown := sorted(table.keys() - known):
        raise ConfigError(f"{config_file(environ)} has unknown settings in [client]: {', '.join(unknown)}.")
    if "tags" in table:
        table["tags"] = tuple(table["tags"])
    return dict(table)


def _key_from(command: str | None) -> str:
    """TINKER_CREDENTIAL_CMD: a command of the user's own whose output is the key."""
    if not command:
        return ""
    import shlex
    import subprocess

    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        # The command line may hold a secret: name the kind of failure only.
        raise ConfigError(f"TINKER_CREDENTIAL_CMD failed ({type(problem).__name__}).") from None
    return done.stdout.strip()


def _stored_key() -> str:
    """The key that `tinker auth login` of the official package keeps."""
    path = Path.home() / ".tinker" / "credentials.json"
    if not path.is_file():
        return ""
    import json

    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return str(stored["keys"][stored["default"]]["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _keyless(base_url: str) -> str:
    if is_loopback(base_url):
        return KEYLESS
    raise ConfigError(
        "No API key. Pass api_key=..., or set TINKER_API_KEY. A service on this machine "
        "(base_url=http://127.0.0.1:...) needs none."
    )
