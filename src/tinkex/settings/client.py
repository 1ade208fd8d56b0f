"""Resolves the settings of a client (`Config`). An explicit argument always wins.

Order: argument, environment, file (`tinkex.toml` in the user's configuration folder, or named by TINKEX_CONFIG,
table `[client]`), what other programs read from the environment too (proxies, certificates), default. All of them are
in `CLIENT`, from which `docs/settings.md` is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tinkex.errors import ConfigError
from tinkex.settings.folders import cache_dir, home_folder
from tinkex.settings.setting import Setting, Sourced, as_float, check_names, count, gather, unchanged

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
KEYLESS = "tml-local"
"""Sent to a service on this machine when no key is set: official servers insist on some key with this prefix."""

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
    max_response_bytes: int = 1 << 30
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
    metrics_dir: str = ""

    def __post_init__(self) -> None:
        for setting in CLIENT:
            if setting.name in self.__slots__:
                # A default is right as it is; what a caller passed is brought into shape once, here.
                object.__setattr__(self, setting.name, setting.value(getattr(self, setting.name), setting.name))

    @property
    def key(self) -> tuple[str, str]:
        """What shared state is kept under: the normalised base URL and the key."""
        return self.base_url, self.api_key


def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """Return the configuration of a client. Arguments that are None count as not given."""
    environ = os.environ if environ is None else environ
    check_names((name for name, value in arguments.items() if value is not None), Config.__slots__)
    merged = {name: sourced.value for name, sourced in _gather(environ, arguments).items()}
    command = merged.pop("credential_cmd", None)
    merged.setdefault("base_url", DEFAULT_BASE_URL)
    if not merged.get("api_key"):
        merged["api_key"] = _key_from(command) or _stored_key() or _keyless(merged["base_url"], environ)
    merged.setdefault("cache_dir", str(cache_dir(environ)))
    merged.setdefault("metrics_dir", str(home_folder(environ) / "metrics"))
    return Config(**merged)


def _gather(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Sourced]:
    return gather(CLIENT, "client", environ, arguments, _from_shared(environ))


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """TINKER_LOG: debug or info; anything else leaves logging alone."""
    return (os.environ if environ is None else environ).get(LOG.variable, "").lower()


def sources(environ: Mapping[str, str] | None = None, **arguments: Any) -> dict[str, str]:
    """Where `resolve` takes each value from, in words: "argument", a variable, a file, "default"."""
    gathered = _gather(os.environ if environ is None else environ, arguments)
    origins = {name: gathered[name].source if name in gathered else "default" for name in Config.__slots__}
    if origins["api_key"] == "default":
        if "credential_cmd" in gathered:
            origins["api_key"] = "TINKER_CREDENTIAL_CMD"
        elif _stored_key():
            origins["api_key"] = "the official client's login"
    return origins


def normalise_url(url: str) -> str:
    """One spelling per service, so that shared state is found: lower-case host, no final slash or usual port."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is none, half a bracket, an empty label
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = re.sub(r"//[^/@]*@", "//***@", url)  # a password in it must not be printed
        raise ConfigError(f"base_url {shown!r} is not an http(s) address. Example: http://127.0.0.1:8642")
    if parts.username or parts.password:
        raise ConfigError("base_url must not hold a user name or password. Pass api_key= instead.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port and port != {"http": 80, "https": 443}[parts.scheme]:
        host = f"{host}:{port}"
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))


def is_loopback(base_url: str) -> bool:
    """Whether an address is on this machine. By number, not by how it begins: 127.example.com is somewhere else."""
    return is_loopback_host(urlsplit(base_url).hostname or "")


def is_loopback_host(host: str) -> bool:
    """Whether a host is this machine, so that nobody else can reach a server that listens on it."""
    import ipaddress

    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def proxy_for(url: str, config: Config) -> str | None:
    """The proxy on the way to an address: `proxy` for all of them, else HTTP(S)_PROXY unless NO_PROXY names the host.

    A service on this machine is reached directly, whatever the environment says: no proxy can reach it for us.
    """
    if config.proxy:
        return _with_scheme(config.proxy)
    parts = urlsplit(url)
    proxy = config.https_proxy if parts.scheme == "https" else config.http_proxy
    if not proxy or is_loopback(url) or _is_exempt(parts.hostname or "", config.no_proxy):
        return None
    return _with_scheme(proxy)


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


