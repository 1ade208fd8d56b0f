"""`import tinker`, its modules, its names and the parts that are ours alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tinkex
from tinkex import as_tinker
from tinkex.testing import ScriptedService

HERE = Path(__file__).parent
SURFACE = HERE.parent / "golden" / "surface"
RELEASES = ("0.36.0", "0.4.1")
INNER = {
    "_tensor_container": {"tensor_container_dim", "tensor_container_shape"},
    "custom_loss_graph": {"CustomLossNodeOp"},
    "topk_logprobs": {"MASK_LOGPROB", "topk_to_lists"},
}
"""Names in upstream's files that its own `tinker.types` does not export, and neither do we."""


def recorded(name: str, folder: Path = HERE) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_the_official_package_exports_is_there(tinker: ModuleType, release: str) -> None:
    exported = recorded(release, SURFACE)["all"]
    assert [name for name in exported if getattr(tinker, name, None) is None] == []
    assert set(exported) <= set(tinker.__all__)


@pytest.mark.parametrize("release", RELEASES)
def test_every_type_the_official_package_exports_is_there(tinker: ModuleType, release: str) -> None:
    names = recorded(release, SURFACE)["types_names"]
    assert [name for name in names if getattr(tinker.types, name) is not getattr(tinkex.types, name)] == []


@pytest.mark.parametrize("release", RELEASES)
def test_every_official_types_module_imports_and_has_its_types(tinker: ModuleType, release: str) -> None:
    wrong = []
    for path, names in recorded(f"type_modules_{release}").items():
        module = importlib.import_module(f"tinker.types.{path}")
        offered = set(names) - INNER.get(path, set())
        wrong += [f"{path}.{name}" for name in offered if getattr(module, name) is not getattr(tinkex.types, name)]
    assert wrong == []


def test_a_type_is_one_class_by_every_path(tinker: ModuleType) -> None:
    assert tinker.types.image_chunk.ImageChunk is tinkex.types.ImageChunk is tinker.ImageChunk
    assert tinker.EncodedTextChunk is tinker.types.EncodedTextChunk is tinkex.EncodedTextChunk
    from tinker.types.tensor_data import TensorData

    assert TensorData is tinker.TensorData is tinkex.TensorData


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("tinker.lib.public_interfaces", "APIFuture", "APIFuture"),
        ("tinker.lib.public_interfaces.api_future", "APIFuture", "APIFuture"),
        ("tinker.lib.public_interfaces.rest_client", "RestClient", "RestClient"),
        ("tinker.lib.public_interfaces.admin_client", "AdminClient", "AdminClient"),
        ("tinker.lib.public_interfaces.service_client", "ServiceClient", "ServiceClient"),
        ("tinker.lib.public_interfaces.training_client", "TrainingClient", "TrainingClient"),
        ("tinker.lib.public_interfaces.sampling_client", "SamplingClient", "SamplingClient"),
        ("tinker._exceptions", "BadRequestError", "BadRequestError"),
        ("tinker.lib.experimental", "ExperimentalWarning", "ExperimentalWarning"),
    ],
)
def test_inner_module_paths_that_programs_use_lead_to_the_same_classes(
    tinker: ModuleType, module: str, name: str, ours: str
) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(tinkex, ours)


def test_every_way_to_read_the_version_gives_the_protocol_version(tinker: ModuleType) -> None:
    from tinker._version import __version__

    assert tinker.__version__ == __version__ == importlib.metadata.version("tinker") == "0.36.0"
    assert tinker.__title__ == "tinker"


def test_compat_model_dump_takes_the_official_arguments(tinker: ModuleType) -> None:
    from tinker._compat import model_dump

    params = tinker.AdamParams(learning_rate=0.5)
    assert model_dump(params, exclude_unset=True, mode="json", exclude=None, warnings=False) == {"learning_rate": 0.5}
    assert "learning_rate" not in model_dump(params, exclude={"learning_rate"})


def test_star_imports_give_the_official_names(tinker: ModuleType) -> None:
    space: dict[str, Any] = {}
    exec("from tinker import *", space)
    assert space["Datum"] is tinkex.Datum and space["types"] is tinker.types
    space.clear()
    exec("from tinker.types import *", space)
    assert space["ImageChunk"] is tinkex.types.ImageChunk


def test_a_missing_name_or_module_is_an_import_error(tinker: ModuleType) -> None:
    with pytest.raises(ImportError, match="nothing_like_it"):
        from tinker import nothing_like_it  # noqa: F401
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = tinker.types.nothing_like_it
    with pytest.raises(ModuleNotFoundError, match="public modules") as caught:
        importlib.import_module("tinker.cli")
    assert caught.value.name == "tinker.cli"


def test_installing_twice_changes_nothing(tinker: ModuleType) -> None:
    before = list(sys.meta_path), list(sys.path)
    as_tinker.install()
    assert (sys.meta_path, sys.path) == before
    assert sys.modules["tinker"] is tinker


def test_uninstalling_leaves_no_trace() -> None:
    before = list(sys.meta_path), list(sys.path), {name for name in sys.modules if name.split(".")[0] == "tinker"}
    as_tinker.install()
    importlib.import_module("tinker.types.datum")
    as_tinker.uninstall()
    after = list(sys.meta_path), list(sys.path), {name for name in sys.modules if name.split(".")[0] == "tinker"}
    assert after == before
    as_tinker.uninstall()


