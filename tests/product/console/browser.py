"""A real Chromium, driven through chromedriver by W3C WebDriver over plain HTTP: no package is needed for it.

Debian's `chromium` and `chromium-driver` are used if they are there and fetched with apt-get if they can be.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "/usr/lib/chromium-browser/chromedriver", "/usr/lib/chromium/chromedriver")
INSTALL_S = 420
NO_BROWSER = "TINKEX_NO_BROWSER"
"""Set it where no browser can be had: then tests in one are left out instead of failing."""
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Enter": "\ue007", "Tab": "\ue004", "Escape": "\ue00c", "Space": " ", "ArrowLeft": "\ue012", "ArrowUp": "\ue013",
    "ArrowRight": "\ue014", "ArrowDown": "\ue015", "Home": "\ue011", "End": "\ue010", "Shift": "\ue008",
    "Control": "\ue009",
}  # fmt: skip


@functools.cache
def programs() -> tuple[str, str]:
    """Where Chromium and its driver are; installed if they can be."""
    reason = None if _found() else _install()
    if (found := _found()) is not None:
        return found
    if os.environ.get(NO_BROWSER):
        pytest.skip(f"{NO_BROWSER} is set, and no browser can be installed: {reason}")
    raise AssertionError(
        f"The console is tested in a browser, and there is none: {reason} Install chromium and chromium-driver, "
        f"or set {NO_BROWSER}=1 to leave these tests out."
    )


def _found() -> tuple[str, str] | None:
    browser, driver = (next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, DRIVERS))
    return (browser, driver) if browser and driver else None


def _install() -> str:
    """Why there is still none, if there is."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "only root can install one here, with apt-get."
    environment, end = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, time.monotonic() + INSTALL_S
    said = ""
    for words in (["update", "-qq"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
        left = max(1.0, end - time.monotonic())
        try:
            done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return f"apt-get took longer than {INSTALL_S} s."
        said = done.stderr.strip()[-300:] or said
    return f"apt-get said {said!r}."


class Browser:
    """One window. Elements are found by CSS; what is not there yet is waited for."""

    def __init__(self, folder: Path) -> None:
        browser, driver = programs()
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        with (folder / "driver.log").open("wb") as log:
            self._driver = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=log)
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(rb"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError(f"{driver} did not start.")
        self._port, self._session, self._size = int(found[1]), "", (1200, 800, False)
        options = {
            "binary": browser,
            "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"],
            "prefs": {"download.default_directory": str(self.downloads), "download.prompt_for_download": False},
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    # ── WebDriver

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=90)
        try:
            content = json.dumps({} if body is None else body) if method == "POST" else None
            connection.request(method, self._session + path, content, {"content-type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value and "stacktrace" in value:
            raise BrowserError(f"{value['error']}: {value['message']}")
        return value

    def cdp(self, command: str, **parameters: object) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str, *arguments: object) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def open(self, url: str) -> None:
        """In a new tab: what the last page kept in its session is gone."""
        fresh = self._ask("POST", "/window/new", {"type": "tab"})["handle"]
        for handle in self._ask("GET", "/window/handles"):
            if handle != fresh:
                self._ask("POST", "/window", {"handle": handle})
                self._ask("DELETE", "/window")
        self._ask("POST", "/window", {"handle": fresh})
        self.size(*self._size)
        self.go(url)

    def go(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    # ── What is on the page

    def find(self, css: str, text: str | None = None, *, wait_s: float = 20) -> dict[str, str]:
        """The first visible element that matches and has the text."""
        script = """
            const [css, text] = arguments;
            return [...document.querySelectorAll(css)].find((element) =>
                element.checkVisibility() && (text === null || element.textContent.includes(text))) ?? null;
        """
        found: dict[str, str] = self.wait(
            lambda: self.run(script, css, text), f"{css} with {text!r}" if text else css, wait_s
        )
        return found

    def texts(self, css: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())"
            ".map((e) => e.textContent)",
            css,
        )
        return found

    def text(self, css: str = "main") -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def wait(self, look: Callable[[], Any], what: str, wait_s: float = 20) -> Any:
        end = time.monotonic() + wait_s
        while not (found := look()):
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not come in {wait_s} s. The page says:\n{self.text('body')[:2000]}")
            time.sleep(0.05)
        return found

    def wait_text(self, text: str, css: str = "main", wait_s: float = 20) -> None:
        self.wait(lambda: text in self.text(css), f"the text {text!r} in {css}", wait_s)

    # ── What a person does

    def click(self, css: str, text: str | None = None) -> None:
        found = self.find(css, text)
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        self._ask("POST", f"/element/{found[ELEMENT]}/click")

    def enter(self, css: str, text: str) -> None:
        """In place of what is there."""
        found = self.find(css)
        self._ask("POST", f"/element/{found[ELEMENT]}/clear")
        self._ask("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def press(self, *names: str) -> None:
        """Keys one after the other; `Shift+Tab` holds the first."""
        steps: list[dict[str, str]] = []
        for name in names:
            *held, last = [KEYS.get(part, part) for part in name.split("+")]
            steps += [{"type": "keyDown", "value": key} for key in (*held, last)]
            steps += [{"type": "keyUp", "value": key} for key in (last, *reversed(held))]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def hover(self, element: dict[str, str], x: int = 0, y: int = 0) -> None:
        """The middle of the element, or beside it."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        move = {"type": "pointerMove", "duration": 0, "origin": element, "x": x, "y": y}
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def focused(self) -> str:
        """What has the focus, as a reader would name it."""
        return str(
            self.run(
                "const e = document.activeElement;"
                "return e.getAttribute('aria-label') ?? (e.labels?.[0] ?? e).textContent.trim()"
            )
        )

    # ── How it is looked at

    def size(self, width: int, height: int, is_dark: bool = False) -> None:
        self._size = (width, height, is_dark)
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path, *, is_whole: bool = True) -> None:
        """The whole page as a PNG."""
        if is_whole:
            width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
            before = self.run("return innerHeight")
            self.cdp(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            time.sleep(0.1)  # plots are drawn anew
        content = self.cdp("Page.captureScreenshot", format="png")["data"]
        if is_whole:
            self.cdp(
                "Emulation.setDeviceMetricsOverride", width=width, height=before, deviceScaleFactor=1, mobile=False
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(content))

    def complaints(self) -> list[str]:
        """What the browser logged since it was last asked: errors, refused requests, breaches of the policy."""
        logged = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in logged if entry["level"] in ("SEVERE", "WARNING")]

    def asked_hosts(self) -> set[str]:
        """Every host that this page has loaded something from."""
        found = self.run(
            "return performance.getEntries().filter((e) => e.name.includes('://')).map((e) => new URL(e.name).host)"
        )
        return set(found)

    def close(self) -> None:
        try:
            if self._session:
                self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(20)
            if self._driver.stdout is not None:
                self._driver.stdout.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BrowserError(Exception):
    pass
