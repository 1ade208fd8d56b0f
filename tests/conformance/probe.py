"""Calls every public method of a client against a real service, and prints as JSON how each fared.

    python -m tests.conformance.probe MODULE BASE_URL BASE_MODEL

MODULE is `tinker` (run it in an environment with the official package) or `tinkex`. The methods are found by
reflection; one without a probe counts as failed, so that a new release shows up.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")
KEY = "tml-methods"
WAIT_S = 120.0
PROJECT = "project-of-the-probe"
SEQUENCES = [[(7 * i + 3 * k) % 190 + 5 for i in range(12 + k)] for k in range(3)]
_TWIN = "_async"

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

    def __init__(self, name: str) -> None:
        self.name = name

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
        """The loss one step on, with the moments of the steps before. Changes `state`'s run, not its checkpoint."""
        again = self.service.create_training_client_from_state_with_optimizer(self.state)
        self.step(again)
        return self.loss_of(again)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def step(self, training: Any) -> None:
        passed = training.forward_backward(self.data, "cross_entropy")
        stepped = training.optim_step(self.T.AdamParams(learning_rate=1e-2))
        done(passed), done(stepped)

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


def public_methods(module: Any) -> list[str]:
    """`Class.method` of every client; what a class inherits from the standard library is not ours to show."""
    found = []
    for name in CLASSES:
        kind = getattr(module, name)
        for method in dir(kind):
            owner = next(place for place in kind.__mro__ if method in vars(place) or place is object)
            is_own = owner.__module__.partition(".")[0] == module.__name__
            if not method.startswith("_") and is_own and callable(vars(owner)[method]):
                found.append(f"{name}.{method}")
    return found


def probe_of(method: str) -> Probe | None:
    name = method.removesuffix(_TWIN)
    return PROBES.get(name) or PROBES.get("*." + name.partition(".")[2])


def run(world: World, method: str) -> str | None:
    """What went wrong; None if nothing did."""
    function = probe_of(method)
    if function is None:
        return "no probe: write one"
    try:
        function(world, Call(method.partition(".")[2]))
    except Exception as problem:  # a probe reports its failure and the next one runs
        return f"{type(problem).__name__}: {problem}"
    return None


def main(module_name: str, url: str, model: str) -> dict[str, Any]:
    # Every probe's module registers itself; those of the command are for the official package alone.
    for part in ("probe_service", "probe_training", "probe_rest", "probe_ours"):
        importlib.import_module(f"tests.conformance.{part}")
    warnings.simplefilter("ignore")  # deprecations: they are the subject
    world = World(importlib.import_module(module_name), url, model)
    outcomes = {method: run(world, method) for method in public_methods(world.T)}
    found: dict[str, Any] = {"methods": outcomes}
    from tests.conformance import probe_arguments, probe_cli, probe_ours

    found["arguments"] = {name: _told(refused, world) for name, refused in probe_arguments.ARGUMENTS.items()}
    if world.is_ours:
        found["functions"] = {name: _told(function, world) for name, function in probe_ours.FUNCTIONS.items()}
    else:
        found["commands"] = probe_cli.run_all(world)
    return found


def _told(function: Callable[[World], object], world: World) -> str | None:
    try:
        function(world)
    except Exception as problem:  # as in `run`
        return f"{type(problem).__name__}: {problem}"
    return None


if __name__ == "__main__":
    # A hang must not last: say where everybody stood, and end.
    import faulthandler

    faulthandler.dump_traceback_later(600, exit=True)
    with contextlib.redirect_stdout(sys.stderr):
        outcome = main(*sys.argv[1:4])
    print(json.dumps(outcome), flush=True)
    assert threading.current_thread() is threading.main_thread()
    os._exit(0)  # clients' threads and goodbyes are not what is asked
