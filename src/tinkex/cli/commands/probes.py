"""The checks of `tinkex doctor`, from the settings to the service's models. Every check ends within 5 seconds.

A check returns findings and raises nothing: an error becomes a finding with advice on how to fix it.
"""

from __future__ import annotations

import importlib.util
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from tinkex import settings
from tinkex.cli.connect import OF_THE_HOME, locate
from tinkex.client.diagnose import ServiceProbe, tls_context
from tinkex.clock import REAL
from tinkex.errors import ConfigError, TinkexError
from tinkex.local_service import NEEDS
from tinkex.redact import redact
from tinkex.settings import Config
from tinkex.types import GetServerCapabilitiesResponse, SupportedModel
from tinkex.wire import endpoints, json_codec
from tinkex.wire.dialect import Dialect

PROBE_S = 5.0
SKEW_WARN_S = 30.0
SKEW_FAIL_S = 300.0
"""Access tokens are renewed five minutes before they expire: a clock that far off uses expired ones."""
EXTRAS = {
    "tokenizers": "text prompts",
    "torch": "custom losses and tensors",
    "local": "a service on this machine",
    "otel": "traces",
}
"""Extra → what it is needed for."""
ALWAYS_SHOWN = ("base_url", "api_key")
SECRETS = ("cf_client_id", "cf_client_secret", "headers", "http_proxy", "https_proxy", "proxy")
MISSING, NOT_NEEDED = "missing", "none needed on this machine"
PROBE_KEY = "tml-doctor"
"""Replaces a missing key, so that the connection can be checked all the same."""
NO_SERVICE_REMEDY = "Start one with `tinkex serve`, or set TINKER_BASE_URL (for the hosted service: TINKER_API_KEY)."
WRONG_KEY = "Set TINKER_API_KEY to a key of this service."
T = TypeVar("T")


class Finding(NamedTuple):
    """The result of one check. `status`: ok, warn or FAIL."""

    check: str
    status: str
    detail: str
    remedy: str = ""


class Route(NamedTuple):
    """The host to connect to: the service itself, or a proxy."""

    host: str
    port: int
    is_tls: bool
    proxy: str | None


def examine(base_url: str | None, api_key: str | None) -> tuple[list[Finding], dict[str, Any], list[SupportedModel]]:
    """Run all checks. Returns the findings, the settings with the source of each, and the service's models."""
    config, shown, findings = _settings(base_url, api_key)
    models: list[SupportedModel] = []
    if config is not None:
        service_findings, models = _service(config)
        findings += service_findings
    return [*findings, _extras()], shown, models


def _settings(base_url: str | None, api_key: str | None) -> tuple[Config | None, dict[str, Any], list[Finding]]:
    """Find the service. Return the settings, the source of each one, and findings about them."""
    # One attempt and a short timeout: retries would hide the errors that the doctor looks for.
    probing: dict[str, Any] = {"max_retries": 1, "timeout_s": PROBE_S, "unreachable_s": PROBE_S}
    missing: list[Finding] = []
    try:
        located = locate(base_url, api_key)
        if located is None:
            detail = f"no setting names one, and none runs on this machine's data folder ({settings.home()})"
            return None, {}, [Finding("service", "FAIL", detail, NO_SERVICE_REMEDY)]
        arguments = located.arguments
        sources = settings.sources(**arguments)
        if located.origin == OF_THE_HOME:
            sources |= {"base_url": OF_THE_HOME, "api_key": "its data folder", "proxy": "default"}
        try:
            config = settings.resolve(**arguments)
        except ConfigError as error:
            if not str(error).startswith("No API key"):
                raise
            missing = [Finding("key", "FAIL", "not set", "Set TINKER_API_KEY.")]
            sources["api_key"] = MISSING
            arguments["api_key"] = PROBE_KEY
            config = settings.resolve(**arguments)
        if config.api_key == settings.KEYLESS and sources["api_key"] == "default":
            sources["api_key"] = NOT_NEEDED
        shown = {name: {"value": _shown(name, config, sources), "from": sources[name]} for name in sources}
        findings = [
            Finding(name, "ok", f"{entry['value']} (from: {entry['from']})")
            for name, entry in shown.items()
            if (name in ALWAYS_SHOWN or entry["from"] != "default") and entry["from"] != MISSING
        ]
        return replace(config, **probing), shown, findings + missing
    except ConfigError as error:
        return None, {}, [Finding("settings", "FAIL", str(error), "Fix this first; nothing else can be checked.")]


