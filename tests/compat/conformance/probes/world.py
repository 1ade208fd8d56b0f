"""What probes need: the method under test as a call, and clients and checkpoints to try it on."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any

KEY = "tml-methods"
WAIT_S = 120.0
SEQUENCES = [[(7 * i + 3 * k) % 190 + 5 for i in range(12 + k)] for k in range(3)]

Probe = Callable[["World", "Call"], object]
PROBES: dict[str, Probe] = {}
"""By `Class.method` without `_async`; `*.method` stands for every class."""


def probe(*names: str) -> Callable[[Probe], Probe]:
    def register(function: Probe) -> Probe:
        PROBES.update(dict.fromkeys(names, function))
        return function

    return register


class Call:
    """The method under test: `call(client, …)` waits for its answer, whether it is a value, a future or a coroutine."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def __call__(self, client: Any, *args: Any, **named: Any) -> Any:
        return done(getattr(client, self.name)(*args, **named))


def done(answer: Any) -> Any:
    if inspect.isawaitable(answer) and not hasattr(answer, "result"):
        return asyncio.run(_awaited(answer))
    return answer.result(WAIT_S) if hasattr(answer, "result") else answer


async def _awaited(coroutine: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        answer = await coroutine
        # Training methods are awaited twice: for the future, then for the result.
        return await answer.result_async() if hasattr(answer, "result_async") else answer


class World:
    """What probes share, made on first use. A probe that changes something makes its own."""

    def __init__(self, module: Any, url: str, model: str) -> None:
        self.T, self.url, self.model = module, url, model
        self.is_ours = module.__name__ == "tinkex"
        self.data = [self.datum(tokens) for tokens in SEQUENCES]
        self._numbers = itertools.count()

    def datum(self, tokens: list[int], **inputs: Any) -> Any:
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1), **inputs}
        return self.T.Datum(model_input=self.T.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def prompt(self, length: int = 6) -> Any:
        return self.T.ModelInput.from_ints(SEQUENCES[0][:length])

    def name(self) -> str:
        return f"probe-{next(self._numbers)}"

    def project(self) -> str:
        """One that nobody used before, on this service or by another client."""
        return f"project-{uuid.uuid4().hex[:12]}"

    # -- clients -------------------------------------------------------------------------------------------------------

    def new_service(self, **named: Any) -> Any:
        return self.T.ServiceClient(base_url=self.url, api_key=KEY, **named)

    def new_training(self, seed: int = 1, **named: Any) -> Any:
        return self.service.create_lora_training_client(self.model, rank=4, seed=seed, **named)

    @cached_property
    def service(self) -> Any:
        return self.new_service(user_metadata={"made": "by the probe"}, display_name="the probe")

    @cached_property
    def rest(self) -> Any:
        return self.T.RestClient(base_url=self.url, api_key=KEY)

    @cached_property
    def admin(self) -> Any:
        return self.T.AdminClient(base_url=self.url, api_key=KEY)

    @cached_property
    def training(self) -> Any:
        """A run of three steps. Its weights stay as they are; see `state` for what comes next."""
        training = self.new_training()
        for _ in range(3):
            self.step(training)
        return training

    @cached_property
    def sampler(self) -> Any:
        return self.service.create_sampling_client(model_path=self.sampler_path)

    def client(self, kind: str) -> Any:
        clients = {"ServiceClient": "service", "TrainingClient": "training", "SamplingClient": "sampler"}
        return getattr(self, {**clients, "RestClient": "rest", "AdminClient": "admin"}[kind])

    # -- what they made ------------------------------------------------------------------------------------------------

    @cached_property
    def run_id(self) -> str:
        return str(self.training.get_info().model_id)

    @cached_property
    def session_id(self) -> str:
        return self.run_id.partition(":")[0]

    @cached_property
    def state(self) -> str:
        return str(done(self.training.save_state(self.name())).path)

    @cached_property
    def sampler_path(self) -> str:
        return str(done(self.training.save_weights_for_sampler(self.name())).path)

    def new_state(self, **named: Any) -> str:
        return str(done(self.training.save_state(self.name(), **named)).path)

    @cached_property
    def loss(self) -> float:
        return self.loss_of(self.training)

    @cached_property
    def next_loss(self) -> float:
        """The loss one step on, with the moments of the steps before."""
        again = self.service.create_training_client_from_state_with_optimizer(self.state)
        self.step(again)
        return self.loss_of(again)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def step(self, training: Any) -> None:
        passed = training.forward_backward(self.data, "cross_entropy")
        stepped = training.optim_step(self.T.AdamParams(learning_rate=1e-2))
        done(passed)
        done(stepped)

    def loss_of(self, training: Any) -> float:
        return self.total(done(training.forward(self.data, "cross_entropy")))

    def total(self, output: Any) -> float:
        """The summed loss, from the log-probabilities."""
        assert [len(row["logprobs"].tolist()) for row in output.loss_fn_outputs] == [len(s) - 1 for s in SEQUENCES]
        return -sum(sum(row["logprobs"].tolist()) for row in output.loss_fn_outputs)

    def greedy(self, sampler: Any) -> list[int]:
        params = self.T.SamplingParams(max_tokens=5, temperature=0.0)
        return list(done(sampler.sample(self.prompt(), 1, params)).sequences[0].tokens)

    def checkpoint(self, path: str) -> Any:
        """The checkpoint as the list of its run has it; None if it is not there."""
        listed = done(self.rest.list_checkpoints(path.removeprefix("tinker://").partition("/")[0])).checkpoints
        return next((checkpoint for checkpoint in listed if checkpoint.tinker_path == path), None)

    def found_session(self, session_id: str) -> Any:
        request = self.T.types.SessionSearchRequest(session_id=session_id)
        return done(self.rest.search_sessions(request)).sessions[0]


def near(one: float, other: float, tolerance: float = 1e-3) -> bool:
    return abs(one - other) <= tolerance * max(1.0, abs(other))
