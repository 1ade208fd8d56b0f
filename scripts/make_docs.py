"""Writes the parts of docs/ that say what the code says: settings, errors, commands. `--check` only compares.

A made part stands between two marks in its page; the prose around it is written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tinkex import errors, settings
from tinkex.cli import main as cli

DOCS = Path(__file__).resolve().parent.parent / "docs"
Error = type[errors.TinkexError]
MARKS = re.compile(r"(<!-- made by scripts/make_docs.py: do not edit -->\n).*?(<!-- end -->)", re.DOTALL)

SETTINGS = {
    "base_url": "The service.",
    "api_key": "The key. A service on this machine needs none.",
    "credential_cmd": "A command that prints the key; asked where no key is given.",
    "timeout_s": "Seconds for one HTTP answer. A poll that the service holds open has 60.",
    "max_retries": "Attempts of one request, the first included.",
    "unreachable_s": "Seconds without any valid answer after which an operation fails.",
    "deadline_s": "Seconds an operation may take in all.",
    "wait_line_s": "Seconds between two lines that say what is being waited for.",
    "pools": "Connections per kind of traffic. Named ones replace the default, the others stay.",
    "headers": "Sent with every request. As an argument: `default_headers`.",
    "telemetry": "Whether the service is told when sessions start, end and fail. Holds no key, header or body.",
    "proxy": "The proxy for every address, also one on this machine.",
    "http_proxy": "The proxy for `http` addresses. A service on this machine is reached directly.",
    "https_proxy": "The proxy for `https` addresses.",
    "no_proxy": "Hosts, domains, addresses and networks that `http_proxy` and `https_proxy` leave out; `*`: all.",
    "ca_file": "Certificates to trust, as a PEM file.",
    "project_id": "The project that new sessions belong to.",
    "tags": "Tags of new sessions, with commas between them.",
    "cf_client_id": "Cloudflare Access: sent as `CF-Access-Client-Id`, if the secret is set too.",
    "cf_client_secret": "Cloudflare Access: sent as `CF-Access-Client-Secret`.",
    "cache_dir": "Where tokenizers that the service hands out are kept.",
    "log": "`debug` or `info`: what the loggers `tinkex.*` say. Not a field of `Config`.",
}
"""What each setting is for. A setting without a sentence here stops this script."""


def settings_table() -> str:
    fields = [field.name for field in dataclasses.fields(settings.Config)]
    names = [*fields, *(name for name in settings.ENVIRONMENT if name not in fields)]
    rows = ["| setting | environment | default | what it is |", "|---|---|---|---|"]
    for name in names:
        own = [settings.ENVIRONMENT[name]] if name in settings.ENVIRONMENT else []
        variables = ", ".join(f"`{variable}`" for variable in (*own, *settings.SHARED_ENVIRONMENT.get(name, ())))
        default = _default(name) if name in fields else ""
        rows.append(f"| `{name}` | {variables} | {default} | {SETTINGS[name]} |")
    return "\n".join(rows)


def _default(name: str) -> str:
    value = getattr(settings.Config(), name)
    if name == "cache_dir":
        return "the user's cache folder"
    if isinstance(value, dict) and value:
        return ", ".join(f"`{name}` {size}" for name, size in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) and value else "" if value in (None, "", (), {}) else str(value)


def serve_table() -> str:
    rows = ["| flag | environment | in `[serve]` | default | what it is |", "|---|---|---|---|---|"]
    rows += [
        f"| `{row.flag}` | `{row.variable}` | `{row.key}` | {_serve_default(row.name)} | {row.about} |"
        for row in settings.SERVE
    ]
    return "\n".join(rows)


def _serve_default(name: str) -> str:
    places = {
        "data_dir": "the user's data folder",
        "cache_dir": "the user's cache folder",
        "database_url": "`tinkex.db` in the data folder",
    }
    value = getattr(settings.ServeConfig(), name)
    if name in places or value in (None, ()):
        return places.get(name, "")
    if isinstance(value, tuple):
        value = ", ".join(value)
    return f"`{value}`" if isinstance(value, str) else f"{value:,.10g}" if value >= 10_000 else f"{value:g}"


def error_table() -> str:
    statuses: dict[Error, str] = {kind: str(status) for status, kind in errors._BY_STATUS.items()}
    statuses[errors.InternalServerError] = "5xx"
    rows = ["| error | also a | status | again? | when |", "|---|---|---|---|---|"]
    for depth, kind in _tree(errors.TinkexError):
        place = "· " * depth
        others = ", ".join(f"`{base.__name__}`" for base in kind.__bases__[1:])
        rows.append(
            f"| {place}`{kind.__name__}` | {others} | {statuses.get(kind, '')} | {_retryable(kind, statuses)} | "
            f"{_sentence(kind)} |"
        )
    return "\n".join(rows)


def _tree(kind: Error, depth: int = 0) -> Iterator[tuple[int, Error]]:
    yield depth, kind
    for child in kind.__subclasses__():
        # One place each: under the first base.
        if child.__bases__[0] is kind and child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def _retryable(kind: Error, statuses: dict[Error, str]) -> str:
    if kind is errors.RequestFailedError:
        return "unless `category` is `user`"
    if kind is errors.APIStatusError:
        return "408, 425, 5xx"
    if issubclass(kind, errors.APIStatusError):
        status = statuses.get(kind, "400")
        return "yes" if errors.is_retryable_status(500 if status == "5xx" else int(status), {}) else "no"
    return "yes" if kind.retryable is True else "no"


def _sentence(kind: Error) -> str:
    """The first paragraph of the docstring, on one line."""
    text = inspect.getdoc(kind) if "__doc__" in vars(kind) and kind.__doc__ else None
    if text is None:
        raise SystemExit(f"{kind.__name__} has no docstring: the catalogue needs a sentence.")
    return " ".join(text.split("\n\n")[0].split())


def command_pages() -> str:
    # Named here so that each of them is loaded.
    return "\n\n".join(_command(parser) for parser in _parsers(cli.parser(list(cli.NOUNS))))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    children = _children(parser)
    yield parser
    for child in children.values():
        yield from _parsers(child)


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


def _command(parser: argparse.ArgumentParser) -> str:
    """Laid out here and not by argparse, whose layout changes with the release of Python."""
    lines = [f"## `{parser.prog}`", "", (parser.description or "").strip()]
    options = [action for action in parser._actions if _is_own(action, parser)]
    if options:
        lines += ["", "| argument | what it is |", "|---|---|"]
        lines += [f"| {_words(action)} | {action.help} |" for action in options]
    if children := _children(parser):
        lines += ["", f"Commands: {', '.join(f'`{name}`' for name in children)}."]
    examples = [line.strip() for line in (parser.epilog or "").splitlines() if line.strip().startswith("tinkex ")]
    if examples:
        lines += ["", "```bash", *(re.sub(r"\s{2,}", "  # ", line) for line in examples), "```"]
    return "\n".join(lines)


def _is_own(action: argparse.Action, parser: argparse.ArgumentParser) -> bool:
    """Not `--help`, not the commands below; what is shared by all stands at the top only."""
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
        return False
    return parser.prog == "tinkex" or action.dest not in cli.DEFAULTS


def _words(action: argparse.Action) -> str:
    values = action.metavar or ("\\|".join(action.choices) if action.choices else None)
    if values is None and action.nargs != 0:
        values = action.dest.upper()
    value = str(values or "").replace("|", "\\|").replace("\\\\", "\\")
    if not action.option_strings:
        return f"`{value}`" + (" (optional)" if action.nargs in ("?", "*") else "")
    return ", ".join(f"`{word}{f' {value}' if value else ''}`" for word in action.option_strings)


MADE: dict[str, tuple[Callable[[], str], ...]] = {
    "settings.md": (settings_table, serve_table),
    "errors.md": (error_table,),
    "cli.md": (command_pages,),
}
"""Page → what makes its parts, in their order."""


def made(page: str) -> tuple[str, str]:
    """The page as it is, and as it should be."""
    text = (DOCS / page).read_text(encoding="utf-8")
    makers = iter(MADE[page])
    if len(MARKS.findall(text)) != len(MADE[page]):
        raise SystemExit(f"docs/{page} needs pairs of marks, one for each of {len(MADE[page])} parts: {MARKS.pattern}")
    return text, MARKS.sub(lambda found: f"{found[1]}{next(makers)()}\n{found[2]}", text)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    is_check = parser.parse_args(argv).check
    stale = []
    for page in MADE:
        text, wanted = made(page)
        if text != wanted:
            stale.append(page)
            if not is_check:
                (DOCS / page).write_text(wanted, encoding="utf-8")
                print(f"wrote docs/{page}")
    if is_check and stale:
        print(f"Not up to date: {', '.join(stale)}. Run python scripts/make_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
