"""The console's files over plain HTTP: who gets which response, and what they must not contain."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.unit.server.conftest import Served
from tinkex.server.routes.console import FOLDER, MEDIA_TYPES

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(file.name for file in FOLDER.iterdir() if file.name != "index.html" and not file.name.startswith("__"))


def test_a_browser_gets_the_page_and_a_program_gets_json(served: Served) -> None:
    page, facts = served.ask("GET", "/", headers=HTML), served.ask("GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and b"<main" in page.content
    assert facts.json["api"] == f"{served.base_url}/api/v1"
    assert page.headers["vary"] == facts.headers["vary"] == "Accept"
    assert served.ask("HEAD", "/", headers=HTML).headers["etag"] == page.headers["etag"]


def test_every_file_has_its_content_type_and_is_cached(served: Served) -> None:
    assert len(FILES) > 10
    for name in FILES:
        first = served.ask("GET", f"/console/{name}")
        assert first.status == 200 and first.content == (FOLDER / name).read_bytes()
        assert first.headers["content-type"] == MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
        assert first.headers["x-content-type-options"] == "nosniff"
    for tag in (first.headers["etag"], f"W/{first.headers['etag']}", f'"other", {first.headers["etag"]}'):
        again = served.ask("GET", f"/console/{name}", headers={"if-none-match": tag})
        assert (again.status, again.content) == (304, b"")
    assert served.ask("GET", f"/console/{name}", headers={"if-none-match": '"other"'}).status == 200


def test_the_policy_allows_our_own_files_and_nothing_else(served: Served) -> None:
    for answer in (served.ask("GET", "/", headers=HTML), served.ask("GET", "/console/main.js")):
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {name: policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == dict.fromkeys(
            ("script-src", "style-src", "connect-src", "img-src"), "'self'"
        )
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert not re.search(r"unsafe|\*|https?:|data:", str(policy))


def test_no_name_leads_out_of_the_folder(served: Served) -> None:
    elsewhere = ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "a/../main.js")
    for name in (*elsewhere, "nothing.js", "index.html", "%00", "."):
        answer = served.ask("GET", f"/console/{name}")
        assert answer.status == 404 and b"import" not in answer.content, name


def test_the_console_files_need_no_api_key_and_its_data_does(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=("tml-alice-0123456789",))
    assert served.ask("GET", "/", headers=HTML).status == 200
    assert served.ask("GET", "/console/main.js").status == 200
    assert served.ask("GET", "training_runs").status == 401


@pytest.mark.parametrize("prefix", ["", "/lab/tinkex"])
def test_the_address_without_its_last_slash_leads_to_the_page(
    serve: Callable[..., Served],
    prefix: str,
) -> None:
    served = serve(public_url=f"https://example.org{prefix}/")
    assert served.ask("GET", f"{prefix}/console").headers["location"] == "./"
    assert served.ask("GET", f"{prefix}/console/").headers["location"] == "../"
    if prefix:
        answer = served.ask("GET", prefix, headers=HTML)
        assert (answer.status, answer.headers["location"]) == (307, f"{prefix}/")
        assert served.ask("GET", f"{prefix}/console/main.js").status == 200


def test_an_archive_address_is_in_the_body_where_a_redirect_cannot_be_read(served: Served) -> None:
    run = served.training_run()
    served.checkpoint(run)
    asked = f"training_runs/{run.id}/checkpoints/weights/0001/archive"
    told = served.ask("GET", f"{asked}?redirect=false")
    assert told.status == 200 and told.headers["cache-control"] == "no-store"
    assert told.json["url"] == served.ask("GET", asked).headers["location"]


def test_the_page_makes_no_html_from_text_and_names_no_other_host() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML|srcdoc"
        r"|createContextualFragment|javascript:"
    )
    for file in FOLDER.iterdir():
        if file.suffix in MEDIA_TYPES:
            text = file.read_text()
            assert not forbidden.search(text), file.name
            hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text.replace("tinker://", "")))
            assert hosts <= {"www.w3.org"}, (file.name, hosts)


def test_the_files_of_the_console_stay_small() -> None:
    assert all(len(file.read_text().splitlines()) <= 300 for file in FOLDER.iterdir() if file.suffix in MEDIA_TYPES)
