"""Which runs this server may work on, where several servers share a store. A server that is alone has none of this."""

from __future__ import annotations

from typing import Protocol

from tinkex.store.records import Home


class RunHomes(Protocol):
    """Which runs this server may work on, where several share the store; `server.cluster` has it."""

    async def own(self, run_id: str) -> Home:
        """Return the right to work on a run. Raises HomeLost if another server has it."""

    def lose(self, home: Home) -> None:
        """Note that another server has it: a write was rolled back."""