def test_installing_after_the_real_package_was_imported_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tinker.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("tinker")
    try:
        with pytest.raises(tinkex.ConfigError, match=f"{tmp_path}.*before the first `import tinker`"):
            as_tinker.install()
    finally:
        del sys.modules["tinker"]
    assert not any(isinstance(finder, as_tinker.Finder) for finder in sys.meta_path)


def test_installing_beats_a_real_package_that_is_installed_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tinker.py").write_text("raise RuntimeError('the real one')")
    monkeypatch.syspath_prepend(tmp_path)
    as_tinker.install()
    try:
        assert importlib.import_module("tinker").Datum is tinkex.Datum
    finally:
        as_tinker.uninstall()


def test_import_tinker_through_the_alias_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tinkex import as_tinker; as_tinker.install(); import tinker.types; tinker.ModelInput;"
        "print(*{'torch', 'transformers', 'numpy', 'pydantic', 'pyqwest', 'google.protobuf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- what is refused, and what stands in ------------------------------------------------------------------------------


def test_server_side_losses_are_rejected_with_an_alternative(tinker: ModuleType) -> None:
    service = tinker.ServiceClient(base_url="http://127.0.0.1:9")
    with pytest.raises(tinkex.ValidationError, match="forward_backward_custom"):
        service.create_custom_loss(lambda logprobs: (logprobs.sum(), {}), {"target_tokens": 1})
    with pytest.raises(tinkex.ValidationError, match="forward_backward_custom"):
        tinker.LossHandle(name="mine")


@pytest.mark.parametrize("kind", ["tinker", "like httpx"])
def test_a_timeout_object_sets_the_response_timeout(tinker: ModuleType, kind: str) -> None:
    timeout = tinker.Timeout(30.0, read=7.0) if kind == "tinker" else SimpleNamespace(connect=30.0, read=7.0)
    service = tinker.ServiceClient(base_url="http://127.0.0.1:9", timeout=timeout)
    assert service._session.config.timeout_s == 7.0


def test_a_timeout_applies_to_phases_without_their_own(tinker: ModuleType) -> None:
    assert tinker.Timeout(5.0, connect=1.0).as_dict() == {"connect": 1.0, "read": 5.0, "write": 5.0, "pool": 5.0}
    assert tinker.Timeout(5.0) == tinker.Timeout(5.0) != tinker.Timeout(6.0)


def test_queue_states_equal_the_strings_that_observers_get(tinker: ModuleType) -> None:
    from tinker.lib.api_future_impl import QueueState

    states = recorded("0.36.0", SURFACE)["unexported"]["lib.api_future_impl.QueueState"]["members"]
    assert {state.name: state.value for state in QueueState} == states
    assert QueueState.PAUSED_CAPACITY == "paused_capacity"


def test_a_retry_config_has_the_official_fields_and_samplers_accept_it(
    tinker: ModuleType, service: ScriptedService
) -> None:
    from tinker.lib.retry_handler import RetryConfig

    fields = recorded("0.36.0", SURFACE)["unexported"]["lib.retry_handler.RetryConfig"]["fields"]
    config = RetryConfig(progress_timeout=60)
    assert set(vars(config)) == {field["name"] for field in fields}
    with tinker.ServiceClient(base_url=service.url) as client:
        assert client.create_sampling_client(base_model="tinkex/tiny", retry_config=config).base_model == "tinkex/tiny"


def test_an_awaitable_concurrent_future_returns_the_inner_result(tinker: ModuleType) -> None:
    from tinker.lib.public_interfaces import AwaitableConcurrentFuture

    inner: concurrent.futures.Future[int] = concurrent.futures.Future()
    outer = AwaitableConcurrentFuture(inner)
    inner.set_result(7)

    async def wait() -> int:
        return int(await outer)

    assert outer.result(1) == asyncio.run(wait()) == 7
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(KeyError("gone"))
    with pytest.raises(KeyError, match="gone"):
        AwaitableConcurrentFuture(failed).result(1)


# -- tinker.auth ------------------------------------------------------------------------------------------------------


def test_the_token_is_the_configured_api_key(tinker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tinker.auth.get_tinker_token() is None
    assert not tinker.auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_API_KEY", "tml-set")
    assert tinker.auth.get_tinker_token() == "tml-set"
    assert tinker.auth.tinker_has_credentials()


def test_a_credential_command_counts_as_credentials_and_is_not_run(
    tinker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {tmp_path / 'ran'}")
    assert tinker.auth.tinker_has_credentials()
    assert tinker.auth.get_tinker_token() is None
    assert not (tmp_path / "ran").exists()


def test_a_service_on_this_machine_needs_no_credentials(tinker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    assert tinker.auth.tinker_has_credentials()
    assert tinker.auth.get_tinker_token() is None


def test_checking_accessibility_opens_no_session(tinker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedService(api_key="tml-right") as service:
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-right")
        tinker.auth.raise_if_tinker_not_accessible()
        assert len(service.requests_to("get_server_capabilities")) == 1
        assert service.sessions == {}
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        with pytest.raises(tinker.AuthenticationError):
            tinker.auth.raise_if_tinker_not_accessible()


def test_an_unreachable_service_fails_at_once(tinker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(tinker.APIConnectionError):
        tinker.auth.raise_if_tinker_not_accessible()
