"""Checkpoints: save, go on later with the optimizer's state, list, let expire, delete.

python examples/04_checkpoints.py [base model]
"""

from __future__ import annotations

import sys

import tinkex

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"
DAY = 24 * 3600


def step(training: tinkex.TrainingClient) -> float:
    tokens = [101, 7, 23, 42]
    example = tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0, 1.0, 1.0]}
    )
    forward_backward = training.forward_backward([example], "cross_entropy")
    training.optim_step(tinkex.AdamParams(learning_rate=5e-3)).result()
    return forward_backward.result().metrics["loss:sum"]


def main() -> None:
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=16, user_metadata={"purpose": "example"})
        print(f"loss {step(training):.3f}")

        # Two kinds: state to train on (weights and optimizer), and weights to sample from.
        state = training.save_state("after-step-1", ttl_seconds=7 * DAY).result()
        for_sampling = training.save_weights_for_sampler("after-step-1", ttl_seconds=DAY).result()
        print(f"saved {state.path}")

        # A new client, as after a crash: rank, trained parts and optimizer are those that were saved.
        resumed = service.create_training_client_from_state_with_optimizer(state.path)
        print(f"resumed, loss {step(resumed):.3f}")

        sampler = service.create_sampling_client(model_path=for_sampling.path)
        answer = sampler.sample(tinkex.ModelInput.from_ints([101, 7]), 1, tinkex.SamplingParams(max_tokens=4)).result()
        print(f"sampled {answer.sequences[0].tokens}")

        rest = service.create_rest_client()
        rest.set_checkpoint_ttl_from_tinker_path(state.path, None).result()  # keep it after all
        for saved in rest.list_checkpoints(training.model_id).result().checkpoints:
            until = "for good" if saved.expires_at is None else f"until {saved.expires_at:%Y-%m-%d}"
            print(f"{saved.checkpoint_id} ({saved.checkpoint_type}) is kept {until}")

        for path in (state.path, for_sampling.path):
            rest.delete_checkpoint_from_tinker_path(path).result()
        left = rest.list_checkpoints(training.model_id).result().checkpoints
        print(f"{len(left)} checkpoints left")


if __name__ == "__main__":
    main()
