"""Makes `import tinker` mean this package, so that programs written for the official client run unmodified.

    import tinkex.as_tinker
    tinkex.as_tinker.install()  # before the first `import tinker`

or `python -m tinkex.as_tinker script.py …`. The modules named `tinker…` are empty: every name is looked up in tinkex on
first use, so `tinker.Datum is tinkex.Datum`. `tinker.__version__` is the release whose API we offer.

Others import: the package itself (`install`, `uninstall`).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.errors import ConfigError

SPAWNED = str(Path(__file__).with_name("path"))
"""A folder with a module `tinker` that installs the alias, for processes that inherit `sys.path` but not the finder."""

_OWN = "tinkex.as_tinker.stand_ins"
_INTERFACES = "tinker.lib.public_interfaces"
_HOMES: dict[str, tuple[str, ...]] = {
    "tinker": ("tinkex", _OWN),
    "tinker.types": ("tinkex.types",),
    "tinker.auth": ("tinkex.as_tinker.auth",),
    "tinker._compat": (_OWN,),
    "tinker._exceptions": ("tinkex.errors",),
    "tinker._version": (),
    "tinker.lib": (),
    "tinker.lib.api_future_impl": (_OWN,),
    "tinker.lib.experimental": ("tinkex.errors",),
    "tinker.lib.retry_handler": (_OWN,),
    _INTERFACES: ("tinkex", _OWN),
    f"{_INTERFACES}.admin_client": ("tinkex.client.rest",),
    f"{_INTERFACES}.api_future": ("tinkex.client.future", _OWN),
    f"{_INTERFACES}.custom_loss": (_OWN,),
    f"{_INTERFACES}.rest_client": ("tinkex.client.rest",),
    f"{_INTERFACES}.sampling_client": ("tinkex.client.sampling",),
    f"{_INTERFACES}.service_client": ("tinkex.client.service",),
    f"{_INTERFACES}.training_client": ("tinkex.client.training",),
}
"""Module of the official package → the modules of tinkex that have its names."""

_PACKAGES = ("tinker", "tinker.lib", _INTERFACES, "tinker.types", "tinker.types.shared", "tinker.types._pydantic_types")
# Upstream has one file per type, named after the type; these files have other names.
_TYPE_FILES = (
    "_tensor_container",
    "_torch_utils",
    "billing_usage_request",
    "current_checkpoint_storage_usage_request",
    "optimizer",
)

_EXPORTS = {
    "tinker": """
        TrainingClient ServiceClient SamplingClient RestClient AdminClient APIFuture LossHandle PerDatumLossFn auth
        AdamOptimizerConfig AdamParams DimuonOptimizerConfig DimuonParams OptimParams Checkpoint CheckpointType Datum
        DmelChunk EncodedTextChunk ForwardBackwardOutput SampledProvenanceSpan LoraConfig ModelID ModelInput
        ModelInputChunk OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan
        SampledSequence SampleRequest SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun
        Timeout RequestOptions TinkerError APIError APIStatusError APITimeoutError APIConnectionError
        APIResponseValidationError RequestFailedError BadRequestError AuthenticationError BillingError
        PermissionDeniedError NotFoundError ConflictError UnprocessableEntityError RateLimitError InternalServerError
        ExperimentalWarning types __version__ __title__
    """,
    _INTERFACES: """
        ServiceClient TrainingClient SamplingClient RestClient AdminClient APIFuture AwaitableConcurrentFuture
        LossHandle PerDatumLossFn
    """,
}
"""The names that `from … import *` imports, where upstream defines them."""


def install() -> None:
    """Make `import tinker` import this package. Calling it again has no effect."""
    if _installed() is not None:
        return
    present = sys.modules.get("tinker")
    if present is not None:
        file = getattr(present, "__file__", None) or "an unknown file"
        raise ConfigError(
            f"The tinker package from {file} is already imported, and parts of the program use its classes. "
            "Call tinkex.as_tinker.install() before the first `import tinker`, "
            "or start the program with `python -m tinkex.as_tinker script.py`."
        )
    sys.meta_path.insert(0, Finder())
    # Not first: the first entry is the folder of the script, which programs read and change.
    sys.path.insert(1, SPAWNED)


def uninstall() -> None:
    """Undo `install`. Names that were imported in between do not change."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    if SPAWNED in sys.path:
        sys.path.remove(SPAWNED)
    for name in [name for name in sys.modules if _is_ours(name)]:
        del sys.modules[name]


def _installed() -> Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def _is_ours(name: str) -> bool:
    return name == "tinker" or name.startswith("tinker.")


class Finder(MetaPathFinder, Loader):
    """Finds and fills the modules named `tinker…`, and reports which version of `tinker` is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_ours(fullname):
            return None
        if _homes(fullname) is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: tinkex.as_tinker replaces the public modules of the official package, "
                "not its internal ones.",
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin="tinkex.as_tinker", is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        homes = _homes(name) or ()
        module.__doc__ = f"The public names of `{name}`, provided by tinkex."
        if name in ("tinker", "tinker._version"):
            module.__dict__.update(__version__=PROTOCOL_VERSION, __title__="tinker")
        exports = _exports(name)
        if exports:
            module.__dict__["__all__"] = exports

        def look_up(attribute: str) -> Any:
            value = _find(name, homes, attribute)
            module.__dict__[attribute] = value  # the next access costs nothing
            return value

        module.__dict__["__getattr__"] = look_up
        module.__dict__["__dir__"] = lambda: sorted({*vars(module), *exports})

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        """Answer `importlib.metadata.version("tinker")`, with which programs find out what they can use."""
        if getattr(context, "name", None) not in (None, "tinker"):
            return []
        from importlib.metadata import Distribution

        class TinkerDistribution(Distribution):
            """Has a name and a version, and no files."""

            def read_text(self, filename: str) -> str | None:
                if filename != "METADATA":
                    return None
                return f"Metadata-Version: 2.1\nName: tinker\nVersion: {PROTOCOL_VERSION}\nSummary: served by tinkex\n"

            def locate_file(self, path: Any) -> Path:
                return Path(__file__).parent.joinpath(str(path))

        return [TinkerDistribution()]


def _homes(name: str) -> tuple[str, ...] | None:
    """Return the modules that have the names of a module; None if there is no such module."""
    if name in _HOMES:
        return _HOMES[name]
    parent, _, last = name.rpartition(".")
    if name in _PACKAGES or (parent in _PACKAGES and parent.startswith("tinker.types") and _is_type_file(last)):
        return _HOMES["tinker.types"]
    return None


def _is_type_file(name: str) -> bool:
    if name in _TYPE_FILES:
        return True
    return name.islower() and name in {_snake_case(kind) for kind in importlib.import_module("tinkex.types").__all__}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _exports(name: str) -> list[str]:
    if name in ("tinker.types", "tinker.auth"):
        return list(importlib.import_module(_HOMES[name][0]).__all__)
    return _EXPORTS.get(name, "").split()


def _find(name: str, homes: tuple[str, ...], attribute: str) -> Any:
    if not attribute.startswith("__"):
        if _homes(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        for home in homes:
            source = importlib.import_module(home)
            if hasattr(source, attribute):
                return getattr(source, attribute)
    raise AttributeError(f"module {name!r} (served by tinkex) has no attribute {attribute!r}")
