"""Behaviours of the official clients, beyond names, that tinker-cookbook's code relies on.

Each runs through the alias, against a scripted service.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import datetime
import functools
import inspect
import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tinkex import events
from tinkex.testing import FailFuture, ScriptedService

TINY = "tinkex/tiny"
CAPTURED = {
    "SamplingClient": ("sample", "sample_async"),
    "TrainingClient": tuple(
        name + suffix
        for name in ("forward_backward", "optim_step", "save_weights_for_sampler")
        for suffix in ("", "_async")
    ),
}
"""Methods that the cookbook's capture layer replaces on the classes."""
TRACED = {
    "TrainingClient": (
        "forward_async",
        "forward_backward_async",
        "forward_backward_custom_async",
        "get_info_async",
        "optim_step_async",
        "save_state_async",
        "load_state_async",
        "load_state_with_optimizer_async",
        "save_weights_for_sampler_async",
        "save_weights_external_async",
        "save_weights_and_get_sampling_client_async",
        "create_sampling_client_async",
    ),
    "SamplingClient": ("sample_async", "compute_logprobs_async", "get_base_model_async"),
}
"""Methods that its tracer replaces."""


@pytest.fixture
def client(tinker: ModuleType, service: ScriptedService) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=service.url, user_metadata={"recipe": "test"}) as client:
        yield client


@pytest.fixture
def training(client: Any) -> Any:
    return client.create_lora_training_client(base_model=TINY, rank=8, user_metadata={"renderer_name": "role_colon"})


@pytest.fixture
def sampling(client: Any) -> Any:
    return client.create_sampling_client(base_model=TINY)


@pytest.fixture
def datum(tinker: ModuleType) -> Any:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def replace(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, seen: Callable[[str], object]) -> None:
    """What monkeypatching programs do: a wrapper on the class, around whatever is there."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, wrapper)


# -- replaced methods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [CAPTURED, TRACED], ids=["capture", "trace"])
def test_methods_that_programs_replace_are_plain_functions_of_their_class(
    tinker: ModuleType, table: dict[str, tuple[str, ...]]
) -> None:
    for cls in (tinker.TrainingClient, tinker.SamplingClient):
        for name in table[cls.__name__]:
            function = inspect.getattr_static(cls, name)
            assert inspect.isfunction(function), name
            assert inspect.iscoroutinefunction(function) == name.endswith("_async"), name
            assert "self" in inspect.signature(function).parameters, name


def test_a_replaced_method_is_the_one_that_existing_clients_call(
    tinker: ModuleType, sampling: Any, training: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for cls in (tinker.TrainingClient, tinker.SamplingClient):
        for name in CAPTURED[cls.__name__]:
            replace(monkeypatch, cls, name, calls.append)
    sampling.sample(datum.model_input, 1, tinker.SamplingParams(max_tokens=1)).result()
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=1e-4))
    training.save_weights_for_sampler("one").result()
    assert calls == ["sample", "forward_backward", "optim_step", "save_weights_for_sampler"]


def test_async_twins_call_the_sync_method_at_once_in_the_callers_context(
    tinker: ModuleType, sampling: Any, training: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")
    seen: list[tuple[str, str, int]] = []

    def note(name: str) -> None:
        seen.append((name, scope.get(), threading.get_ident()))

    replace(monkeypatch, tinker.SamplingClient, "sample", note)
    for name in ("forward_backward", "optim_step", "save_weights_for_sampler"):
        replace(monkeypatch, tinker.TrainingClient, name, note)

    async def program() -> None:
        scope.set("mine")
        await sampling.sample_async(datum.model_input, 1, tinker.SamplingParams(max_tokens=1))
        await training.forward_backward_async([datum], "cross_entropy")
        await training.optim_step_async(tinker.AdamParams(learning_rate=1e-4))
        await (await training.save_weights_for_sampler_async("one")).result_async()

    asyncio.run(program())
    here = threading.get_ident()
    expected = ["sample", "forward_backward", "optim_step", "save_weights_for_sampler"]
    assert seen == [(name, "mine", here) for name in expected]


def test_log_probabilities_are_not_counted_as_samples_by_a_replaced_sample(
    tinker: ModuleType, sampling: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace(monkeypatch, tinker.SamplingClient, "sample", calls.append)
    assert len(sampling.compute_logprobs(datum.model_input).result()) == 3
    assert calls == []


# -- what is awaited, and what comes of it -----------------------------------------------------------------------------


def test_training_twins_give_a_future_and_sampling_twins_the_result(
    tinker: ModuleType, sampling: Any, training: Any, datum: Any
) -> None:
    async def program() -> None:
        future = await training.forward_backward_async([datum], "cross_entropy")
        assert isinstance(future, tinker.APIFuture)
        output = await future
        assert isinstance(output, tinker.ForwardBackwardOutput)
        assert await future.result_async() is output
        response = await sampling.sample_async(datum.model_input, 2, tinker.SamplingParams(max_tokens=3))
        assert [len(sequence.tokens) for sequence in response.sequences] == [3, 3]
        logprobs = await sampling.compute_logprobs_async(datum.model_input)
        assert logprobs[0] is None and len(logprobs) == 3

    asyncio.run(program())


def test_sample_gives_a_concurrent_future_with_callbacks(tinker: ModuleType, sampling: Any, datum: Any) -> None:
    future = sampling.sample(datum.model_input, 1, tinker.SamplingParams(max_tokens=1))
    assert isinstance(future, concurrent.futures.Future)
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.add_done_callback(done.set_result)
    assert done.result(10) is future
    assert concurrent.futures.wait([future], timeout=10).done == {future}


def test_training_futures_show_an_inner_future_with_callbacks(training: Any, datum: Any) -> None:
    future = training.forward_backward([datum], "cross_entropy")
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future._future.add_done_callback(lambda inner: done.set_result(inner.result()))
    assert done.result(10) is future.result(timeout=10)


# -- what is read from clients and values ------------------------------------------------------------------------------


def test_clients_carry_the_ids_that_programs_read(client: Any, training: Any, service: ScriptedService) -> None:
    path = training.save_weights_for_sampler("one").result().path
    sampler = client.create_sampling_client(model_path=path)
    assert training.model_id in service.models
    assert sampler._sampling_session_id in service.samplers
    assert (sampler.model_path, sampler.base_model) == (path, None)
    both = client.create_sampling_client(model_path=path, base_model=None)
    assert both.get_base_model() == TINY


def test_isinstance_distinguishes_chunks_and_errors(tinker: ModuleType) -> None:
    text = tinker.EncodedTextChunk(tokens=[1])
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=2)
    pointer = tinker.types.ImageAssetPointerChunk(location="asset://1", format="png", expected_tokens=2)
    prompt = tinker.ModelInput(chunks=[text, image, pointer])
    kinds = (tinker.EncodedTextChunk, tinker.types.ImageChunk, tinker.types.ImageAssetPointerChunk)
    assert [[isinstance(chunk, kind) for kind in kinds].index(True) for chunk in prompt.chunks] == [0, 1, 2]
    assert issubclass(tinker.APITimeoutError, tinker.APIConnectionError)
    assert issubclass(tinker.RateLimitError, tinker.APIStatusError) and issubclass(tinker.APIError, tinker.TinkerError)


# -- errors ------------------------------------------------------------------------------------------------------------


class HttpxLike:
    """What an `httpx.Response` shows of itself."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers = {"content-type": "application/json"}
        self.request = object()


