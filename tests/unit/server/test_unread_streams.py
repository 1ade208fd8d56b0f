"""Clients that do not read: samples of their streams are cancelled, their connections closed, their results counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_event_stream import SCOPE, encode_error, never
from tests.unit.server.test_sample_queue import TARGET, spec
from tests.unit.server.test_stored_results import SIZE, LargeResults, passes
from tests.unit.server.test_survival import poll, request
from tests.unit.server.test_worker import new_run, running, scenario
from tinkex.client.stream import MAX_TOKEN_BYTES
from tinkex.engine.contract import Sampled, SampleEvent, SampleSpec, SequenceOutput, Tokens
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.event_stream import open_event_stream
from tinkex.server.http.large_response import PIECE_BYTES, WrittenResponse, written
from tinkex.server.limits.tenant_turns import TenantTurns
from tinkex.server.routes import futures
from tinkex.server.routes import sampling as sampling_routes
from tinkex.server.sampling.stream_buffer import MOST_MERGED, MOST_WAITING, StreamBuffer


class EndlessEngine(FakeEngine):
    """Draws tokens until it is told to stop."""

    drawn = 0
    has_stopped = False

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        try:
            while True:
                self.drawn += 1
                yield Tokens(self.drawn % 64, [1], [-0.5])
                await asyncio.sleep(0)
        finally:
            self.has_stopped = True


@scenario
async def test_a_stream_that_is_not_read_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Before: the queue of a stream had no bound, and grew by 2 MB per second."""
    engine = EndlessEngine()
    async with running(tmp_path, engine, max_unread_bytes=100_000) as service:
        stream: Any = service.sampling.run("t", TARGET, spec())
        assert isinstance(await anext(stream), Tokens)
        async with asyncio.timeout(10):
            while not engine.has_stopped:
                await asyncio.sleep(0.001)
        assert engine.drawn < 2000
        with pytest.raises(RequestRejected, match="not read") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "stream_unread"
        assert service.sampling.running == 0


def drawn(buffer: StreamBuffer, count: int) -> list[SampleEvent]:
    """Put so many tokens of two sequences before any is read; return what the reader then gets."""

    async def scenario() -> list[SampleEvent]:
        for token in range(count):
            buffer.put(Tokens(token % 2, [token], [-float(token)]))
        buffer.put(Sampled(sequences=[]))
        events = [await buffer.get()]
        while not isinstance(events[-1], Sampled):
            events.append(await buffer.get())
        return events[:-1]

    return asyncio.run(scenario())


def test_a_reader_that_is_late_for_a_moment_gets_every_token_by_itself() -> None:
    """Before: tokens that waited were merged at once, and on a busy machine 16 of them came as one event."""
    events = drawn(StreamBuffer(100_000, lambda: AssertionError("overflow")), MOST_WAITING)
    assert events == [Tokens(token % 2, [token], [-float(token)]) for token in range(MOST_WAITING)]


def test_tokens_that_wait_are_merged_so_that_a_slow_reader_catches_up() -> None:
    events = drawn(StreamBuffer(1_000_000, lambda: AssertionError("overflow")), 1000)
    assert len(events) == MOST_WAITING
    for index in (0, 1):
        mine = [event for event in events if isinstance(event, Tokens) and event.index == index]
        assert [token for event in mine for token in event.tokens] == list(range(index, 1000, 2))
        assert [value for event in mine for value in event.logprobs] == [-float(n) for n in range(index, 1000, 2)]
        assert [len(event.tokens) for event in mine[:-1]] == [1] * (len(mine) - 1)


def test_merged_tokens_do_not_become_an_event_that_our_own_client_rejects() -> None:
    events = drawn(StreamBuffer(1 << 30, lambda: AssertionError("overflow")), 3 * MOST_MERGED)
    assert max(len(event.tokens) for event in events if isinstance(event, Tokens)) == MOST_MERGED
    assert 40 * MOST_MERGED < MAX_TOKEN_BYTES


def test_a_large_event_is_sent_in_pieces_that_add_up() -> None:
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield bytes(range(256)) * 1000

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await (await open_event_stream(events(), encode_error))(SCOPE, never, send)

    asyncio.run(run())
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert b"".join(message["body"] for message in bodies) == bytes(range(256)) * 1000
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]


@scenario
async def test_large_results_are_written_one_block_per_round_of_the_loop(tmp_path: Path) -> None:
    """Before: each was written in a thread of its own, which took the interpreter from the loop at every wait. Six
    polls of 53 MB made the training of others wait for two seconds."""
    turns, made, rounds = TenantTurns(), [0], [0]

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            made[0] += 1
            yield bytes(PIECE_BYTES)

    async def read() -> int:
        return sum([len(block) async for block in written(pieces(), turns, "t")])

    async def look() -> None:
        most = 0
        while made[0] < 3 * 20:
            before = made[0]
            await asyncio.sleep(0)
            most, rounds[0] = max(most, made[0] - before), rounds[0] + 1
        assert most == 1

    *sizes, _ = await asyncio.gather(read(), read(), read(), look())
    assert sizes == [20 * PIECE_BYTES] * 3 and rounds[0] >= 3 * 20


