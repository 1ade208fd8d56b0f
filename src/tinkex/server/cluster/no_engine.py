"""The engine of a front: it has no models and runs nothing. Its requests are handed on before any handler gets here."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tinkex.engine.contract import EngineFault, EngineState, SampleEvent, SampleSpec
from tinkex.engine.frames import Frame


class NoEngine:
    state = EngineState(is_ready=True)

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        raise self._fault()

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        raise self._fault()
        yield  # it is an iterator

    @staticmethod
    def _fault() -> EngineFault:
        return EngineFault("This server has no engine (--no-engine).", "server")
