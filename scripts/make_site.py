"""Builds the documents into a static site: `python scripts/make_site.py [FOLDER]`, by default `site/`.

The pages are the Markdown files of docs/ as they are, and the pages elsewhere that they link to (benchmarks,
ARCHITECTURE.md …); source files that they link to become pages too. Any warning ends the build: a link or a heading
that does not exist, a page that is in no part of the navigation. Why Sphinx: docs/decisions/documents.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
STYLE = Path(__file__).with_name("site.css")

NAVIGATION: dict[str, list[str]] = {
    "Start": ["guides/first-fine-tune", "examples"],
    "Guides": [
        "guides/rl-loop",
        "guides/custom-losses",
        "guides/checkpoints-and-export",
        "guides/running-a-service",
        "guides/many-tenants",
        "guides/from-laptop-to-cluster",
        "guides/moving-between-services",
        "guides/migrating-from-tinker",
    ],
    "The client": [
        "service",
        "training",
        "sampling",
        "streaming",
        "rest",
        "futures",
        "types",
        "tokenizers",
        "progress",
        "events",
        "testing",
    ],
    "The service": ["serving", "reliability", "failures", "elsewhere/deploy/README", "console", "cli", "compatibility"],
    "Tables": ["settings", "limits", "errors", "benchmarks"],
    "Reference": ["reference/index"],
    "Coming from tinker": ["as_tinker", "migrating"],
    "The project": [
        "elsewhere/ARCHITECTURE",
        "elsewhere/CONTRIBUTING",
        "decisions/index",
        "requirements",
        "LOG",
        "elsewhere/CHANGELOG",
        "elsewhere/SECURITY",
    ],
}
"""Part → its pages, in the order of the side bar."""
BELOW = {
    "reference/index": "tinkex.*",
    "decisions/index": "*",
    "benchmarks": "elsewhere/benchmarks/results/*",
}
"""Page → the pages that unfold below it."""

LINK = re.compile(r"(?<!\\)(!?\[[^\]]*\]\()(?P<target>[^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SOURCES = {".py": "python", ".toml": "toml", ".ipynb": "json", ".sh": "bash", "": "text", ".txt": "text"}
OPTIONS = {
    "project": "tinkex",
    "html_title": "tinkex",
    "extensions": ["myst_parser"],
    "html_theme": "furo",
    "myst_heading_anchors": 4,
    "myst_linkify_fuzzy_links": False,
    "html_static_path": ["_static"],
    "html_css_files": ["site.css"],
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "pygments_style": "friendly",
    "pygments_dark_style": "github-dark",
    "html_theme_options": {"top_of_page_buttons": [], "footer_icons": []},
    # Blocks such as shell sessions that a lexer cannot read in full are shown all the same.
    "suppress_warnings": ["misc.highlighting_failure"],
}


class Stage:
    """A copy of the pages in which every link stays inside the site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: list[Path] = []
        self._places: dict[Path, Path] = {}

    def fill(self) -> None:
        for file in sorted(DOCS.rglob("*")):
            if file.is_file():
                self._place(file)
        while self._waiting:
            file = self._waiting.pop(0)
            target = self.folder / self._places[file]
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                target.write_text(self._page(file), encoding="utf-8")
            elif target.suffix == ".md":
                target.write_text(_listing(file), encoding="utf-8")
            else:
                shutil.copyfile(file, target)
        (self.folder / "_static").mkdir(exist_ok=True)
        shutil.copyfile(STYLE, self.folder / "_static" / "site.css")
        for page, lines in [("index", self._navigation()), *((page, _toctree([glob])) for page, glob in BELOW.items())]:
            with (self.folder / f"{page}.md").open("a", encoding="utf-8") as file:
                file.write("\n".join(["", *lines, ""]))

    def _place(self, file: Path) -> Path:
        """Where a file of the repository stands in the stage; it is copied once."""
        if file not in self._places:
            if file.is_relative_to(DOCS):
                place = file.relative_to(DOCS)
            else:
                place = Path("elsewhere") / file.relative_to(ROOT)
                if file.suffix != ".md":
                    place = place.with_name(place.name + ".md")
            self._places[file] = place
            self._waiting.append(file)
        return self._places[file]

    def _page(self, file: Path) -> str:
        text = file.read_text(encoding="utf-8")
        parts = FENCE.split(text)
        parts[::2] = [LINK.sub(lambda found: self._link(file, found), part) for part in parts[::2]]
        text = "".join(parts)
        # What lies elsewhere may be reached by a link alone; a page of docs/ must have its place at the side.
        return text if file.is_relative_to(DOCS) else f"---\norphan: true\n---\n\n{text}"

    def _link(self, page: Path, found: re.Match[str]) -> str:
        target, mark, anchor = found["target"].partition("#")
        if not target or ":" in target:
            return found[0]
        file = (page.parent / target).resolve()
        if file.is_dir():
            return f"{found[1]}{self._relative(page, _folder_page(file))}{found[3]}"
        if not file.is_file():
            raise SystemExit(f"{page.relative_to(ROOT)}: {found[0]} leads nowhere.")
        return f"{found[1]}{self._relative(page, file)}{mark}{anchor}{found[3]}"

    def _relative(self, page: Path, file: Path) -> str:
        return Path(os.path.relpath(self._place(file), self._places[page].parent)).as_posix()

    def _navigation(self) -> list[str]:
        lines: list[str] = []
        for part, pages in NAVIGATION.items():
            there = [page for page in pages if (self.folder / f"{page}.md").exists()]
            lines += _toctree(there, f":caption: {part}")
        return lines


