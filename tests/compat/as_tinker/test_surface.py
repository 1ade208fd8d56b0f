"""Every method, argument and coroutine of the official clients, as recorded from the packages themselves."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tinkex

SURFACE = Path(__file__).parent.parent / "golden" / "surface"
MOVED = {
    # 0.4.1 has `user_metadata` where 0.36.0 has `base_model`: a mapping in that place is taken for the former.
    "ServiceClient.create_training_client_from_state",
    "ServiceClient.create_training_client_from_state_async",
    # 0.4.1's only argument is called `adam_params`, which 0.36.0 takes by name.
    "TrainingClient.optim_step",
    "TrainingClient.optim_step_async",
}


class Recorded(NamedTuple):
    """A method as the official package has it."""

    client: str
    name: str
    positional: list[str]
    keyword_only: list[str]
    is_coroutine: bool
    is_static: bool

    def __str__(self) -> str:
        return f"{self.client}.{self.name}"


def clients(release: str) -> dict[str, Any]:
    return dict(json.loads((SURFACE / f"{release}.json").read_text())["clients"])


def methods(release: str) -> list[Recorded]:
    found = []
    for client, row in clients(release).items():
        for name, method in row.get("methods", {}).items():
            arguments = ast.parse(f"def f{method['signature']}: ...").body[0].args  # type: ignore[attr-defined]
            positional = [entry.arg for entry in arguments.args]
            keywords = [entry.arg for entry in arguments.kwonlyargs]
            is_static = method.get("binding") == "staticmethod"
            found.append(Recorded(client, name, positional, keywords, method["coroutine"], is_static))
    return found


def ours(recorded: Recorded) -> Any:
    return getattr(getattr(tinkex, recorded.client), recorded.name)


@pytest.mark.parametrize("release", ["0.36.0", "0.4.1"])
def test_every_method_of_the_official_clients_is_there(release: str) -> None:
    missing = [str(row) for row in methods(release) if not hasattr(getattr(tinkex, row.client), row.name)]
    assert missing == []


@pytest.mark.parametrize("release", ["0.36.0", "0.4.1"])
def test_every_argument_has_the_official_name_and_position(release: str) -> None:
    wrong = []
    for row in methods(release):
        parameters = inspect.signature(ours(row)).parameters
        places = [name for name, entry in parameters.items() if entry.kind is entry.POSITIONAL_OR_KEYWORD]
        wanted = row.positional
        if row.is_static:
            wanted, places = wanted[1:], places[1:]  # the first is the official package's inner object
        names = set(row.positional[row.is_static :] + row.keyword_only)
        if places[: len(wanted)] != wanted and not (release == "0.4.1" and str(row) in MOVED):
            wrong.append(f"{row}: {wanted} are {places} here")
        if not names <= set(parameters):
            wrong.append(f"{row} lacks {names - set(parameters)}")
    assert wrong == []


@pytest.mark.parametrize("release", ["0.36.0", "0.4.1"])
def test_official_coroutine_functions_are_coroutine_functions_here(release: str) -> None:
    wrong = [str(row) for row in methods(release) if row.is_coroutine and not inspect.iscoroutinefunction(ours(row))]
    assert wrong == []


@pytest.mark.parametrize("client", ["TrainingClient", "SamplingClient"])
def test_no_public_coroutine_function_beyond_those_of_the_official_clients(client: str) -> None:
    # The cookbook fails its suite on any it does not know. Upstream wraps some `_async` names (load_state_async) in a
    # plain function that returns a coroutine, so the names count, not what the wrapper says of itself.
    known = {name for name in clients("0.36.0")[client]["methods"] if name.endswith("_async")}
    kind = getattr(tinkex, client)
    found = {
        name for name in dir(kind) if not name.startswith("_") and inspect.iscoroutinefunction(getattr(kind, name))
    }
    assert found <= known


@pytest.mark.parametrize("release", ["0.36.0", "0.4.1"])
def test_service_clients_take_every_constructor_argument(release: str) -> None:
    text = clients(release)["ServiceClient"]["init"]
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    wanted = {entry.arg for entry in (*arguments.args, *arguments.kwonlyargs)}
    assert wanted <= set(inspect.signature(tinkex.ServiceClient.__init__).parameters)


def test_the_holder_of_a_service_client_makes_the_other_clients() -> None:
    service = tinkex.ServiceClient(base_url="http://127.0.0.1:9")
    assert repr(tinkex.RestClient(service.holder)) == "<RestClient http://127.0.0.1:9>"
    assert repr(tinkex.AdminClient(service.holder)) == "<AdminClient http://127.0.0.1:9>"
