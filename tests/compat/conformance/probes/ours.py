"""Probes of what our client has beyond the official one."""

from __future__ import annotations

import io
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.compat.conformance.probes.world import Call, World, done, near, probe


@probe("ServiceClient.create_training_client_from_run")
def create_training_client_from_run(world: World, call: Call) -> None:
    first = world.new_training()
    world.step(first)
    before = world.loss_of(first)
    again = call(world.service, first.model_id)
    assert near(world.loss_of(again), before)
    world.step(again)
    assert world.loss_of(again) < before


@probe("TrainingClient.save_weights_and_get_sampling_client_submit")
def save_weights_and_get_sampling_client_submit(world: World, call: Call) -> None:
    assert world.greedy(call(world.training)) == world.greedy(world.sampler)


@probe("TrainingClient.unload_model")
def unload_model(world: World, call: Call) -> None:
    training = world.new_training()
    assert call(training).model_id == training.model_id


@probe("SamplingClient.stream")
def stream(world: World, call: Call) -> None:
    params = world.T.SamplingParams(max_tokens=5, temperature=0.0)
    chunks = list(world.sampler.stream(world.prompt(), params))
    assert [token for chunk in chunks for token in chunk.tokens] == world.greedy(world.sampler)
    assert len(chunks) > 1 and chunks[-1].stop_reason in ("length", "stop"), chunks


@probe(
    "RestClient.get_checkpoint_archive_url",
    "RestClient.get_checkpoint_archive_url_from_tinker_path",
)
def get_checkpoint_archive_url(world: World, call: Call) -> None:
    run_id, _, checkpoint_id = world.state.removeprefix("tinker://").partition("/")
    answer = call(world.rest, *((world.state,) if "path" in call.name else (run_id, checkpoint_id)))
    with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(answer.url, timeout=30).read())) as archive:
        assert "adapter_model.safetensors" in {Path(name).name for name in archive.getnames()}


@probe("RestClient.get_run_steps")
def get_run_steps(world: World, call: Call) -> None:
    training = world.new_training()
    for _ in range(2):
        world.step(training)
    found = call(world.rest, training.model_id)
    assert len(found.steps) == 2 and found.steps[1].loss < found.steps[0].loss, found
    assert len(call(world.rest, training.model_id, found.steps[0].seq_id).steps) == 1


@probe("TrainingClient.log_metrics", "TrainingClient.log_sample", "TrainingClient.flush_metrics")
def log_metrics(world: World, call: Call) -> None:
    training = world.new_training()
    if "log_metrics" in call.name:
        call(training, {"reward": 0.5}, 1)
    elif "log_sample" in call.name:
        call(training, "2+2=", "4", 1.0, step=1)
    else:
        training.log_metrics({"reward": 0.5}, step=1)
        call(training)
    training.flush_metrics()
    if "sample" in call.name:
        [sample] = world.rest.get_run_samples(training.model_id).result().samples
        assert (sample.prompt, sample.text, sample.reward, sample.step) == ("2+2=", "4", 1.0, 1)
    else:
        [entry] = world.rest.get_run_metrics(training.model_id).result().entries
        assert (entry.metrics, entry.step) == ({"reward": 0.5}, 1)


@probe("RestClient.get_run_metrics", "RestClient.get_run_samples", "RestClient.get_run_history")
def get_run_metrics(world: World, call: Call) -> None:
    training = world.new_training()
    world.step(training)
    training.log_metrics({"reward": 0.5}, step=1)
    training.log_sample("2+2=", "4", 1.0, step=1)
    training.flush_metrics()
    found = call(world.rest, training.model_id)
    if "history" in call.name:
        assert "reward" in found and "loss" in found, found
    elif "samples" in call.name:
        assert [sample.text for sample in found.samples] == ["4"], found
    else:
        assert [entry.metrics for entry in found.entries] == [{"reward": 0.5}], found


