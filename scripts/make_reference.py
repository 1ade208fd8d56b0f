"""Writes docs/reference/: one page for each public module, with signatures and docstrings. `--check` only compares.

What is public is said by the package itself (`tinkex._HOMES`, `tinkex.types._MODULES`) and, for modules that are
imported by their own name, by `OTHERS` below. The sources are read with griffe and not imported, so the pages are the
same on every release of Python, and need neither torch nor a pytest session.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe

import tinkex
from tinkex import testing, types

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
OTHERS: dict[str, tuple[str, ...]] = {
    "tinkex.as_tinker": ("install", "uninstall"),
    "tinkex.client.download": ("download_checkpoint", "Progress"),
    "tinkex.client.future": ("FutureStatus",),
    "tinkex.local_service": ("LocalServiceClient",),
    "tinkex.events": ("RequestEvent", "RetryEvent", "PollEvent", "QueueEvent", "StepEvent"),
    "tinkex.settings": ("Config", "ServeConfig"),
    "tinkex.testing": tuple(testing.__all__),
    "tinkex.testing.pytest_plugin": ("tinkex_service", "tinkex_clock"),
    "tinkex.watch.progress": ("Progress",),
    "tinkex.watch.tally": ("StepRecord",),
}
"""Public names that are not in `tinkex` itself: they are imported from their module."""
TOLD_IN = {
    "tinkex.as_tinker": "as_tinker.md",
    "tinkex.client.download": "rest.md",
    "tinkex.client.future": "futures.md",
    "tinkex.client.rest": "rest.md",
    "tinkex.client.sampling": "sampling.md",
    "tinkex.client.service": "service.md",
    "tinkex.client.stream": "streaming.md",
    "tinkex.client.tokenizer": "tokenizers.md",
    "tinkex.client.training": "training.md",
    "tinkex.local_service": "serving.md",
    "tinkex.errors": "errors.md",
    "tinkex.events": "events.md",
    "tinkex.watch.progress": "progress.md",
    "tinkex.watch.tally": "progress.md",
    "tinkex.settings": "settings.md",
    "tinkex.testing": "testing.md",
    "tinkex.testing.pytest_plugin": "testing.md",
    "tinkex.types": "types.md",
}
"""Module → the page that tells how it is used."""
WIDTH = 100
NOTE = "<!-- made by scripts/make_reference.py: do not edit -->"
Item = griffe.Object | griffe.Alias


def surface() -> dict[str, list[str]]:
    """Module → its public names, in the order of the pages. Types stand in one module for each kind."""
    found: dict[str, list[str]] = {}
    for module, names in [*tinkex._HOMES.items(), *OTHERS.items()]:
        if module != "tinkex.types":
            known = found.setdefault(module, [])
            known += [name for name in names if name not in known]
    for kind, words in types._MODULES.items():
        found[f"tinkex.types.{kind}"] = words.split()
    return dict(sorted(found.items()))


def pages() -> dict[str, str]:
    """Name of the file → its text."""
    package = griffe.load("tinkex", search_paths=[ROOT / "src"], allow_inspection=False)
    public = surface()
    made = {f"{module}.md": _page(package, module, names) for module, names in public.items()}
    made["tinkex.types.md"] = _types_page(package, public)
    made["index.md"] = _index(package, public)
    return made


def _index(package: Item, public: dict[str, list[str]]) -> str:
    lines = ["# Reference", NOTE, ""]
    lines += ["Made from the sources: every public name with its signature and what its docstring says.", ""]
    lines += ["| module | what it is for | names |", "|---|---|---|"]
    for module, names in public.items():
        links = ", ".join(f"[{name}]({module}.md#{name.lower()})" for name in names)
        if module.startswith("tinkex.types."):
            links = "in [tinkex.types](tinkex.types.md)"
        lines.append(f"| [{module}]({module}.md) | {_first_sentence(_module(package, module))} | {links} |")
    everyday = sorted(tinkex._HOME)
    lines += ["", "## Names of `tinkex`", "", "`import tinkex` gives these; each is loaded on first use.", ""]
    homes = {name: module for module, names in public.items() for name in names}
    lines += [", ".join(f"[{name}]({homes[name]}.md#{name.lower()})" for name in everyday) + ".", ""]
    return "\n".join(lines)


def _types_page(package: Item, public: dict[str, list[str]]) -> str:
    lines = ["# tinkex.types", NOTE, "", *_told("tinkex.types"), *_prose(_module(package, "tinkex.types")), ""]
    lines += ["| kind | names |", "|---|---|"]
    for module, names in public.items():
        if module.startswith("tinkex.types."):
            links = ", ".join(f"[{name}]({module}.md#{name.lower()})" for name in names)
            lines.append(f"| [{module.rpartition('.')[2]}]({module}.md) | {links} |")
    return "\n".join([*lines, "", *_class(_module(package, "tinkex.types.base").members["Value"], "Value"), ""])


def _page(package: Item, module: str, names: Iterable[str]) -> str:
    source = _module(package, module)
    lines = [f"# {module}", NOTE, "", *_told(module), *_prose(source), ""]
    if module.startswith("tinkex.types."):
        lines += ["Import these from `tinkex.types`. What every value can do: [Value](tinkex.types.md#value).", ""]
    for name in names:
        item = source.members[name]
        target = item.final_target if isinstance(item, griffe.Alias) else item
        if target.is_class:
            lines += [*_class(target, name), ""]
        elif target.is_function:
            lines += [f"## `{name}`", "", *_signature(target, name), *_prose(target), ""]
        else:
            lines += [f"## `{name}`", "", *_block(f"{name} = {target.value}"), *_prose(target), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _module(package: Item, name: str) -> Item:
    inner = name.removeprefix("tinkex").lstrip(".")
    return package[inner] if inner else package


def _told(module: str) -> list[str]:
    page = TOLD_IN.get(module)
    if page is None:
        return []
    title = (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return [f"How it is used: [{title}](../{page}).", ""]


def _first_sentence(item: Item) -> str:
    text = " ".join((item.docstring.value if item.docstring else "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


def _prose(item: Item) -> list[str]:
    """The docstring as Markdown: examples that are typed at a prompt get a fence."""
    text = item.docstring.value if item.docstring else ""
    fenced = re.sub(r"(?m)(^>>> .*(?:\n(?!\s*$).*)*)", r"```pycon\n\1\n```", text)
    # A drawing or program that is indented in the docstring is a block in Markdown too, after an empty line.
    return [re.sub(r"(?m)^(\S.*)\n( {4})", r"\1\n\n\2", fenced), ""] if fenced else []


# -- classes ----------------------------------------------------------------------------------------------------------

TOLD_ONCE = ("Value", "ServiceClient", "TinkexError")
"""Classes whose members are not repeated in the classes below them."""


def _class(item: Item, name: str) -> list[str]:
    members = _members(item)
    fields = [member for member in members.values() if _is_field(member)]
    is_record = any(word in _header(item) for word in ("NamedTuple", "@dataclass")) or "Value" in _ancestors(item)
    init = members.get("__init__")
    lines = [f"## `{name}`", "", *_class_signature(item, name, init, fields if is_record else []), *_bases(item)]
    lines += _prose(item)
    # A record's signature says all about fields that have no sentence of their own.
    is_told = is_record and (init is None or "@dataclass" in _header(item))
    if fields and (not is_told or any(member.docstring for member in fields)):
        lines += _table("field", fields)
    if any("Enum" in str(base) for base in item.bases):
        words = [member for member in item.members.values() if member.is_attribute and _is_public(member.name)]
        lines += ["| member | value |", "|---|---|", *(f"| `{word.name}` | `{word.value}` |" for word in words), ""]
    properties = [member for member in members.values() if "property" in member.labels and _is_public(member.name)]
    if properties:
        lines += _table("property", properties)
    for key, member in members.items():
        if member.is_function and _is_public(key) and not (key.endswith("_async") and key[:-6] in members):
            lines += [f"### `{name}.{key}`", "", *_signature(member, key), *_prose(member)]
            if twin := members.get(f"{key}_async"):
                lines += [f"`{key}_async`: the same as a coroutine that gives `{twin.returns}`.", ""]
    return lines


def _members(item: Item) -> dict[str, Item]:
    """Its own, then those of its bases. Fields come first from the base, as constructors take them."""
    bases = [base for base in item.mro() if base.path.startswith("tinkex.")]
    told = {name for base in bases if base.name in TOLD_ONCE for name in (*base.members, *base.inherited_members)}
    told -= {name for name in item.members if not name.startswith("model_")} | {"__init__"}
    bases = [base for base in bases if base.name not in TOLD_ONCE]
    fields = {name: member for base in reversed(bases) for name, member in base.members.items() if _is_field(member)}
    found = fields | dict(item.members)
    for base in bases:
        found |= {name: member for name, member in base.members.items() if name not in found}
    return {name: member for name, member in found.items() if name not in told}


def _ancestors(item: Item) -> set[str]:
    return {base.name for base in item.mro()}


def _bases(item: Item) -> list[str]:
    names = [str(base) for base in item.bases]
    hidden = ("Value", "LazyValue", "ProvenanceSpan", "Handle", "NamedTuple", "Clock")
    shown = [f"`{name}`" for name in names if name not in hidden and _is_public(name.split(".")[-1])]
    return [f"Bases: {', '.join(shown)}.", ""] if shown else []


def _header(item: Item) -> str:
    """The lines of the source from the first decorator to the class's own colon."""
    first = item.decorators[0].lineno if item.decorators else item.lineno
    lines = item.filepath.read_text(encoding="utf-8").splitlines()[first - 1 : item.lineno + 4]
    return "\n".join(lines).split(":\n")[0]


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _is_field(member: Item) -> bool:
    if not member.is_attribute or "property" in member.labels or "init=False" in str(member.value):
        return False
    return _is_public(member.name) and member.annotation is not None


