"""Server-sent events, both directions, as the HTML standard defines them (section 9.2, "Server-sent events").

The decoder takes bytes in whatever pieces the network hands over and knows no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tinkex.errors import APIResponseValidationError

MAX_EVENT_BYTES = 1 << 30
"""Of one event, unless the reader sets another limit: that of a client's whole response, `max_response_bytes`. The last
event of a stream has the whole result, and our server allows 8.4 million tokens of 26 bytes in it."""
_PIECE_BYTES = 64
"""What a piece of a line costs in memory beside its bytes."""
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile("\r\n|\r|\n")


class Event(NamedTuple):
    """One event. The fields `id` and `retry`, for readers that reconnect, are passed over: no stream is resumed."""

    event: str
    data: str


class SSEDecoder:
    """Turns the pieces of one stream into events; a piece may end anywhere, even inside a character."""

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0  # of the lines since the last event
        self._is_start = True
        self._after_cr = False
        self._partial: list[bytes] = []  # pieces of the line that has no end yet
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this piece completes. Raises APIResponseValidationError for an event beyond the limit."""
        if not chunk:
            return []
        if self._after_cr and chunk[0] == 0x0A:  # CRLF fell apart between two pieces: one line end, not two
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        events = []
        for line in chunk.splitlines(keepends=True):
            self._partial.append(line)
            self._size_bytes += len(line) + _PIECE_BYTES
            if self._size_bytes > self._limit_bytes:
                raise APIResponseValidationError(
                    message=f"An event of the service's stream has more than {self._limit_bytes:,} bytes. If it is "
                    "right to send so much, raise max_response_bytes."
                )
            if line.endswith((b"\n", b"\r")):
                event = self._line(b"".join(self._partial).rstrip(b"\r\n"))
                self._partial.clear()
                if event is not None:
                    events.append(event)
        return events

    def _line(self, line: bytes) -> Event | None:
        if self._is_start:
            self._is_start = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        # Bytes that are not UTF-8 become U+FFFD: the standard never fails on them.
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        # Anything else is a comment (empty name) or a field for other readers.
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._event or "message", "\n".join(self._data)) if self._data else None
        self._event, self._data, self._size_bytes = "", [], 0
        return event


def encode(event: str, data: str | bytes) -> bytes:
    """Return one event as bytes; without a name, readers take it as a `message`. Line ends in `data` arrive as LF."""
    if _LINE_END.search(event):
        raise ValueError(f"an event's name is one line, got {event!r}")
    text = data.decode() if isinstance(data, bytes) else data
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    name = f"event: {event}\n" if event else ""
    return f"{name}{lines}\n".encode()


def encode_pieces(event: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield one event whose data, a single line, come in pieces."""
    yield f"event: {event}\ndata: ".encode()
    yield from pieces
    yield b"\n\n"


def comment(text: str) -> bytes:
    """A line that readers skip: it keeps idle connections open."""
    if _LINE_END.search(text):
        raise ValueError(f"a comment is one line, got {text!r}")
    return f": {text}\n\n".encode()
