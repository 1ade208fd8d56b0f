"""Probes of `TrainingClient`."""

from __future__ import annotations

from typing import Any

from tests.compat.conformance.probes.world import Call, World, done, near, probe


@probe("TrainingClient.create_sampling_client")
def create_sampling_client(world: World, call: Call) -> None:
    assert world.greedy(call(world.training, world.sampler_path)) == world.greedy(world.sampler)


@probe("TrainingClient.forward")
def forward(world: World, call: Call) -> None:
    output = call(world.training, world.data, "cross_entropy")
    assert near(world.total(output), world.loss) and near(output.metrics["loss:sum"], world.loss), output.metrics


@probe("TrainingClient.forward_backward")
def forward_backward(world: World, call: Call) -> None:
    training = world.new_training()
    before = world.total(call(training, world.data, "cross_entropy"))
    done(training.optim_step(world.T.AdamParams(learning_rate=1e-2)))
    assert world.loss_of(training) < before


@probe("TrainingClient.forward_backward_custom")
def forward_backward_custom(world: World, call: Call) -> None:
    def summed(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = -sum(row.sum() for row in logprobs)
        return loss, {"mine": float(loss)}

    custom, plain = world.new_training(), world.new_training()
    output = call(custom, world.data, summed)
    done(custom.optim_step(world.T.AdamParams(learning_rate=1e-2)))
    world.step(plain)
    assert near(output.metrics["mine"], world.loss_of(world.new_training())), output.metrics
    assert near(world.loss_of(custom), world.loss_of(plain)), "another step than cross_entropy's"


@probe("TrainingClient.get_info")
def get_info(world: World, call: Call) -> None:
    info = call(world.training)
    assert (info.model_id, info.lora_rank, info.model_data.model_name) == (world.run_id, 4, world.model), info


@probe("TrainingClient.get_tokenizer", "SamplingClient.get_tokenizer")
def get_tokenizer(world: World, call: Call) -> None:
    tokenizer = call(world.client(call.kind))
    assert tokenizer.decode(tokenizer.encode("hello there", add_special_tokens=False)) == "hello there"


@probe("TrainingClient.load_state")
def load_state(world: World, call: Call) -> None:
    training = world.new_training(seed=2)
    call(training, world.state)
    assert near(world.loss_of(training), world.loss)
    world.step(training)
    assert not near(world.loss_of(training), world.next_loss), "the moments came along"


@probe("TrainingClient.load_state_with_optimizer")
def load_state_with_optimizer(world: World, call: Call) -> None:
    training = world.new_training(seed=2)
    call(training, world.state)
    world.step(training)
    assert near(world.loss_of(training), world.next_loss), "without the moments"


@probe("TrainingClient.optim_step")
def optim_step(world: World, call: Call) -> None:
    training = world.new_training()
    before = world.total(done(training.forward_backward(world.data, "cross_entropy")))
    call(training, world.T.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0))
    assert world.loss_of(training) < before


@probe("TrainingClient.save_state")
def save_state(world: World, call: Call) -> None:
    path = call(world.training, world.name(), ttl_seconds=3600, user_metadata={"step": "3"}).path
    saved = world.checkpoint(path)
    assert saved.checkpoint_type == "training" and saved.user_metadata == {"step": "3"} and saved.expires_at, saved
    assert near(world.loss_of(world.service.create_training_client_from_state(path)), world.loss)


@probe("TrainingClient.save_weights_and_get_sampling_client")
def save_weights_and_get_sampling_client(world: World, call: Call) -> None:
    assert world.greedy(call(world.training)) == world.greedy(world.sampler)


@probe("TrainingClient.save_weights_external")
def save_weights_external(world: World, call: Call) -> None:
    path = call(world.training, world.name(), ttl_seconds=3600).path
    saved = world.checkpoint(path)
    assert saved.checkpoint_type == "external" and saved.size_bytes > 1000, saved


@probe("TrainingClient.save_weights_for_sampler")
def save_weights_for_sampler(world: World, call: Call) -> None:
    path = call(world.training, world.name(), user_metadata={"for": "sampling"}).path
    assert world.checkpoint(path).checkpoint_type == "sampler"
    assert world.greedy(world.service.create_sampling_client(model_path=path)) == world.greedy(world.sampler)
