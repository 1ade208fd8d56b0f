"""Calls every public method of a client against a real service, and prints as JSON what went wrong with which.

    python -m tests.compat.conformance.probes MODULE BASE_URL BASE_MODEL [PACKAGES]

MODULE is `tinker` (run it in an environment with the official package) or `tinkex`. The methods are found by
reflection; one without a probe counts as failed, so that a new release shows up. PACKAGES is a folder to import from
what the environment lacks: torch, which custom losses need and which is large.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from tests.compat.conformance.probes import arguments, ours, rest, sampling, service, training
from tests.compat.conformance.probes.world import PROBES, Call, Probe, World

PARTS = (service, training, sampling, rest, ours)
"""Importing them registers their probes."""
CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")
_TWIN = "_async"


def main(module: str, url: str, model: str) -> dict[str, dict[str, str | None]]:
    warnings.simplefilter("ignore")  # deprecated methods are asked for too
    world = World(importlib.import_module(module), url, model)
    found = {"methods": {method: _tried(method, world) for method in public_methods(world.T)}}
    found["arguments"] = {name: _problem(name, probe, world) for name, probe in arguments.ARGUMENTS.items()}
    if world.is_ours:
        found["functions"] = {name: _problem(name, probe, world) for name, probe in ours.FUNCTIONS.items()}
    else:
        from tests.compat.conformance.probes import commands

        found["commands"] = {name: _problem(name, commands.try_command, world, name) for name in commands.names()}
    return found


def public_methods(module: Any) -> list[str]:
    """`Class.method` of every client, without what a class inherits from the standard library."""
    found = []
    for name in CLASSES:
        kind = getattr(module, name)
        for method in dir(kind):
            owner = next(place for place in kind.__mro__ if method in vars(place))
            is_own = owner.__module__.partition(".")[0] == module.__name__
            if not method.startswith("_") and is_own and callable(vars(owner)[method]):
                found.append(f"{name}.{method}")
    return found


def _tried(method: str, world: World) -> str | None:
    kind, _, name = method.partition(".")
    probe = _probe_of(kind, name.removesuffix(_TWIN))
    return "no probe: write one" if probe is None else _problem(method, probe, world, Call(kind, name))


def _probe_of(kind: str, name: str) -> Probe | None:
    return PROBES.get(f"{kind}.{name}") or PROBES.get(f"*.{name}")


def _problem(name: str, attempt: Callable[..., object], *args: object) -> str | None:
    """What went wrong; None if nothing did."""
    started = time.perf_counter()
    try:
        attempt(*args)
        problem = None
    except Exception as raised:  # one that fails is reported, and the next is tried
        problem = f"{type(raised).__name__}: {raised}"
    print(f"{time.perf_counter() - started:6.2f} s  {name}  {problem or ''}", file=sys.stderr, flush=True)
    return problem


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)  # a hang says where it is, and ends
    with contextlib.redirect_stdout(sys.stderr):
        sys.path += sys.argv[4:]
        outcome = main(*sys.argv[1:4])
    print(json.dumps(outcome), flush=True)
    os._exit(0)  # without the clients' goodbyes: they are not what is asked