def _table(kind: str, members: list[Item]) -> list[str]:
    """A column that would be empty is left out."""
    rows = [
        [
            _code(member.name),
            _code(str(member.annotation)),
            _code(_default(member)) if kind == "field" else "",
            " ".join(member.docstring.value.split()).replace("|", "\\|") if member.docstring else "",
        ]
        for member in members
    ]
    heads = [kind, "type", "default", "what it is"]
    kept = [column for column in range(4) if any(row[column] for row in rows)]
    lines = [
        [heads[column] for column in kept],
        ["---"] * len(kept),
        *([row[column] for column in kept] for row in rows),
    ]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _default(member: Item) -> str:
    text = "" if member.value is None else str(member.value)
    if re.match(r"state\.\w+$", text):
        return ""  # an attribute that shows a part of an object's inner state
    if made := re.match(r"field\(default_factory=(\w+)[,)]", text):
        return {"list": "[]", "dict": "{}", "tuple": "()", "lambda": "…"}.get(made[1], f"{made[1]}()")
    plain = re.match(r"field\(default=([^,)]+)", text)
    return plain[1] if plain else text


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


# -- signatures -------------------------------------------------------------------------------------------------------


def _class_signature(item: Item, name: str, init: Item | None, fields: list[Item]) -> list[str]:
    takes = list(_parameters(init)) if init is not None else [_field(member) for member in fields]
    if init is None and takes and "Value" in _ancestors(item) and "kw_only=False" not in _header(item):
        takes.insert(0, "*")
    return _block(_fitted(f"class {name}", takes, "") if takes else f"class {name}")


