"""Links have a target, and the tests and files that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.product.docs.pages import PAGES, ROOT, named, prose
from tinkex.wire import endpoints

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]*)`")
PACKAGE = ROOT / "src" / "tinkex"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    wrong = []
    for link in LINK.finditer(prose(page)):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = (page.parent / target).resolve() if target else page
        is_there = found.exists() and found.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in {slug(heading) for heading in headings(found)}):
            wrong.append(link[0])
    assert not wrong, f"{named(page)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_test_that_a_link_names_is_in_the_file_it_leads_to(page: Path) -> None:
    wrong = [
        link["text"]
        for link in LINK.finditer(prose(page))
        if link["text"].startswith("test_")
        and not re.search(rf"^def {link['text']}\(", (page.parent / link["target"]).read_text(), re.MULTILINE)
    ]
    assert not wrong, f"{named(page)}: {wrong}"


@pytest.mark.parametrize("page", [page for page in PAGES if "decisions" not in page.parts], ids=named)
def test_files_named_in_prose_exist(page: Path) -> None:
    # A path in backquotes that starts with a folder of ours and is no call of the API; decisions speak of their day.
    folders = {path.name for place in (ROOT, PACKAGE) for path in place.iterdir() if path.is_dir()}
    calls = {row.path.removeprefix("/api/v1/") for row in endpoints.ALL}
    wrong = [
        path
        for path in FILE.findall(prose(page))
        if path.split("/")[0] in folders
        and path not in calls
        and not any((place / path).exists() for place in (ROOT, PACKAGE, page.parent))
    ]
    assert not wrong, f"{named(page)}: {wrong}"


def test_every_page_of_docs_is_reached_from_the_readme_and_the_front_page() -> None:
    waiting, seen = [ROOT / "README.md", ROOT / "docs" / "index.md"], set[Path]()
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        waiting += [(page.parent / link["target"].partition("#")[0]).resolve() for link in LINK.finditer(prose(page))]
    missing = [named(page) for page in sorted((ROOT / "docs").rglob("*.md")) if page not in seen]
    assert not missing


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
