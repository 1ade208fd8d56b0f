"""The REST clients over real HTTP. No session is opened for any of it."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable

import pytest

import tinkex
from tests.integration.client.conftest import MODEL
from tinkex.testing import Answer, ScriptedService, Status

Connect = Callable[..., tinkex.ServiceClient]


@pytest.fixture
def saved(service: ScriptedService, connect: Connect) -> tuple[tinkex.RestClient, str, str]:
    """A REST client of its own, and the paths of a state and of sampler weights that another client saved."""
    training = connect(service).create_lora_training_client(MODEL, rank=4, user_metadata={"who": "me"})
    state = training.save_state("first").result(20).path
    sampler = training.save_weights_for_sampler("second").result(20).path
    key = training._session.config.api_key
    return tinkex.RestClient(base_url=service.url, api_key=key), state, sampler


def test_runs_and_checkpoints_are_listed_without_opening_a_session(
    service: ScriptedService, saved: tuple[tinkex.RestClient, str, str]
) -> None:
    rest, state, sampler = saved
    before = len(service.requests_to("create_session"))
    (run,) = rest.list_training_runs().result(20).training_runs
    assert run.base_model == MODEL and run.lora_rank == 4
    assert rest.get_training_run(run.training_run_id).result(20).training_run_id == run.training_run_id
    assert rest.get_training_run_by_tinker_path(state).result(20).user_metadata == {"who": "me"}
    paths = {checkpoint.tinker_path for checkpoint in rest.list_checkpoints(run.training_run_id).result(20).checkpoints}
    assert paths == {state, sampler}
    assert len(rest.list_user_checkpoints(limit=1).result(20).checkpoints) == 1
    assert len(service.requests_to("create_session")) == before


def test_publish_ttl_and_delete_reach_the_service(
    service: ScriptedService, saved: tuple[tinkex.RestClient, str, str]
) -> None:
    rest, state, sampler = saved
    rest.publish_checkpoint_from_tinker_path(state).result(20)
    assert service.checkpoints[state].is_public
    rest.unpublish_checkpoint_from_tinker_path(state).result(20)
    assert not service.checkpoints[state].is_public
    rest.set_checkpoint_ttl_from_tinker_path(sampler, 3600).result(20)
    asyncio.run(rest.set_checkpoint_ttl_from_tinker_path_async(sampler, None))
    rest.delete_checkpoint_from_tinker_path(state).result(20)
    assert state not in service.checkpoints
    with pytest.raises(tinkex.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(state).result(20)


def test_an_archive_address_comes_with_an_aware_expiry(
    service: ScriptedService, saved: tuple[tinkex.RestClient, str, str]
) -> None:
    rest, state, _ = saved
    found = rest.get_checkpoint_archive_url_from_tinker_path(state).result(20)
    assert found.url.startswith("http")
    assert found.expires.tzinfo is not None
    service.script.on("checkpoint_archive", do=Status(302, headers={"location": "http://127.0.0.1:1/x"}))
    later = rest.get_checkpoint_archive_url_from_tinker_path(state).result(20).expires
    assert dt.timedelta(minutes=10) < later - dt.datetime.now(dt.UTC) < dt.timedelta(minutes=20)


def test_an_archive_answer_without_an_address_is_a_typed_error(
    service: ScriptedService, saved: tuple[tinkex.RestClient, str, str]
) -> None:
    rest, state, _ = saved
    service.script.on("checkpoint_archive", do=Answer({}))
    with pytest.raises(tinkex.APIResponseValidationError, match="no address"):
        rest.get_checkpoint_archive_url_from_tinker_path(state).result(20)


def test_a_checkpoint_without_a_size_is_read(
    service: ScriptedService, saved: tuple[tinkex.RestClient, str, str]
) -> None:
    rest, state, _ = saved
    row = {
        "checkpoint_id": "weights/first", "checkpoint_type": "training", "time": "2026-01-01T00:00:00Z",
        "tinker_path": state, "size_bytes": None,
    }  # fmt: skip
    service.script.on("list_user_checkpoints", do=Answer({"checkpoints": [row]}))
    (checkpoint,) = rest.list_user_checkpoints().result(20).checkpoints
    assert checkpoint.size_bytes is None and checkpoint.time.tzinfo is not None


def test_bad_paths_are_refused_before_they_are_sent(saved: tuple[tinkex.RestClient, str, str]) -> None:
    rest, _, _ = saved
    with pytest.raises(tinkex.ValidationError, match="tinker://"):
        rest.delete_checkpoint_from_tinker_path("weights/0001")


def test_weights_info_external_urls_copies_and_sessions(proto_service: ScriptedService, connect: Connect) -> None:
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL, rank=4)
    rest = client.create_rest_client()
    state = training.save_state("s").result(20).path
    assert rest.get_weights_info_by_tinker_path(state).result(20).lora_rank == 4
    external = training.save_weights_external("e").result(20).path
    assert rest.get_external_weights_urls(external).result(20).urls
    copied = client.copy_weights(state).result(20)
    assert copied != state and copied in proto_service.checkpoints
    (session_id,) = rest.list_sessions().result(20).sessions
    assert training.model_id in rest.get_session(session_id).result(20).training_run_ids
    sampler = client.create_sampling_client(base_model=MODEL)
    assert rest.get_sampler(sampler.sampling_session_id).result(20).base_model == MODEL
    assert asyncio.run(sampler.get_base_model_async()) == MODEL


def test_capabilities_info_and_unload(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    assert MODEL in [model.model_name for model in client.get_server_capabilities().supported_models]
    training = client.create_lora_training_client(MODEL)
    assert training.get_info().model_id == training.model_id
    assert asyncio.run(training.get_info_async()).model_data is not None
    assert training.unload_model().result(20).model_id == training.model_id


def test_a_runs_steps_and_the_services_state_can_be_read(service: ScriptedService, connect: Connect) -> None:
    training = connect(service).create_lora_training_client(MODEL, rank=4)
    rates = (1e-3, 5e-4)
    for rate in rates:
        training.optim_step(tinkex.AdamParams(learning_rate=rate)).result(20)
    rest = tinkex.RestClient(base_url=service.url, api_key=training._session.config.api_key)
    found = rest.get_run_steps(training.model_id).result(20)
    assert [step.learning_rate for step in found.steps] == list(rates)
    first = found.steps[0].seq_id
    assert [step.learning_rate for step in rest.get_run_steps(training.model_id, first).result(20).steps] == [5e-4]
    assert MODEL in rest.get_service_state().result(20).models
    assert rest.list_failed_operations().result(20).operations == []
