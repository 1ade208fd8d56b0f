"""Arguments that a method takes and this service may not: each is tried for real."""

from __future__ import annotations

from collections.abc import Callable

from tests.compat.conformance.probes.world import World, done


def dimuon(world: World) -> None:
    world.service.create_lora_training_client(world.model, rank=2, optimizer=world.T.DimuonOptimizerConfig())


def dimuon_step(world: World) -> None:
    training = world.new_training()
    done(training.forward_backward(world.data, "cross_entropy"))
    done(training.optim_step(world.T.DimuonParams(learning_rate=1e-3)))


def age(world: World) -> None:
    done(world.training.save_weights_external(world.name(), age_encryption_recipients=["age1probe"]))


def stable_reinforce(world: World) -> None:
    data = [world.datum([5, 6, 7, 8], advantages=[1.0] * 3, logprobs=[-1.0] * 3)]
    done(world.new_training().forward_backward(data, "stable_reinforce"))


def loss_by_name(name: str) -> Callable[[World], None]:
    def attempt(world: World) -> None:
        training = world.new_training()
        before = world.loss_of(training)
        rows = done(training.forward(world.data, "cross_entropy")).loss_fn_outputs
        data = []
        for datum, row in zip(world.data, rows, strict=True):
            logprobs = row["logprobs"].tolist()
            tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
            data.append(rl_datum(world, tokens, logprobs))
        assert len(done(training.forward_backward(data, name)).loss_fn_outputs) == len(data)
        done(training.optim_step(world.T.AdamParams(learning_rate=1e-2)))
        assert world.loss_of(training) < before

    return attempt


def rl_datum(world: World, tokens: list[int], logprobs: list[float]) -> object:
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [1.0] * len(logprobs)}
    return world.T.Datum(model_input=world.T.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def image(world: World) -> None:
    chunk = world.T.types.ImageChunk(data=b"\x89PNG\r\n\x1a\n", format="png", expected_tokens=4)
    prompt = world.T.ModelInput(chunks=[chunk])
    done(world.sampler.sample(prompt, 1, world.T.SamplingParams(max_tokens=1)))


ARGUMENTS: dict[str, Callable[[World], None]] = {
    **{
        f'forward_backward(loss_fn="{name}")': loss_by_name(name)
        for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
    'forward_backward(loss_fn="stable_reinforce")': stable_reinforce,
    "create_lora_training_client(optimizer=DimuonOptimizerConfig())": dimuon,
    "optim_step(DimuonParams(...))": dimuon_step,
    "save_weights_external(age_encryption_recipients=[...])": age,
    "sample(prompt with an ImageChunk)": image,
}
