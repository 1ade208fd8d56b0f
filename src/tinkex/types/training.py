"""Training: optimizers, LoRA, losses, and the requests and responses of forward_backward and optim_step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex.errors import ValidationError
from tinkex.types.base import REQUIRED, Value, field
from tinkex.types.coerce import Mismatch
from tinkex.types.inputs import Datum
from tinkex.types.inputs import LossFnInputs as LossFnInputs
from tinkex.types.tensor import TensorData

ModelID = str

# The names that are known today. A service may offer others: nothing here rejects one.
LossFnType = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
    "kl_divergence",
]
LossFnOutput = dict[str, TensorData]


class OptimizerFamily(Value):
    """A value told by its `type`. Of a type that is not known here, all fields are kept and sent as they are."""

    type: str
    _more: dict[str, Any] = field(init=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            more = {} if name == "_more" else self._more
            if name not in more:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return more[name]

    def _fill(self, given: Mapping[str, Any]) -> None:
        is_known = self._defaults["type"] is not REQUIRED
        more = {} if is_known else {name: value for name, value in given.items() if name not in self._defaults}
        object.__setattr__(self, "_more", more)
        super()._fill({name: value for name, value in given.items() if name not in more})

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        is_open = cls._defaults["type"] is REQUIRED
        return cls(**obj) if is_open and isinstance(obj, Mapping) else super().model_validate(obj)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {**super().model_dump(**options), **self._more}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return super().model_copy(update={**self._more, **(update or {})}, deep=deep)

    def __eq__(self, other: object) -> bool:
        # Not `and`: NotImplemented, for a value of another class, counts as true.
        return super().__eq__(other) is True and self._more == getattr(other, "_more", None)

    __hash__ = Value.__hash__

    def __repr__(self) -> str:
        shown = {**{name: getattr(self, name) for name in self._defaults}, **self._more}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, fields) = super().__reduce__()
        return rebuild, (cls, {**fields, **self._more})


class OptimizerConfigBase(OptimizerFamily):
    """The optimizer that is chosen when a model is created."""


class AdamOptimizerConfig(OptimizerConfigBase):
    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(OptimizerConfigBase):
    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


OptimizerConfig = AdamOptimizerConfig | DimuonOptimizerConfig | OptimizerConfigBase


class AdamParams(Value):
    """One AdamW step. `weight_decay` is decoupled; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def _coerce(cls, value: Any) -> Self:
        if isinstance(value, Mapping) and "type" in value:
            raise Mismatch(f"{value['type']!r} names another optimizer than Adam")
        return super()._coerce(value)


class OptimParamsBase(OptimizerFamily):
    """One step of an optimizer other than Adam."""


class DimuonParams(OptimParamsBase):
    """One Dimuon step. `grad_clip_norm` 0 means no clipping."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float
    grad_clip_norm: float = 0.0
    beta1: float = 0.9

    def _check(self) -> None:
        if not 0 <= self.learning_rate < float("inf"):
            raise ValidationError(f"DimuonParams.learning_rate must be at least 0 and finite, got {self.learning_rate}")
        if not 0 <= self.beta1 < 1:
            raise ValidationError(f"DimuonParams.beta1 must be at least 0 and below 1, got {self.beta1}")
        if not abs(self.grad_clip_norm) < float("inf"):
            raise ValidationError(f"DimuonParams.grad_clip_norm must be finite, got {self.grad_clip_norm}")


OptimParams = AdamParams | DimuonParams | OptimParamsBase


class LoraConfig(Value):
    """The adapter to train: its rank, its seed, and which layers it is on."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Value):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Value):
    model_id: str
    type: Literal["create_model"] = "create_model"


class ForwardBackwardInput(Value, kw_only=False):
    """The data of one forward or forward_backward, the loss by its name, and the loss's settings."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None = None


class ForwardBackwardRequest(Value, kw_only=False):
    forward_backward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


class ForwardRequest(Value, kw_only=False):
    forward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


class ForwardBackwardOutput(Value, kw_only=False):
    """What a loss gave: named tensors for each datum, and metrics named `name:reducer`."""

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The summed loss: the metric `loss:sum`, or None if the service gave none. Not a field on the wire.

        The mean, as `tinkex.progress` shows it, is `loss_per_token`.
        """
        return self.metrics.get("loss:sum")

    @property
    def loss_per_token(self) -> float | None:
        """The loss per unit of weight: per token, where all weights are 1. Not a field on the wire.

        None where the service reports no weights, or they do not sum to a positive number; and of a custom loss.
        """
        loss, weight = self.metrics.get("loss:sum"), self.metrics.get("weight:sum")
        return loss / weight if loss is not None and weight is not None and weight > 0 else None


class OptimStepRequest(Value):
    """One optimizer step. Pass `optim_params`, or `adam_params` as in older releases; both name the same thing."""

    optim_params: OptimParams | None = None
    adam_params: AdamParams | None = None
    model_id: str
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    def _check(self) -> None:
        is_given = self.optim_params is not None, self.adam_params is not None
        # Both is right where they are the same: a dump of this value has both.
        if not any(is_given) or (all(is_given) and self.optim_params != self.adam_params):
            raise ValidationError("OptimStepRequest needs either optim_params or adam_params.")
        if self.optim_params is None:
            object.__setattr__(self, "optim_params", self.adam_params)
        elif isinstance(self.optim_params, AdamParams):
            object.__setattr__(self, "adam_params", self.optim_params)


class OptimStepResponse(Value):
    metrics: dict[str, float] | None = None


CustomLossInputRank = Literal[0, 1, 2]


class CustomLossInput(Value):
    """An input of an uploaded loss: its name and how many axes it has."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Value):
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class CustomLossGraph(Value):
    """A traced loss as a list of operations."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Value):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Value):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