def test_status_errors_are_built_from_any_http_librarys_response(tinker: ModuleType) -> None:
    response = HttpxLike(400)
    error = tinker.BadRequestError("no good", response=response, body=None)
    assert (error.status_code, error.response, error.body, str(error)) == (400, response, None, "no good")
    assert tinker.APIConnectionError(request=object()).message
    assert tinker.APITimeoutError(request=object()).message


def test_a_failed_operation_is_a_tinker_error(
    tinker: ModuleType, training: Any, datum: Any, service: ScriptedService
) -> None:
    service.script.on("forward_backward", do=FailFuture("out of memory", category="server"))
    with pytest.raises(tinker.TinkerError, match="out of memory") as caught:
        training.forward_backward([datum], "cross_entropy").result()
    assert isinstance(caught.value, tinker.RequestFailedError)


def test_a_rejected_call_is_both_a_tinker_error_and_a_value_error(tinker: ModuleType, training: Any) -> None:
    for kind in (tinker.TinkerError, ValueError):
        with pytest.raises(kind):
            training.forward_backward([], "cross_entropy")


def test_a_prompt_over_the_context_is_rejected_with_the_text_that_proxies_match(tinker: ModuleType) -> None:
    has_asked = threading.Event()
    stop = events.on("request", lambda seen: seen.endpoint == "get_server_capabilities" and has_asked.set())
    with ScriptedService(max_context_length=16) as service, tinker.ServiceClient(base_url=service.url) as client:
        sampling = client.create_sampling_client(base_model=TINY)
        assert has_asked.wait(10), "the client did not ask how long prompts may be"
        # One exchange later the answer has been read, too.
        sampling.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result()
        with pytest.raises(tinker.TinkerError) as caught:
            sampling.sample(tinker.ModelInput.from_ints([1] * 10), 1, tinker.SamplingParams(max_tokens=8)).result()
    stop()
    assert re.search(r"prompt length plus max_tokens exceeds", str(caught.value), re.IGNORECASE)
    assert re.search(r"10\s*prompt tokens\s*\+\s*8\s*max_tokens\s*>\s*16", str(caught.value), re.IGNORECASE)


# -- values ------------------------------------------------------------------------------------------------------------


