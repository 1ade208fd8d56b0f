"""Serves the console: its page at `/`, its files under `/console/`. They hold no data and need no key."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tinkex.server.http.errors import error_response, not_found

FOLDER: Final = Path(__file__).parents[1] / "console"
PAGE: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The browser itself refuses to turn text into HTML, should the page ever try.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser may cache, but must ask every time: after an update the page must not mix old files with new ones.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file of the console, ready to be sent."""

    content: bytes
    media_type: str
    etag: str


async def page(request: Request) -> Response:
    return _respond(request, (await asyncio.to_thread(console_files))[PAGE], {"vary": "Accept"})


async def console_file(request: Request) -> Response:
    name = request.path_params["name"]
    file = (await asyncio.to_thread(console_files)).get(name)
    if file is None or name == PAGE:
        return error_response(not_found("file", name))
    return _respond(request, file)


async def to_page(request: Request) -> Response:
    """Redirect to the page. The address is relative, because a reverse proxy may have removed a prefix."""
    return RedirectResponse("../" if request.url.path.endswith("/") else "./", headers=HEADERS)


@functools.cache
def console_files() -> Mapping[str, ConsoleFile]:
    """Return all files by name, read once. The name in a request is looked up here and never becomes a path."""
    files = {}
    for file in FOLDER.iterdir():
        if file.suffix in MEDIA_TYPES:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[file.name] = ConsoleFile(content, MEDIA_TYPES[file.suffix], etag)
    return files


def wants_page(request: Request) -> bool:
    """Return whether the client is a browser: browsers accept HTML, programs do not ask for it."""
    return "text/html" in request.headers.get("accept", "")


ROUTES = [
    Route("/console", to_page),
    Route("/console/", to_page),
    Route("/console/{name:path}", console_file),
]


def _respond(request: Request, file: ConsoleFile, extra_headers: Mapping[str, str] = {}) -> Response:
    headers = {**HEADERS, **extra_headers, "etag": file.etag}
    # Proxies that compress mark an ETag as weak; it still identifies this content.
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
