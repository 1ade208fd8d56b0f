"""Observe the SDK: events, statistics, the status of a future, and why the service makes work wait.

    python examples/12_watch.py --model smollm2-135m

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import os

import tinkex
from tinkex.events import RetryEvent, StepEvent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    model = parser.parse_args().model

    # Listeners and observers run on the SDK's thread: they must be quick and must not wait for the SDK.
    steps: list[StepEvent] = []
    retries: list[RetryEvent] = []
    waits: list[tuple[str, str | None]] = []
    endings = [tinkex.on("step", steps.append), tinkex.on("retry", retries.append)]

    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        training = service.create_lora_training_client(model, rank=16)
        training.on_queue_state(lambda state, reason: waits.append((state, reason)))
        datum = tinkex.Datum(
            tinkex.ModelInput.from_ints([101, 7, 23]), {"target_tokens": [7, 23, 42], "weights": [1.0, 1.0, 1.0]}
        )
        future = training.forward_backward([datum], "cross_entropy")
        try:
            future.result(timeout=0.001)  # a timeout of the caller does not cancel the work
        except TimeoutError:
            print(f"still {future.status().state}")
        print(f"loss {future.result().metrics['loss:sum']:.3f}")
        print(f"done after {future.status().polls} polls")

        stats = service.stats()
        print(f"{stats['requests']} requests, {stats['retries']} retries, {stats['sent_bytes']} bytes sent")

    for end in endings:
        end()
    for retry in retries:
        print(f"{retry.endpoint}: attempt {retry.attempt} failed, the next came {retry.delay_s:.2f} s later")
    for state, reason in waits:
        print(f"the queue was {state}: {reason}")
    for step in steps:
        print(
            f"{step.operation}: {step.seconds:.3f} s = submit {step.submit_s:.3f} + queue {step.queue_s:.3f} "
            f"+ compute {step.compute_s:.3f} + fetch {step.fetch_s:.3f}"
        )


if __name__ == "__main__":
    main()
