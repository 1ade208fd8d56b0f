"""A first fine-tune: teach a model one sequence, watch the loss fall, sample.

    python examples/01_first_fine_tune.py [base model]

The service and the key come from TINKER_BASE_URL and TINKER_API_KEY. Token ids are used as they are, so no tokenizer is
needed; with one it is `tokens = training.get_tokenizer().encode(text)`.
"""

from __future__ import annotations

import sys

import tinkex

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"
STEPS = 8


def main() -> None:
    tokens = [101, 7, 23, 42, 5, 88, 12, 64]
    # Position t of the input predicts target t: the same tokens, shifted by one.
    example = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=16)

        # Calls return at once and run in the order they were made. Nothing is waited for inside this loop, so the
        # service always has the next step at hand.
        passes: list[tinkex.APIFuture[tinkex.ForwardBackwardOutput]] = []
        steps: list[tinkex.APIFuture[tinkex.OptimStepResponse]] = []
        for _ in range(STEPS):
            passes.append(training.forward_backward([example], "cross_entropy"))
            steps.append(training.optim_step(tinkex.AdamParams(learning_rate=5e-3)))

        for number, (forward_backward, optim_step) in enumerate(zip(passes, steps, strict=True)):
            # Losses are sums over tokens.
            loss = forward_backward.result().metrics["loss:sum"] / (len(tokens) - 1)
            optim_step.result()
            print(f"step {number}: loss {loss:.3f} per token")

        sampler = training.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=7, temperature=0.0)
        answer = sampler.sample(tinkex.ModelInput.from_ints(tokens[:1]), 1, params).result()
        print(f"after {tokens[:1]}: {answer.sequences[0].tokens}")


if __name__ == "__main__":
    main()
