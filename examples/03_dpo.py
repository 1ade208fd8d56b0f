"""Direct preference optimisation (DPO), a custom loss written in torch: short answers instead of flattery.

    python examples/03_dpo.py --model smollm2-135m --steps 10

`forward_backward_custom` runs the function below in this program, between two passes on the service.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import tinkex

DATA = Path(__file__).parent / "data" / "preferences.jsonl"
BETA = 0.1
"""How strongly the adapter is held to the base model: a larger value holds it closer."""


def datum_of(tokenizer: Any, question: str, answer: str) -> tinkex.Datum:
    """Return the whole text as a datum; only the answer has weight."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    reply: list[int] = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints((prompt + reply)[:-1]),
        {"target_tokens": (prompt + reply)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply)},
    )


def with_reference(datum: tinkex.Datum, logprobs: tinkex.TensorData) -> tinkex.Datum:
    """Add the reference. Keys that the service does not know are passed to the loss and not sent."""
    return tinkex.Datum(datum.model_input, {**datum.loss_fn_inputs, "reference": logprobs})


def dpo(data: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """−log σ(β·(gain of the chosen answer − gain of the rejected one)); the two alternate in `data`.

    A gain is how much likelier the answer is now than it was under the reference.
    """
    gains: list[torch.Tensor] = []
    for datum, found in zip(data, logprobs, strict=True):
        inputs = datum.loss_fn_inputs
        gains.append((inputs["weights"].to_torch() * (found - inputs["reference"].to_torch())).sum())
    margins = BETA * (torch.stack(gains[0::2]) - torch.stack(gains[1::2]))
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    right = (margins.detach() > 0).float().mean()
    return loss, {"margin": float(margins.detach().mean()), "accuracy": float(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(arguments.model) as service:
        training = service.create_lora_training_client(arguments.model, rank=16)
        tokenizer = training.get_tokenizer()
        pairs = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
        data = [datum_of(tokenizer, pair["question"], pair[side]) for pair in pairs for side in ("chosen", "rejected")]

        # A new adapter changes nothing yet: its log-probabilities are those of the base model.
        reference = training.forward(data, "cross_entropy").result()
        data = [
            with_reference(datum, output["logprobs"])
            for datum, output in zip(data, reference.loss_fn_outputs, strict=True)
        ]

        progress = tinkex.progress(training, steps=arguments.steps)
        for _ in progress:
            forward_backward = training.forward_backward_custom(data, dpo)
            optim_step = training.optim_step(tinkex.AdamParams(learning_rate=5e-4))  # the SDK sends it after the loss
            metrics = forward_backward.result().metrics
            optim_step.result()
            progress.note(margin=metrics["margin"], accuracy=metrics["accuracy"])
        print(progress.curve("margin"))
        accuracy = progress.notes["accuracy"][-1].value
        print(f"in {accuracy:.0%} of the pairs the chosen answer gained more than the rejected one")


if __name__ == "__main__":
    main()
