"""`tinkex doctor`: what is wrong between this machine and the service, and what to do about it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinkex.terminal import output

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.commands.probes import Finding
    from tinkex.cli.main import Words
    from tinkex.settings import Config

EXTRAS = {
    "tokenizers": "text prompts",
    "torch": "custom losses and tensors",
    "local": "a service on this machine",
    "otel": "traces",
}
"""Extra → what it is good for."""
ALWAYS_SHOWN = ("base_url", "api_key")
SECRETS = ("cf_client_id", "cf_client_secret", "headers", "http_proxy", "https_proxy", "proxy")
MISSING, NOT_NEEDED = "missing", "none needed on this machine"
PROBE_KEY = "tml-doctor"
"""Stands in for a missing key, so that the way to the service can be looked at all the same."""


def add(words: Words, about: str) -> None:
    words.add(
        "doctor", doctor, about, "tinkex doctor", "tinkex doctor -o json",
        more="Looks at the settings, the way to the service, the key, the protocol, the clock and this machine's\n"
        "limits, and says what to do about what is wrong. Opens no session. Takes seconds, and never more\n"
        "than 5 for one thing. Exit code 1 if a check FAILs.",
    )  # fmt: skip


def doctor(args: argparse.Namespace) -> int:
    config, where, findings = _settings(args)
    found: dict[str, Any] = {"models": []}
    if config is not None:
        findings += _service(config, found)
    findings += _extras()
    is_well = all(finding.status != "FAIL" for finding in findings)
    if args.output == "json":
        output.write_json({"ok": is_well, "findings": [one._asdict() for one in findings], "settings": where, **found})
    else:
        _write(findings)
    return 0 if is_well else 1


def _settings(args: argparse.Namespace) -> tuple[Config | None, dict[str, Any], list[Finding]]:
    """What is set, and where it was set."""
    from tinkex import settings
    from tinkex.cli.commands.probes import PROBE_S, Finding
    from tinkex.errors import ConfigError

    given = {"base_url": args.base_url, "api_key": args.api_key}
    # One attempt each, and soon over: a doctor wants to see the fever.
    probing: dict[str, Any] = {"max_retries": 1, "timeout_s": PROBE_S, "unreachable_s": PROBE_S}
    missing: list[Finding] = []
    try:
        sources = settings.sources(**given)
        try:
            config = settings.resolve(**given)
        except ConfigError as problem:
            if not str(problem).startswith("No API key"):
                raise
            missing = [Finding("key", "FAIL", "none is set", "Set TINKER_API_KEY.")]
            sources["api_key"] = MISSING
            given["api_key"] = PROBE_KEY
            config = settings.resolve(**given)
        if config.api_key == settings.KEYLESS and sources["api_key"] == "default":
            sources["api_key"] = NOT_NEEDED
        shown = {name: {"value": _shown(name, config, sources), "from": sources[name]} for name in sources}
        findings = [
            Finding(name, "ok", f"{entry['value']} (from: {entry['from']})")
            for name, entry in shown.items()
            if (name in ALWAYS_SHOWN or entry["from"] != "default") and entry["from"] != MISSING
        ]
        return replace(config, **probing), shown, findings + missing
    except ConfigError as problem:
        return None, {}, [Finding("settings", "FAIL", str(problem), "Mend this first; nothing else can be checked.")]


def _shown(name: str, config: Config, sources: dict[str, str]) -> str:
    """A setting for the eyes of whoever the output is sent to."""
    value = getattr(config, name)
    if name == "api_key":
        if sources[name] in (MISSING, NOT_NEEDED):
            return "–"
        return f"{value[:4]}… ({len(value)} characters)"
    if name in SECRETS:
        return "set" if value else "–"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str("–" if value is None else value)


def _service(config: Config, found: dict[str, Any]) -> list[Finding]:
    """From the wire upwards; what is above a failure is not looked at."""
    from tinkex.cli.commands import probes
    from tinkex.client._runtime.link import connection_for

    findings, is_http2 = probes.network(config)
    findings.append(_files(config, is_http2))
    if any(finding.status == "FAIL" for finding in findings):
        return findings
    connection = connection_for(config)
    answers, is_up = probes.http(connection)
    findings += answers
    if not is_up:
        return findings
    findings += probes.service(connection)
    if config.api_key != PROBE_KEY:
        findings.append(probes.key(connection))
    finding, found["models"] = probes.models(connection)
    return [*findings, finding]


def _files(config: Config, is_http2: bool) -> Finding:
    """Whether the connections that settings allow fit the number of files a process may open."""
    from tinkex.cli.commands.probes import Finding

    try:
        import resource
    except ImportError:  # Windows has no such limit
        return Finding("open files", "ok", "not limited on this system")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = sum(config.pools.values())
    detail = f"at most {limit:,} at once; connections may take {needed:,}"
    if is_http2:
        return Finding("open files", "ok", f"{detail} (far fewer over HTTP/2)")
    if limit == resource.RLIM_INFINITY or limit > needed + 64:  # 64: what a program opens for itself
        return Finding("open files", "ok", detail)
    remedy = f"A burst of samples will wait for free connections. For more of them: ulimit -n {2 * needed + 128}."
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
        print(f"{status}  {finding.check.ljust(wide)}  {output.clean(finding.detail)}")
        if finding.remedy:
            print(f"{' ' * (wide + 8)}→ {output.clean(finding.remedy)}")
    bad = sum(finding.status == "FAIL" for finding in findings)
    print("\nAll is well." if not bad else f"\n{bad} of {len(findings)} checks FAIL.")
