"""Operations arrive in the order of the calls, exactly once, and none blocks the next."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, step
from tinkex.testing import Drop, Hang, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]


def ran(service: ScriptedService, client: tinkex.TrainingClient) -> list[tuple[int | None, str]]:
    return [(seq_id, op) for model_id, seq_id, op in service.executed if model_id == client.model_id]


def test_all_training_operations_share_one_counter_in_call_order(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    calls: list[tinkex.APIFuture[Any]] = [
        training.forward([datum()], "cross_entropy"),
        training.forward_backward([datum()], "cross_entropy"),
        training.optim_step(step()),
        training.save_state("a"),
        training.save_weights_for_sampler("b"),
        training.optim_step(step()),
    ]
    for call in calls:
        call.result(20)
    assert [seq_id for seq_id, _ in ran(service, training)] == [1, 2, 3, 4, 5, 6]
    assert [op for _, op in ran(service, training)] == [
        "forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "optim_step",
    ]  # fmt: skip


def test_save_weights_for_sampler_then_optim_step_are_never_reordered(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    futures: list[tinkex.APIFuture[Any]] = []
    for index in range(20):
        futures += [training.save_weights_for_sampler(f"s{index}"), training.optim_step(step())]
    for future in futures:
        future.result(20)
    assert [op for _, op in ran(proto_service, training)] == ["save_weights_for_sampler", "optim_step"] * 20


def test_a_failed_chunk_does_not_wedge_the_training_client(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"fwdbwd_max_chunk_len": 1}, gap_s=0.2) as service:
        service.script.on("forward_backward", nth=2, do=Status(400, "bad chunk"))
        training = connect(service).create_lora_training_client(MODEL)
        failing = training.forward_backward([datum(), datum(), datum()], "cross_entropy")
        after = training.optim_step(step())
        with pytest.raises(tinkex.BadRequestError, match=r"chunk 2 failed.*1 before it.*learning_rate=0"):
            failing.result(20)
        assert after.result(20) is not None
        # Chunk 3 was never sent: its number is a gap, and the next operation has the number after it.
        assert ran(service, training) == [(1, "forward_backward"), (4, "optim_step")]


def test_chunks_are_submitted_in_order_and_their_outputs_joined(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"fwdbwd_max_chunk_len": 2}) as service:
        training = connect(service).create_lora_training_client(MODEL)
        output = training.forward_backward([datum(n) for n in (2, 3, 4, 5, 6)], "cross_entropy").result(20)
        assert [len(one["logprobs"].tolist()) for one in output.loss_fn_outputs] == [2, 3, 4, 5, 6]
        assert [seq_id for seq_id, _ in ran(service, training)] == [1, 2, 3]


def test_cancelling_a_queued_operation_gives_its_turn_on(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    gate = proto_service.script.on("forward_backward", nth=1, do=[Status(500, headers={"retry-after-ms": "300"})])
    first = training.forward_backward([datum()], "cross_entropy")
    queued = training.optim_step(step())
    last = training.forward_backward([datum()], "cross_entropy")
    assert queued.cancel() is True
    assert "never saw it" in queued.status().note
    assert first.result(20).loss_fn_outputs
    assert last.result(20).loss_fn_outputs
    assert gate.fired == 1
    assert ran(proto_service, training) == [(1, "forward_backward"), (3, "forward_backward")]
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result(1)


def test_cancelling_all_queued_operations_leaves_no_gap(proto_service: ScriptedService, connect: Connect) -> None:
    """Only the last of their numbers used to come back, and the next operation waited for the others in vain."""
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("forward_backward", nth=1, do=[Status(500, headers={"retry-after-ms": "300"})])
    first = training.forward_backward([datum()], "cross_entropy")
    queued = [training.optim_step(step()) for _ in range(4)]
    assert all(future.cancel() for future in queued)
    assert first.result(20).loss_fn_outputs
    assert training.optim_step(step()).result(20)
    assert ran(proto_service, training) == [(1, "forward_backward"), (2, "optim_step")]


def test_a_waiters_timeout_neither_cancels_nor_leaks_a_turn(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", nth=1, do=Work(0.4))
    slow = training.optim_step(step())
    with pytest.raises(TimeoutError):
        slow.result(0.05)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await slow.result_async(0.05)

    asyncio.run(impatient())
    assert training.forward_backward([datum()], "cross_entropy").result(20).loss_fn_outputs
    assert slow.result(20) is slow.result(20)
    assert ran(proto_service, training) == [(1, "optim_step"), (2, "forward_backward")]


def test_numbers_that_never_left_are_used_again_so_that_no_service_waits_for_them(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"fwdbwd_max_chunk_len": 1}, gap_s=30) as service:
        training = connect(service).create_lora_training_client(MODEL)

        def broken(data: list[tinkex.Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
            raise KeyError("my own bug")

        with pytest.raises(KeyError, match="my own bug"):
            training.forward_backward_custom([datum(), datum()], broken).result(20)  # type: ignore[arg-type]
        assert training.optim_step(step()).result(5) is not None
        # Two forwards were sent; the two numbers of the backward pass were not.
        assert ran(service, training) == [(1, "forward"), (2, "forward"), (3, "optim_step")]


def test_an_operation_that_never_gets_an_answer_fails_alone(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service, timeout_s=0.2, max_retries=2).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", times=2, do=Hang())
    lost = training.optim_step(step())
    after = training.forward_backward([datum()], "cross_entropy")
    with pytest.raises(tinkex.APIConnectionError, match="gave up after 2 attempts"):
        lost.result(20)
    # The service never got number 1; it waits for it for a while and then goes on.
    assert after.result(30).loss_fn_outputs


def test_a_retried_optim_step_runs_once(service: ScriptedService, training: tinkex.TrainingClient) -> None:
    service.script.on("optim_step", nth=1, do=Drop(when="after_accept"))
    service.script.on("optim_step", nth=2, do=Status(503, when="after_accept"))
    training.optim_step(step()).result(20)
    assert ran(service, training) == [(1, "optim_step")]
    sent = [request for request in service.requests if request.endpoint == "optim_step"]
    assert len(sent) == 3
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 1
    assert len({request.body for request in sent}) == 1


@pytest.mark.slow
def test_2000_operations_from_8_threads_and_8_loops_arrive_in_call_order_exactly_once_through_chaos(
    proto_service: ScriptedService, connect: Connect
) -> None:
    service = proto_service
    clients = [connect(service).create_lora_training_client(MODEL) for _ in range(4)]
    service.script.chaos(seed=7, p_500=0.03, p_429=0.02, p_408=0.02, p_reset=0.03, p_delay=0.1)
    called: dict[str, list[tuple[int | None, str]]] = {client.model_id: [] for client in clients}
    lock = threading.Lock()
    data = [datum()]
    done: list[object] = []

    def call(client: tinkex.TrainingClient, number: int) -> tinkex.APIFuture[Any]:
        with lock:  # a call and its note are one step: the order of calls is what arrival is compared with
            is_step = number % 2 == 0
            future = client.optim_step(step()) if is_step else client.forward_backward(data, "cross_entropy")
            called[client.model_id].append((future.status().seq_id, future.status().operation))
            return future

    def burst(worker: int) -> list[tinkex.APIFuture[Any]]:
        return [call(clients[(worker + number) % 4], number) for number in range(125)]

    def in_thread(worker: int) -> None:
        done.extend(future.result(120) for future in burst(worker))

    async def in_loop(worker: int) -> None:
        done.extend(await asyncio.gather(*burst(worker)))

    workers = [threading.Thread(target=in_thread, args=(index,)) for index in range(8)]
    workers += [threading.Thread(target=lambda index=index: asyncio.run(in_loop(index))) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)
    assert len(done) == 2000
    for client in clients:
        assert ran(service, client) == called[client.model_id]
