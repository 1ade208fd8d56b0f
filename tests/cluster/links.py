"""TCP links on 127.0.0.1 that can be cut or made silent, as a network between two machines can. They know no protocol.

A silent link loses nothing: what was sent meanwhile arrives when it is open again, also if its sender has given up. So
an old statement can still reach the database, which is what a fence is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import Literal

Mode = Literal["open", "cut", "silent"]
PIECE_BYTES = 256 << 10
MOST_PIECES = 64
"""That are under way in one direction."""


class Link:
    """One direction of connecting: clients of `port` reach `upstream`, a port or a unix socket."""

    def __init__(self, links: Links, upstream: int | Path, delay_s: float) -> None:
        self._links, self._upstream, self._delay_s = links, upstream, delay_s
        self.mode: Mode = "open"
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def set(self, mode: Mode) -> None:
        """Change what happens to its connections, at once; from another thread."""
        self._links.call(self._set, mode)

    # ── On the thread of the links

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._handle, sock=self._listener, limit=PIECE_BYTES)

    def _set(self, mode: Mode) -> None:
        self.mode = mode
        if mode == "open":
            self._is_open.set()
            return
        self._is_open.clear()
        if mode == "cut":
            for writer in list(self._writers):
                _reset(writer)
            # Their pumps go on and find it: nothing that was silent before is delivered after a cut.
            self._is_open.set()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            await self._is_open.wait()
            if self.mode == "cut":
                _reset(writer)
                return
            there, other = await self._connect()
            self._writers.add(other)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, other))
                pumps.create_task(self._pump(there, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, other):
                if end is not None:
                    self._writers.discard(end)
                    end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._upstream, Path):
            return await asyncio.open_unix_connection(str(self._upstream), limit=PIECE_BYTES)
        return await asyncio.open_connection("127.0.0.1", self._upstream, limit=PIECE_BYTES)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Deliver what comes in, in order, each piece after the link's delay: several are under way at once."""
        pieces = asyncio.Queue[tuple[float, bytes]](MOST_PIECES)
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(max(due - loop.time(), 0.0))
                await self._is_open.wait()
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            while True:
                piece = await reader.read(PIECE_BYTES)
                await pieces.put((loop.time() + self._delay_s, piece))
                if not piece:
                    return

    def close(self) -> None:
        for writer in list(self._writers):
            _reset(writer)


class Links:
    """The thread that all links of a schedule run on. Who creates it closes it."""

    def __init__(self, delay_s: float = 0.0) -> None:
        """`delay_s` is how long each byte is under way, in each direction."""
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy of links", daemon=True)
        self._thread.start()

    def add(self, upstream: int | Path) -> Link:
        async def start() -> Link:
            link = Link(self, upstream, self._delay_s)
            self._links.append(link)
            self._servers.append(await link.serve())
            return link

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def call(self, function: object, *args: object) -> None:
        async def run() -> None:
            assert callable(function)
            function(*args)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def heal(self) -> None:
        for link in self._links:
            if link.mode != "open":
                link.set("open")

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for link in self._links:
                link.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset instead of an orderly end."""
    opened = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if opened.family != socket.AF_UNIX:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