def _from_shared(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what other programs' variables say: setting → (text, variable)."""
    shared = {}
    for name, variables in SHARED_ENVIRONMENT.items():
        for variable in variables:
            text = environ.get(variable, "").strip()
            if not text or (name == "ca_file" and not Path(text).is_file()):
                continue
            if variable == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
                continue  # under CGI this is a header that a visitor sent (httpoxy.org)
            shared[name] = (text, variable)
            break
    return shared


def _key_from(command: str | None) -> str:
    """TINKER_CREDENTIAL_CMD: a command of the user's own whose output is the key."""
    if not command:
        return ""
    import shlex
    import subprocess

    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        # The command line may hold a secret: name the kind of failure only.
        raise ConfigError(f"TINKER_CREDENTIAL_CMD failed ({type(error).__name__}).") from None
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


def _keyless(base_url: str, environ: Mapping[str, str]) -> str:
    if is_loopback(base_url):
        return KEYLESS
    from tinkex.home.running import running_service

    service = running_service(home_folder(environ))
    here = (
        "To train on this machine instead, use tinkex.local()."
        if service is None
        else f"To use the service that runs on this machine, at {service.url}: tinkex.local() joins it."
    )
    raise ConfigError(f"No API key. Pass api_key=..., or set TINKER_API_KEY. {here}")


# -- how values are read ----------------------------------------------------------------------------------------------


def _base_url(raw: Any) -> str:
    return normalise_url(raw or DEFAULT_BASE_URL)


def _key(raw: Any) -> str | None:
    if raw and not (str(raw).isascii() and str(raw).isprintable()):
        raise ValueError("printable ASCII without a line break, as every key is. Copy it again, whole")
    return None if raw is None else str(raw)


def _above_0(raw: Any) -> float:
    if not (value := as_float(raw)) > 0:
        raise ValueError("above 0 seconds")
    return value


def _switch(raw: Any) -> bool:
    return raw.lower() in ("1", "true", "yes", "on") if isinstance(raw, str) else bool(raw)


def _tags(raw: Any) -> tuple[str, ...]:
    return tuple(tag.strip() for tag in raw.split(",") if tag.strip()) if isinstance(raw, str) else tuple(raw)


def _proxy(raw: Any) -> str | None:
    if raw and not _is_proxy(str(raw)):
        raise ValueError("an http:// proxy (no other kind is supported), for example http://proxy.example:3128")
    return None if raw is None else str(raw)


def _pools(raw: Any) -> dict[str, int]:
    if unknown := sorted(set(raw) - set(POOL_SIZES)):
        raise ConfigError(f"Unknown pools: {', '.join(unknown)}. Known: {', '.join(POOL_SIZES)}.")
    for name, size in raw.items():
        if size < 1:
            raise ConfigError(f"Pool {name!r} needs at least one connection, not {size!r}.")
    return {**POOL_SIZES, **raw}


CLIENT = (
    Setting("base_url", _base_url, "The service.", environment="TINKER_BASE_URL"),
    Setting("api_key", _key, "The key. A service on this machine needs none.", "", "", True, "TINKER_API_KEY"),
    Setting("timeout_s", _above_0, "Seconds for one HTTP answer. A poll that the service holds open has 60."),
    Setting("max_retries", count(0), "Attempts of one request, the first included. A full queue uses up none."),
    Setting("unreachable_s", _above_0, "Seconds without any valid answer after which an operation fails."),
    Setting("deadline_s", _above_0, "Seconds an operation may take in all."),
    Setting("wait_line_s", _above_0, "Seconds between two lines that say what is being waited for."),
    Setting("max_response_bytes", count(1 << 20, 1 << 32), "Bytes of one answer, also after decompression; a larger "
            "one is rejected. Files that are downloaded go to the disk and may be larger."),
    Setting("pools", _pools, "Connections per kind of traffic. Named ones replace the default, the others stay.",
            environment=""),
    Setting("headers", unchanged, "Sent with every request. As an argument: `default_headers`.", "", "", True, ""),
    Setting("telemetry", _switch, "Whether the service is told when sessions start, end and fail. Holds no key, header "
            "or body.", environment="TINKER_TELEMETRY"),
    Setting("proxy", _proxy, "The proxy for every address, also one on this machine.", is_secret=True),
    Setting("http_proxy", unchanged, "The proxy for `http` addresses. A service on this machine is reached directly.",
            "", "", True, ""),
    Setting("https_proxy", unchanged, "The proxy for `https` addresses.", "", "", True, ""),
    Setting("no_proxy", unchanged, "Hosts, domains, addresses and networks that `http_proxy` and `https_proxy` leave "
            "out; `*`: all.", environment=""),
    Setting("ca_file", unchanged, "Certificates to trust, as a PEM file."),
    Setting("project_id", unchanged, "The project that new sessions belong to.", environment="TINKER_PROJECT_ID"),
    Setting("tags", _tags, "Tags of new sessions, with commas between them.", environment="TINKER_TAGS"),
    Setting("cf_client_id", _key, "Cloudflare Access: sent as `CF-Access-Client-Id`, if the secret is set too.",
            "", "", True, "CLOUDFLARE_ACCESS_CLIENT_ID"),
    Setting("cf_client_secret", _key, "Cloudflare Access: sent as `CF-Access-Client-Secret`.",
            "", "", True, "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
    Setting("cache_dir", unchanged, "Where tokenizers that the service hands out are kept."),
    Setting("metrics_dir", unchanged, "Where `metrics.jsonl` of each run is kept. `none`: nowhere."),
    Setting("credential_cmd", unchanged, "A command that prints the key; asked where no key is given.",
            "", "", True, "TINKER_CREDENTIAL_CMD"),
)  # fmt: skip
"""Every setting of a client, in the order of `Config`; the last is no field, but gives one. The TINKER_ variables are
the official package's names, read as it reads them."""

LOG = Setting("log", unchanged, "`debug` or `info`: what the loggers `tinkex.*` say. Not a field of `Config`.",
              environment="TINKER_LOG")  # fmt: skip
"""Read by `log_level` alone: logging is set up before there is a client, and no file says how."""

ENVIRONMENT = {setting.name: setting.variable for setting in (*CLIENT, LOG) if setting.variable}
"""Setting → environment variable."""

SHARED_ENVIRONMENT = {
    "ca_file": ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),  # SSL_CERT_FILE and SSL_CERT_DIR are read by OpenSSL itself
    "http_proxy": ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"),
    "https_proxy": ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
    "no_proxy": ("no_proxy", "NO_PROXY"),
}
"""Setting → variables that other programs read as well; the first that is set counts.

They were set with no thought of us. So an argument, TINKEX_PROXY, TINKEX_CA_FILE and our file come first, a file of
certificates that is not there is passed over, and a service on this machine is never reached through a proxy of theirs
(only through `proxy=` or TINKEX_PROXY, which hold for every address).
"""
