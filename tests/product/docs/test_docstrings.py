"""The examples in docstrings run: with the settings in the environment, and `service` a `ServiceClient`."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import tinkex

MODULES = sorted(
    found.name for found in pkgutil.walk_packages(tinkex.__path__, "tinkex.") if not found.name.endswith("__main__")
)
WITH_EXAMPLES = [
    name
    for name in MODULES
    if any(test.examples for test in doctest.DocTestFinder().find(importlib.import_module(name)))
]
VERBS = {
    "tinkex.client.service.ServiceClient",
    "tinkex.client.service.ServiceClient.create_lora_training_client",
    "tinkex.client.training.TrainingClient.forward_backward",
    "tinkex.client.training.TrainingClient.optim_step",
    "tinkex.client.sampling.SamplingClient.sample",
    "tinkex.client.sampling.SamplingClient.stream",
    "tinkex.client.future.APIFuture",
    "tinkex.types.tensor.TensorData",
    "tinkex.watch.progress.progress",
    "tinkex.types.inputs.ModelInput",
    "tinkex.types.inputs.Datum",
    "tinkex.events.on",
}
"""What newcomers look up first."""


@pytest.fixture
def service(environment: dict[str, str]) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient() as client:
        yield client


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name: str, service: tinkex.ServiceClient) -> None:
    done = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"service": service, "tinkex": tinkex},
        optionflags=doctest.ELLIPSIS,
    )
    assert done.attempted > 0
    assert done.failed == 0


def test_public_verbs_have_an_example() -> None:
    found = {
        test.name
        for name in WITH_EXAMPLES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
        if test.examples
    }
    assert found >= VERBS, sorted(VERBS - found)
