"""Checkpoints: save them, continue training with the optimizer's state, list, expire and delete them.

    python examples/11_checkpoints.py --model smollm2-135m

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs. What is saved is there
after the program has ended.
"""

from __future__ import annotations

import argparse
import os

import tinkex

DAY = 24 * 3600


def step(training: tinkex.TrainingClient) -> float:
    tokens: list[int] = training.get_tokenizer().encode("What is kept is not lost.", add_special_tokens=False)
    datum = tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    forward_backward = training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
    return forward_backward.result().metrics["loss:sum"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    model = parser.parse_args().model

    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        training = service.create_lora_training_client(model, rank=16, user_metadata={"purpose": "example"})
        print(f"loss {step(training):.3f}")

        # Two kinds: state to continue training (weights and optimizer), and weights to sample from.
        state = training.save_state("after-step-1", ttl_seconds=7 * DAY).result()
        for_sampling = training.save_weights_for_sampler("after-step-1", ttl_seconds=DAY).result()
        print(f"saved {state.path}")

        # A new client, as in another program: rank, trained layers and optimizer are those of the checkpoint.
        resumed = service.create_training_client_from_state_with_optimizer(state.path)
        print(f"resumed, loss {step(resumed):.3f}")

        sampler = service.create_sampling_client(model_path=for_sampling.path)
        prompt = tinkex.ModelInput.from_text("What is kept", sampler.get_tokenizer())
        answer = sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=4)).result()
        print(f"sampled {answer.sequences[0].tokens}")

        rest = service.create_rest_client()
        rest.set_checkpoint_ttl_from_tinker_path(state.path, None).result()  # never expire
        for saved in rest.list_checkpoints(training.model_id).result().checkpoints:
            until = "for good" if saved.expires_at is None else f"until {saved.expires_at:%Y-%m-%d}"
            print(f"{saved.checkpoint_id} ({saved.checkpoint_type}) is kept {until}")

        for path in (state.path, for_sampling.path):
            rest.delete_checkpoint_from_tinker_path(path).result()
        left = rest.list_checkpoints(training.model_id).result().checkpoints
        print(f"{len(left)} checkpoints left")


if __name__ == "__main__":
    main()
