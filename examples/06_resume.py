"""Resume after a crash: the training process is killed in the middle, continues, and gives the same result.

    python examples/06_resume.py --model smollm2-135m --steps 12

`train` is what your own program would look like: it saves its state every few steps, notes the path, and continues from
there when it is started again. `main` kills it in a separate process, starts it again, and compares the result with an
undisturbed run.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tinkex

TEXTS = [
    "The anchor is down and the lamps are lit.",
    "Eight bells, and all is well.",
    "The wind comes from the north tonight.",
    "Keep the lighthouse on the left.",
]
EVERY = 4
"""Steps between two saved states. A crash loses fewer steps than that."""


def datum_of(tokenizer: Any, text: str) -> tinkex.Datum:
    tokens: list[int] = tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def train(service: tinkex.ServiceClient, model: str, steps: int, notes: Path, killed_in: int = -1) -> list[float]:
    """Train to the end from the step in the notes. Returns the log-probabilities of the data at the end."""
    done = 0
    if notes.exists():
        saved = json.loads(notes.read_text())
        # Weights, optimizer, rank and trained layers are those of the saved state.
        training = service.create_training_client_from_state_with_optimizer(saved["path"])
        done = saved["steps"]
        print(f"going on after step {done}")
    else:
        training = service.create_lora_training_client(model, rank=8, seed=1)
    data = [datum_of(training.get_tokenizer(), text) for text in TEXTS]

    for step in tinkex.progress(training, steps=steps, start=done):
        # The data of a step depends only on its number, so a repeated step is the same step.
        forward_backward = training.forward_backward([data[step % len(data)]], "cross_entropy")
        if step == killed_in:
            forward_backward.result()
            os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, nothing saved
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
        if (step + 1) % EVERY == 0:
            state = training.save_state(f"step-{step + 1}", ttl_seconds=24 * 3600).result()
            part = notes.with_suffix(".part")
            part.write_text(json.dumps({"path": state.path, "steps": step + 1}))
            part.replace(notes)  # atomic: the file has the old notes or the new ones
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    return [logprob for output in outputs for logprob in output["logprobs"].tolist()]


def train_and_be_killed(service: tinkex.ServiceClient, model: str, steps: int, notes: Path) -> None:
    """Run `train` in a separate process."""
    config = service.holder.config  # address and key of the service, wherever it is
    child = subprocess.run(
        [sys.executable, __file__, f"--model={model}", f"--steps={steps}", f"--notes={notes}"],
        env={**os.environ, "TINKER_BASE_URL": config.base_url, "TINKER_API_KEY": config.api_key},
        check=False,
    )
    print(f"the first process ended with {child.returncode} in step {steps // 2 + 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--notes", type=Path, help="be the process that is killed, and keep notes here")
    arguments = parser.parse_args()
    model, steps = arguments.model, arguments.steps

    with (
        tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service,
        tempfile.TemporaryDirectory() as folder,
    ):
        if arguments.notes is not None:
            train(service, model, steps, arguments.notes, killed_in=steps // 2)
            return
        notes = Path(folder) / "killed.json"
        train_and_be_killed(service, model, steps, notes)
        resumed = train(service, model, steps, notes)
        print("once more, without a crash")
        undisturbed = train(service, model, steps, Path(folder) / "undisturbed.json")
        apart = max(abs(a - b) for a, b in zip(resumed, undisturbed, strict=True))
        print(f"the log-probabilities of the two runs differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
