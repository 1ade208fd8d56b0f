"""What training promises: the order of seq_ids, each exactly once, and a loss that falls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkex.testing import FailFuture, ScriptedService, Work

from .http_client import Client, optim_body, sample_body, training_body


def test_a_repeated_request_is_the_same_operation(any_service: ScriptedService) -> None:
    client = Client(any_service)
    model = client.model()
    ids = {client.post("optim_step", optim_body(model, 1)).json["request_id"] for _ in range(3)}
    assert len(ids) == 1 and any_service.executed == [(model, 1, "optim_step")]


def test_another_body_under_a_used_seq_id_is_refused_not_409(client: Client) -> None:
    model = client.model()
    client.post("optim_step", optim_body(model, 1))
    refused = client.post("optim_step", optim_body(model, 1, learning_rate=1.0))
    assert refused.status == 400 and "seq_id 1" in refused.json["detail"]


def test_operations_that_overtook_each_other_run_in_order(client: Client, service: ScriptedService) -> None:
    model = client.model()
    ids = {seq_id: client.post("optim_step", optim_body(model, seq_id)).json["request_id"] for seq_id in (3, 2)}
    assert service.executed == []
    client.post("optim_step", optim_body(model, 1))
    assert [seq_id for _, seq_id, _ in service.executed] == [1, 2, 3]
    assert client.poll(ids[3]).status == 200


def test_a_missing_seq_id_is_skipped_after_a_while_and_then_too_late(client: Client, service: ScriptedService) -> None:
    model = client.model()
    request_id = client.post("optim_step", optim_body(model, 2)).json["request_id"]
    client.wait(request_id)
    late = client.result("optim_step", optim_body(model, 1))
    assert late["category"] == "user" and "came after seq_id 2" in late["error"]
    assert service.executed == [(model, 2, "optim_step")]


def test_a_step_without_gradient_changes_nothing_and_says_so(client: Client, service: ScriptedService) -> None:
    model = client.model()
    assert client.result("optim_step", optim_body(model, 1))["metrics"]["no_gradient:max"] == 1.0
    assert service.models[model].weights.steps == 0


def test_training_lowers_the_loss_and_saved_state_restores_it(client: Client, service: ScriptedService) -> None:
    model = client.model()

    def loss(seq_id: int) -> float:
        return float(client.result("forward_backward", training_body(model, seq_id))["metrics"]["loss:sum"])

    first = loss(1)
    path = client.result("save_weights", {"model_id": model, "path": "a", "seq_id": 2})["path"]
    assert path == f"tinker://{model}/weights/a"
    client.result("optim_step", optim_body(model, 3, learning_rate=0.05))
    assert loss(4) < 0.9 * first
    client.result("load_weights", {"model_id": model, "path": path, "seq_id": 5})
    assert loss(6) == first
    assert service.models[model].weights.steps == 0, "without `optimizer`, only the weights are loaded"


def test_a_learning_rate_of_zero_discards_a_gradient(client: Client, service: ScriptedService) -> None:
    model = client.model()
    client.post("forward_backward", training_body(model, 1))
    client.post("optim_step", optim_body(model, 2, learning_rate=0.0))
    assert service.models[model].weights.skill == 0.0 and service.models[model].gradient is None


def test_data_that_do_not_fit_fail_their_operation_and_no_other(client: Client, service: ScriptedService) -> None:
    model = client.model()
    bad = client.result("forward_backward", training_body(model, 1, weights=[1.0] * 4))
    assert bad["category"] == "user" and "datum 0: weights has 4 values" in bad["error"]
    short = client.result("forward_backward", training_body(model, 2, target_tokens=[1]))
    assert "target_tokens has 1 positions" in short["error"]
    assert "metrics" in client.result("forward_backward", training_body(model, 3))
    assert service.executed == [(model, 3, "forward_backward")]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_policy_losses_need_log_probabilities_and_advantages(client: Client, loss_fn: str) -> None:
    model = client.model()
    body = training_body(model, 1)
    body["forward_backward_input"]["loss_fn"] = loss_fn
    assert "needs 'logprobs'" in client.result("forward_backward", body)["error"]
    body = training_body(model, 2, logprobs=[-1.0] * 5, advantages=[1.0] * 5)
    body["forward_backward_input"]["loss_fn"] = loss_fn
    assert client.result("forward_backward", body)["metrics"]["loss:sum"] < 0


def test_a_failed_operation_lets_the_next_one_run(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("forward_backward", nth=1, do=FailFuture("out of memory", "server"))
    failed = client.result("forward_backward", training_body(model, 1))
    assert failed == {"error": "out of memory", "category": "server"}
    client.result("optim_step", optim_body(model, 2))
    assert service.executed == [(model, 2, "optim_step")]


def test_a_poll_is_held_until_the_work_is_done() -> None:
    with ScriptedService(hold_s=30.0) as service:
        client, other = Client(service), Client(service)
        model = client.model()
        body = optim_body(model, 2)
        request_id = client.post("optim_step", body).json["request_id"]
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(client.poll, request_id)
            service.wait_for_requests("retrieve_future", count=2)  # the first one was for create_model
            other.post("optim_step", optim_body(model, 1))
            assert held.result(timeout=10).status == 200


def test_operations_of_one_model_take_their_time_one_after_the_other(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("optim_step", do=Work(0.08))
    ids = [client.post("optim_step", optim_body(model, seq_id)).json["request_id"] for seq_id in (1, 2)]
    client.wait(ids[1])
    polls = [request.status for request in service.requests_to("retrieve_future")]
    assert polls.count(408) >= 2, "0.16 s of work outlast two polls of 0.05 s"


def test_a_saved_sampler_keeps_the_weights_of_its_moment(client: Client) -> None:
    model = client.model()
    client.post("forward_backward", training_body(model, 1))
    body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 7}
    saved = client.result("save_weights_for_sampler", body)
    assert saved["sampling_session_id"].endswith(":sample:7") and "path" not in saved
    client.post("optim_step", optim_body(model, 3, learning_rate=0.1))
    session = saved["sampling_session_id"]
    before = client.result("asample", sample_body(session))["sequences"][0]["logprobs"]
    after = client.result("save_weights_for_sampler", {**body, "seq_id": 4, "sampling_session_seq_id": 8})
    assert client.result("asample", sample_body(after["sampling_session_id"]))["sequences"][0]["logprobs"] > before


def test_a_repeated_sample_is_drawn_once_and_a_lost_one_again(client: Client, service: ScriptedService) -> None:
    sampler = client.sampler()
    first, again = (client.post("asample", sample_body(sampler)).json["request_id"] for _ in range(2))
    assert first == again and len(service.sampled) == 1
    service.script.on("asample", nth=1, do=FailFuture())
    failed = client.post("asample", sample_body(sampler, 1)).json["request_id"]
    assert "error" in client.poll(failed).json
    assert "sequences" in client.result("asample", sample_body(sampler, 1))
