"""Training flows over real HTTP: losses of one's own, states, dialects, chunks, metadata, refusals before sending."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.client._runtime import session
from tinkex.testing import ScriptedService, Status, Work
from tinkex.wire.dialect import Dialect

Connect = Callable[..., tinkex.ServiceClient]


def loss(data: list[tinkex.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return -sum(one.sum() for one in logprobs), {"seen": float(len(data))}


# -- custom losses ---------------------------------------------------------------------------------------------------


def test_a_custom_loss_trains_and_an_optim_step_called_next_applies_it(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    custom = training.forward_backward_custom([datum(), datum(4)], loss)
    after = training.optim_step(step())
    output = custom.result(30)
    after.result(30)
    assert output.metrics["seen"] == 2.0
    assert "surrogate_loss:sum" in output.metrics
    assert [op for _, _, op in service.executed] == ["forward", "forward_backward", "optim_step"]


def test_every_loss_fn_input_reaches_the_custom_loss_and_2d_targets_work(training: tinkex.TrainingClient) -> None:
    seen: list[set[str]] = []

    def look(data: list[tinkex.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        seen.extend(set(one.loss_fn_inputs) for one in data)
        assert tuple(logprobs[1].shape) == (3, 2)
        return loss(data, logprobs)

    flat = datum(extra=[1.0, 2.0, 3.0])
    grid = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [[1, 2], [3, 4], [5, 6]], "rewards": [[0.5, 0.5]] * 3},
    )
    assert training.forward_backward_custom([flat, grid], look).result(30).loss_fn_outputs
    assert seen == [{"target_tokens", "weights", "extra"}, {"target_tokens", "rewards"}]


def test_a_slow_custom_loss_stops_neither_heartbeats_nor_other_clients(
    proto_service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.05)
    client = connect(proto_service)
    training, sampler = client.create_lora_training_client(MODEL), client.create_sampling_client(base_model=MODEL)
    entered, leave = threading.Event(), threading.Event()

    def slow(data: list[tinkex.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        entered.set()
        assert leave.wait(20)
        return loss(data, logprobs)

    future = training.forward_backward_custom([datum()], slow)
    assert entered.wait(20)
    beats = len(proto_service.requests_to("session_heartbeat"))
    assert sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=2)).result(20).sequences
    proto_service.wait_for_requests("session_heartbeat", beats + 3)
    leave.set()
    assert future.result(20).loss_fn_outputs


def test_a_sync_call_of_another_client_inside_a_custom_loss_works_and_of_the_same_is_refused(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service)
    training, sampler = client.create_lora_training_client(MODEL), client.create_sampling_client(base_model=MODEL)

    def nosy(data: list[tinkex.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        assert sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=2)).result(10).sequences
        training.optim_step(step()).result(10)
        return loss(data, logprobs)

    with pytest.raises(tinkex.WrongThread, match="inside the custom loss"):
        training.forward_backward_custom([datum()], nosy).result(20)
    assert training.optim_step(step()).result(20) is not None


def test_a_custom_loss_that_raises_fails_its_own_call_only(training: tinkex.TrainingClient) -> None:
    def broken(data: list[tinkex.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        raise KeyError("my own bug")

    with pytest.raises(KeyError, match="my own bug"):
        training.forward_backward_custom([datum()], broken).result(20)
    assert training.optim_step(step()).result(20) is not None


# -- dialects --------------------------------------------------------------------------------------------------------


def test_the_dialect_is_learned_from_client_config(service: ScriptedService, training: tinkex.TrainingClient) -> None:
    training.forward_backward([datum()], "cross_entropy").result(20)
    (sent,) = service.requests_to("forward_backward")
    is_json = training._session.link().dialect is Dialect.JSON
    assert (sent.headers["content-type"] == "application/json") == is_json


@pytest.mark.parametrize("status", [400, 415, 422])
def test_a_service_that_refuses_the_first_protobuf_body_gets_json_with_the_same_seq_id(
    proto_service: ScriptedService, connect: Connect, status: int
) -> None:
    proto_service.script.on(
        "forward_backward", do=Status(status, "what is this?"), where=lambda r: "protobuf" in r.headers["content-type"]
    )
    training = connect(proto_service).create_lora_training_client(MODEL)
    for _ in range(2):
        assert training.forward_backward([datum()], "cross_entropy").result(20).loss_fn_outputs
    kinds = [request.headers["content-type"] for request in proto_service.requests_to("forward_backward")]
    assert kinds == ["application/x-protobuf", "application/json", "application/json"]
    assert [seq_id for _, seq_id, _ in proto_service.executed] == [1, 2]


def test_a_refusal_in_both_dialects_is_the_services_first_word(
    proto_service: ScriptedService, connect: Connect
) -> None:
    proto_service.script.on("forward_backward", do=Status(400, "your data are bad"))
    training = connect(proto_service).create_lora_training_client(MODEL)
    with pytest.raises(tinkex.BadRequestError, match="your data are bad"):
        training.forward_backward([datum()], "cross_entropy").result(20)
    assert training._session.link().dialect is Dialect.PROTO


def test_training_bodies_are_compressed_where_the_service_asks_for_it(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"proto_compress_fwdbwd": True}) as service:
        training = connect(service).create_lora_training_client(MODEL)
        assert training.forward_backward([datum(200)], "cross_entropy").result(20).loss_fn_outputs
        (sent,) = service.requests_to("forward_backward")
        assert sent.headers["content-encoding"] == "zstd"


# -- states ----------------------------------------------------------------------------------------------------------


def test_a_client_from_state_has_the_rank_and_flags_of_the_saved_adapter(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service)
    flags: dict[str, Any] = {"train_mlp": False, "train_attn": True, "train_unembed": False}
    first = client.create_lora_training_client(MODEL, rank=4, seed=3, **flags)
    path = first.save_state("here").result(20).path
    for create in (
        client.create_training_client_from_state,
        client.create_training_client_from_state_with_optimizer,
    ):
        again = create(path)
        lora = proto_service.models[again.model_id].lora
        assert {name: lora[name] for name in ("rank", *flags)} == {"rank": 4, **flags}


def test_create_from_state_works_where_weights_info_is_missing(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    path = client.create_lora_training_client(MODEL, rank=4).save_state("x").result(20).path
    service.script.on("weights_info", do=Status(404, "no such call"))
    again = asyncio.run(client.create_training_client_from_state_async(path))
    assert service.models[again.model_id].lora["rank"] == 4


def test_an_ephemeral_sampler_has_no_name_and_says_so(training: tinkex.TrainingClient) -> None:
    with pytest.warns(DeprecationWarning, match="ephemeral"):
        sampler = training.save_weights_and_get_sampling_client(name="kept?")
    assert sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=2)).result(20).sequences


def test_a_retried_ephemeral_save_reuses_its_sampler_number(proto_service: ScriptedService, connect: Connect) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("save_weights_for_sampler", times=2, do=Status(503, headers={"retry-after-ms": "5"}))
    training.save_weights_and_get_sampling_client()
    bodies = {request.body for request in proto_service.requests_to("save_weights_for_sampler")}
    assert len(bodies) == 1


@pytest.mark.timing
def test_save_weights_and_get_sampling_client_async_leaves_the_callers_loop_free(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("save_weights_for_sampler", do=Work(0.6))

    async def go() -> float:
        worst = 0.0
        saving = asyncio.ensure_future(training.save_weights_and_get_sampling_client_async())
        while not saving.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - before)
        await saving
        return worst

    assert asyncio.run(go()) < 0.4


# -- refused before anything is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.forward_backward([], "cross_entropy"), "empty"),
        (lambda t: t.forward_backward([datum(weights=[1.0])], "cross_entropy"), r"data\[0\].*weights"),
        (
            lambda t: t.forward_backward([datum(), datum(weights=[1.0, float("nan"), 1.0])], "cross_entropy"),
            r"data\[1\]",
        ),
        (lambda t: t.forward_backward([datum()], "cross_entropy", {"x": object()}), "loss_fn_config"),
        (lambda t: t.optim_step(None), "AdamParams"),
        (lambda t: t.optim_step(tinkex.AdamParams(learning_rate=float("inf"))), "learning_rate"),
        (lambda t: t.save_state("a/b"), "name"),
        (lambda t: t.load_state("tinker://run/sampler_weights/x"), "weights"),
        (lambda t: t.save_state("x", ttl_seconds=-1), "ttl_seconds"),
    ],
)
def test_bad_input_is_refused_at_the_call_nothing_is_sent_and_the_client_stays_usable(
    proto_service: ScriptedService, connect: Connect, call: Callable[[tinkex.TrainingClient], object], says: str
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    before = len(proto_service.requests)
    with pytest.raises(tinkex.ValidationError, match=says):
        call(training)
    # Background traffic (capabilities) aside, no request came of it.
    names = {request.endpoint for request in proto_service.requests[before:]}
    assert names <= {"get_server_capabilities", "session_heartbeat"}
    assert training.optim_step(step()).result(20) is not None


def test_a_plain_dict_of_adam_params_is_taken(training: tinkex.TrainingClient) -> None:
    assert training.optim_step({"learning_rate": 1e-4}).result(20) is not None


def test_a_weights_path_where_sampler_weights_is_needed_is_refused_in_one_line(
    proto_service: ScriptedService, connect: Connect
) -> None:
    with pytest.raises(tinkex.ValidationError, match="sampler_weights"):
        connect(proto_service).create_sampling_client(model_path="tinker://run/weights/0001")
    assert not proto_service.requests_to("create_sampling_session")


def test_metrics_of_all_chunks_are_combined(connect: Connect) -> None:
    with ScriptedService(base_models=[MODEL], client_config={"fwdbwd_max_chunk_len": 1}) as service:
        training = connect(service).create_lora_training_client(MODEL)
        whole = [training.forward([datum(n)], "cross_entropy").result(20).metrics["loss:sum"] for n in (2, 3)]
        both = training.forward([datum(2), datum(3)], "cross_entropy").result(20)
        assert both.metrics["loss:sum"] == pytest.approx(sum(whole))
        assert both.loss == both.metrics["loss:sum"]


def test_a_step_event_splits_the_time_into_submit_queue_compute_and_fetch(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Work(0.2))
    steps: list[Any] = []
    stop = tinkex.on("step", steps.append)
    training.optim_step(step()).result(20)
    stop()
    (one,) = [event for event in steps if event.operation == "optim_step"]
    assert one.ok and one.seq_id == 1 and one.model_id == training.model_id
    assert one.seconds == pytest.approx(one.submit_s + one.queue_s + one.compute_s + one.fetch_s, abs=0.02)
    assert one.compute_s >= 0.15


# -- custom losses that misbehave ------------------------------------------------------------------------------------


def _leave(*_: Any) -> Any:
    sys.exit(3)


def _run_dry(*_: Any) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("loss", [_leave, _run_dry], ids=["SystemExit", "StopIteration"])
def test_a_custom_loss_that_exits_or_runs_dry_fails_its_own_future_and_nothing_else(
    proto_service: ScriptedService, connect: Connect, loss: Any
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    future = training.forward_backward_custom([datum()], loss)
    with pytest.raises(tinkex.TinkexError, match=r"SystemExit|StopIteration"):
        future.result(10)
    training.optim_step(step()).result(10)


def test_the_loss_of_a_custom_loss_travels_with_its_second_pass(
    proto_service: ScriptedService, connect: Connect
) -> None:
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    output = training.forward_backward_custom([datum(), datum(4)], loss)
    training.optim_step(step()).result(30)
    [told] = client.create_rest_client().get_run_steps(training.model_id).result(30).steps
    assert told.loss == output.result(30).loss
    passes = proto_service.requests_to("forward_backward")
    assert [request.headers.get("x-tinkex-pass") for request in passes] == ["custom"] * 2
    assert [("x-tinkex-custom-loss" in request.headers) for request in passes] == [False, True]


def test_a_service_that_does_not_announce_it_gets_no_header_of_ours(connect: Connect) -> None:
    with ScriptedService(missing=["log_metrics"], base_models=[MODEL]) as other:
        training = connect(other).create_lora_training_client(MODEL)
        training.forward_backward_custom([datum()], loss).result(30)
        assert not any(name.startswith("x-tinkex") for request in other.requests for name in request.headers)
