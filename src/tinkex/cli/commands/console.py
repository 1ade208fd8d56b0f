"""`tinkex console`: opens the service's web console in the browser.

The key reaches the browser without appearing on a command line or on the screen: the browser opens a port of this
command, which responds once, with a redirect to the console and the key after `#`, a part that no server receives.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import tinkex
from tinkex.cli.connect import config_for, locate_home, patient_config
from tinkex.cli.parser import CommandParser
from tinkex.errors import APIConnectionError, APIStatusError, NotFoundError, TinkexError
from tinkex.terminal import output

WAIT_S = 20.0
"""How long a browser may take to fetch the key: starting one takes seconds."""
START = "Start one with `tinkex serve`, or set TINKER_BASE_URL to its address."
MORE = """\
The console shows runs with their loss while they train, checkpoints, the queue and errors, and has
a playground. Without TINKER_BASE_URL or --base-url, it opens the console of the service that runs
on this machine. If the service uses keys, yours is passed to the browser; it is never printed."""


class ConsoleAddress(NamedTuple):
    """The address of a console, and the key to pass to the browser, if any."""

    url: str
    key: str | None
    remark: str = ""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "console", console, about, "tinkex console", "tinkex console --no-browser",
        "tinkex console --base-url https://tinkex.example.org", more=MORE,
    )  # fmt: skip
    command.add_argument("--no-browser", action="store_true", help="only print the address; the page asks for the key")


def console(args: argparse.Namespace) -> None:
    address = find(args)
    needs_key = address.key is not None or bool(address.remark)
    if args.output == "json":
        output.write_json({"url": address.url, "needs_key": needs_key})
        return
    print(address.url)
    if args.no_browser:
        if needs_key:
            output.remark("The page asks for your API key.")
        return
    is_open = _open(address.url) if address.key is None else open_with_key(address.url, address.key)
    if not is_open:
        output.remark("No browser could be started. Open the address yourself.")
    elif address.remark:
        output.remark(address.remark)


def find(args: argparse.Namespace) -> ConsoleAddress:
    """Return the console of the service in the settings. Raises, with what to do, if no tinkex service responds."""
    config = _config(args)
    url = f"{config.base_url}/"
    try:
        quick = replace(config, max_retries=1)  # the user waits for a browser
        uses_keys = tinkex.RestClient(config=quick).get_service_state().result().uses_keys
    except APIConnectionError:
        raise TinkexError(f"No service responds at {config.base_url}. {START}") from None
    except NotFoundError:
        raise TinkexError(
            f"The service at {config.base_url} has no console: it is not a tinkex service. {START}"
        ) from None
    except APIStatusError as error:
        if error.status_code == 401 and tinkex.settings.is_loopback(config.base_url):
            return ConsoleAddress(url, None, "The service rejected the key in TINKER_API_KEY. The page asks for one.")
        raise
    return ConsoleAddress(url, config.api_key if uses_keys else None)


def _config(args: argparse.Namespace) -> tinkex.Config:
    """Return the settings of the service that is named, else of the one on this machine: the hosted one has no console.

    In that case the key in the environment belongs to the hosted service and must not be sent to a local program.
    """
    settings = tinkex.settings
    if settings.sources(base_url=args.base_url)["base_url"] != "default":
        return config_for(args)
    if (home := locate_home()) is None:
        raise TinkexError(f"No service runs on this machine's data folder ({settings.home()}). {START}")
    return patient_config(home)


def _open(url: str) -> bool:
    import webbrowser

    return webbrowser.open(url)


def open_with_key(url: str, key: str) -> bool:
    """Open the page with the key after `#`; the browser's command line shows only a port and a one-time path."""
    import secrets
    import socketserver
    import threading
    from http.server import BaseHTTPRequestHandler
    from urllib.parse import quote

    one_time_path = f"/{secrets.token_urlsafe(16)}"
    is_taken, is_fetched = threading.Lock(), threading.Event()

    class Once(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            if self.path != one_time_path or not is_taken.acquire(blocking=False):
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

    # Not HTTPServer: it looks up this machine's name, which may take seconds. Threads, because browsers open
    # connections in advance and send nothing on them.
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Once) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), name="tinkex-console", daemon=True).start()
        try:
            if not _open(f"http://127.0.0.1:{server.server_address[1]}{one_time_path}"):
                return False
            if not is_fetched.wait(WAIT_S):
                output.remark("The browser did not fetch the key; the page asks for it.")
                return _open(url)
            return True
        finally:
            server.shutdown()
