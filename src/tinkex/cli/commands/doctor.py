"""`tinkex doctor`: checks the settings and the connection to the service, and says how to fix what is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinkex.terminal import output
from tinkex.terminal.format import clean

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.commands.probes import Finding
    from tinkex.cli.parser import CommandParser
    from tinkex.settings import Config
    from tinkex.types import SupportedModel

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


def add(parser: CommandParser, about: str) -> None:
    parser.add_command(
        "doctor", doctor, about, "tinkex doctor", "tinkex doctor -o json",
        more="Checks the settings, the network, the key, the protocol, the clock and the limits of this machine,\n"
        "and says how to fix what is wrong. Opens no session. Each check takes at most 5 seconds. The exit\n"
        "code is 1 if a check FAILs.",
    )  # fmt: skip


def doctor(args: argparse.Namespace) -> int:
    config, where, findings = _settings(args)
    models: list[SupportedModel] = []
    if config is not None:
        service_findings, models = _service(config)
        findings += service_findings
    findings += _extras()
    is_ok = all(finding.status != "FAIL" for finding in findings)
    if args.output == "json":
        entries = [finding._asdict() for finding in findings]
        output.write_json({"ok": is_ok, "findings": entries, "settings": where, "models": models})
    else:
        _write(findings)
    return 0 if is_ok else 1


def _settings(args: argparse.Namespace) -> tuple[Config | None, dict[str, Any], list[Finding]]:
    """Return the settings, the source of each one, and findings about them."""
    from tinkex import settings
    from tinkex.cli.commands.probes import PROBE_S, Finding
    from tinkex.errors import ConfigError

    arguments = {"base_url": args.base_url, "api_key": args.api_key}
    # One attempt and a short timeout: retries would hide the errors that the doctor looks for.
    probing: dict[str, Any] = {"max_retries": 1, "timeout_s": PROBE_S, "unreachable_s": PROBE_S}
    missing: list[Finding] = []
    try:
        sources = settings.sources(**arguments)
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
    from tinkex.cli.commands import probes
    from tinkex.client.diagnose import ServiceProbe

    findings, is_http2 = probes.network(config)
    findings.append(_files(config, is_http2))
    if any(finding.status == "FAIL" for finding in findings):
        return findings, []
    connection = ServiceProbe(config, probes.PROBE_S)
    http_findings, is_up = probes.http(connection)
    findings += http_findings
    if not is_up:
        return findings, []
    findings += probes.service(connection)
    if config.api_key != PROBE_KEY:
        findings.append(probes.key(connection))
    finding, models = probes.models(connection)
    return [*findings, finding], models


def _files(config: Config, is_http2: bool) -> Finding:
    """Check that the connections which the settings allow fit the number of files a process may open."""
    from tinkex.cli.commands.probes import Finding

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


def _extras() -> list[Finding]:
    from importlib.util import find_spec

    from tinkex.cli.commands.probes import Finding
    from tinkex.local_service import NEEDS

    modules = {"local": NEEDS, "otel": ("opentelemetry",)}
    has = [extra for extra in EXTRAS if all(find_spec(name) for name in modules.get(extra, (extra,)))]
    lacks = [f"{extra} (for {use}: pip install 'tinkex[{extra}]')" for extra, use in EXTRAS.items() if extra not in has]
    detail = f"installed: {', '.join(has) or 'none'}" + (f"; not installed: {', '.join(lacks)}" if lacks else "")
    return [Finding("extras", "ok", f"{detail}; Python {sys.version.split()[0]}")]


def _write(findings: list[Finding]) -> None:
    wide = max(len(finding.check) for finding in findings)
    colours = {"ok": "green", "warn": "yellow", "FAIL": "red"}
    for finding in findings:
        status = output.paint(finding.status.ljust(4), colours[finding.status])
        print(f"{status}  {finding.check.ljust(wide)}  {clean(finding.detail)}")
        if finding.remedy:
            print(f"{' ' * (wide + 8)}→ {clean(finding.remedy)}")
    bad = sum(finding.status == "FAIL" for finding in findings)
    print("\nNo errors found." if not bad else f"\n{bad} of {len(findings)} checks FAIL.")
