"""`tinkex console`: opens the service's own pages in the browser.

A key travels to the browser without standing on anybody's command line or screen: the browser is sent to a port of
this command, which answers once, with a redirect to the console and the key behind `#`, a part that no server gets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tinkex.terminal import output

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.main import Words
    from tinkex.settings import Config

WAIT_S = 20.0
"""How long a browser may take to come for the key: a cold start of one takes seconds."""
START = "Start one with `tinkex serve`, or set TINKER_BASE_URL to where one runs."
MORE = """\
The console shows runs with their loss while they train, checkpoints, the queue and what failed, and
has a playground. Without TINKER_BASE_URL or --base-url, that of `tinkex serve` on this machine is
opened. If the service has keys, the one in TINKER_API_KEY is handed to the browser; it is never
printed."""


class Place(NamedTuple):
    """Where the console is, and the key to hand over, if any."""

    url: str
    key: str | None
    remark: str = ""


def add(words: Words, about: str) -> None:
    made = words.add(
        "console", console, about, "tinkex console", "tinkex console --no-browser",
        "tinkex console --base-url https://tinkex.example.org", more=MORE,
    )  # fmt: skip
    made.add_argument("--no-browser", action="store_true", help="only print the address; the page asks for the key")


def console(args: argparse.Namespace) -> int:
    place = find(args)
    if args.output == "json":
        output.write_json({"url": place.url, "needs_key": place.key is not None or bool(place.remark)})
        return 0
    print(place.url)
    if args.no_browser:
        if place.key is not None or place.remark:
            output.remark("The page asks for your API key.")
        return 0
    is_open = _open(place.url) if place.key is None else open_with_key(place.url, place.key)
    if not is_open:
        output.remark("No browser could be started here. Open the address yourself.")
    elif place.remark:
        output.remark(place.remark)
    return 0


def find(args: argparse.Namespace) -> Place:
    """The console of the service that settings name. Raises, with what to do, if no service of ours answers there."""
    from tinkex.errors import APIConnectionError, APIStatusError, NotFoundError, TinkexError

    config, is_named = _config(args)
    url = f"{config.base_url}/"
    try:
        uses_keys = _state_of(config)
    except APIConnectionError:
        raise TinkexError(f"No service answers at {config.base_url}. {START}") from None
    except NotFoundError:
        raise TinkexError(
            f"The service at {config.base_url} has no console: it is not a tinkex service. {START}"
        ) from None
    except APIStatusError as problem:
        from tinkex import settings

        if problem.status_code == 401 and settings.is_loopback(config.base_url):
            return Place(
                url, None, "The service wants a key, and TINKER_API_KEY is none of its. The page asks for one."
            )
        raise
    return Place(url, config.api_key if uses_keys and is_named else None)


def _config(args: argparse.Namespace) -> tuple[Config, bool]:
    """Settings, and whether they name a service. If not, ours on this machine is meant: the hosted one has no console.

    Then the key in the environment is the hosted service's, which nothing that listens here may be given.
    """
    from tinkex import settings
    from tinkex.cli.connect import config_for

    if settings.sources(base_url=args.base_url)["base_url"] != "default":
        return config_for(args), True
    address = f"http://127.0.0.1:{settings.resolve_serve().port}"
    return settings.resolve(base_url=address, api_key=args.api_key or settings.KEYLESS), args.api_key is not None


def _state_of(config: Config) -> bool:
    """Whether the service uses keys. Asked once: somebody waits for a browser."""
    from tinkex.client._runtime.session import Session
    from tinkex.client.rest import RestClient

    return RestClient(Session(replace(config, max_retries=1))).get_service_state().result().uses_keys


def _open(url: str) -> bool:
    import webbrowser

    return webbrowser.open(url)


def open_with_key(url: str, key: str) -> bool:
    """Open the page with the key behind `#`; the browser's command line shows only a port and a word for one use."""
    import secrets
    import socketserver
    import threading
    from http.server import BaseHTTPRequestHandler
    from urllib.parse import quote

    word = f"/{secrets.token_urlsafe(16)}"
    is_taken, is_fetched = threading.Lock(), threading.Event()

    class Once(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            if self.path != word or not is_taken.acquire(blocking=False):
                self.send_error(404)
                return
            self.send_response(302)
            self.send_header("Location", f"{url}#key={quote(key, safe='')}")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", "0")
            self.end_headers()
            is_fetched.set()

        def log_message(self, *args: object) -> None:
            pass

    # Not HTTPServer: that one looks up this machine's name, which may take seconds. Threads, because browsers open
    # connections ahead and say nothing on them.
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Once) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), name="tinkex-console", daemon=True).start()
        try:
            if not _open(f"http://127.0.0.1:{server.server_address[1]}{word}"):
                return False
            if not is_fetched.wait(WAIT_S):
                output.remark("The browser did not come for the key; the page asks for it.")
                return _open(url)
            return True
        finally:
            server.shutdown()
