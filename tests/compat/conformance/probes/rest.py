"""Probes of `RestClient` and `AdminClient`."""

from __future__ import annotations

import datetime as dt
import json
import struct
import urllib.request

from tests.compat.conformance.probes.world import Call, World, done, probe

# -- runs ------------------------------------------------------------------------------------------------------------


@probe("RestClient.get_training_run", "RestClient.get_training_run_by_tinker_path")
def get_training_run(world: World, call: Call) -> None:
    run = call(world.rest, world.state if "path" in call.name else world.run_id)
    assert (run.training_run_id, run.base_model, run.lora_rank) == (world.run_id, world.model, 4), run
    assert run.last_checkpoint is not None and not run.corrupted, run


@probe("RestClient.list_training_runs")
def list_training_runs(world: World, call: Call) -> None:
    everything = call(world.rest, limit=1000)
    assert world.run_id in {run.training_run_id for run in everything.training_runs}
    page = call(world.rest, limit=1, offset=1)
    assert len(page.training_runs) == 1 and page.cursor.offset == 1, page.cursor
    assert page.cursor.total_count == len(everything.training_runs), page.cursor


@probe("RestClient.get_weights_info_by_tinker_path")
def get_weights_info_by_tinker_path(world: World, call: Call) -> None:
    info = call(world.rest, world.state)
    assert (info.base_model, info.is_lora, info.lora_rank) == (world.model, True, 4), info
    assert info.train_mlp and info.train_attn and info.train_unembed, info


@probe("RestClient.get_sampler")
def get_sampler(world: World, call: Call) -> None:
    assert world.sampler
    sampler_id = done(world.rest.get_session(world.session_id)).sampler_ids[0]
    found = call(world.rest, sampler_id)
    assert (found.sampler_id, found.base_model) == (sampler_id, world.model), found


# -- checkpoints -----------------------------------------------------------------------------------------------------


@probe("RestClient.list_checkpoints")
def list_checkpoints(world: World, call: Call) -> None:
    wanted = {world.state: "training", world.sampler_path: "sampler"}
    listed = {one.tinker_path: one.checkpoint_type for one in call(world.rest, world.run_id).checkpoints}
    assert wanted.items() <= listed.items(), listed


@probe("RestClient.list_user_checkpoints")
def list_user_checkpoints(world: World, call: Call) -> None:
    paths = [world.new_state(), world.new_state()]
    newest = call(world.rest, limit=2)
    assert {one.tinker_path for one in newest.checkpoints} == set(paths), newest
    assert newest.cursor.total_count > 2, newest.cursor


@probe("RestClient.delete_checkpoint", "RestClient.delete_checkpoint_from_tinker_path")
def delete_checkpoint(world: World, call: Call) -> None:
    path = world.new_state()
    run_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
    assert world.checkpoint(path) is not None
    call(world.rest, *((path,) if "path" in call.name else (run_id, checkpoint_id)))
    assert world.checkpoint(path) is None


@probe("RestClient.publish_checkpoint_from_tinker_path", "RestClient.unpublish_checkpoint_from_tinker_path")
def publish(world: World, call: Call) -> None:
    path, is_public = world.new_state(), not call.name.startswith("un")
    if not is_public:
        done(world.rest.publish_checkpoint_from_tinker_path(path))
    assert world.checkpoint(path).public is not is_public
    call(world.rest, path)
    assert world.checkpoint(path).public is is_public


@probe("RestClient.set_checkpoint_ttl_from_tinker_path")
def set_checkpoint_ttl(world: World, call: Call) -> None:
    path = world.new_state()
    call(world.rest, path, 7200)
    left = world.checkpoint(path).expires_at - dt.datetime.now(dt.UTC)
    assert dt.timedelta(hours=1) < left <= dt.timedelta(hours=2), left
    call(world.rest, path, None)
    assert world.checkpoint(path).expires_at is None


@probe("RestClient.get_external_weights_urls")
def get_external_weights_urls(world: World, call: Call) -> None:
    path = done(world.training.save_weights_external(world.name())).path
    answer = call(world.rest, path)
    assert answer.expires > dt.datetime.now(dt.UTC), answer.expires
    files = {name: urllib.request.urlopen(url, timeout=30).read() for name, url in answer.urls.items()}
    assert json.loads(files["adapter_config.json"])["r"] == 4
    tensors = files["adapter_model.safetensors"]
    (length,) = struct.unpack("<Q", tensors[:8])
    assert any("lora_A" in name for name in json.loads(tensors[8 : 8 + length]))


# -- sessions --------------------------------------------------------------------------------------------------------


@probe("RestClient.list_sessions")
def list_sessions(world: World, call: Call) -> None:
    assert world.session_id in call(world.rest, limit=1000).sessions
    assert len(call(world.rest, limit=1).sessions) == 1


@probe("RestClient.get_session")
def get_session(world: World, call: Call) -> None:
    session = call(world.rest, world.session_id)
    assert world.run_id in session.training_run_ids and session.display_name == "the probe", session
    assert session.user_metadata == {"made": "by the probe"}, session


@probe("RestClient.search_sessions")
def search_sessions(world: World, call: Call) -> None:
    request = world.T.types.SessionSearchRequest(user_metadata={"made": "by the probe"}, display_name="PROBE")
    found = {one.session_id: one for one in call(world.rest, request).sessions}
    assert found[world.session_id].status.type == "active", found
    nothing = world.T.types.SessionSearchRequest(user_metadata={"made": "by nobody"})
    assert call(world.rest, nothing).sessions == []


@probe("RestClient.assign_session_project")
def assign_session_project(world: World, call: Call) -> None:
    service, project = world.new_service(), world.project()
    run_id = service.create_lora_training_client(world.model, rank=2).get_info().model_id
    call(world.rest, run_id.partition(":")[0], project)
    runs = done(world.rest.list_training_runs(project_id=project)).training_runs
    assert [run.training_run_id for run in runs] == [run_id], runs
    service.close("success")


@probe("RestClient.export_session_trace")
def export_session_trace(world: World, call: Call) -> None:
    assert call(world.rest, world.session_id).startswith("http")


# -- the account -----------------------------------------------------------------------------------------------------


@probe("RestClient.whoami")
def whoami(world: World, call: Call) -> None:
    identity = call(world.rest)
    assert identity.user_urn == "tml:user:local" and identity.org_urn.startswith("tml:organization:"), identity


@probe("*.get_audit_log")
def get_audit_log(world: World, call: Call) -> None:
    path = world.new_state()
    done(world.rest.delete_checkpoint_from_tinker_path(path))
    entries = call(world.client(call.kind), "checkpoints", dt.datetime.now(dt.UTC).date()).entries
    assert any(entry.event == "checkpoint.delete" and entry.tinker_path == path for entry in entries), entries[-3:]


@probe("*.get_billing_usage")
def get_billing_usage(world: World, call: Call) -> None:
    assert call(world.client(call.kind), "2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").data is not None


@probe("*.get_current_checkpoint_storage_usage")
def get_current_checkpoint_storage_usage(world: World, call: Call) -> None:
    assert world.state
    client = world.client(call.kind)
    (usage,) = call(client).data
    assert usage.checkpoint_count >= 1 and usage.size_bytes > 1000, usage
    (nothing,) = call(client, "a project without anything").data
    assert nothing.checkpoint_count == 0, nothing
