"""The base models that the service offers, loaded or not. A client can name only these: no path, no other model."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.engine.contract import ModelInfo
from tinkex.server.http.errors import RequestRejected


class Catalog:
    def __init__(self, models: Sequence[ModelInfo]) -> None:
        self.models: tuple[ModelInfo, ...] = ()
        self._by_name: dict[str, ModelInfo] = {}
        for model in models:
            self.add(model)

    def add(self, model: ModelInfo) -> None:
        """Offer a model. One of the same name is replaced."""
        kept = [other for other in self.models if other.name != model.name]
        self._set([*kept, model])

    def remove(self, name: str) -> None:
        self._set([other for other in self.models if other.name != name])

    def _set(self, models: Sequence[ModelInfo]) -> None:
        self.models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}

    @property
    def names(self) -> list[str]:
        """Every name that works, aliases included."""
        return list(self._by_name)

    def get(self, name: object) -> ModelInfo | None:
        return self._by_name.get(name) if isinstance(name, str) else None

    def find(self, name: object) -> ModelInfo:
        """Return the model of this name or alias. Raises 400 if it is not served."""
        model = self.get(name)
        if model is None:
            raise RequestRejected(
                400,
                f"Base model {str(name)[:200]!r} is not served here. Served: {', '.join(self.names)}. "
                "To serve another one, its owner runs `tinkex models add NAME`, or starts `tinkex serve` with "
                "--base-model NAME.",
                "unknown_base_model",
            )
        return model
