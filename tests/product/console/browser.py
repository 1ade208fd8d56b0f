"""A real Chromium, driven by Playwright. `make prepare` finds or installs Chromium; nothing is downloaded here.

Playwright's coroutines run on a loop thread, because its blocking API leaves a running loop in the thread that uses it:
every later `asyncio.run` and every blocking call of tinkex in the same process would be rejected.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
from playwright.async_api import (
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Download,
    ElementHandle,
    Page,
    Playwright,
    Route,
    async_playwright,
)
from playwright.async_api import Error as BrowserError
from playwright.async_api import TimeoutError as BrowserTimeout

from tests import prepare

T = TypeVar("T")
CALL_S = 90
FLAGS = [
    "--no-sandbox",  # Chromium does not start as root with it
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

__all__ = ["Browser", "BrowserError"]


def chromium() -> str:
    """Return the path of Chromium. Without one, skip these tests, or fail them in CI."""
    path = prepare.chromium()
    if path is None:
        sentence = "The console is tested in Chromium, and there is none: run `make prepare` as root, or install it."
        if prepare.is_ci():
            pytest.fail(sentence)
        pytest.skip(sentence)
    return path


class Browser:
    """One window. Elements are found by CSS, and `find` waits for those that are not there yet."""

    def __init__(self, folder: Path) -> None:
        executable = chromium()
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        self._complaints: list[str] = []
        self._size = (1200, 800, False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        self._playwright, self._context = self._do(self._launch(executable, folder / "profile"))
        self._page = self._context.pages[0]

    async def _launch(self, executable: str, profile: Path) -> tuple[Playwright, BrowserContext]:
        playwright = await async_playwright().start()
        context = await playwright.chromium.launch_persistent_context(
            profile, executable_path=executable, headless=True, args=FLAGS, accept_downloads=True
        )
        context.on("page", self._listen)
        return playwright, context

    def _listen(self, page: Page) -> None:
        page.on("console", self._note)
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("download", self._keep)
        page.on("dialog", self._dismiss)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._complaints.append(f"{message.location.get('url', '')} {message.text}")

    async def _dismiss(self, dialog: Dialog) -> None:
        """A page never opens one: its questions are elements."""
        self._complaints.append(f"a dialog: {dialog.message}")
        await dialog.dismiss()

    async def _keep(self, download: Download) -> None:
        partial = self.downloads / f"{download.suggested_filename}.partial"
        await download.save_as(partial)
        partial.rename(self.downloads / download.suggested_filename)  # tests wait for the name, then read the file

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop thread and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function in the page. It sees `arguments`, and what it returns comes back."""
        end = time.monotonic() + CALL_S
        while True:
            try:
                return self._do(self._page.evaluate(_function(script), list(arguments)))
            except BrowserError as error:
                # The page went on to another address meanwhile (sign-in, sign-out, another key), perhaps more than
                # once, and its load state may still be the old page's: ask the new page until one stays.
                if "Execution context was destroyed" not in str(error) or time.monotonic() > end:
                    raise

    def open(self, url: str) -> None:
        """Open the address in a new tab, so that the last page's session storage is gone."""
        fresh = self._do(self._context.new_page())
        for page in self._context.pages:
            if page is not fresh:
                self._do(page.close())
        self._page = fresh
        self.size(*self._size)
        self.go(url)

    def go(self, url: str) -> None:
        self._do(self._page.goto(url))

    def offline(self, is_offline: bool) -> None:
        """Cut the page off from the network, or connect it again."""
        self._do(self._context.set_offline(is_offline))

    def answer(self, pattern: str, content: bytes, content_type: str = "application/json", status: int = 200) -> None:
        """Answer the page's requests to addresses of this form, in place of the service, until `answer_no_more`."""

        async def fulfill(route: Route) -> None:
            await route.fulfill(status=status, content_type=content_type, body=content)

        self._do(self._context.route(pattern, fulfill))

    def delay(self, pattern: str, delay_s: float) -> None:
        """Let the page's requests to addresses of this form wait, until `answer_no_more`."""

        async def wait(route: Route) -> None:
            await asyncio.sleep(delay_s)
            await route.continue_()

        self._do(self._context.route(pattern, wait))

    def answer_no_more(self) -> None:
        self._do(self._context.unroute_all())

    # ── What is on the page

    def find(self, css: str, text: str | None = None, *, wait_s: float = 20) -> ElementHandle:
        """Return the first visible element that matches and has the text."""
        elements = self._page.locator(css).filter(visible=True)
        if text is not None:
            elements = elements.filter(has_text=re.compile(re.escape(text)))  # a plain string would ignore case
        try:
            return self._do(elements.first.element_handle(timeout=wait_s * 1000))
        except BrowserTimeout:
            raise self._missing(f"{css} with {text!r}" if text else css, wait_s) from None

    def texts(self, css: str) -> list[str]:
        texts: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())"
            ".map((e) => e.textContent)",
            css,
        )
        return texts

    def text(self, css: str = "main") -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def wait(self, look: Callable[[], Any], what: str, wait_s: float = 20) -> Any:
        """Call `look` until it returns something true, and return that."""
        end = time.monotonic() + wait_s
        while not (value := look()):
            if time.monotonic() > end:
                raise self._missing(what, wait_s)
            time.sleep(0.05)
        return value

    def wait_text(self, text: str, css: str = "main", wait_s: float = 20) -> None:
        self.wait(lambda: text in self.text(css), f"the text {text!r} in {css}", wait_s)

    def _missing(self, what: str, wait_s: float) -> AssertionError:
        return AssertionError(f"{what} did not come in {wait_s} s. The page says:\n{self.text('body')[:2000]}")

    # ── What a person does

    def click(self, css: str, text: str | None = None) -> None:
        self._do(self.find(css, text).click())

    def enter(self, css: str, text: str) -> None:
        """Type the text in place of what is in the field."""
        field = self.find(css)
        self._do(field.fill(""))
        self._do(field.focus())
        self._do(self._page.keyboard.type(text))

    def press(self, *names: str) -> None:
        """Press keys one after the other; `Shift+Tab` holds the first."""
        for name in names:
            self._do(self._page.keyboard.press(name))

    def hover(self, element: ElementHandle) -> None:
        """Move the mouse to the middle of the element."""
        self._do(element.hover())

    def focused(self) -> str:
        """Return the accessible name of the element that has the focus."""
        return str(
            self.run(
                "const e = document.activeElement;"
                "return e.getAttribute('aria-label') ?? (e.labels?.[0] ?? e).textContent.trim()"
            )
        )

    # ── How it is looked at

    def size(self, width: int, height: int, is_dark: bool = False) -> None:
        self._size = (width, height, is_dark)
        self._do(self._page.set_viewport_size({"width": width, "height": height}))
        self._do(self._page.emulate_media(color_scheme="dark" if is_dark else "light"))

    def picture(self, file: Path, *, is_whole: bool = True) -> None:
        """Save the whole page, or what is in view, as a PNG."""
        self._do(self._page.screenshot(path=file, full_page=is_whole))

    def complaints(self) -> list[str]:
        """Return the errors and warnings that the browser logged since the last call."""
        self.run("return 0")  # what was logged before this call has arrived when it returns
        complaints, self._complaints[:] = list(self._complaints), []
        return complaints

    def asked_hosts(self) -> set[str]:
        """Return every host that this page has loaded something from."""
        return set(
            self.run(
                "return performance.getEntries().filter((e) => e.name.includes('://')).map((e) => new URL(e.name).host)"
            )
        )

    def close(self) -> None:
        try:
            self._do(self._context.close())
            self._do(self._playwright.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)
            self._loop.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _function(script: str) -> str:
    return f"(given) => (function () {{ {script} }}).apply(null, given)"
