"""The endpoint table: complete, consistent, and safe to fill with ids."""

from __future__ import annotations

import pytest

from tinkex import types
from tinkex.errors import ValidationError
from tinkex.wire import endpoints
from tinkex.wire.endpoints import ALL, Pool

# The calls of the official service, then those that only ours has.
PUBLISHED = """
POST client/config · POST client/dynamic_config · POST auth/token · POST create_session · POST session_heartbeat
POST sessions/{session_id}/finish · POST create_sampling_session · POST join_sampling_session · POST create_model
POST forward · POST forward_backward · POST optim_step · POST save_weights · POST load_weights
POST save_weights_for_sampler · POST save_weights_external · POST create_custom_loss · POST asample
POST retrieve_future · POST retrieve_futures · POST cancel_future · POST get_info · GET get_server_capabilities
GET healthz · POST unload_model · POST telemetry · POST weights_info · POST copy_weights · GET training_runs
GET training_runs/{run_id} · GET training_runs/{run_id}/checkpoints · GET checkpoints
DELETE training_runs/{run_id}/checkpoints/{checkpoint_id}
POST training_runs/{run_id}/checkpoints/{checkpoint_id}/publish
DELETE training_runs/{run_id}/checkpoints/{checkpoint_id}/publish
GET training_runs/{run_id}/checkpoints/{checkpoint_id}/archive
GET training_runs/{run_id}/checkpoints/{checkpoint_id}/external_weights_urls
PUT training_runs/{run_id}/checkpoints/{checkpoint_id}/ttl · GET samplers/{sampler_id}
GET sessions · GET sessions/{session_id} · PUT sessions/{session_id}/project
GET sessions/{session_id}/trace_export · POST sessions/search · GET audit · GET billing/usage/events
GET billing/usage/checkpoints/current · GET auth/apikey/me · DELETE auth/apikey/me
GET training_runs/find · PATCH training_runs/{run_id} · DELETE training_runs/{run_id}
POST sample_stream · GET tokenizers/{tokenizer}/{file} · GET training_runs/{run_id}/steps
POST training_runs/{run_id}/metrics · GET training_runs/{run_id}/metrics · GET training_runs/{run_id}/samples
GET training_runs/{run_id}/history
GET service_state · GET failed_operations · POST models · DELETE models/{base_model}
"""


def test_the_table_has_exactly_the_calls_of_both_official_releases_and_our_own() -> None:
    listed = {row.strip() for line in PUBLISHED.splitlines() for row in line.split("·") if row.strip()}
    assert {f"{row.method} {row.path.removeprefix('/api/v1/')}" for row in ALL} == listed


def test_every_constant_is_named_after_its_row() -> None:
    for row in ALL:
        assert getattr(endpoints, row.name.upper()) is row
    assert len({row.name for row in ALL}) == len(ALL)


def test_futures_carry_the_request_type_that_official_clients_send() -> None:
    assert {row.name: row.request_type for row in ALL if row.is_future} == {
        "create_model": "CreateModel",
        "unload_model": "UnloadModel",
        "forward": "Forward",
        "forward_backward": "ForwardBackward",
        "optim_step": "OptimStep",
        "create_custom_loss": "CreateCustomLoss",
        "save_weights": "SaveWeights",
        "save_weights_for_sampler": "SaveWeightsForSampler",
        "save_weights_external": "SaveWeightsExternal",
        "load_weights": "LoadWeights",
        "asample": "Sample",
    }
    assert all(row.request_type == "" for row in ALL if not row.is_future)


def test_heartbeats_samples_polls_and_telemetry_never_share_a_pool() -> None:
    sent = (endpoints.SESSION_HEARTBEAT, endpoints.OPTIM_STEP, endpoints.ASAMPLE)
    polled = (endpoints.RETRIEVE_FUTURE, endpoints.RETRIEVE_FUTURES)
    assert [row.pool for row in (*sent, *polled, endpoints.TELEMETRY)] == list(Pool)


def test_every_answer_type_exists() -> None:
    for row in ALL:
        assert row.answer == "" or hasattr(types, row.answer), row


def test_ids_are_quoted_and_a_checkpoint_id_keeps_its_slash() -> None:
    url = endpoints.SET_CHECKPOINT_TTL.url(run_id="5e:train:0", checkpoint_id="sampler_weights/a b?#")
    assert url == "/api/v1/training_runs/5e:train:0/checkpoints/sampler_weights/a%20b%3F%23/ttl"
    assert endpoints.GET_TRAINING_RUN.url(run_id="a/b") == "/api/v1/training_runs/a%2Fb"
    assert endpoints.TOKENIZER_FILE.url(tokenizer="org/m", file="a.json") == "/api/v1/tokenizers/org/m/a.json"


@pytest.mark.parametrize("evil", ["../../x", "weights/..", "weights//x", "", ".", "/weights"])
def test_an_id_that_would_reach_another_endpoint_is_refused(evil: str) -> None:
    with pytest.raises(ValidationError, match="checkpoint_id"):
        endpoints.DELETE_CHECKPOINT.url(run_id="r", checkpoint_id=evil)


@pytest.mark.parametrize("parts", [{}, {"run_id": "r", "more": "x"}, {"session_id": "s"}])
def test_a_url_needs_exactly_its_placeholders(parts: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="run_id"):
        endpoints.GET_TRAINING_RUN.url(**parts)


def test_a_call_without_placeholders_is_its_path() -> None:
    assert endpoints.ASAMPLE.url() == "/api/v1/asample"
