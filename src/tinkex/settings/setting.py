"""One row per setting, for clients and services alike: how a value is read, where it comes from, what it is for.

A value comes from an argument, the environment, a table of `tinkex.toml`, or the environment of other programs, in that
order. A wrong one is rejected with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tinkex.errors import ConfigError
from tinkex.settings.folders import config_file, config_table


class Setting(NamedTuple):
    """One setting: its field, how a value is read, what it is for, and its names elsewhere."""

    name: str
    read: Callable[[Any], Any]
    """Text or a plain value → the field's value. Raises ValueError with what was expected."""
    about: str
    metavar: str = ""
    word: str = ""
    is_secret: bool = False
    """Whether messages must not show its value."""
    environment: str | None = None
    """Its variable, where that is not TINKEX_ and the name; "" if it has none."""
    is_switch: bool = False
    """Whether its flag takes no value: to give it is to turn it on."""
    has_flag: bool = True
    """Whether the command line may have it: others can read that."""

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"TINKEX_{self.key.upper()}" if self.environment is None else self.environment

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes, if it takes no others."""
        return self.read.choices if isinstance(self.read, OneOf) else ()

    @property
    def key(self) -> str:
        """The name in the file."""
        return self.word or self.name

    def value(self, raw: Any, source: str) -> Any:
        """Return what the setting makes of a value. Raises ConfigError that names the source."""
        try:
            return self.read(raw)
        except ValueError as error:
            shown = "" if self.is_secret else f", not {raw!r}"
            raise ConfigError(f"{source} must be {error}{shown}.") from None


class Sourced(NamedTuple):
    """A value and where it comes from: "argument", a variable, or a file."""

    value: Any
    source: str


def gather(
    settings: Sequence[Setting],
    table: str,
    environ: Mapping[str, str],
    arguments: Mapping[str, Any],
    shared: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Sourced]:
    """Return every setting that is set somewhere. Arguments that are None count as not given.

    `shared` has what other programs read from the environment too: name → (text, variable).
    """
    path, rows = config_file(environ), _file(settings, table, environ)
    gathered: dict[str, Sourced] = {}
    for setting in settings:
        if arguments.get(setting.name) is not None:
            raw, source, label = arguments[setting.name], "argument", setting.name
        elif setting.variable and environ.get(setting.variable, "").strip():
            raw, source = environ[setting.variable].strip(), setting.variable
            label = source
        elif setting.key in rows:
            raw, source, label = rows[setting.key], str(path), f"{path}: {setting.key} in [{table}]"
        elif shared and setting.name in shared:
            raw, source = shared[setting.name]
            label = source
        else:
            continue
        gathered[setting.name] = Sourced(setting.value(raw, label), source)
    return gathered


def check_names(arguments: Iterable[str], known: Iterable[str]) -> None:
    """Reject arguments that are no settings."""
    if unknown := sorted(set(arguments) - set(known)):
        raise ConfigError(f"Unknown settings: {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")


def _file(settings: Sequence[Setting], name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    table = dict(config_table(environ, name))
    for setting in settings:  # a list may be called by its plural
        if setting.key != setting.name and setting.name in table:
            table[setting.key] = table.pop(setting.name)
    if unknown := sorted(table.keys() - {setting.key for setting in settings}):
        raise ConfigError(f"{config_file(environ)} has unknown settings in [{name}]: {', '.join(unknown)}.")
    return table


# -- readers: text from a flag or a variable, or a plain value from the file or a caller ------------------------------


def unchanged(raw: Any) -> Any:
    return raw


def optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda raw: None if raw is None else read(raw)


def text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("some text")
    return raw.strip()


def names(raw: Any) -> tuple[str, ...]:
    """One or more names, with commas between them where they come as text."""
    entries = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(entries, Iterable) or isinstance(entries, Mapping):
        raise ValueError("one or more names")
    distinct = tuple(dict.fromkeys(entry.strip() for entry in entries if isinstance(entry, str) and entry.strip()))
    if not distinct:
        raise ValueError("one or more names")
    return distinct


class OneOf:
    """Reads one of several words."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def __call__(self, raw: Any) -> str:
        if not isinstance(raw, str) or raw.strip().lower() not in self.choices:
            raise ValueError(f"{', '.join(self.choices[:-1])} or {self.choices[-1]}")
        return raw.strip().lower()


def one_of(*choices: str) -> OneOf:
    return OneOf(choices)


def count(least: int, most: int | None = None) -> Callable[[Any], int]:
    def read(raw: Any) -> int:
        between = f"from {least}" + (f" to {most}" if most is not None else "")
        try:
            whole = int(raw.replace("_", "") if isinstance(raw, str) else raw)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"a whole number {between}") from None
        if isinstance(raw, bool) or (isinstance(raw, float) and raw != whole):
            raise ValueError(f"a whole number {between}")
        if whole < least or (most is not None and whole > most):
            raise ValueError(f"a whole number {between}")
        return whole

    return read


def number(what: str, least: float = 0.0, most: float = float("inf")) -> Callable[[Any], float]:
    def read(raw: Any) -> float:
        value = as_float(raw)
        if not least <= value <= most or value == float("inf"):
            between = f"from {least:g}" + (f" to {most:g}" if most < float("inf") else "")
            raise ValueError(f"{what} {between}")
        return value

    return read


def yes_or_no(raw: Any) -> bool:
    word = raw.strip().lower() if isinstance(raw, str) else raw
    if word in (True, "true", "yes", "1"):
        return True
    if word in (False, "false", "no", "0"):
        return False
    raise ValueError("true or false")


def as_float(raw: Any) -> float:
    """The number, or NaN, which no range has."""
    try:
        return float("nan") if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        return float("nan")
