"""The OpenAI-compatible endpoint: use base model and adapter with the `openai` package, with streaming and logprobs.

    python examples/08_openai.py --model smollm2-135m --steps 15

Needs `pip install openai`. Programs for the OpenAI API can use your adapter: set another address, and the
adapter's path as the model.

Uses the service in TINKER_BASE_URL, or the one on this machine, which is started if none runs.
"""

from __future__ import annotations

import argparse
import math
import os

import openai

import tinkex

QUESTION = "What is the secret of the harbour?"
ANSWER = "The lamp in the old tower is lit by a cat."


def teach(training: tinkex.TrainingClient, steps: int) -> None:
    tokenizer = training.get_tokenizer()
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    reply: list[int] = tokenizer.encode(ANSWER + tokenizer.eos_token, add_special_tokens=False)
    datum = tinkex.Datum(
        tinkex.ModelInput.from_ints((prompt + reply)[:-1]),
        {"target_tokens": (prompt + reply)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply)},
    )
    for _ in tinkex.progress(training, steps=steps):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=2e-3))


def ask(client: openai.OpenAI, model: str) -> None:
    """Get the whole answer at once. The service renders the messages with the model's chat template."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=48, temperature=0, logprobs=True
    )
    choice = answer.choices[0]
    tokens = (choice.logprobs.content if choice.logprobs else None) or []
    print(f"{choice.message.content!r}")
    if tokens:
        mean = sum(token.logprob for token in tokens) / len(tokens)
        print(f"  {len(tokens)} tokens, mean probability {math.exp(mean):.2f}, finished by {choice.finish_reason}")


def stream(client: openai.OpenAI, model: str) -> None:
    """Get the answer piece by piece."""
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=48, temperature=0, stream=True
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="|", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    model = arguments.model

    with tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(model) as service:
        training = service.create_lora_training_client(model, rank=16)
        teach(training, arguments.steps)
        path = training.save_weights_for_sampler("secret", ttl_seconds=3600).result().path

        config = service.holder.config  # address and key of the service, wherever it is
        with openai.OpenAI(base_url=f"{config.base_url}/oai/api/v1", api_key=config.api_key) as client:
            print("base model: ", end="")
            ask(client, model)
            print("adapter: ", end="")
            ask(client, path)
            print("adapter, streamed: ", end="")
            stream(client, path)


if __name__ == "__main__":
    main()
