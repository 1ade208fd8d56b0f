"""The first demo: a model learns from examples to turn orders into JSON, and is tested on words it has never seen."""

from __future__ import annotations

from typing import Any

from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient
from tinkex.demo import orders
from tinkex.demo.stage import Stage, draw, say
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams
from tinkex.watch.progress import progress

STEPS, BATCH, RANK = 20, 8, 16
RATE, WARM_UP = 1e-3, 4
EXAM, SHOWN = 20, 3
IN_FLIGHT = 2
"""Steps that are sent before the first of them has its result: the service never waits for the client."""


def run(stage: Stage) -> tuple[int, int]:
    """Run the demo; return how many test answers were right before and after training."""
    state = stage.state
    say(f"tinkex demo: {state.model} learns to turn orders into JSON, on this machine.\n")
    exam = orders.held_out(EXAM)
    with stage.service() as service:
        if not state.answers:
            say(f"Before: {EXAM} orders that the model is never trained on …")
            base = service.create_sampling_client(base_model=state.model)
            state.answers = ask(base, exam)
            stage.save_state()
        before = report(exam, state.answers)
        training, start, is_open = stage.training(service, RANK)
        tokenizer = training.get_tokenizer()
        say(
            f"\nTraining: {state.steps} steps of {BATCH} examples; LoRA, rank {RANK}. "
            "Ctrl-C pauses; run the command again to continue."
        )
        sent: list[APIFuture[Any]] = []
        with progress(training, state.steps, start=start) as shown:
            for step in shown:
                # After a stop between the two calls, the gradient is already there.
                if step > start or not is_open:
                    batch = [orders.example(state.seed, step * BATCH + row) for row in range(BATCH)]
                    training.forward_backward([datum(tokenizer, order) for order in batch], "cross_entropy")
                sent.append(training.optim_step(AdamParams(learning_rate=rate(step, state.steps))))
                if len(sent) > IN_FLIGHT:
                    sent.pop(0).result()
        say("\n" + draw([step.loss for step in stage.read_steps(service)[0]], "loss per token"))
        say(f"\nAfter: the same {EXAM} orders …")
        path = stage.save_adapter(service, training)
        after = report(exam, ask(service.create_sampling_client(model_path=path), exam))
    stage.clear_state()
    say(f"\n{before} of {EXAM} right before, {after} of {EXAM} after.")
    stage.print_next_steps(path)
    return before, after


def rate(step: int, steps: int) -> float:
    """Return the learning rate: it rises for a few steps, then falls to a tenth."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * (1.0 - 0.9 * step / steps)


def datum(tokenizer: Any, order: orders.Order) -> Datum:
    """Return question and answer as a datum; only the answer has weight."""
    question, answer = tokenizer.encode(order.prompt), tokenizer.encode(order.answer)
    tokens = question + answer
    weights = [0.0] * (len(question) - 1) + [1.0] * len(answer)
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def ask(sampler: SamplingClient, exam: list[orders.Order]) -> list[str]:
    """Return the most likely answer to each order, sampled all at once."""
    tokenizer = sampler.get_tokenizer()
    params = SamplingParams(max_tokens=orders.MOST_TOKENS, temperature=0.0, stop=[orders.STOP])
    futures = [sampler.sample(ModelInput.from_ints(tokenizer.encode(order.prompt)), 1, params) for order in exam]
    return [tokenizer.decode(future.result().sequences[0].tokens) for future in futures]


def report(exam: list[orders.Order], answers: list[str]) -> int:
    """Print a few answers; return how many of all are right."""
    rights = [orders.is_right(answer, order) for order, answer in zip(exam, answers, strict=True)]
    for order, answer, is_right in list(zip(exam, answers, rights, strict=True))[:SHOWN]:
        say(f"  {order.text}\n    {'right' if is_right else 'wrong'}: {' '.join(answer.split())[:100]}")
    say(f"  {sum(rights)} of {len(exam)} right")
    return sum(rights)
