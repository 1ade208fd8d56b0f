"""Writes the parts of docs/ that say what the code says: settings, errors, commands, losses. `--check` only compares.

A made part stands between two marks in its page; the prose around it is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tinkex import errors, settings
from tinkex.cli import parser as cli
from tinkex.rules.losses import EMPTY_MASK, LOSSES

ROOT = PAGES = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "tinkex"
Error = type[errors.TinkexError]
MARKS = re.compile(r"(<!-- made by scripts/make_docs.py: do not edit -->\n).*?(<!-- end -->)", re.DOTALL)

REMEDIES = {
    "TinkexError": "Catch it to catch everything below.",
    "ConfigError": "Mend the setting that the message names; `tinkex doctor` shows where each came from.",
    "ValidationError": "Mend the argument that the message names, and call again.",
    "MissingExtra": "Install the extra: `pip install -e '.[NAME]'` in a clone.",
    "ClosedError": "Make a new client, or close it later.",
    "DeadlineExceeded": "Look at the run's state before you repeat a step; raise `deadline_s` for long work.",
    "WrongThread": "Use the `_async` twin or `await`, or call from another thread.",
    "StreamAlreadyConsumed": "Call `stream()` again for another sample.",
    "ResultExpired": "Look at the run's state before you repeat a training step; samples are repeated by themselves.",
    "RequestFailedError": "Read `category`. `user`: mend the data. `server`: try again; the service's log says why.",
    "APIError": "Catch it to catch all that can go wrong on the way.",
    "APIConnectionError": "Run `tinkex doctor`: is the service up, is the address right, is a proxy in the way?",
    "APITimeoutError": "As above; raise `timeout_s` for a slow line.",
    "APIResponseValidationError": "Check `TINKER_BASE_URL`: something else than a Tinker service answers there.",
    "APIStatusError": "Read `status_code` and `body`.",
    "BadRequestError": "Mend what the message names.",
    "ContextOverflow": "Shorten the prompt or lower `max_tokens`; the message has the three numbers.",
    "AuthenticationError": "Set `TINKER_API_KEY`; on a service of your own, `tinkex key create`.",
    "BillingError": "Look into the account on the hosted service.",
    "PermissionDeniedError": "Use a key that may, or ask its owner.",
    "NotFoundError": "Check the name. What belongs to another tenant is not found either.",
    "ConflictError": "Use another name, or `overwrite=True` where the call has it.",
    "UnprocessableEntityError": "Mend the field that the message names.",
    "RateLimitError": "Wait; the SDK did so already. Ask for less at once.",
    "InternalServerError": "Try again later; on a service of your own, its log says why.",
}
"""What to do about each error. One without a sentence here stops this script."""

ANSWERS = {
    "damaged_checkpoint": "The file … of … was damaged on the service's disk: it is not what was written.",
    "engine_failed": "The engine failed at this request; the message is its own.",
    "engine_restarting": "The engine is being started again. Ask again in a moment.",
    "model_not_found": "No such model is served, and no such adapter is known.",
    "not_at_home": "Another server works on … now. Send the request again.",
    "not_ready": "The engine cannot work now; the message says why. Ask again in a moment.",
    "store_unavailable": "The disk is full or the database cannot be reached. Ask again after Retry-After.",
    "unauthorised": "The key is missing, unknown or revoked. `tinkex key create` on the server makes one.",
    "unknown_endpoint": "The service has no such call.",
    "wrong_method": "The call exists, with another HTTP verb.",
}
"""What the service says under codes whose message is put together elsewhere."""
MORE_CODES = {
    "unknown_training_run": ("404", "training run … is not known."),
    "node_unreachable": (
        "503",
        "The server that has this, …, does not respond: …. Another one takes over within seconds.",
    ),
    "no_targets": ("400", "data[…].loss_fn_inputs['target_tokens'] is missing: … needs …."),
    "missing_input": ("400", "data[…].loss_fn_inputs[…] is missing: … needs …."),
    "bad_mask": ("400", f"data[…]: {EMPTY_MASK}"),
}
"""Codes that are put together in the code itself."""


def settings_table() -> str:
    fields = {field.name for field in dataclasses.fields(settings.Config)}
    rows = ["| setting | environment | default | what it is |", "|---|---|---|---|"]
    for row in (*settings.CLIENT, settings.LOG):
        own = [row.variable] if row.variable else []
        variables = ", ".join(f"`{variable}`" for variable in (*own, *settings.SHARED_ENVIRONMENT.get(row.name, ())))
        default = _default(row.name) if row.name in fields else ""
        rows.append(f"| `{row.name}` | {variables} | {default} | {row.about} |")
    return "\n".join(rows)


def _default(name: str) -> str:
    value = getattr(settings.Config(), name)
    if name == "cache_dir":
        return "the user's cache folder"
    if name == "metrics_dir":
        return "`metrics` in the user's data folder"
    if isinstance(value, dict) and value:
        return ", ".join(f"`{name}` {size}" for name, size in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) and value else "" if value in (None, "", (), {}) else str(value)


def serve_table() -> str:
    rows = ["| flag | environment | in `[serve]` | default | what it is |", "|---|---|---|---|---|"]
    for row in settings.SERVE:
        flag = f"`{row.flag}`" if row.has_flag else ""
        rows.append(f"| {flag} | `{row.variable}` | `{row.key}` | {_serve_default(row.name)} | {row.about} |")
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
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = ", ".join(value)
    return f"`{value}`" if isinstance(value, str) else f"{value:,.10g}" if value >= 10_000 else f"{value:g}"


def limit_table() -> str:
    rows = ["| flag | default | of | status, code | what it bounds | what to do |", "|---|---|---|---|---|---|"]
    for limit in settings.LIMITS:
        setting, default = limit.setting, _serve_default(limit.setting.name)
        told = f"{limit.status} `{limit.code}`"
        rows.append(f"| `{setting.flag}` | {default} | {limit.scope} | {told} | {setting.about} | {limit.remedy} |")
    return "\n".join(rows)


def error_table() -> str:
    statuses: dict[Error, str] = {kind: str(status) for status, kind in errors._BY_STATUS.items()}
    statuses[errors.InternalServerError] = "5xx"
    rows = ["| error | also a | status | again? | when | what to do |", "|---|---|---|---|---|---|"]
    for depth, kind in _tree(errors.TinkexError):
        place = "· " * depth
        others = ", ".join(f"`{base.__name__}`" for base in kind.__bases__[1:])
        rows.append(
            f"| {place}`{kind.__name__}` | {others} | {statuses.get(kind, '')} | {_retryable(kind, statuses)} | "
            f"{_sentence(kind)} | {REMEDIES[kind.__name__]} |"
        )
    return "\n".join(rows)


def code_table() -> str:
    """Every code that the service can answer with, read from its sources."""
    found: dict[str, set[tuple[str, str]]] = {code: {answer} for code, answer in MORE_CODES.items()}
    for limit in settings.LIMITS:
        said = f"…, and the limit is … ({limit.setting.flag}). {limit.remedy}"
        found.setdefault(limit.code, set()).add((str(limit.status), said))
    for file in sorted(file for room in ("rules", "server") for file in (SOURCES / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for status, code, said in _refusal(node.func.id, [_text(entry) for entry in node.args]):
                    found.setdefault(code, set()).add((status, said))
    rows = ["| code | status | what is said, for example |", "|---|---|---|"]
    for code, answers in sorted(found.items()):
        statuses = ", ".join(sorted({status for status, _ in answers}))
        longest = max((said for _, said in answers), key=lambda said: (len(said), said))
        rows.append(f"| `{code}` | {statuses} | {ANSWERS[code] if longest == '…' else longest} |".replace("*", "\\*"))
    return "\n".join(rows)


def _refusal(maker: str, words: list[str]) -> Iterator[tuple[str, str, str]]:
    """Status, code and text of one place where the service refuses something."""
    if maker == "RequestRejected" and len(words) > 2:
        status, said, code = words[:3]
    elif maker in ("bad_request", "too_many_requests"):
        status, said, code = {"bad_request": "400", "too_many_requests": "429"}[maker], *[*words, "bad_request"][:2]
    elif maker == "reject" and len(words) > 2:
        status, said, code = "400", f"{words[0]} {words[1]}", words[2]
    elif maker == "ValidationError" and len(words) > 1:
        status, said, code = "400", *words[:2]
    elif maker == "not_found":
        status, said, code = "404", f"{words[0]} … is not known.", f"unknown_{words[0].replace(' ', '_')}"
    else:
        return
    if "…" not in code and status != "…":
        yield status, code, said


def _text(node: ast.expr) -> str:
    """A string as far as the source tells it; … stands for what is filled in."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case _:
            return "…"


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
    return "\n\n".join(_command(parser) for parser in _parsers(cli.build_parser(list(cli.COMMANDS))))


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


