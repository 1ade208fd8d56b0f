"""`tinkex doctor`: checks the settings and the connection to the service, and says how to fix what is wrong."""

from __future__ import annotations

import argparse

from tinkex.cli.parser import CommandParser
from tinkex.terminal import output
from tinkex.terminal.format import clean

COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


def add(parser: CommandParser, about: str) -> None:
    parser.add_command(
        "doctor", doctor, about, "tinkex doctor", "tinkex doctor -o json",
        more="Checks the settings, the network, the key, the protocol, the clock and the limits of this machine,\n"
        "and says how to fix what is wrong. Opens no session. Each check takes at most 5 seconds. The exit\n"
        "code is 1 if a check FAILs.",
    )  # fmt: skip


def doctor(args: argparse.Namespace) -> int:
    from tinkex.cli.commands.probes import examine

    findings, settings, models = examine(args.base_url, args.api_key)
    failed = sum(finding.status == "FAIL" for finding in findings)
    if args.output == "json":
        entries = [finding._asdict() for finding in findings]
        output.write_json({"ok": not failed, "findings": entries, "settings": settings, "models": models})
        return 1 if failed else 0
    wide = max(len(finding.check) for finding in findings)
    for finding in findings:
        status = output.paint(finding.status.ljust(4), COLOURS[finding.status])
        print(f"{status}  {finding.check.ljust(wide)}  {clean(finding.detail)}")
        if finding.remedy:
            print(f"{' ' * (wide + 8)}→ {clean(finding.remedy)}")
    print(f"\n{failed} of {len(findings)} checks FAIL." if failed else "\nNo errors found.")
    return 1 if failed else 0
