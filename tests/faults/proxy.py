"""An HTTP proxy on 127.0.0.1 between the clients and the servers that delays, drops, cuts, resets and repeats requests.

It counts the requests that pass; the schedule says what happens to which. It also looks into successful responses for
ids of other tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable

from tests.faults.history import FaultRecord, Recorder
from tests.faults.http_message import LIMIT, Message, read_message
from tests.faults.schedule import NetworkFault

TRAINING = ("/forward", "/optim_step", "/save_weights", "/load_weights", "/create_model")
"""Requests that the heavy faults are counted by: polls depend on time, these on the programs alone."""
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 12\r\n\r\n<h1>502</h1>"
Spy = Callable[[str, bytes], str | None]
"""From an API key and the body of a successful response to whose id it gives away, or None."""


class Closed(Exception):
    """The connection with the client ends here."""


class Proxy:
    """Runs on a thread of its own. `upstreams` are ports; a connection, or each request, goes to the next one."""

    def __init__(
        self,
        upstreams: list[int],
        faults: Iterable[NetworkFault],
        recorder: Recorder,
        spy: Spy | None = None,
        *,
        by_request: bool = False,
    ) -> None:
        self._upstreams, self._recorder, self._spy, self._by_request = upstreams, recorder, spy, by_request
        self._faults = {fault.at: fault for fault in faults}
        self.requests = self.training_requests = self.in_flight = self._turns = 0
        self.is_partitioned = False
        self._changed = threading.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    # ── For other threads

    def wait_for_training_requests(self, count: int, is_over: Callable[[], bool]) -> bool:
        """Wait until so many have passed; False if `is_over` says so first."""
        with self._changed:
            while self.training_requests < count:
                if is_over():
                    return False
                self._changed.wait(0.05)
        return True

    def partition(self, is_on: bool) -> None:
        """Cut all connections, and take no new ones until it is off again."""
        self.is_partitioned = is_on
        if is_on:
            self._loop.call_soon_threadsafe(self._abort_all)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    # ── On the thread

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle, sock=self._listener, limit=LIMIT)
        await self._stop.wait()
        server.close()
        self._abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_partitioned:
            _reset(writer)
            return
        self._writers.add(writer)
        upstream = self._next_upstream()
        try:
            while (request := await read_message(reader, is_response=False)) is not None:
                self.in_flight += 1
                if self._by_request:
                    upstream.close()
                    upstream = self._next_upstream()
                try:
                    await self._pass(request, writer, upstream)
                finally:
                    self.in_flight -= 1
        except (OSError, Closed, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled: the proxy is closing, and a cancelled handler would be logged as a crash
        finally:
            upstream.close()
            writer.close()
            self._writers.discard(writer)

    def _next_upstream(self) -> _Upstream:
        self._turns += 1
        return _Upstream(self._upstreams[self._turns % len(self._upstreams)])

    async def _pass(self, request: Message, writer: asyncio.StreamWriter, upstream: _Upstream) -> None:
        """Let one request through, or break it as the schedule says."""
        self.requests += 1
        fault = self._faults.get(self.requests)
        if any(name in request.target for name in TRAINING):
            with self._changed:
                self.training_requests += 1
                self._changed.notify_all()
        if fault is None:
            writer.write(await self._exchange(request, upstream))
            await writer.drain()
            return
        began_s = self._recorder.now()
        try:
            await self._break(fault, request, writer, upstream)
        finally:
            record = FaultRecord(
                what=fault.kind, began_s=began_s, ended_s=self._recorder.now(), note=f"request {fault.at}"
            )
            self._recorder.add(self._recorder.history.faults, record)
            self._recorder.say(f"network: {fault} on {request.start.split(' HTTP')[0]}")

    async def _exchange(self, request: Message, upstream: _Upstream) -> bytes:
        """Send a request on and return the response's bytes, which may be a tenant's only."""
        response = await upstream.exchange(request)
        if self._spy is not None and response.status < 300:
            owner = self._spy(request.headers.get("x-api-key", ""), response.body)
            if owner is not None:
                sentence = f"The response to {request.start} of another tenant contains an id of {owner}."
                self._recorder.add(self._recorder.history.leaks, sentence)
        return response.content

    async def _break(
        self, fault: NetworkFault, request: Message, writer: asyncio.StreamWriter, upstream: _Upstream
    ) -> None:
        match fault.kind:
            case "delay request":
                await asyncio.sleep(fault.seconds)
                writer.write(await self._exchange(request, upstream))
            case "delay response":
                response = await self._exchange(request, upstream)
                await asyncio.sleep(fault.seconds)
                writer.write(response)
            case "drop before":
                raise Closed
            case "drop after":
                await self._exchange(request, upstream)
                raise Closed
            case "cut request":
                await upstream.send_part(request.content[: int(len(request.content) * fault.share)])
                raise Closed
            case "cut response":
                response = await self._exchange(request, upstream)
                writer.write(response[: int(len(response) * fault.share)])
                await writer.drain()
                raise Closed
            case "reset":
                await self._exchange(request, upstream)
                _reset(writer)
                raise Closed
            case "repeat at once":
                responses = await asyncio.gather(
                    self._exchange(request, upstream), self._again(request, upstream.port, 0.0)
                )
                writer.write(responses[0] if fault.share < 0.5 else responses[1] or responses[0])
            case "repeat later":
                task = asyncio.create_task(self._ghost(request, upstream.port, fault.seconds))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                writer.write(await self._exchange(request, upstream))
            case "bad gateway":
                writer.write(BAD_GATEWAY)
        await writer.drain()

    async def _again(self, request: Message, port: int, delay_s: float) -> bytes:
        """Send the same bytes on a connection of their own, as a network or a proxy may that repeats packets."""
        await asyncio.sleep(delay_s)
        other = _Upstream(port)
        try:
            return await self._exchange(request, other)
        except (OSError, asyncio.IncompleteReadError):
            return b""
        finally:
            other.close()

    async def _ghost(self, request: Message, port: int, delay_s: float) -> None:
        await self._again(request, port, delay_s)


class _Upstream:
    """The server's side of one client connection. Connects when it is needed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def exchange(self, request: Message) -> Message:
        """Send a request and return its response; raises OSError if there is none."""
        await self.send_part(request.content)
        assert self._reader is not None
        response = await read_message(self._reader, is_response=True, has_no_body=request.start.startswith("HEAD "))
        if response is None:
            raise ConnectionResetError("the server closed the connection")
        if response.headers.get("connection", "").lower() == "close":
            self.close()
        return response

    async def send_part(self, content: bytes) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port, limit=LIMIT)
        self._writer.write(content)
        await self._writer.drain()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset instead of an orderly end."""
    opened = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
