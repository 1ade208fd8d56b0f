"""The documents build into a static site with every page and no dead link; a dead one stops the build."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts import make_site
from tests.product.docs.pages import ROOT

LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
"""Elements that a browser loads something for, and the attribute that says what."""


class Page(HTMLParser):
    """What a page loads, links to, and can be linked at."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_site.py", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


@pytest.mark.slow
def test_every_page_of_the_documents_is_in_the_site_and_its_navigation(site: Path, pages: dict[Path, Page]) -> None:
    documents = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in documents if not (site / name).is_file()] == []
    reached, waiting = set[Path](), [site / "index.html"]
    while waiting:
        file = waiting.pop()
        if file not in reached and file in pages:
            reached.add(file)
            waiting += [(file.parent / unquote(urlsplit(link).path)).resolve() for link in pages[file].links]
    assert [name for name in documents if site / name not in reached] == []


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert any(load.endswith("searchtools.js") for load in loads), "a site without search"
    assert [load for load in loads if urlsplit(load).netloc] == []
    styles = [
        text for file in site.rglob("*.css") for text in re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", file.read_text())
    ]
    assert [text for pair in styles for text in pair if "//" in text.replace("http://www.w3.org", "")] == []
    scripts = [file.name for file in site.rglob("*.js") if re.search(r"https?://(cdn|unpkg|fonts)", file.read_text())]
    assert scripts == []


@pytest.mark.slow
def test_every_link_and_anchor_inside_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for file, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                dead.append(f"{file.relative_to(site)}: {link}")
    assert dead == []
    assert sum(len(page.links) for page in pages.values()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "leads nowhere"),
        ("[gone](other.md#never-was)", "never-was"),
        ("a page that is fine, in no part of the navigation", "toctree"),
    ],
)
def test_a_dead_link_or_a_lost_page_stops_the_build(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    is_lost = complaint == "toctree"
    (docs / "index.md").write_text("# Front\n\n[other](other.md)\n", encoding="utf-8")
    (docs / "other.md").write_text(f"# Other\n\n{text}\n", encoding="utf-8")
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    monkeypatch.setattr(make_site, "DOCS", docs)
    monkeypatch.setattr(make_site, "NAVIGATION", {"Part": [] if is_lost else ["other"]})
    monkeypatch.setattr(make_site, "BELOW", {})
    with pytest.raises(SystemExit) as ended:
        make_site.main([str(tmp_path / "site")])
    assert complaint in f"{ended.value}{capfd.readouterr().err}"
