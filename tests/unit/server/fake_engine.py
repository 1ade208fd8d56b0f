"""An engine without maths: an adapter is the list of what was done to it, so lost or doubled work shows at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tinkex.engine.contract import (
    EngineDied,
    EngineFault,
    EngineState,
    Sampled,
    SampleEvent,
    SampleSpec,
    SequenceOutput,
    Tokens,
)
from tinkex.engine.frames import Frame, decode


def head_of(command: Frame | bytes) -> dict[str, Any]:
    return (command if isinstance(command, Frame) else decode(command)).head


class FakeEngine:
    """Dies when told to, forgetting every adapter, as a killed process does."""

    def __init__(self) -> None:
        self.generation = 1
        self.adapters: dict[str, list[str]] = {}
        self.commands: list[dict[str, Any]] = []
        self.received: list[tuple[Frame | bytes, str]] = []
        """Every command as it came, and its tenant."""
        self.deaths: list[Callable[[dict[str, Any]], bool]] = []
        """Each is asked before a command; the first that says yes kills the engine, once."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_ready = True
        self.pass_s = 0.0
        """What it says that a pass took of its own."""
        self.samples: list[SampleSpec] = []

    @property
    def state(self) -> EngineState:
        return EngineState(
            is_ready=self.is_ready, reason="" if self.is_ready else "loading", generation=self.generation
        )

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    def die(self) -> None:
        self.generation += 1
        self.adapters.clear()

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        head = head_of(command)
        generation = self.generation
        await self.gate.wait()
        await asyncio.sleep(0)
        for death in self.deaths:
            if death(head):
                self.deaths.remove(death)
                self.die()
                break
        if self.generation != generation:
            raise EngineDied("killed by signal 9")
        self.commands.append(head)
        self.received.append((command, tenant))
        return Frame(self._reply(head), [])

    def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
        op, name = head["op"], head["adapter"]
        if op not in ("create", "restore", "drop") and name not in self.adapters:
            raise EngineFault(f"Adapter {name} is not in this engine.", "server")
        if op == "create":
            self.adapters[name] = [f"seed {head['seed']}"]
        elif op == "restore":
            self.adapters[name] = json.loads((Path(head["folder"]) / "state.json").read_text())
        elif op == "drop":
            self.adapters.pop(name, None)
        elif op in ("snapshot", "save"):
            Path(head["folder"]).mkdir(parents=True)
            content = json.dumps(self.adapters[name]).encode()
            (Path(head["folder"]) / "state.json").write_bytes(content)
            about = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            return {"size_bytes": len(content), "files": {"state.json": about}}
        elif op == "size":
            return {"size_bytes": len(json.dumps(self.adapters[name]))}
        elif op == "load":
            self.adapters[name] = json.loads((Path(head["folder"]) / "state.json").read_text())
        elif op in ("forward", "forward_backward"):
            if head["loss_fn"] == "broken":
                raise EngineFault("loss_fn 'broken' is not known.", "user")
            if op == "forward_backward":
                self.adapters[name].append(f"fb {len(head['data'])}")
            return {"metrics": {"loss:sum": 1.0}, "outputs": [], "seconds": self.pass_s}
        elif op == "optim_step":
            self.adapters[name].append(f"step {head['learning_rate']}")
            return {"metrics": {"step:max": 1.0}}
        return {}

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        self.samples.append(spec)
        generation = self.generation
        if spec.is_streamed:
            yield Tokens(0, [1], [-0.5])
        await self.gate.wait()
        if self.generation != generation:
            raise EngineDied("killed by signal 9")
        rows = [
            SequenceOutput(tokens=[1, 2], logprobs=[-0.5, -0.25], stop_reason="length") for _ in range(spec.num_samples)
        ]
        yield Sampled(sequences=rows, prompt_tokens=len(spec.prompt))
