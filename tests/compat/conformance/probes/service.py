"""Probes of `ServiceClient`."""

from __future__ import annotations

from typing import Any

from tests.compat.conformance.probes.world import Call, World, done, near, probe

TELEMETRY_EVENT = "compatibility probe"


@probe("ServiceClient.close")
def close(world: World, call: Call) -> None:
    service = world.new_service()
    session_id = service.create_lora_training_client(world.model, rank=2).get_info().model_id.partition(":")[0]
    assert world.found_session(session_id).status.type == "active"
    call(service, "errored", "tried enough")
    status = world.found_session(session_id).status
    assert (status.type, status.reason.type, status.detail) == ("client_finished", "errored", "tried enough"), status


@probe("ServiceClient.copy_weights", "RestClient.copy_weights")
def copy_weights(world: World, call: Call) -> None:
    project = world.project()
    client = world.rest if call.kind == "RestClient" else world.new_service(project_id=project)
    copy = call(client, world.state, **({"destination_project_id": project} if client is world.rest else {}))
    assert copy != world.state and copy.startswith("tinker://"), copy
    assert near(world.loss_of(world.service.create_training_client_from_state(copy)), world.loss)
    (usage,) = done(world.admin.get_current_checkpoint_storage_usage(project)).data
    assert usage.checkpoint_count == 1, usage


@probe("ServiceClient.create_custom_loss")
def create_custom_loss(world: World, call: Call) -> None:
    def weighted(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/seen:sum": loss * 0 + 1}

    handle = call(world.service, weighted, {"logprobs": 1, "weights": 1})
    output = done(world.new_training().forward_backward_custom(world.data, handle))
    assert output.metrics["custom/seen:sum"] == len(world.data), output.metrics


@probe("ServiceClient.create_lora_training_client")
def create_lora_training_client(world: World, call: Call) -> None:
    training = call(world.service, world.model, rank=3, seed=7, train_unembed=False, user_metadata={"colour": "blue"})
    info = training.get_info()
    assert info.lora_rank == 3, info
    run = done(world.rest.get_training_run(info.model_id))
    assert run.base_model == world.model and run.user_metadata == {"colour": "blue"}, run
    before = world.loss_of(training)
    world.step(training)
    assert world.loss_of(training) < before


@probe("ServiceClient.create_rest_client")
def create_rest_client(world: World, call: Call) -> None:
    assert done(call(world.service).get_training_run(world.run_id)).training_run_id == world.run_id


@probe("ServiceClient.create_sampling_client")
def create_sampling_client(world: World, call: Call) -> None:
    trained, base = call(world.service, model_path=world.sampler_path), call(world.service, base_model=world.model)
    tokens = world.data[0].model_input
    of_trained, of_base = (sum(done(one.compute_logprobs(tokens))[1:]) for one in (trained, base))
    assert of_trained > of_base, (of_trained, of_base)


@probe("ServiceClient.create_training_client_from_state")
def create_training_client_from_state(world: World, call: Call) -> None:
    training = call(world.service, world.state, user_metadata={"from": "state"})
    assert near(world.loss_of(training), world.loss)
    world.step(training)
    assert not near(world.loss_of(training), world.next_loss), "the moments came along"


@probe("ServiceClient.create_training_client_from_state_with_optimizer")
def create_training_client_from_state_with_optimizer(world: World, call: Call) -> None:
    training = call(world.service, world.state)
    assert near(world.loss_of(training), world.loss)
    world.step(training)
    assert near(world.loss_of(training), world.next_loss), "without the moments"


@probe("ServiceClient.get_server_capabilities")
def get_server_capabilities(world: World, call: Call) -> None:
    models = {model.model_name: model for model in call(world.service).supported_models}
    assert models[world.model].max_context_length > 0 and models[world.model].trainable, models


@probe("*.get_console_url")
def get_console_url(world: World, call: Call) -> None:
    assert world.run_id  # the session exists
    url = call(world.client(call.kind))
    place = {"ServiceClient": f"/sessions/{world.session_id}", "TrainingClient": f"/training_runs/{world.run_id}"}
    assert url.startswith("http") and url.endswith(place[call.kind]), url


@probe("*.get_telemetry")
def get_telemetry(world: World, call: Call) -> None:
    telemetry = call(world.client(call.kind))
    if not world.is_ours:  # ours sends its own, and hands nothing out
        assert telemetry.log(TELEMETRY_EVENT, {"method": f"{call.kind}.{call.name}"}), "the event was not taken"
        telemetry._trigger_flush()
        assert telemetry._wait_until_drained_sync()
    else:
        assert telemetry is None


@probe("APIFuture.result")
def result(world: World, call: Call) -> None:
    assert near(world.total(call(world.training.forward(world.data, "cross_entropy"), 60)), world.loss)
