"""Write down the public surface of an installed client package as JSON: exported names, the fields of every type,
the signatures of every client method, and the error tree.

Usage: python surface.py [MODULE] > surface/VERSION.json   (MODULE defaults to `tinker`; standard library only)
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")
PROVIDER_MODULES = ("lib.public_interfaces", "lib.public_interfaces.rest_client")
# Not exported, yet met by users: passed to a client, or found inside a result.
UNEXPORTED = (
    "lib.retry_handler.RetryConfig",
    "lib.api_future_impl.QueueState",
    "lib.public_interfaces.api_future.AwaitableConcurrentFuture",
    "types.topk_logprobs.TopkLogprobs",
    "types.optimizer.OptimParamsBase",
    "types.optimizer.OptimizerConfigBase",
    "types.checkpoints_list_response.CheckpointsListResponse",
    "types.checkpoint_archive_url_response.CheckpointArchiveUrlResponse",
)


def main(module_name: str = "tinker") -> None:
    print(json.dumps(surface_of(importlib.import_module(module_name)), indent=1, ensure_ascii=False))


def surface_of(package: ModuleType) -> dict[str, Any]:
    types = importlib.import_module(f"{package.__name__}.types")
    exported = sorted(name for name in vars(types) if not name.startswith("_") and is_exported(getattr(types, name)))
    return {
        "version": package.__version__,
        "all": list(package.__all__),
        "types_names": exported,
        "types": {name: describe(getattr(types, name)) for name in exported},
        "package_types": {
            name: describe(getattr(package, name))
            for name in package.__all__
            if name not in exported and name not in CLIENTS and is_value_type(getattr(package, name))
        },
        "unexported": {
            path: describe(getattr(module, path.rpartition(".")[2]))
            for path in UNEXPORTED
            if (module := load(f"{package.__name__}.{path.rpartition('.')[0]}")) is not None
            and hasattr(module, path.rpartition(".")[2])
        },
        "clients": {name: client(package, name) for name in CLIENTS if find(package, name) is not None},
        "errors": errors(package),
        "modules": {
            path: sorted(
                n for n, value in vars(module).items() if not n.startswith("_") and is_class_of(package, value)
            )
            for path in PROVIDER_MODULES
            if (module := load(f"{package.__name__}.{path}")) is not None
        },
    }


def is_exported(value: object) -> bool:
    return not isinstance(value, ModuleType) and value not in (typing.TYPE_CHECKING, annotations)


def is_class_of(package: ModuleType, value: object) -> bool:
    return isinstance(value, type) and value.__module__.split(".")[0] == package.__name__


def is_value_type(value: object) -> bool:
    return not isinstance(value, (ModuleType, str)) and not is_error(value)


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def load(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


def find(package: ModuleType, name: str) -> Any:
    """The class, from the package itself or from where a release that does not export it keeps it."""
    places = [package, *(load(f"{package.__name__}.{path}") for path in PROVIDER_MODULES)]
    return next((getattr(place, name) for place in places if place is not None and hasattr(place, name)), None)


def describe(value: Any) -> dict[str, Any]:
    if not isinstance(value, type):
        return {"kind": "alias", "is": text(value)}
    if issubclass(value, enum.Enum):
        return {"kind": "enum", "bases": bases(value), "members": {m.name: m.value for m in value}}
    if hasattr(value, "model_fields"):
        return {"kind": "pydantic", "config": config(value), "fields": pydantic_fields(value), **members(value)}
    if dataclasses.is_dataclass(value):
        params = value.__dataclass_params__  # type: ignore[attr-defined]
        return {
            "kind": "dataclass",
            "config": {"frozen": params.frozen, "eq": params.eq, "init": signature(value)},
            "fields": dataclass_fields(value),
            **members(value),
        }
    if typing.is_typeddict(value):
        required = value.__required_keys__  # type: ignore[attr-defined]
        fields = [
            {"name": k, "annotation": text(v), "required": k in required} for k, v in value.__annotations__.items()
        ]
        return {"kind": "typeddict", "fields": fields}
    if value.__module__ == "builtins":
        return {"kind": "alias", "is": value.__name__}
    return {"kind": "class", "bases": bases(value), "init": signature(value), **members(value)}


def config(model: Any) -> dict[str, Any]:
    wanted = ("extra", "frozen", "populate_by_name", "strict", "protected_namespaces")
    return {key: text(model.model_config[key]) for key in wanted if key in model.model_config}


def pydantic_fields(model: Any) -> list[dict[str, Any]]:
    rows = []
    for name, field in model.model_fields.items():
        row: dict[str, Any] = {"name": name, "annotation": text(field.annotation), "required": field.is_required()}
        if field.metadata:
            row["constraints"] = [text(item) for item in field.metadata]
        if field.alias and field.alias != name:
            row["alias"] = field.alias
        if field.validation_alias and not isinstance(field.validation_alias, str):
            row["accepts"] = text(field.validation_alias)
        if field.discriminator:
            row["discriminator"] = text(field.discriminator)
        if field.default_factory is not None:
            row["default_factory"] = text(field.default_factory)
        elif not field.is_required():
            row["default"] = text(field.default)
        rows.append(row)
    return rows


def dataclass_fields(cls: Any) -> list[dict[str, Any]]:
    rows = []
    for field in dataclasses.fields(cls):
        has_default = field.default is not dataclasses.MISSING
        has_factory = field.default_factory is not dataclasses.MISSING
        row: dict[str, Any] = {"name": field.name, "annotation": text(field.type)}
        row["required"] = not (has_default or has_factory)
        if has_default:
            row["default"] = text(field.default)
        if has_factory:
            row["default_factory"] = text(field.default_factory)
        rows.append(row)
    return rows


def members(cls: type) -> dict[str, Any]:
    """Public methods and properties that the class, or a parent inside the same package, defines itself."""
    package = cls.__module__.split(".")[0]
    own: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent.__module__.split(".")[0] == package:
            own.update({name: (parent, value) for name, value in vars(parent).items() if not name.startswith("_")})
    methods, properties = {}, {}
    for name, (_, value) in sorted(own.items()):
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            getter: Any = value.fget if isinstance(value, property) else value.func
            properties[name] = text(inspect.signature(getter).return_annotation)
        elif inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod)):
            methods[name] = method(cls, name)
    return {key: table for key, table in (("methods", methods), ("properties", properties)) if table}


def method(cls: type, name: str) -> dict[str, Any]:
    static = inspect.getattr_static(cls, name)
    function = static.__func__ if isinstance(static, (classmethod, staticmethod)) else static
    row: dict[str, Any] = {"signature": signature(function)}
    row["coroutine"] = inspect.iscoroutinefunction(function)
    if isinstance(static, (classmethod, staticmethod)):
        row["binding"] = type(static).__name__
    return row


def client(package: ModuleType, name: str) -> dict[str, Any]:
    cls = find(package, name)
    special = [
        n for n in ("__init__", "__await__", "__enter__", "__aenter__", "__reduce__", "__del__") if n in own(cls)
    ]
    return {
        "exported": hasattr(package, name),
        "module": cls.__module__,
        "bases": bases(cls),
        "init": signature(cls.__init__),
        "special": special,
        **members(cls),
    }


def own(cls: type) -> set[str]:
    package = cls.__module__.split(".")[0]
    return {n for parent in cls.__mro__ if parent.__module__.split(".")[0] == package for n in vars(parent)}


def errors(package: ModuleType) -> dict[str, Any]:
    found = {name: value for name in package.__all__ if is_error(value := getattr(package, name))}
    hidden = load(f"{package.__name__}._exceptions")
    if hidden is not None:
        found.update({n: v for n, v in vars(hidden).items() if is_error(v) and not n.startswith("_")})
    return {
        name: {
            "exported": name in package.__all__,
            "mro": [parent.__name__ for parent in cls.__mro__],
            "init": signature(cls.__init__),
            "attributes": {
                key: text(value)
                for parent in reversed(cls.__mro__)
                for key, value in getattr(parent, "__annotations__", {}).items()
            },
            "class_values": {k: v for k, v in vars(cls).items() if isinstance(v, int) and not k.startswith("_")},
        }
        for name, cls in sorted(found.items())
    }


def bases(cls: type) -> list[str]:
    return [base.__name__ for base in cls.__bases__]


def signature(function: Callable[..., Any]) -> str:
    try:
        return text(str(inspect.signature(function)))
    except (TypeError, ValueError):
        return "(...)"


def text(value: Any) -> str:
    """A value, type or annotation as short, stable text."""
    if isinstance(value, type) and not typing.get_args(value):
        return value.__name__
    if inspect.isroutine(value):
        return value.__qualname__
    shown = value if isinstance(value, str) else repr(value)
    shown = re.sub(r" at 0x[0-9a-f]+", "", shown)
    shown = re.sub(r"PropertyInfo\([^()]*(discriminator='\w+')\)", r"\1", shown)
    shown = re.sub(r"<class '([^']+)'>", r"\1", shown)
    return re.sub(
        r"\b(typing|typing_extensions|datetime|concurrent\.futures\._base|tinker(\.[a-z_]+)*)\.(?=\w)", "", shown
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
