"""The `tinkex` command: runs one command and turns errors into one sentence and an exit code.

Exit codes: 0 success, 1 failure (one sentence on stderr), 2 wrong usage, 130 stopped with Ctrl-C, 141 broken pipe.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tinkex.cli.parser import build_parser, parse, show_version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end the command
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        build_parser(argv).print_help()
        return 0
    args = parse(argv)
    try:
        if args.run is not show_version:
            _set_up_logging(args)
        code: int = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ntinkex: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except Exception as error:
        from tinkex.cli.error_text import describe

        if args.debug:
            import traceback

            traceback.print_exc()
        print(f"tinkex: {describe(error)}", file=sys.stderr)
        return 1


def _set_up_logging(args: argparse.Namespace) -> None:
    from tinkex.settings import log_level

    level = "debug" if args.debug else log_level()
    args.debug = level == "debug"
    if level in ("debug", "info"):
        import logging

        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit, which would print an error about the broken pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no real file behind it: nothing will be flushed