def _signature(item: Item, name: str) -> list[str]:
    word = "async def" if "async" in item.labels else "def"
    decorators = [f"@{word}" for word in ("classmethod", "staticmethod") if word in item.labels]
    returns = f" -> {item.returns}" if item.returns is not None else ""
    return _block(*decorators, _fitted(f"{word} {name}", list(_parameters(item)), returns))


def _block(*lines: str) -> list[str]:
    return ["```python", *lines, "```", ""]


def _fitted(head: str, takes: list[str], returns: str) -> str:
    """On one line if it fits, else one argument on each."""
    line = f"{head}({', '.join(takes)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{head}(", *(f"    {entry}," for entry in takes), f"){returns}"])


def _parameters(item: Item) -> Iterator[str]:
    is_after_star = False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        kind = parameter.kind.value
        if kind == "keyword-only" and not is_after_star:
            yield "*"
        is_after_star = is_after_star or kind in ("keyword-only", "variadic positional")
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = f"{star}{parameter.name}" + (f": {parameter.annotation}" if parameter.annotation is not None else "")
        default = (
            "…"
            if str(parameter.default) in ("ABSENT", "dict()") or "lambda" in str(parameter.default)
            else parameter.default
        )
        yield text + (f" = {default}" if parameter.default is not None and not star else "")


def _field(member: Item) -> str:
    default = _default(member)
    return f"{member.name}: {member.annotation}" + (f" = {default}" if default else "")


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    is_check = parser.parse_args(argv).check
    wanted = pages()
    present = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")}
    stale = sorted({name for name in wanted | present if wanted.get(name) != present.get(name)})
    if is_check:
        if stale:
            print(f"Not up to date: {', '.join(stale)}. Run python scripts/make_reference.py", file=sys.stderr)
        return 1 if stale else 0
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (REFERENCE / name).write_text(wanted[name], encoding="utf-8")
        else:
            (REFERENCE / name).unlink()
        print(f"{'wrote' if name in wanted else 'removed'} docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
