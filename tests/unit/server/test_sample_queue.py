"""The sample queue on an engine without maths: fair, bounded, and cancelled samples leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_survival import request
from tests.unit.server.test_worker import TINY, running, scenario
from tinkex.engine.contract import Sampled, SampleSpec, SequenceOutput
from tinkex.server.routes import sampling as routes
from tinkex.server.sampling import sample_queue
from tinkex.server.sampling.sample_queue import PolledSample, SampleTarget
from tinkex.server.service import Service

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
async def test_finished_samples_are_listed_by_cursor_and_old_samplers_are_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        first = submit(service)
        await service.sampling.wait(first, 5)
        found, cursor = await service.sampling.completed("sampler", 0, 0.01)
        assert found == [(first.id, "finished")]
        assert await service.sampling.completed("sampler", cursor, 0.01) == ([], cursor)
        for number in range(sample_queue.MOST_SAMPLERS):
            await service.sampling.completed(f"other {number}", 0, 0.0)
        second = submit(service)
        await service.sampling.wait(second, 5)
        found, later = await service.sampling.completed("sampler", cursor, 0.01)
        assert found == [(second.id, "finished")], "a cursor from before it was forgotten skips nothing"
        assert later > cursor
        assert len(service.sampling._completions) <= sample_queue.MOST_SAMPLERS


@scenario
async def test_kept_results_are_counted_with_their_ranked_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        plain = sample.size_bytes
        ranked = [[(token, -1.0) for token in range(20)] for _ in range(100)]
        row = SequenceOutput(tokens=[1] * 100, logprobs=[-1.0] * 100, stop_reason="length", topk=ranked)
        sample.result = Sampled(sequences=[row], topk_prompt=[None, *ranked])
        assert sample.size_bytes - plain > 100 * 20 * 100


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
