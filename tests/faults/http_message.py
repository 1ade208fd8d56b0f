"""Reads HTTP/1.1 messages as bytes, whole, and knows nothing of what they mean."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

LIMIT = 1 << 26


class Message(NamedTuple):
    """The start line, lower-case headers, and all bytes of the message as they came."""

    start: str
    headers: dict[str, str]
    content: bytes

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    @property
    def target(self) -> str:
        return self.start.split()[1]

    @property
    def body(self) -> bytes:
        return self.content.partition(b"\r\n\r\n")[2]


async def read_message(reader: asyncio.StreamReader, *, is_response: bool, has_no_body: bool = False) -> Message | None:
    """Read the next message; None if there is none any more. Raises IncompleteReadError in the middle of one."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    start, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    if has_no_body or (is_response and int(start.split()[1]) in (204, 304)):
        return Message(start, headers, head)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Message(start, headers, head + await _chunks(reader))
    if "content-length" in headers:
        return Message(start, headers, head + await reader.readexactly(int(headers["content-length"])))
    return Message(start, headers, head + (await reader.read(LIMIT) if is_response else b""))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        content += line + await reader.readexactly(size + 2)
        if size == 0:
            return content
