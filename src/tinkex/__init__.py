"""A drop-in client for the Tinker fine-tuning API, and a self-hosted service for it.

Names load on first use, so `import tinkex` takes milliseconds. The public names are those of the official `tinker`
package, and a few more: `local`, `on`, `progress`, `Config`, `SampleStream`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__

__title__ = "tinkex"

_HOMES = {
    "tinkex.client.service": ("ServiceClient",),
    "tinkex.client.training": ("TrainingClient",),
    "tinkex.client.sampling": ("SamplingClient",),
    "tinkex.client.rest": ("RestClient", "AdminClient"),
    "tinkex.client.future": ("APIFuture",),
    "tinkex.client.stream": ("SampleStream", "StreamChunk"),
    "tinkex.client.tokenizer": ("Tokenizer",),
    "tinkex.local_service": ("local",),
    "tinkex.settings": ("Config",),
    "tinkex.events": ("on",),
    "tinkex.watch.progress": ("progress",),
    "tinkex.errors": (
        "TinkexError", "TinkerError", "ConfigError", "ValidationError", "MissingExtra", "ClosedError",
        "DeadlineExceeded", "WrongThread", "StreamAlreadyConsumed", "ResultExpired", "RequestFailedError",
        "RequestErrorCategory", "APIError", "APIConnectionError", "APITimeoutError", "APIResponseValidationError",
        "APIStatusError", "BadRequestError", "ContextOverflow",
        "AuthenticationError", "BillingError", "PermissionDeniedError", "NotFoundError", "ConflictError",
        "UnprocessableEntityError", "RateLimitError", "InternalServerError", "ExperimentalWarning",
    ),
    "tinkex.types": (
        "AdamOptimizerConfig", "AdamParams", "DimuonOptimizerConfig", "DimuonParams", "OptimParams", "Checkpoint",
        "CheckpointType", "Datum", "DmelChunk", "EncodedTextChunk", "ForwardBackwardOutput", "ImageAssetPointerChunk",
        "ImageChunk", "LoraConfig", "LossFnType", "ModelID", "ModelInput", "ModelInputChunk", "OptimStepRequest",
        "OptimStepResponse", "ParsedCheckpointTinkerPath", "PromptProvenanceSpan", "SampledProvenanceSpan",
        "SampledSequence", "SampleRequest", "SampleResponse", "SamplingParams", "StopReason", "TensorData",
        "TensorDtype", "TrainingRun",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__title__", "__version__", "errors", "types", *sorted(_HOME)]


if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
        elif name in ("types", "errors", "settings", "events", "testing"):
            value = importlib.import_module(f"tinkex.{name}")
        else:
            raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
        globals()[name] = value  # the next access costs nothing
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from tinkex import errors as errors
    from tinkex import events as events
    from tinkex import settings as settings
    from tinkex import testing as testing
    from tinkex import types as types
    from tinkex.client.future import APIFuture as APIFuture
    from tinkex.client.rest import AdminClient as AdminClient
    from tinkex.client.rest import RestClient as RestClient
    from tinkex.client.sampling import SamplingClient as SamplingClient
    from tinkex.client.service import ServiceClient as ServiceClient
    from tinkex.client.stream import SampleStream as SampleStream
    from tinkex.client.stream import StreamChunk as StreamChunk
    from tinkex.client.tokenizer import Tokenizer as Tokenizer
    from tinkex.client.training import TrainingClient as TrainingClient
    from tinkex.errors import *  # noqa: F403
    from tinkex.events import on as on
    from tinkex.local_service import local as local
    from tinkex.settings import Config as Config
    from tinkex.types import *  # noqa: F403
    from tinkex.watch.progress import progress as progress
