"""Move an adapter to PEFT: train here, download, load it with `peft`, and get the same log-probabilities.

    python examples/09_to_peft.py --model smollm2-135m --steps 10

Needs `pip install peft`.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import peft
import torch

import tinkex
from tinkex.client.download import download_checkpoint

TEXT = "Every ship that leaves the harbour carries a lamp, a log and a loaf of bread."


def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token after the first, computed with transformers and PEFT only."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, :-1].float()
    found = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return [float(logprob) for logprob in found.squeeze(1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    model = arguments.model

    with (
        tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service,
        tempfile.TemporaryDirectory() as folder,
    ):
        training = service.create_lora_training_client(model, rank=8, train_unembed=False)  # for vLLM
        tokens: list[int] = training.get_tokenizer().encode(TEXT, add_special_tokens=False)
        datum = tinkex.Datum(
            tinkex.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for _ in tinkex.progress(training, steps=arguments.steps):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
        ours: list[float] = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

        # For PEFT and vLLM. `tinkex export PATH --merge --out FOLDER` writes a merged model instead.
        path = training.save_weights_for_sampler("to-peft", ttl_seconds=3600).result().path
        files = download_checkpoint(service.create_rest_client(), path, folder).result()
        print(f"downloaded {', '.join(sorted(file.name for file in files))}")

        # adapter_config.json names the base model: a name on the hub, or a folder in the service's cache.
        auto: Any = peft.AutoPeftModelForCausalLM
        loaded = auto.from_pretrained(folder, dtype=torch.float32)
        theirs = logprobs_of(loaded, tokens)
        with loaded.disable_adapter():
            base = logprobs_of(loaded, tokens)
        print(f"mean log-probability: base {sum(base) / len(base):.4f}, adapter {sum(theirs) / len(theirs):.4f}")
        apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"service and PEFT differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
