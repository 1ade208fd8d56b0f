"""Weights: saving, loading, exporting and copying them, and the checkpoints that a service keeps."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal, Self

from tinkex.errors import ValidationError
from tinkex.types.base import Value, field
from tinkex.types.training import AdamOptimizerConfig, OptimizerConfig

CheckpointType = Literal["training", "sampler", "external"]

_CONSOLE = "https://tinker.thinkingmachines.ai"
_KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Cursor(Value):
    """Where a page stands in its list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Value):
    """Weights that the service keeps, until `expires_at` if that is given."""

    checkpoint_id: str
    checkpoint_type: CheckpointType | str
    time: dt.datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: dt.datetime | None = None


class CheckpointsListResponse(Value):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ParsedCheckpointTinkerPath(Value):
    """The parts of a path `tinker://<run>/<kind>/<name>`; `checkpoint_id` is `<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """
        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://r:train:0/weights/last").checkpoint_id
        'weights/last'
        """
        scheme, _, rest = tinker_path.partition("://")
        run, kind, name = parts if len(parts := rest.split("/")) == 3 else ("", "", "")
        if scheme != "tinker" or not run or not name or kind not in _KINDS:
            raise ValidationError(
                f"Not the path of a checkpoint: {tinker_path!r}. Expected tinker://<run>/<kind>/<name> "
                f"with one of the kinds {', '.join(_KINDS)}."
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=_KINDS[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class SaveWeightsRequest(Value):
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Value):
    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """Where the hosted service shows this checkpoint."""
        return _console_url(self.path)


class LoadWeightsRequest(Value):
    """Load into a model (`model_id`, `seq_id`), or make a new one of a session. Without `optimizer`: weights only."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Value):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class SaveWeightsForSamplerRequest(Value):
    """Save under a name (`path`), or as an ephemeral sampler (`sampling_session_seq_id`)."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Value):
    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """Where the hosted service shows this checkpoint."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """Where the hosted service lets people talk to this checkpoint."""
        from urllib.parse import quote

        return f"{_CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(Value):
    """The service's own answer: a path for a named save, a sampling session for an ephemeral one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(Value):
    """Export weights for download."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Value):
    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Value):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class ExternalWeightsUrlsResponse(Value):
    """A download address for each file of an export, good until `expires`."""

    urls: dict[str, str]
    expires: dt.datetime


class CheckpointArchiveUrlResponse(Value):
    """The download address of a checkpoint's archive, good until `expires`."""

    url: str
    expires: dt.datetime


class WeightsInfoResponse(Value):
    """What is needed to make a training client of saved weights."""

    base_model: str
    optimizer_config: OptimizerConfig | None = field(default_factory=AdamOptimizerConfig)
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(Value):
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Value):
    tinker_path: str


class UnloadModelRequest(Value):
    model_id: str
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Value):
    model_id: str
    type: Literal["unload_model"] | None = None


def _console_url(tinker_path: str) -> str:
    from urllib.parse import quote

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return f"{_CONSOLE}/checkpoints/{quote(parsed.training_run_id, safe='')}/{quote(parsed.checkpoint_id, safe='')}"