def _shown(name: str, config: Config, sources: dict[str, str]) -> str:
    """Return a setting as text, without secrets: users send this output to others."""
    value = getattr(config, name)
    if name == "api_key":
        if sources[name] in (MISSING, NOT_NEEDED):
            return "–"
        return f"{value[:4]}… ({len(value)} characters)"
    if name in SECRETS:
        return "set" if value else "–"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str("–" if value is None else value)


def _service(config: Config) -> tuple[list[Finding], list[SupportedModel]]:
    """Check from the network upwards, and stop at the first layer that fails. Returns the service's models too."""
    findings, is_http2 = network(config)
    findings.append(_files(config, is_http2))
    if any(finding.status == "FAIL" for finding in findings):
        return findings, []
    connection = ServiceProbe(config, PROBE_S)
    http_findings, is_up = http(connection)
    findings += http_findings
    if not is_up:
        return findings, []
    findings += service(connection)
    if config.api_key != PROBE_KEY:
        findings.append(key(connection))
    finding, offered = models(connection)
    return [*findings, finding], offered


def _files(config: Config, is_http2: bool) -> Finding:
    """Check that the connections which the settings allow fit the number of files a process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return Finding("open files", "ok", "no limit on this system")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = sum(config.pools.values())
    detail = f"limit {limit:,}; connections may use {needed:,}"
    if is_http2:
        return Finding("open files", "ok", f"{detail} (far fewer over HTTP/2)")
    if limit == resource.RLIM_INFINITY or limit > needed + 64:  # 64: files that the program itself opens
        return Finding("open files", "ok", detail)
    remedy = f"Many samples at once will wait for free connections. To allow more: ulimit -n {2 * needed + 128}."
    return Finding("open files", "warn", detail, remedy)


def _extras() -> Finding:
    modules = {"local": NEEDS, "otel": ("opentelemetry",)}
    has = [extra for extra in EXTRAS if all(map(importlib.util.find_spec, modules.get(extra, (extra,))))]
    lacks = [f"{extra} (for {use}: pip install 'tinkex[{extra}]')" for extra, use in EXTRAS.items() if extra not in has]
    detail = f"installed: {', '.join(has) or 'none'}" + (f"; not installed: {', '.join(lacks)}" if lacks else "")
    return Finding("extras", "ok", f"{detail}; Python {sys.version.split()[0]}")


def route_to(config: Config) -> Route:
    parts = urlsplit(config.base_url)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    proxy = settings.proxy_for(config.base_url, config)
    if proxy is None:
        return Route(host, parts.port or (443 if is_tls else 80), is_tls, None)
    through = urlsplit(proxy)
    name = f"{through.hostname}:{through.port or 80}"  # without the password that the address may contain
    return Route(through.hostname or "", through.port or 80, False, name)


def network(config: Config) -> tuple[list[Finding], bool]:
    """Check DNS, TCP and TLS; also return whether the service supports HTTP/2."""
    route = route_to(config)
    to = f"the proxy {route.proxy}" if route.proxy else f"{route.host}:{route.port}"
    try:
        addresses, took_s = _timed(lambda: socket.getaddrinfo(route.host, route.port, type=socket.SOCK_STREAM))
        shown = ", ".join(sorted({str(address[4][0]) for address in addresses}))
        findings = [Finding("DNS", "ok", f"{route.host} is {shown} ({took_s * 1000:.0f} ms)")]
    except OSError as error:
        remedy = "Check base_url, this machine's DNS, and whether a VPN is needed."
        return [Finding("DNS", "FAIL", f"{route.host} cannot be found: {_reason(error)}", remedy)], False
    try:
        took_s = _timed(lambda: socket.create_connection((route.host, route.port), PROBE_S).close())[1]
        findings.append(Finding("TCP", "ok", f"{to} accepts connections ({took_s * 1000:.0f} ms)"))
    except ConnectionRefusedError:
        remedy = "Nothing listens there. Is the service running, and is the port right?"
        return [*findings, Finding("TCP", "FAIL", f"{to} refuses connections", remedy)], False
    except OSError as error:
        remedy = "A firewall may drop the packets; behind a company proxy set TINKEX_PROXY."
        return [*findings, Finding("TCP", "FAIL", f"{to} does not respond: {_reason(error)}", remedy)], False
    if not route.is_tls:
        return findings, False
    finding, is_http2 = _tls(config, route)
    return [*findings, finding], is_http2


def _tls(config: Config, route: Route) -> tuple[Finding, bool]:
    def shake() -> tuple[str | None, str | None, float]:
        with (
            socket.create_connection((route.host, route.port), PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=route.host) as wrapped,
        ):
            expires = ssl.cert_time_to_seconds(str((wrapped.getpeercert() or {})["notAfter"]))
            return wrapped.version(), wrapped.selected_alpn_protocol(), expires

    try:
        context = tls_context(config.ca_file)
        (version, protocol, expires), took_s = _timed(shake)
    except ConfigError as error:
        return Finding("TLS", "FAIL", str(error), "Set TINKEX_CA_FILE to a file of certificates (PEM)."), False
    except ssl.SSLCertVerificationError as error:
        remedy = "Behind a company proxy, set TINKEX_CA_FILE to the certificate file of its authority."
        return Finding("TLS", "FAIL", f"the certificate is not trusted: {error.verify_message}", remedy), False
    except OSError as error:
        remedy = "Is this an https address? A service on this machine is usually http://127.0.0.1:PORT."
        return Finding("TLS", "FAIL", f"no encrypted connection: {_reason(error)}", remedy), False
    days = (expires - REAL.wall()) / 86400
    detail = f"{version}, {protocol or 'http/1.1'}, certificate valid for {days:.0f} days ({took_s * 1000:.0f} ms)"
    finding = Finding("TLS", "ok", detail)
    if days < 7:
        finding = Finding("TLS", "warn", detail, "Ask the operator of the service to renew its certificate.")
    return finding, protocol == "h2"


def http(connection: ServiceProbe) -> tuple[list[Finding], bool]:
    """Check that the service responds, and compare its clock with ours."""
    started = REAL.now()
    try:
        response = connection.ask(endpoints.HEALTHZ)
    except TinkexError as error:
        remedy = "The address responds, but not with HTTP. Check base_url, and any proxy in between."
        return [Finding("HTTP", "FAIL", redact(str(error)), remedy)], False
    took_s = REAL.now() - started
    detail = f"GET {endpoints.HEALTHZ.path} answered {response.status} ({took_s * 1000:.0f} ms)"
    finding = Finding("HTTP", "ok", detail)
    if response.status >= 500:
        finding = Finding("HTTP", "FAIL", detail, "The service is starting, or it has a fault. Try again soon.")
    elif response.status >= 400:
        finding = Finding("HTTP", "ok", f"{detail}; the service has no health check")
    return [finding, clock(response.headers.get("date"), REAL.wall() - took_s / 2)], True


def clock(date: str | None, wall: float) -> Finding:
    """Compare this machine's clock with the service's. A date has whole seconds: small differences mean nothing."""
    try:
        skew_s = wall - parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return Finding("clock", "ok", "not compared: the service sends no date")
    if abs(skew_s) < 3:
        return Finding("clock", "ok", "agrees with the service's to within a few seconds")
    detail = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the service's"
    if abs(skew_s) < SKEW_WARN_S:
        return Finding("clock", "ok", detail)
    remedy = "Set this machine's clock (turn on time synchronisation): tokens and expiry times depend on it."
    return Finding("clock", "FAIL" if abs(skew_s) >= SKEW_FAIL_S else "warn", detail, remedy)


def service(connection: ServiceProbe) -> list[Finding]:
    """Check the handshake: dialect and limits, as the service announces them."""
    try:
        dialect, server, own = connection.handshake()
    except (TinkexError, ValueError) as error:  # ValueError: the response is no JSON
        remedy = "Is base_url the address of a Tinker API? It is the part before /api/v1."
        if getattr(error, "status_code", 0) in (401, 403):
            remedy = WRONG_KEY
        return [Finding("dialect", "FAIL", redact(str(error)), remedy)]
    if dialect is Dialect.JSON:
        return [Finding("dialect", "ok", "JSON: a service with a protocol before 0.18, which announces no limits")]
    offers = ", ".join(name for name, is_on in own.items() if is_on is True)
    detail = "protobuf" + (
        f"; tinkex service {own.get('version', '?')}, offers {offers or 'nothing more'}" if own else ""
    )
    limits = (
        f"chunks of {server.fwdbwd_max_chunk_len} datums or {server.fwdbwd_max_chunk_bytes_count / 1e6:.1f} MB; "
        f"{server.sample_max_concurrent_requests} samples in flight"
    )
    return [Finding("dialect", "ok", detail), Finding("limits", "ok", limits)]


def key(connection: ServiceProbe) -> Finding:
    """Check that the service accepts the key, with a call that every service protects."""
    row = endpoints.LIST_TRAINING_RUNS
    try:
        response = connection.ask(row, f"{row.path}?limit=1")
    except TinkexError as error:
        return Finding("key", "FAIL", redact(str(error)), "Try again; the service responded before.")
    if response.status in (401, 403):
        return Finding("key", "FAIL", f"rejected (HTTP {response.status})", WRONG_KEY)
    if response.status == 402:
        return Finding("key", "FAIL", "accepted, but the account cannot pay (HTTP 402)", "Check the account's billing.")
    if response.status >= 400:
        remedy = "Try again; if it persists, ask the operator of the service."
        return Finding("key", "warn", f"unknown: HTTP {response.status}", remedy)
    return Finding("key", "ok", "accepted")


def models(connection: ServiceProbe) -> tuple[Finding, list[SupportedModel]]:
    """List the models that the service offers."""
    try:
        response = connection.ask(endpoints.GET_SERVER_CAPABILITIES)
        if response.status >= 400:
            return Finding("models", "warn", f"unknown: HTTP {response.status}", "Check the key."), []
        offered = json_codec.read_content(GetServerCapabilitiesResponse, response.content).supported_models
    except TinkexError as error:
        return Finding("models", "warn", redact(str(error)), "Ask the operator of the service."), []
    if not offered:
        return Finding("models", "warn", "the service offers no models", "Ask the operator of the service."), []
    shown = ", ".join(map(_model, offered[:8])) + (f" and {len(offered) - 8} more" if len(offered) > 8 else "")
    return Finding("models", "ok", shown), offered


def _model(offered: SupportedModel) -> str:
    about = [f"{offered.max_context_length:,} tokens"] if offered.max_context_length else []
    about += ["no training"] if offered.trainable is False else []
    about += ["no sampling"] if offered.sampleable is False else []
    return f"{offered.model_name}" + (f" ({', '.join(about)})" if about else "")


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result and its seconds. Runs on a thread of its own: a DNS lookup cannot be cancelled."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except OSError as error:
            outcome.set_exception(error)

    started = REAL.now()
    thread = threading.Thread(target=run, name="tinkex-doctor", daemon=True)
    thread.start()
    thread.join(PROBE_S)
    if not outcome.done():
        raise TimeoutError(f"no response within {PROBE_S:.0f} s")
    return outcome.result(), REAL.now() - started


def _reason(error: OSError) -> str:
    return str(error.strerror or error)
