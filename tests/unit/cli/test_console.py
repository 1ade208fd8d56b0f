"""`tinkex console`: the address, the browser, and the way of the key."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tinkex.testing import Answer, ScriptedService

from .conftest import KEY, OWNER_KEY, Tinkex

WITH_KEYS = '{"version": "testing", "tenant": "a", "is_ready": true, "uses_keys": true}'
BROWSER = """\
import sys, urllib.request
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args): return None
opened = sys.argv[1]
try: urllib.request.build_opener(Stay).open(opened, timeout=10); went = opened
except urllib.error.HTTPError as answer: went = answer.headers["location"] if answer.code == 302 else opened
open(sys.argv[0] + ".log", "w").write(f"{opened}\\n{went}\\n")
"""


class Browser:
    """A program that goes where it is sent, once, and writes down where that was."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "browser.py"
        self.file.write_text(BROWSER)
        self.command = f"{sys.executable} {self.file} %s"

    @property
    def went(self) -> tuple[str, str]:
        """What stood on its command line, and where it ended."""
        opened, went = Path(f"{self.file}.log").read_text().splitlines()
        return opened, went

    @property
    def is_used(self) -> bool:
        return Path(f"{self.file}.log").exists()


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Browser:
    made = Browser(tmp_path)
    import webbrowser

    monkeypatch.setenv("BROWSER", made.command)
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # it reads the variable once in a process
    return made


def test_a_console_without_keys_is_opened_directly(run: Tinkex, service: ScriptedService, browser: Browser) -> None:
    ran = run("console")
    assert (ran.code, ran.out, ran.err) == (0, f"{service.url}/\n", "")
    assert browser.went == (f"{service.url}/", f"{service.url}/")


def test_no_browser_only_prints_the_address(run: Tinkex, service: ScriptedService, browser: Browser) -> None:
    assert run("console", "--no-browser").out == f"{service.url}/\n"
    assert run("console", "-o", "json").json == {"url": f"{service.url}/", "needs_key": False}
    assert not browser.is_used


def test_the_key_reaches_the_browser_and_neither_the_screen_nor_its_command_line(
    run: Tinkex, service: ScriptedService, browser: Browser
) -> None:
    service.script.on("service_state", do=Answer(WITH_KEYS))
    ran = run("console")
    assert (ran.code, ran.out, ran.err) == (0, f"{service.url}/\n", "")
    opened, went = browser.went
    assert went == f"{service.url}/#key={KEY}"
    assert KEY not in opened and opened.startswith("http://127.0.0.1:")
    assert run("console", "--no-browser").err == "The page asks for your API key.\n"


def test_the_key_can_be_fetched_once_only(run: Tinkex, service: ScriptedService, browser: Browser) -> None:
    service.script.on("service_state", do=Answer(WITH_KEYS))
    run("console")
    port = int(browser.went[0].split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1).close()


def test_the_service_of_the_home_is_opened_with_its_owners_key_and_never_gets_the_hosted_one(
    run: Tinkex, at_home: ScriptedService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-hosted-service")
    at_home.script.on("service_state", do=Answer(WITH_KEYS))
    ran = run("console")
    assert (ran.code, ran.out, ran.err) == (0, f"{at_home.url}/\n", "")
    assert browser.went[1] == f"{at_home.url}/#key={OWNER_KEY}"
    assert not any("tml-of-the-hosted-service" in str(request.headers) for request in at_home.requests)


def test_a_key_that_the_service_rejects_is_not_passed_on(
    run: Tinkex, service: ScriptedService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-another-key")
    ran = run("console")
    assert (ran.code, ran.out) == (0, f"{service.url}/\n")
    assert ran.err == "The service rejected the key in TINKER_API_KEY. The page asks for one.\n"
    assert browser.went == (f"{service.url}/", f"{service.url}/")


def test_without_a_service_it_says_how_to_start_one(run: Tinkex, browser: Browser, environment: Path) -> None:
    ran = run("console")
    assert ran.code == 1 and not browser.is_used
    assert ran.err == (
        f"tinkex: No service runs on this machine's data folder ({environment}/.local/share/tinkex). Start one with "
        "`tinkex serve`, or set TINKER_BASE_URL to its address.\n"
    )


def test_another_vendors_service_has_no_console(run: Tinkex, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedService(api_key=KEY, missing={"service_state"}) as hosted:
        monkeypatch.setenv("TINKER_BASE_URL", hosted.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        ran = run("console")
    assert ran.code == 1 and not browser.is_used
    assert "has no console" in ran.err and "tinkex serve" in ran.err


def test_without_a_browser_the_address_is_printed(
    run: Tinkex, service: ScriptedService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    import webbrowser

    monkeypatch.setattr(webbrowser, "_tryorder", [])
    ran = run("console")
    assert (ran.code, ran.out) == (0, f"{service.url}/\n")
    assert "Open the address yourself" in ran.err
