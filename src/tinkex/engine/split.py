"""An engine made of several: one trains, and others sample for it (`--sampler vllm`). To the server it is one engine.

The trainer writes a proof (`proofs`) with all weights that can be sampled. A sampler serves one base model. What it
does not offer goes to the trainer's own sampler (`vllm.requests.lack_reason`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tinkex.engine.contract import (
    Engine,
    EngineFault,
    EngineState,
    ModelInfo,
    Proof,
    ProofMissing,
    Sampled,
    SampleEvent,
    SampleSpec,
)
from tinkex.engine.frames import Frame
from tinkex.engine.proofs import as_json, checked_proof, logprobs_of_pass, probe_frame, probe_spec, probe_tokens
from tinkex.engine.vllm.requests import lack_reason

logger = logging.getLogger("tinkex.engine")


class SplitEngine:
    """Implements `engine.contract.Engine`.

    `state` is that of the trainer: when a sampler restarts, no adapter in training is lost, and training goes on.
    """

    def __init__(self, models: list[ModelInfo], trainer: Engine, samplers: Mapping[str, Engine]) -> None:
        """`samplers`: base model → the engine that samples it. Without any, the trainer samples and writes proofs for
        samplers elsewhere."""
        self._models = {name: model for model in models for name in model.names}
        self._trainer, self._samplers = trainer, samplers
        self._probe = probe_tokens(min(model.vocab_size for model in models))
        """Tokens that every model has."""
        self._base: dict[str, list[float]] = {}
        """Their log-probabilities with each base model."""

    @property
    def state(self) -> EngineState:
        state = self._trainer.state
        samplers = {name: sampler.state for name, sampler in self._samplers.items()}
        return replace(state, models=None, extras={**state.extras, "samplers": samplers})

    async def start(self) -> None:
        await asyncio.gather(self._trainer.start(), *(sampler.start() for sampler in self._samplers.values()))

    async def ready(self) -> None:
        """Wait for the trainer. A sample waits for its sampler by itself."""
        await self._trainer.ready()

    async def close(self) -> None:
        await asyncio.gather(self._trainer.close(), *(sampler.close() for sampler in self._samplers.values()))

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        if isinstance(command, Frame) and command.head.get("op") == "save" and not command.head["with_optimizer"]:
            command = Frame({**command.head, **await self._proof_of_adapter(command.head)})
        return await self._trainer.run(command, tenant=tenant)

    async def _proof_of_adapter(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field of a `save` that has the proof; nothing if the weights give no finite numbers.

        Commands of one adapter run in the order of arrival, and the server sends no other one meanwhile.
        """
        try:
            reply = await self._trainer.run(probe_frame(head["adapter"], self._probe))
            proof = checked_proof(self._probe, logprobs_of_pass(reply), await self._base_logprobs(head["base"]))
        except (EngineFault, ValueError) as fault:
            logger.warning("no proof is saved with %s: %s", head["adapter"], fault)
            return {}
        return {"proof": as_json(proof)}

    async def _base_logprobs(self, base: str) -> list[float]:
        if base not in self._base:
            self._base[base] = await self._own_logprobs(probe_spec(base, None, "", self._probe))
        return self._base[base]

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        model = self._models.get(spec.base)
        sampler = None if model is None else self._samplers.get(model.name)
        if sampler is None or model is None or lack_reason(spec, model) is not None:
            async with aclosing(self._trainer.sample(spec)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
            return
        try:
            async with aclosing(sampler.sample(spec)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
            return
        except ProofMissing:  # saved before there was a sampler, or uploaded
            spec = replace(spec, proof=await self._proof_of_folder(spec))
        async with aclosing(sampler.sample(spec)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    async def _proof_of_folder(self, spec: SampleSpec) -> Proof:
        """Compute a proof with the trainer's own sampler, which reads the files strictly."""
        logprobs = await self._own_logprobs(probe_spec(spec.base, spec.weights, spec.tenant, self._probe))
        return checked_proof(self._probe, logprobs, await self._base_logprobs(spec.base))

    async def _own_logprobs(self, probe: SampleSpec) -> list[float]:
        async with aclosing(self._trainer.sample(probe)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Sampled) and event.prompt_logprobs is not None:
                    return [value or 0.0 for value in event.prompt_logprobs[1:]]
        raise EngineFault("The engine did not say how likely the tokens of a proof are.", "server")
