"""A loss of your own: direct preference optimisation (DPO), written in torch.

    python examples/03_custom_loss.py [base model]

`forward_backward_custom` runs the function here, in a worker thread, between two passes on the service. The function
gets the data with all their `loss_fn_inputs`, and the log-probabilities of each datum's targets.
"""

from __future__ import annotations

import sys

import torch

import tinkex

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"
BETA = 0.1
STEPS = 6
PROMPT = [101, 7, 23]
PAIRS = [([42, 5, 88, 12], [64, 9]), ([42, 6, 80, 17], [61, 3])]
"""What should be said after the prompt, and what should not."""


def datum(completion: list[int], reference: list[float] | None = None) -> tinkex.Datum:
    tokens = PROMPT + completion
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(completion)
    inputs: dict[str, list[int] | list[float]] = {"target_tokens": tokens[1:], "weights": weights}
    if reference is not None:
        inputs["reference"] = reference  # a key of our own: it reaches the loss and is not sent
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)


def dpo(data: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Chosen and rejected answers take turns in `data`."""
    gains: list[torch.Tensor] = []
    for entry, found in zip(data, logprobs, strict=True):
        inputs = entry.loss_fn_inputs
        gains.append((inputs["weights"].to_torch() * (found - inputs["reference"].to_torch())).sum())
    margins = BETA * (torch.stack(gains[0::2]) - torch.stack(gains[1::2]))
    loss = torch.log1p(torch.exp(-margins)).mean()
    seen = margins.detach()
    return loss, {"margin": float(seen.mean()), "accuracy": float((seen > 0).float().mean())}


def main() -> None:
    completions = [completion for pair in PAIRS for completion in pair]
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=16)

        # A new adapter changes nothing yet: its log-probabilities are the reference.
        before = training.forward([datum(completion) for completion in completions], "cross_entropy").result()
        references = [output["logprobs"].tolist() for output in before.loss_fn_outputs]
        data = [datum(*entry) for entry in zip(completions, references, strict=True)]

        for number in range(STEPS):
            forward_backward = training.forward_backward_custom(data, dpo)
            optim_step = training.optim_step(tinkex.AdamParams(learning_rate=5e-3))  # waits for the loss by itself
            metrics = forward_backward.result().metrics
            optim_step.result()
            print(f"step {number}: loss {metrics['loss:sum']:.4f}, accuracy {metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