def _toctree(pages: list[str], *options: str) -> list[str]:
    return ["", "```{toctree}", ":hidden:", ":glob:", ":titlesonly:", *options, "", *pages, "```"]


def _folder_page(folder: Path) -> Path:
    """A link to a folder leads to its own page, or to the page that tells of it."""
    for name in ("README.md", "index.md"):
        if (folder / name).is_file():
            return folder / name
    told = {"examples": DOCS / "examples.md", "results": DOCS / "benchmarks.md", "benchmarks": DOCS / "benchmarks.md"}
    return told.get(folder.name, DOCS / "index.md")


def _listing(file: Path) -> str:
    name = file.relative_to(ROOT).as_posix()
    kind = SOURCES.get(file.suffix, "text")
    text = file.read_text(encoding="utf-8").rstrip()
    return f"---\norphan: true\n---\n\n# {name}\n\n`````{kind}\n{text}\n`````\n"


def build(folder: Path) -> Iterator[str]:
    """Build the site into `folder`; yields the names of its pages."""
    with tempfile.TemporaryDirectory(prefix="tinkex-site-") as temporary:
        stage = Stage(Path(temporary) / "pages")
        stage.folder.mkdir()
        stage.fill()
        settings = "\n".join(f"{name} = {value!r}" for name, value in OPTIONS.items())
        (stage.folder / "conf.py").write_text(settings, encoding="utf-8")
        site = Sphinx(
            srcdir=stage.folder,
            confdir=stage.folder,
            outdir=folder,
            doctreedir=Path(temporary) / "trees",
            buildername="html",
            status=None,
            warning=sys.stderr,
            freshenv=True,
            warningiserror=True,
        )
        site.build(force_all=True)
        if site.statuscode:
            raise SystemExit("The site was not built: see the warnings above.")
        yield from sorted(site.env.found_docs)
    for leftover in (".buildinfo", "objects.inv"):
        (folder / leftover).unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="where to write (default: site)")
    folder = parser.parse_args(argv).folder.resolve()
    try:
        pages = list(build(folder))
    except SphinxError as problem:
        print(f"The site was not built: {problem}", file=sys.stderr)
        return 1
    print(f"{len(pages)} pages. Open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
