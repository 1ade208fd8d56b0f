"""Many samples at once, a service that answers 429, streams, and copies of a sampler in other processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, prompt
from tinkex.client._calls import limits
from tinkex.client._calls.limits import Gate, limiter_for
from tinkex.clock import REAL
from tinkex.testing import Answer, Delay, Drop, Expire, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=4, seed=1)


def test_a_sample_carries_tokens_logprobs_and_a_stop_reason(sampler: tinkex.SamplingClient) -> None:
    found = sampler.sample(prompt(), 2, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(20)
    assert len(found.sequences) == 2
    for sequence in found.sequences:
        assert 1 <= len(sequence.tokens) <= 4
        assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.tokens)
        assert sequence.stop_reason in ("length", "stop")
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
    assert found.topk_prompt_logprobs is not None and found.topk_prompt_logprobs[0] is None


def test_compute_logprobs_gives_one_per_token_and_none_for_the_first(sampler: tinkex.SamplingClient) -> None:
    found = sampler.compute_logprobs(prompt()).result(20)
    assert len(found) == 3
    assert found[0] is None
    assert asyncio.run(sampler.compute_logprobs_async(prompt())) == found


def test_sequence_ids_announced_by_the_service_name_the_sequences(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    found = sampler.sample(prompt(), 2, PARAMS).result(20)
    ids = [sequence.sequence_id for sequence in found.sequences]
    assert all(ids) and len(set(ids)) == 2


def test_a_429_slows_all_samplers_of_the_key_down_and_fails_none(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    first, second = (client.create_sampling_client(base_model=MODEL) for _ in range(2))
    service.script.on("asample", times=5, do=Status(429, headers={"retry-after-ms": "150"}))
    futures = [sampler.sample(prompt(), 1, PARAMS) for sampler in (first, second) for _ in range(20)]
    assert all(future.result(30).sequences for future in futures)
    config = client._session.config
    assert limiter_for(*config.key) is limiter_for(*config.key)
    assert client.stats()["rate_limited"] == 5


def test_a_service_that_answers_only_429_is_given_up_with_a_reason(
    proto_service: ScriptedService, connect: Connect
) -> None:
    sampler = connect(proto_service, unreachable_s=0.5).create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", do=Status(429, headers={"retry-after-ms": "50"}))
    with pytest.raises(tinkex.DeadlineExceeded, match="429 to every sample"):
        sampler.sample(prompt(), 1, PARAMS).result(20)


def test_a_lost_answer_is_asked_for_again_under_the_same_seq_id(service: ScriptedService, connect: Connect) -> None:
    sampler = connect(service).create_sampling_client(base_model=MODEL)
    service.script.on("asample", nth=1, do=Drop(when="after_accept"))
    assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences
    assert len(service.requests_to("asample")) == 2
    assert len(service.sampled) == 1


def test_a_result_that_expired_is_sampled_again(service: ScriptedService, connect: Connect) -> None:
    sampler = connect(service).create_sampling_client(base_model=MODEL)
    service.script.on("asample", nth=1, do=Expire())
    assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences
    assert len(service.requests_to("asample")) == 2


def test_seq_ids_are_unique_when_many_threads_sample_at_once(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    futures: list[tinkex.APIFuture[tinkex.SampleResponse]] = []

    def burst() -> None:
        futures.extend(sampler.sample(prompt(), 1, PARAMS) for _ in range(50))

    threads = [threading.Thread(target=burst) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(future.result(30).sequences for future in futures)
    numbers = [seq_id for _, seq_id in proto_service.sampled]
    assert len(numbers) == len(set(numbers)) == 400


@pytest.mark.slow
def test_10000_samples_at_once_stay_within_the_pools_and_all_arrive(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL]) as service:
        client = connect(service, deadline_s=120.0)
        sampler = client.create_sampling_client(base_model=MODEL)

        async def burst() -> list[tinkex.SampleResponse]:
            return await asyncio.gather(*(sampler.sample_async(prompt(), 1, PARAMS) for _ in range(10_000)))

        assert len(asyncio.run(burst())) == 10_000
        pools = client._session.config.pools
        assert service.peak_connections <= sum(pools.values())
        assert len(service.requests_to("asample")) == 10_000


@pytest.mark.timing
def test_waiting_at_the_gate_costs_the_same_for_few_and_for_many() -> None:
    async def contend(waiters: int) -> float:
        gate = Gate(REAL, 10)

        async def one() -> None:
            await gate.acquire(1)
            await asyncio.sleep(0)
            gate.release(1)

        started = time.process_time()
        await asyncio.gather(*(one() for _ in range(waiters)))
        return (time.process_time() - started) / waiters

    few, many = (min(asyncio.run(contend(n)) for _ in range(3)) for n in (500, 8000))
    # The official client goes from 1.1 to 12 ms per waiter between 500 and 4,000.
    assert many < 4 * few


def test_the_byte_budget_bounds_what_is_in_flight_but_lets_one_giant_through() -> None:
    async def go() -> tuple[int, bool]:
        gate = Gate(REAL, 100, limit_bytes=10)
        await gate.acquire(4)
        await gate.acquire(6)
        blocked = asyncio.ensure_future(gate.acquire(1))
        await asyncio.sleep(0)
        assert not blocked.done()
        gate.release(4)
        await blocked
        gate.release(6)
        gate.release(1)
        await gate.acquire(1000)  # alone: admitted, however large
        return gate.admitted, gate.admitted_bytes == 1000

    assert asyncio.run(go()) == (1, True)


def test_a_cancelled_waiter_leaves_the_gate_as_it_was() -> None:
    async def go() -> tuple[int, int]:
        gate = Gate(REAL, 1)
        await gate.acquire()
        waiting = asyncio.ensure_future(gate.acquire())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.release()
        await asyncio.wait_for(gate.acquire(), 1)
        return gate.admitted, gate.waiting

    assert asyncio.run(go()) == (1, 0)


@pytest.mark.timing
def test_after_a_back_off_few_are_admitted_at_a_time() -> None:
    async def go() -> int:
        gate = Gate(REAL, 400)
        gate.back_off(0.01)
        waiting = [asyncio.ensure_future(gate.acquire()) for _ in range(50)]
        await asyncio.sleep(0.1)
        admitted = sum(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return admitted

    assert asyncio.run(go()) == limits.DISPATCHES_WHILE_BACKED_OFF


def test_one_batched_poll_serves_all_samples_where_the_service_offers_it(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"sample_use_retrieve_futures": True}) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        service.script.on("asample", do=Work(0.3))
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(30)]
        assert all(future.result(20).sequences for future in futures)
        # One fetch each, no matter how long they took; the waiting was done by the batch.
        assert len(service.requests_to("retrieve_future")) == 30
        assert len(service.requests_to("retrieve_futures")) >= 1


def test_a_batched_poll_that_fails_fails_no_sample(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"sample_use_retrieve_futures": True}) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        service.script.on("retrieve_futures", do=Status(403, "no"))
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(5)]
        assert all(future.result(20).sequences for future in futures)


def test_a_cancelled_sample_is_cancelled_on_a_service_that_offers_it(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], dynamic_config={"sample_cancel_enabled": True}) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        service.script.on("asample", do=Work(30))
        future = sampler.sample(prompt(), 1, PARAMS)
        service.wait_for_requests("retrieve_future")
        assert future.cancel()
        service.wait_for_requests("cancel_future")
        assert service.cancelled == [future.status().request_id]


def test_large_answers_are_announced_by_size_and_fetched_within_the_byte_budget(connect: Connect) -> None:
    config = {"inflight_response_bytes_semaphore_size": 100}
    with ScriptedService(base_models=[MODEL], metadata_over_bytes=1, client_config=config) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(10)]
        assert all(future.result(20).sequences for future in futures)
        assert len(service.requests_to("retrieve_future")) == 20


def test_a_sampler_handle_rebuilds_the_sampler_and_never_holds_the_key(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service)
    sampler = client.create_sampling_client(base_model=MODEL)
    handle = sampler.get_sampler_handle()
    key = client._session.config.api_key
    assert key not in handle
    copy = tinkex.SamplingClient.from_sampler_handle(handle, api_key=key)
    drawn = [client.sample(prompt(), 1, PARAMS).result(20).sequences[0].tokens for client in (copy, sampler)]
    assert drawn[0] == drawn[1]
    own, other = (seq_id for _, seq_id in proto_service.sampled)
    assert own is not None and other is not None and abs(own - other) >= 1_000_000_000
    with pytest.raises(tinkex.ValidationError, match="not a handle"):
        tinkex.SamplingClient.from_sampler_handle("rubbish")


def test_a_copy_asks_for_its_block_of_numbers_where_the_service_offers_it(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"sample_join_sampling_session": True}) as service:
        client = connect(service)
        sampler = client.create_sampling_client(base_model=MODEL)
        key = client._session.config.api_key
        copy = tinkex.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=key)
        for future in [copy.sample(prompt(), 1, PARAMS) for _ in range(5)]:
            future.result(20)
        assert len(service.requests_to("join_sampling_session")) >= 1
        numbers = [seq_id for _, seq_id in service.sampled]
        assert len(set(numbers)) == 5
        assert all(number is not None and number >= 1_000_000_000 for number in numbers)


def test_a_prompt_too_long_for_the_model_is_refused_before_it_is_sent(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], max_context_length=8) as service:
        client = connect(service)
        sampler = client.create_sampling_client(base_model=MODEL)
        service.wait_for_requests("get_server_capabilities")
        # The answer may still be on its way; the first call that knows it refuses.
        deadline = time.monotonic() + 5
        while not client._session.link().context_lengths.get(MODEL) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(tinkex.TinkexError, match=r"Prompt length plus max_tokens exceeds"):
            sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=100))
        assert not service.requests_to("asample")
        assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences


def test_an_unknown_stop_word_never_crashes_a_result(connect: Connect) -> None:
    with ScriptedService(dialect="json", base_models=[MODEL]) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        answer = {"sequences": [{"tokens": [1], "stop_reason": "cosmic_ray"}], "type": "sample"}
        service.script.on("retrieve_future", do=Answer(answer))
        (sequence,) = sampler.sample(prompt(), 1, PARAMS).result(20).sequences
        assert sequence.tokens == [1]
        assert sequence.raw_stop_reason == "cosmic_ray"


def test_a_process_that_may_open_only_60_files_still_gets_all_its_samples(proto_service: ScriptedService) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "import tinkex\n"
        f"service = tinkex.ServiceClient(base_url={proto_service.url!r}, telemetry=False)\n"
        f"sampler = service.create_sampling_client(base_model={MODEL!r})\n"
        "prompt, params = tinkex.ModelInput.from_ints([1, 2]), tinkex.SamplingParams(max_tokens=2)\n"
        "futures = [sampler.sample(prompt, 1, params) for _ in range(500)]\n"
        "print(sum(len(future.result(30).sequences) for future in futures))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "500", done.stderr


@pytest.mark.timing
def test_a_service_that_tells_the_size_again_and_again_is_asked_at_a_measured_pace(connect: Connect) -> None:
    config = {"inflight_response_bytes_semaphore_size": 100}
    with ScriptedService(base_models=[MODEL], client_config=config) as service:
        client = connect(service)
        sampler = client.create_sampling_client(base_model=MODEL)
        told = Answer({"status": "complete_metadata", "response_payload_size": 80})
        service.script.on("retrieve_future", times=4, do=told)
        started = time.monotonic()
        assert sampler.sample(prompt(), 1, PARAMS).result(10).sequences
        assert time.monotonic() - started > 0.1
        answers = client._session.link().limiter.results
        assert (answers.admitted, answers.admitted_bytes) == (0, 0)


def test_the_time_an_announced_answer_took_to_fetch_is_told_apart(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], metadata_over_bytes=1) as service:
        sampler = connect(service).create_sampling_client(base_model=MODEL)
        service.script.on("retrieve_future", do=Delay(0.1))
        steps: list[Any] = []
        stop = tinkex.on("step", steps.append)
        sampler.sample(prompt(), 1, PARAMS).result(10)
        stop()
        assert [entry.fetch_s >= 0.1 for entry in steps if entry.operation == "sample"] == [True]