@probe(
    "RestClient.find_run", "RestClient.rename_run", "RestClient.tag_run", "RestClient.archive_run",
    "RestClient.delete_run", "RestClient.has_run_records",
)  # fmt: skip
def run_records(world: World, call: Call) -> None:
    training = world.new_training()
    run_id = training.model_id
    if "has_run_records" in call.name:
        assert call(world.rest) is True
    elif "find" in call.name:
        assert call(world.rest, run_id).training_run_id == run_id
    elif "rename" in call.name:
        assert call(world.rest, run_id, "probe").name == "probe"
    elif "tag" in call.name:
        assert call(world.rest, run_id, ["kept"]).tags == ["kept"]
    elif "archive" in call.name:
        assert call(world.rest, run_id).archived_at is not None
    else:
        call(world.rest, run_id, True)
        assert isinstance(world.rest.get_training_run(run_id).exception(60), world.T.NotFoundError)


@probe("RestClient.get_service_state")
def get_service_state(world: World, call: Call) -> None:
    state = call(world.rest)
    assert state.is_ready and world.model in state.models and state.checkpoints > 0, state


@probe("RestClient.offer_model", "RestClient.withdraw_model")
def offer_model(world: World, call: Call) -> None:
    if "offer" in call.name:
        assert call(world.rest, world.model).model_name == world.model
    else:
        try:
            call(world.rest, "never-offered")
        except Exception as error:
            assert "is not known" in str(error), error


@probe("RestClient.list_failed_operations")
def list_failed_operations(world: World, call: Call) -> None:
    training = world.new_training()
    missing = f"tinker://{training.model_id}/weights/never-saved"
    try:
        done(training.load_state(missing))
    except Exception:
        pass
    latest = call(world.rest, limit=1).operations[0]
    assert latest.run_id == training.model_id and "never-saved" in latest.error, latest


@probe("*.stats")
def stats(world: World, call: Call) -> None:
    assert near(world.loss_of(world.training), world.loss)
    sums = call(world.client(call.kind))
    assert sums["requests"] > 0 and sums["sent_bytes"] > 0 and sums["operations"]["forward"]["count"] > 0, sums


@probe("*.on_queue_state", "*.on_queue_state_change")
def on_queue_state(world: World, call: Call) -> None:
    client, heard = world.client(call.kind), []
    stop = client.on_queue_state(lambda *told: heard.append(told))
    client.on_queue_state_change("paused_capacity", "full")
    stop()
    client.on_queue_state_change("active", None)
    assert heard == [("paused_capacity", "full")], heard


@probe("*.result")
def client_as_its_own_result(world: World, call: Call) -> None:
    client = world.client(call.kind)
    assert call(client) is client


# -- futures -----------------------------------------------------------------------------------------------------------


@probe("APIFuture.add_done_callback")
def add_done_callback(world: World, call: Call) -> None:
    heard: list[object] = []
    future = world.training.forward(world.data, "cross_entropy")
    future.add_done_callback(heard.append)
    done(future)
    assert heard == [future]


@probe("APIFuture.cancel")
def cancel(world: World, call: Call) -> None:
    params = world.T.SamplingParams(max_tokens=400, stop=[])
    future = world.sampler.sample(world.prompt(), 1, params)
    assert call(future) is True and future.cancelled()
    assert world.greedy(world.sampler)  # and the client goes on


@probe("APIFuture.exception")
def exception(world: World, call: Call) -> None:
    assert call(world.training.forward(world.data, "cross_entropy"), 60) is None
    missing = world.rest.get_training_run("nobody:train:0")
    assert isinstance(call(missing, 60), world.T.NotFoundError)


@probe("APIFuture.future")
def future(world: World, call: Call) -> None:
    work = world.training.forward(world.data, "cross_entropy")
    assert near(world.total(work.future().result(60)), world.loss)


@probe("APIFuture.on_queue_state")
def on_queue_state_of_a_future(world: World, call: Call) -> None:
    work = world.training.forward(world.data, "cross_entropy")
    assert work.on_queue_state(lambda state, reason: None) is work
    done(work)


@probe("APIFuture.status")
def status(world: World, call: Call) -> None:
    work = world.training.forward(world.data, "cross_entropy")
    done(work)
    assert str(call(work).state) == "done", call(work)


# -- functions ---------------------------------------------------------------------------------------------------------


def download_checkpoint(world: World) -> None:
    from tinkex.client.download import download_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        files = done(download_checkpoint(world.rest, world.state, folder))
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in files}, files


FUNCTIONS: dict[str, Callable[[World], None]] = {"tinkex.client.download.download_checkpoint": download_checkpoint}
