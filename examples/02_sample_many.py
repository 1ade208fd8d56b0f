"""Many samples at once, from asyncio. No semaphore is needed: the SDK sends as many as the service takes.

    python examples/02_sample_many.py [base model]

A 429 slows all samplers of the key down and fails none. A sample that fails for good fails alone.
"""

from __future__ import annotations

import asyncio
import sys

import tinkex

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"
PROMPTS = 200


async def main() -> None:
    # The pools say how many connections there may be: `sample` to submit, `retrieve_samples` to wait.
    async with tinkex.ServiceClient(pools={"sample": 16, "retrieve_samples": 64}) as service:
        sampler = await service.create_sampling_client_async(base_model=MODEL)
        params = tinkex.SamplingParams(max_tokens=16, temperature=0.8, seed=1)
        prompts = [tinkex.ModelInput.from_ints([101, 7, number]) for number in range(PROMPTS)]

        answers = await asyncio.gather(
            *(sampler.sample_async(prompt, 2, params) for prompt in prompts), return_exceptions=True
        )

        tokens = 0
        failed: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                failed.append(answer)
            else:
                tokens += sum(len(sequence.tokens) for sequence in answer.sequences)
        print(f"{len(answers) - len(failed)} of {len(answers)} prompts answered, {tokens} tokens")
        for problem in failed[:3]:
            print(f"failed: {problem}")

        stats = service.stats()
        print(
            f"{stats['requests']} requests, {stats['retries']} retries, told to slow down {stats['rate_limited']} times"
        )


if __name__ == "__main__":
    asyncio.run(main())
