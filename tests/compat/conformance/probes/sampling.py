"""Probes of `SamplingClient`."""

from __future__ import annotations

import base64
import logging

from tests.compat.conformance.probes.world import KEY, SEQUENCES, Call, World, done, near, probe


@probe("SamplingClient.compute_logprobs")
def compute_logprobs(world: World, call: Call) -> None:
    first, *others = call(world.sampler, world.T.ModelInput.from_ints(SEQUENCES[0]))
    trained = done(world.training.forward(world.data, "cross_entropy")).loss_fn_outputs[0]["logprobs"].tolist()
    assert first is None and len(others) == len(trained)
    assert max(abs(one - other) for one, other in zip(others, trained, strict=True)) < 2e-2


@probe("SamplingClient.create")
def create(world: World, call: Call) -> None:
    sampler = call(world.T.SamplingClient, world.service.holder, model_path=world.sampler_path)
    assert world.greedy(sampler) == world.greedy(world.sampler)


@probe("SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle")
def handles(world: World, call: Call) -> None:
    handle = world.sampler.get_sampler_handle()
    assert KEY not in handle and KEY.encode() not in base64.urlsafe_b64decode(handle)
    again = world.T.SamplingClient.from_sampler_handle(handle, api_key=KEY)
    assert world.greedy(again) == world.greedy(world.sampler)


@probe("SamplingClient.get_base_model")
def get_base_model(world: World, call: Call) -> None:
    assert call(world.sampler) == world.model


@probe("SamplingClient.on_queue_state_change")
def on_queue_state_change(world: World, call: Call) -> None:
    heard: list[str] = []
    sampler = world.service.create_sampling_client(base_model=world.model)
    if world.is_ours:
        sampler.on_queue_state(lambda state, reason: heard.append(f"{state}: {reason}"))
        call(sampler, "paused_capacity", "the probe says so")
    else:
        from tinker.lib.api_future_impl import QueueState

        listener = logging.Handler()
        listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tinker").addHandler(listener)
        call(sampler, QueueState.PAUSED_CAPACITY, "the probe says so")
        logging.getLogger("tinker").removeHandler(listener)
    assert any("the probe says so" in line for line in heard), heard


@probe("SamplingClient.sample")
def sample(world: World, call: Call) -> None:
    params = world.T.SamplingParams(max_tokens=4, temperature=0.8, seed=3, stop=[])
    answer = call(
        world.sampler,
        prompt=world.prompt(),
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
    )
    assert [(len(one.tokens), len(one.logprobs), one.stop_reason) for one in answer.sequences] == [(4, 4, "length")] * 2
    alone = done(world.sampler.compute_logprobs(world.prompt()))
    assert answer.prompt_logprobs[0] is None
    assert all(near(one, other) for one, other in zip(answer.prompt_logprobs[1:], alone[1:], strict=True))
    assert [len(row or ()) for row in answer.topk_prompt_logprobs] == [0] + [2] * (world.prompt().length - 1)