def test_a_datum_converts_its_inputs_and_is_frozen(tinker: ModuleType) -> None:
    import torch

    prompt = tinker.ModelInput.from_ints([1, 2])
    given = {"target_tokens": torch.tensor([2, 3]), "weights": [0, 1], "advantages": torch.tensor([0.5, 1.0]).numpy()}
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs=given)
    inputs = datum.loss_fn_inputs
    assert {key: tensor.dtype for key, tensor in inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
    }
    assert inputs["target_tokens"].to_torch().tolist() == [2, 3] == inputs["target_tokens"].tolist()
    assert inputs["advantages"].to_numpy().tolist() == [0.5, 1.0]
    with pytest.raises(Exception, match="frozen"):
        datum.model_input = prompt


def test_two_dimensional_torch_targets_become_sparse(tinker: ModuleType) -> None:
    import torch

    dense = torch.zeros(64, 8, dtype=torch.int64)
    dense[5, 0] = 7
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * 64),
        loss_fn_inputs={"target_tokens": dense, "weights": (dense > 0).float()},
    )
    for key in ("target_tokens", "weights"):
        tensor = datum.loss_fn_inputs[key]
        assert tensor.sparse_crow_indices is not None and len(tensor.data) == 1
    assert torch.equal(datum.loss_fn_inputs["target_tokens"].to_torch(), dense)


# -- across processes --------------------------------------------------------------------------------------------------


def sample_elsewhere(sampling: Any, prompt: Any, params: Any) -> list[int]:
    return list(sampling.sample(prompt, 1, params).result().sequences[0].tokens)


@pytest.mark.slow
def test_a_sampling_client_works_in_a_spawned_process(tinker: ModuleType, sampling: Any, datum: Any) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        done = pool.submit(sample_elsewhere, sampling, datum.model_input, tinker.SamplingParams(max_tokens=4))
        assert len(done.result(60)) == 4


# -- pipelining --------------------------------------------------------------------------------------------------------


def test_steps_submitted_before_any_was_awaited_run_in_the_order_of_the_calls(
    tinker: ModuleType, training: Any, datum: Any, service: ScriptedService
) -> None:
    async def program() -> None:
        futures = []
        for _ in range(5):
            futures.append(await training.forward_backward_async([datum], loss_fn="cross_entropy"))
            futures.append(await training.optim_step_async(tinker.AdamParams(learning_rate=1e-4)))
        assert not any(future.done() for future in futures)
        service.resume()
        for future in reversed(futures):
            await future.result_async()

    service.pause()
    asyncio.run(program())
    assert [op for _, _, op in service.executed] == ["forward_backward", "optim_step"] * 5
    assert [seq for _, seq, _ in service.executed] == sorted(seq or 0 for _, seq, _ in service.executed)


# -- what reaches the service ------------------------------------------------------------------------------------------


def test_a_state_saved_without_a_ttl_does_not_expire(training: Any, service: ScriptedService) -> None:
    kept = training.save_state("kept", ttl_seconds=None).result().path
    short = training.save_state("short", ttl_seconds=3600).result().path
    assert service.checkpoints[kept].expires_at is None
    assert service.checkpoints[short].expires_at is not None


def test_the_renderer_name_is_stored_with_the_run(client: Any, training: Any) -> None:
    path = training.save_state("one").result().path
    run = client.create_rest_client().get_training_run_by_tinker_path(path).result()
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert (run.base_model, run.lora_rank) == (TINY, 8)


def test_a_client_that_fails_reports_it_to_the_service(tinker: ModuleType, service: ScriptedService) -> None:
    client = tinker.ServiceClient(base_url=service.url)
    client.create_sampling_client(base_model=TINY)
    client.close("errored", "the loss is NaN").result()
    (session,) = service.sessions.values()
    assert "errored" in str(session.finished)


# -- calls of earlier releases ----------------------------------------------------------------------------------------


def test_metadata_as_second_argument_is_read_as_in_0_4_1(client: Any, training: Any, service: ScriptedService) -> None:
    path = training.save_state("one").result().path
    resumed = client.create_training_client_from_state(path, {"resumed": "yes"})
    metadata = service.models[resumed.model_id].user_metadata
    assert metadata is not None and metadata["resumed"] == "yes"
    assert resumed.base_model == TINY


def test_a_sampler_can_be_created_without_waiting(
    tinker: ModuleType, client: Any, training: Any, service: ScriptedService
) -> None:
    ephemeral = training.save_weights_and_get_sampling_client_submit().result()
    made = tinker.SamplingClient.create(client.holder, base_model=TINY).result()
    again = tinker.SamplingClient.create(client.holder, sampling_session_id=made._sampling_session_id).result()
    for sampler in (ephemeral, made, again):
        assert sampler._sampling_session_id in service.samplers
    assert len(service.samplers) == 2


def test_the_rest_client_returns_the_audit_log_too(client: Any, tinker: ModuleType) -> None:
    log = client.create_rest_client().get_audit_log(day=datetime.date(2025, 1, 2)).result()
    assert isinstance(log, tinker.types.AuditLogResponse)
