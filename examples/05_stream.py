"""Tokens as they are made. On a service that does not announce streaming, each sample comes as one last chunk.

python examples/05_stream.py [base model]
"""

from __future__ import annotations

import sys

import tinkex

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"


def main() -> None:
    with tinkex.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = tinkex.SamplingParams(max_tokens=12, seed=1)
        stream = sampler.stream(tinkex.ModelInput.from_ints([101, 7, 23]), params)

        for chunk in stream:  # or `async for`; either way once
            print(*chunk.tokens, end=" ", flush=True)
            if chunk.stop_reason:
                print(f"({chunk.stop_reason})")

        if stream.response is not None:  # the whole answer, as sample() gives it
            sequence = stream.response.sequences[0]
            mean = sum(sequence.logprobs or []) / len(sequence.tokens)
            print(f"{len(sequence.tokens)} tokens, mean log-probability {mean:.3f}")


if __name__ == "__main__":
    main()
