"""Says why an operation is not finished: the state of its queue, and the reason, for polls and the console."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.engine.contract import Engine
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.catalog import Catalog


class QueueReasons:
    """`paused` has the causes for which the worker starts nothing, and their reasons."""

    def __init__(self, engine: Engine, catalog: Catalog, models: BaseModels, paused: Mapping[str, str]) -> None:
        self._engine, self._catalog, self._models, self._paused = engine, catalog, models, paused

    def of(self, queue: RunQueue, pending: PendingOperation) -> tuple[str, str]:
        """Return the state of an operation's queue, and why the operation is not finished."""
        engine = self._engine.state
        if reason := next(iter(self._paused.values()), None) or self.unserved(queue):
            return "paused_capacity", reason
        if not engine.is_ready:
            return "paused_capacity", f"the engine is not ready: {engine.reason}"
        if pending.waits_for:
            return "paused_capacity", pending.waits_for
        if queue.running is not pending:
            if (missing := queue.missing(pending.row.seq_id)) is not None:
                return "active", f"waits for operation {missing} of this run, which has not arrived"
            if ahead := queue.ahead(pending.row.seq_id):
                return "active", f"{ahead} operation{'s' if ahead > 1 else ''} of this run before it"
        if reason := self._models.reason(queue.run.base_model):
            return "paused_capacity", reason
        return "active", "running or next in line"

    def unserved(self, queue: RunQueue) -> str | None:
        """Return why a run cannot go on: the service may have been restarted without the run's base model."""
        name = queue.run.base_model
        if self._catalog.get(name) is not None:
            return None
        return (
            f"its base model {name} is not served now; run `tinkex models add {name}`, or start the service with "
            f"--base-model {name}, and it goes on"
        )
