"""Many samples at once from asyncio, then one streamed token by token.

    python examples/10_sampling.py --model smollm2-135m --prompts 40

No semaphore is needed: the SDK sends as many requests as the service accepts. A 429 slows down all samplers of the key
and fails none of them; a sample that fails does not affect the others.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import tinkex


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    model = arguments.model

    async with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        sampler = await service.create_sampling_client_async(base_model=model)
        tokenizer = sampler.get_tokenizer()
        params = tinkex.SamplingParams(max_tokens=16, temperature=0.8, seed=1)
        texts = [f"{number} bottles of rum and" for number in range(arguments.prompts)]
        prompts = [tinkex.ModelInput.from_text(text, tokenizer) for text in texts]

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

        # If the service does not announce streaming, the sample arrives as one last chunk.
        stream = sampler.stream(prompts[0], params)
        print(texts[0], end="", flush=True)
        async for chunk in stream:  # or `for`; a stream can be read once
            print(f"|{tokenizer.decode(chunk.tokens)}", end="", flush=True)
            if chunk.stop_reason:
                print(f" ({chunk.stop_reason})")
        if stream.response is not None:  # the complete response, as sample() returns it
            sequence = stream.response.sequences[0]
            mean = sum(sequence.logprobs or []) / len(sequence.tokens)
            print(f"{len(sequence.tokens)} tokens, mean log-probability {mean:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
