"""A small HTTP/1.1 server on 127.0.0.1, on its own thread, with connections that can be reset and a life that can end.

It knows nothing of the API. It exists so that the scripted service needs no dependency and can misbehave on purpose.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tinkex.testing.http.connection import Connection
from tinkex.testing.http.messages import Reply, Request

T = TypeVar("T")
Handler = Callable[[Request], "Reply | Awaitable[Reply]"]


class HttpServer:
    """Listens on 127.0.0.1 and hands every complete request to `handle`, on the server's own loop thread."""

    def __init__(self, handle: Handler, refuse_head: Callable[[Request], bool]) -> None:
        self.handle = handle
        self.refuse_head = refuse_head
        self.connections: set[Connection] = set()
        self.peak_connections = 0
        self.accepted_connections = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._listener: asyncio.Server | None = None
        _watch_forks()
        _servers.add(self)
        self._thread = threading.Thread(target=self.loop.run_forever, name="tinkex-testing", daemon=True)

    def start(self) -> None:
        """Listen on the port of the last time, or on a free one."""
        if self.loop.is_closed():
            raise RuntimeError("this service was stopped: make a new one (one that was killed can start again)")
        if not self._thread.is_alive():
            self._thread.start()
        self.run(self._listen())

    def kill(self) -> None:
        """Go dead: nobody listens, every connection is reset, whatever was being answered is given up."""
        if self._thread.is_alive():
            self.run(self._close())

    def stop(self) -> None:
        """Go dead and end the thread."""
        if self._thread.is_alive():
            self.run(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def let_go(self) -> None:
        """In a forked child: give up the inherited sockets, else a connection closed in the parent would stay open."""
        listening = self._listener.sockets if self._listener is not None else ()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for sock in (*listening, *(connection.sock for connection in self.connections)):
            if sock.fileno() >= 0:
                # Overwritten, not closed: objects in the child still own these numbers and will close them.
                os.dup2(nowhere, sock.fileno())
        os.close(nowhere)

    async def _listen(self) -> None:
        # 2,000 clients may connect at once; the kernel caps the backlog at its own limit.
        self._listener = await self.loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=4096, reuse_address=True
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.reset()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_let_go_of_all)


def _let_go_of_all() -> None:
    for server in list(_servers):
        server.let_go()