class LargeResultEngine(FakeEngine):
    """Every sample has a megabyte of log-probabilities."""

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        row = SequenceOutput(tokens=[1] * 125_000, logprobs=[-0.5] * 125_000, stop_reason="length")
        yield Sampled(sequences=[row], prompt_tokens=3)


@pytest.mark.slow
@scenario
async def test_polled_results_that_are_not_read_are_bounded_and_later_polls_find_none_yet(tmp_path: Path) -> None:
    """Before: every poll of a result made a response of its own; 30 of 53 MB that nobody read took 1.5 GB."""
    async with running(tmp_path, LargeResultEngine(), max_tenant_response_bytes=2_500_000) as service:
        sample = service.sampling.submit("t", "s", TARGET, spec(), None, None)
        await service.sampling.wait(sample, 5)

        async def poll() -> Response:
            return await futures._sample(service, "t", sample.id, False, False)

        responses = [await poll() for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 408]
        assert b"--max-tenant-response-bytes" in responses[2].body
        assert service.ledger.total("response_bytes") == 2_000_000
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await responses[0](SCOPE, never, send)
        assert len(b"".join(message.get("body", b"") for message in sent)) > 800_000
        assert (await poll()).status_code == 200

        async def broken(message: Message) -> None:
            raise OSError("the client has left")

        with pytest.raises(OSError, match="left"):
            await responses[1](SCOPE, never, broken)
        assert (await poll()).status_code == 200


@scenario
async def test_a_stored_result_is_counted_before_it_is_read(tmp_path: Path) -> None:
    """Before: every poll after a restart read the whole result. 250 polls of 8 MB, unread, took 657 MB, and held the
    store for so long that another tenant's calls took 3.7 s."""
    async with running(tmp_path, LargeResults()) as service:
        (request_id,) = await passes(service, await new_run(service), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(futures, "IN_THREAD_BYTES", 1000)
        patch.setattr(futures, "UNREAD_DELAY_S", 0.0)
        async with running(tmp_path, FakeEngine(), max_tenant_response_bytes=SIZE + 10_000) as service:
            read: list[str] = []
            payload = service.store.payload
            patch.setattr(service.store, "payload", lambda name, part: read.append(name) or payload(name, part))
            responses = [await poll(service, request_id) for _ in range(3)]
            assert [response.status_code for response in responses] == [200, 408, 408]
            assert read == [request_id]


@scenario
async def test_the_result_at_the_end_of_a_stream_counts_until_it_is_read(tmp_path: Path) -> None:
    """Before: 100 streams whose ends of a megabyte nobody read were counted nowhere."""
    async with running(tmp_path, LargeResultEngine(), max_tenant_response_bytes=1_500_000) as service:
        body = {"base_model": "tinkex/tiny", "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}}
        sampling = {"num_samples": 1, "sampling_params": {"max_tokens": 4}}

        async def stream(receive: Receive, on_body: Callable[[], Awaitable[None]]) -> bytes:
            response = await sampling_routes.sample_stream(request(service, {**body, **sampling}))
            sent: list[bytes] = []

            async def send(message: Message) -> None:
                sent.append(message.get("body", b""))
                await on_body()

            await response(SCOPE, receive, send)
            return b"".join(sent)

        has_begun, may_go_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            has_begun.set()
            await may_go_on.wait()

        async def go_on() -> None:
            pass

        first = asyncio.create_task(stream(never, wait))
        async with asyncio.timeout(10):
            await has_begun.wait()
            while not service.ledger.total("response_bytes"):
                await asyncio.sleep(0.01)
            with pytest.raises(RequestRejected, match="--max-tenant-response-bytes"):
                await stream(never, go_on)
            may_go_on.set()
            assert (await first).endswith(b"}\n\n")
            assert service.ledger.total("response_bytes") == 0
            assert b"event: done" in await stream(never, go_on)


def test_a_client_of_http_1_0_gets_a_length_and_no_chunks(tmp_path: Path) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    pieces = (b"x" * 50_000 for _ in range(4))

    async def run() -> None:
        response = WrittenResponse(pieces, TenantTurns(), "t", "application/json")
        await response({**SCOPE, "http_version": "1.0"}, never, send)

    asyncio.run(run())
    assert (b"content-length", b"200000") in sent[0]["headers"]
    assert b"".join(message.get("body", b"") for message in sent) == b"x" * 200_000
