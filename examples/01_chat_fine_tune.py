"""Fine-tune on conversations, with the model's chat template and a loss on the assistant's tokens only.

python examples/01_chat_fine_tune.py --model smollm2-135m --steps 20
"""

# %% [markdown]
# # A first fine-tune
#
# Sixteen short conversations teach a model to talk like the help desk of a harbour. The training loop runs in your
# program, the model on a service: the one in `TINKER_BASE_URL`, or else the one on this machine.

# %%
from __future__ import annotations

import argparse  # not in the notebook
import json
import os
import random
from pathlib import Path

import tinkex

# %% notebook: MODEL, STEPS, DATA = "smollm2-135m", 20, Path("data")
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="as the service names it")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()
MODEL, STEPS, DATA = arguments.model, arguments.steps, Path(__file__).parent / "data"

# %% [markdown]
# ## The service
#
# A training client trains one adapter. The service also provides the tokenizer, with the model's chat template.

# %%
service = tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local(MODEL)
training = service.create_lora_training_client(MODEL, rank=16)
tokenizer = training.get_tokenizer()

# %% [markdown]
# ## The data
#
# The template renders a conversation, as it will when the model is used. The model reads every token, but only those of
# the last answer have weight 1. Position t of the input predicts target t: the same tokens, shifted by one.


# %%
def render(messages: list[dict[str, str]], is_question: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_question))


def datum_of(messages: list[dict[str, str]]) -> tinkex.Datum:
    question = render(messages[:-1], is_question=True)
    answer = render(messages, is_question=False).removeprefix(question)  # includes the token that ends a turn
    prompt: list[int] = tokenizer.encode(question, add_special_tokens=False)
    reply: list[int] = tokenizer.encode(answer, add_special_tokens=False)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints((prompt + reply)[:-1]),
        {"target_tokens": (prompt + reply)[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply)},
    )


lines = (DATA / "harbour.jsonl").read_text(encoding="utf-8").splitlines()
conversations: list[list[dict[str, str]]] = [json.loads(line)["messages"] for line in lines]
data = [
    datum_of(messages[: turn + 1])
    for messages in conversations
    for turn, message in enumerate(messages)
    if message["role"] == "assistant"
]
print(f"{len(conversations)} conversations, {len(data)} answers to learn")

# %% [markdown]
# ## Before
#
# Questions that are not in the data.


# %%
def answers(sampler: tinkex.SamplingClient) -> None:
    params = tinkex.SamplingParams(max_tokens=24, temperature=0.0, stop=[tokenizer.eos_token_id])
    questions = ["Where do I buy a ticket?", "Can I swim in the harbour?"]
    prompts = [render([{"role": "user", "content": question}], is_question=True) for question in questions]
    futures = [
        sampler.sample(tinkex.ModelInput.from_text(prompt, tokenizer, add_special_tokens=False), 1, params)
        for prompt in prompts
    ]
    for question, future in zip(questions, futures, strict=True):
        tokens = future.result().sequences[0].tokens
        print(f"{question} → {tokenizer.decode(tokens, skip_special_tokens=True)!r}")


answers(service.create_sampling_client(base_model=MODEL))

# %% [markdown]
# ## Training
#
# Calls return at once and run in the order they were made. The loop sends the next step before it waits for the last
# one, so the service always has work. `tinkex.progress` counts the steps, shows one line about them and records their
# losses.

# %%
order = random.Random(0)
adam = tinkex.AdamParams(learning_rate=1e-3)
passes: list[tinkex.APIFuture[tinkex.ForwardBackwardOutput]] = []
progress = tinkex.progress(training, steps=STEPS)
for step in progress:
    passes.append(training.forward_backward(order.sample(data, 8), "cross_entropy"))
    training.optim_step(adam)
    if step > 0:
        passes[step - 1].result()
print(progress.curve())

# %% [markdown]
# ## After
#
# The sampler has the weights after all calls so far. Training can continue from a saved state later.

# %%
answers(training.save_weights_and_get_sampling_client())
print(f"saved {training.save_state('harbour').result().path}")
service.close().result()
