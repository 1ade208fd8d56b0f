"""The sample queue on an engine without maths: fair, bounded, and cancelled samples leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_survival import request
from tests.unit.server.test_worker import TINY, running, scenario
from tinkex.engine.contract import OutOfMemory, Sampled, SampleEvent, SampleSpec, SequenceOutput
from tinkex.server.http.errors import RequestRejected
from tinkex.server.routes import sampling as routes
from tinkex.server.sampling import completions, finished_samples
from tinkex.server.sampling.finished_samples import FinishedSamples
from tinkex.server.sampling.sample_queue import PolledSample, SampleTarget
from tinkex.server.service import Service
from tinkex.server.training.waiters import wait_in
from tinkex.server.upkeep.janitor import Janitor
from tinkex.testing import FakeClock
from tinkex.types.sampling import TopkLogprobs

TARGET = SampleTarget(TINY)


def spec(**given: int) -> SampleSpec:
    return SampleSpec(base="tinkex/tiny", prompt=(1, 2, 3), **given)  # type: ignore[arg-type]


def submit(service: Service, sampler: str = "sampler", tenant: str = "t") -> PolledSample:
    return service.sampling.submit(tenant, sampler, TARGET, spec(), None, None)


@scenario
async def test_a_sample_cancelled_before_it_began_frees_its_rows(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        sample = submit(service)
        assert service.sampling.running == 1
        service.sampling.cancel(sample)  # the task has not had its first step
        await asyncio.sleep(0.01)
        assert service.sampling.running == service.sampling.queued == 0


@scenario
async def test_samples_that_are_cancelled_while_they_wait_leave_the_queue(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with running(tmp_path, engine, max_rows=1) as service:
        at_work = [submit(service) for _ in range(2)]
        for _ in range(100):
            service.sampling.cancel(submit(service))
        assert service.sampling.queued == 0
        assert not service.sampling._queues
        engine.gate.set()
        for sample in at_work:
            await service.sampling.wait(sample, 5)
            assert sample.result is not None


@scenario
async def test_a_tenant_with_many_samples_does_not_keep_another_waiting(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with running(tmp_path, engine, max_rows=1) as service:
        samples = [submit(service, tenant="greedy") for _ in range(20)]
        samples.append(submit(service, tenant="modest"))
        engine.gate.set()
        for sample in samples:
            await service.sampling.wait(sample, 5)
        assert [spec.tenant for spec in engine.samples].index("modest") <= 3


@scenario
async def test_one_request_of_a_thousand_sequences_does_not_keep_another_tenant_in_the_queue(tmp_path: Path) -> None:
    """Before: it counted with all its sequences until the last one was done, and everybody waited for that."""
    engine = FakeEngine()
    engine.gate.clear()
    async with running(tmp_path, engine, max_rows=4) as service:
        large = service.sampling.submit("greedy", "s", TARGET, spec(num_samples=1024), None, None)
        small = submit(service, tenant="modest")
        await asyncio.sleep(0)
        assert [spec.tenant for spec in engine.samples] == ["greedy", "modest"]
        for _ in range(10):
            submit(service, tenant="greedy")
        assert service.sampling.queued == 6, "4 rows of the large request and 4 others are twice the 4 rows"
        engine.gate.set()
        for sample in (large, small):
            await service.sampling.wait(sample, 5)
            assert sample.result is not None


@scenario
async def test_finished_samples_are_listed_by_cursor_and_old_samplers_are_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        first = submit(service)
        await service.sampling.wait(first, 5)
        found, cursor = await service.sampling.completions.since("sampler", 0, 0.01)
        assert found == [(first.id, "finished")]
        assert await service.sampling.completions.since("sampler", cursor, 0.01) == ([], cursor)
        for number in range(completions.MOST_SAMPLERS):
            await service.sampling.completions.since(f"other {number}", 0, 0.0)
        second = submit(service)
        await service.sampling.wait(second, 5)
        found, later = await service.sampling.completions.since("sampler", cursor, 0.01)
        assert found == [(second.id, "finished")], "a cursor from before it was forgotten skips nothing"
        assert later > cursor
        assert len(service.sampling.completions) <= completions.MOST_SAMPLERS


@scenario
async def test_a_finished_sample_keeps_neither_its_task_nor_its_request(tmp_path: Path) -> None:
    """Results are kept for minutes. Tasks and requests, of 50 MB with two million targets, were kept with them."""
    async with running(tmp_path, FakeEngine()) as service:
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        await asyncio.sleep(0.01)
        assert service.sampling.find("t", sample.id) is sample
        assert sample.job is None
        cancelled = submit(service)
        service.sampling.cancel(cancelled)
        assert cancelled.job is None
        await asyncio.sleep(0.01)
        assert service.ledger.total("sample_bytes") == 0


@scenario
async def test_samples_of_a_tenant_that_wait_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    """Before: only their sequences were counted, and requests of 935 bytes with two million targets took 50 MB each."""
    engine = FakeEngine()
    engine.gate.clear()
    large = replace(spec(), targets=((1,) * 10_000,))
    async with running(tmp_path, engine, max_tenant_sample_bytes=2_000_000) as service:
        samples = [service.sampling.submit("greedy", "s", TARGET, large, None, None) for _ in range(3)]
        with pytest.raises(RequestRejected, match="--max-tenant-sample-bytes") as caught:
            service.sampling.submit("greedy", "s", TARGET, large, None, None)
        assert (caught.value.status, caught.value.code) == (429, "too_many_sample_bytes")
        samples.append(submit(service, tenant="modest"))
        engine.gate.set()
        for sample in samples:
            await service.sampling.wait(sample, 5)
            assert sample.result is not None
        await asyncio.sleep(0.01)
        assert service.ledger.total("sample_bytes") == 0
        service.sampling.submit("greedy", "s", TARGET, large, None, None)


@scenario
async def test_kept_results_are_counted_with_their_ranked_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        plain = sample.size_bytes
        ranked = TopkLogprobs.from_lists([[(token, -1.0) for token in range(20)] for _ in range(100)])
        row = SequenceOutput(tokens=[1] * 100, logprobs=[-1.0] * 100, stop_reason="length", topk=ranked)
        sample.result = Sampled(sequences=[row], topk_prompt=ranked)
        assert sample.size_bytes - plain > 2 * 100 * 20 * 8


class LargeResultEngine(FakeEngine):
    """The numbers of a result take as many bytes as its request says in `max_tokens`; they share their memory."""

    zeros = bytes(256 << 20)

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        half = memoryview(self.zeros)[: spec.max_tokens // 8 * 4]
        yield Sampled(sequences=[SequenceOutput(tokens=half, logprobs=half, stop_reason="length")], prompt_tokens=3)


@scenario
async def test_large_results_of_one_tenant_do_not_delete_those_of_another(tmp_path: Path) -> None:
    async with running(tmp_path, LargeResultEngine()) as service:
        alices = submit(service, tenant="alice")
        await service.sampling.wait(alices, 5)
        bobs = []
        for _ in range(5):
            large = service.sampling.submit("bob", "sampler", TARGET, spec(max_tokens=64_000_000), None, None)
            await service.sampling.wait(large, 5)
            bobs.append(large.id)
        assert service.sampling.find("alice", alices.id) is alices
        are_there = [service.sampling.find("bob", sample_id) is not None for sample_id in bobs]
        assert are_there == [False, True, True, True, True], "his oldest goes"


def test_beyond_the_budget_the_tenant_with_the_most_bytes_loses_its_oldest() -> None:
    finished = FinishedSamples()
    part = finished_samples.KEPT_BYTES // 4
    assert list(finished.add("alice", "a1", 10, 0)) == []
    assert [list(finished.add("bob", f"b{number}", part, 1 + number)) for number in range(3)] == [[], [], []]
    assert list(finished.add("bob", "b3", part, 4)) == ["b0"]
    assert list(finished.add("alice", "a2", 10, 5)) == []
    assert list(finished.add("carol", "c1", 2 * part, 6)) == ["b1", "b2"]
    assert finished.size_bytes == 3 * part + 20


def test_results_leave_when_their_time_is_over() -> None:
    """Before: all of them stayed for a quarter of an hour, and the last ones until the next sample."""
    finished = FinishedSamples()
    large = finished_samples.LARGE_BYTES + 1
    for name, size in (("asked", 10), ("waiting", 10), ("large", large), ("large and asked", large)):
        assert list(finished.add("alice", name, size, 0)) == []
    briefly, later = finished_samples.BRIEFLY_S, finished_samples.BRIEFLY_S + 5
    finished.note_asked("alice", "asked", 5)
    finished.note_asked("alice", "large and asked", 5)
    assert list(finished.expired(briefly - 1)) == []
    assert list(finished.expired(briefly)) == ["large"]
    finished.note_asked("alice", "asked", briefly)
    assert list(finished.expired(later)) == ["large and asked"]
    assert list(finished.expired(2 * briefly)) == ["asked"], "asking again keeps it longer"
    assert list(finished.expired(finished_samples.KEPT_S)) == ["waiting"], "its client has not asked yet"
    assert finished.size_bytes == 0


@scenario
async def test_what_is_kept_of_samples_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """Before: fetched results stayed for a quarter of an hour, and their ids for ever: 10 MB per minute."""
    clock = FakeClock()
    async with running(tmp_path, FakeEngine(), clock=clock) as service:

        async def fetch(count: int) -> None:
            for number in range(count):
                sample = service.sampling.submit("t", "sampler", TARGET, spec(), f"key {clock.now()} {number}", None)
                await service.sampling.wait(sample, 5)
                assert sample.result is not None

        janitor = Janitor(service, lambda folder: 10**12, started_at=0.0)
        await fetch(20)
        _, cursor = await service.sampling.completions.since("sampler", 0, 0.01)
        for _ in range(3):
            clock.advance(finished_samples.BRIEFLY_S)
            await fetch(20)
            await janitor.tick()
            assert len(service.sampling._samples) == len(service.sampling._by_key) == 20
            listed, cursor = await service.sampling.completions.since("sampler", cursor, 0.01)
            assert len(listed) == 20
        assert len((await service.sampling.completions.since("sampler", 0, 0.01))[0]) == 20
        clock.advance(finished_samples.BRIEFLY_S)
        await janitor.tick()
        assert not service.sampling._samples, "also when no other sample comes"


@scenario
async def test_a_result_that_nobody_asked_for_waits_for_its_client(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(tmp_path, FakeEngine(), clock=clock) as service:
        sample = submit(service)
        await wait_in(sample.waiters, 5)  # as the queue sees it, not its client
        assert sample.is_done
        clock.advance(finished_samples.KEPT_S - 1)
        await service.sampling.drop_expired()
        assert service.sampling.find("t", sample.id) is sample
        await service.sampling.wait(sample, 5)
        clock.advance(finished_samples.BRIEFLY_S - 1)
        await service.sampling.drop_expired()
        assert service.sampling.find("t", sample.id) is sample, "the response may have been lost"
        clock.advance(1)
        await service.sampling.drop_expired()
        assert service.sampling.find("t", sample.id) is None


@scenario
async def test_others_are_served_while_many_results_are_dropped(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(tmp_path, FakeEngine(), clock=clock) as service:
        for number in range(2000):
            sample = PolledSample(f"sample-{number}", "t", "sampler", None, 1)
            service.sampling._samples[sample.id] = sample
            service.sampling._settle(sample, error=("Cancelled by the client.", "user"))
        clock.advance(finished_samples.KEPT_S)
        dropping = asyncio.create_task(service.sampling.drop_expired())
        await asyncio.sleep(0)
        assert 0 < len(service.sampling._samples) < 2000
        await dropping
        assert not service.sampling._samples


def test_a_dropped_sample_costs_the_same_however_many_wait() -> None:
    finished = FinishedSamples()
    dropped = [name for number in range(20_000) for name in finished.add("t", str(number), 1 << 20, number / 1000)]
    assert dropped == [str(number) for number in range(20_000 - 256)]


@scenario
async def test_a_dropped_sample_leaves_the_key_to_the_attempt_after_it(tmp_path: Path) -> None:
    async with running(tmp_path, LargeResultEngine()) as service:
        first = service.sampling.submit("t", "sampler", TARGET, spec(), "key", None)
        assert first.job is not None
        service.sampling._cancel(first.job)
        service.sampling._settle(first, error=("lost", "server"))
        await service.sampling.wait(first, 5)
        second = service.sampling.submit("t", "sampler", TARGET, spec(), "key", None)
        await service.sampling.wait(second, 5)
        size = finished_samples.KEPT_BYTES - first.size_bytes - 2 * second.size_bytes + 500  # a little too much
        large = service.sampling.submit("t", "sampler", TARGET, spec(max_tokens=size), None, None)
        await service.sampling.wait(large, 5)
        assert service.sampling.find("t", first.id) is None
        assert service.sampling.submit("t", "sampler", TARGET, spec(), "key", None) is second


@scenario
async def test_a_stream_begins_although_its_sample_still_waits(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with running(tmp_path, engine, max_rows=1) as service:
        at_work = [submit(service) for _ in range(2)]
        body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}, "num_samples": 1}
        asked = request(service, {**body, "base_model": "tinkex/tiny"})
        response = await asyncio.wait_for(routes.sample_stream(asked), 5)
        assert response.status_code == 200
        engine.gate.set()
        said = b"".join([piece async for piece in response.body_iterator])  # type: ignore[attr-defined]
        assert b"event: token" in said
        assert b"event: done" in said
        assert all(sample.is_done for sample in at_work)


class FullEngine(FakeEngine):
    """Has no memory for a sample until so many training runs have left."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        if self.failures:
            self.failures -= 1
            raise OutOfMemory("The engine had not enough memory.", "server")
        async for event in super().sample(spec):
            yield event


@scenario
async def test_a_sample_that_runs_out_of_memory_is_tried_again_after_idle_runs_have_left(tmp_path: Path) -> None:
    """Before: it failed, however much memory idle training runs had."""
    evicted: list[int] = []

    async def relieve(most: int, but_run: str | None) -> int:
        evicted.append(most)
        return most

    async with running(tmp_path, FullEngine(2)) as service:
        service.sampling._relieve = relieve
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        assert sample.result is not None
        assert evicted == [2, 4]
    async with running(tmp_path / "more", FullEngine(9)) as service:
        service.sampling._relieve = relieve
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        assert sample.error is not None
        assert evicted == [2, 4, 2, 4, 8]