def loss_table() -> str:
    """Every loss with its inputs and settings; losses that take the same share a row."""
    rows = ["| loss | needs | may have | `loss_fn_config` (default) |", "|---|---|---|---|"]
    names: dict[tuple[str, ...], list[str]] = {}
    for name, rule in LOSSES.items():
        settings = ", ".join(f"`{key}` ({value:g})" for key, value in rule.config.items())
        cells = (", ".join(f"`{key}`" for key in keys) for keys in (rule.required, rule.optional))
        names.setdefault((*cells, settings), []).append(f"`{name}`")
    return "\n".join([*rows, *(f"| {', '.join(shared)} | {' | '.join(cells)} |" for cells, shared in names.items())])


MADE: dict[str, tuple[Callable[[], str], ...]] = {
    "docs/settings.md": (settings_table, serve_table),
    "docs/limits.md": (limit_table,),
    "docs/errors.md": (error_table, code_table),
    "docs/cli.md": (command_pages,),
    "docs/training.md": (loss_table,),
}
"""Page → what makes its parts, in their order."""


def made(page: str) -> tuple[str, str]:
    """The page as it is, and as it should be."""
    text = (PAGES / page).read_text(encoding="utf-8")
    makers = iter(MADE[page])
    if len(MARKS.findall(text)) != len(MADE[page]):
        raise SystemExit(f"{page} needs pairs of marks, one for each of {len(MADE[page])} parts: {MARKS.pattern}")
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
                (PAGES / page).write_text(wanted, encoding="utf-8")
                print(f"wrote {page}")
    if is_check and stale:
        print(f"Not up to date: {', '.join(stale)}. Run python scripts/make_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
