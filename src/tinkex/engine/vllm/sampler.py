"""Runs sampling requests on vLLM's asynchronous engine. The only module that imports vLLM, and only when it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.engine.contract import EngineFault, ModelInfo, Sampled, SampleSpec, Tokens
from tinkex.engine.vllm import null_adapter
from tinkex.engine.vllm.adapters import Adapters, is_dead
from tinkex.engine.vllm.requests import MOST_LOGPROBS, Collector, check_prompt, sampling_arguments

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be built for."""


def engine_arguments(start: Mapping[str, Any], model: ModelInfo, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.AsyncEngineArgs` for what the server sent at the start."""
    options = start["vllm"]
    slots = options["slots"] + is_cpu  # one for the base model (`null_adapter`)
    arguments = {
        "model": model.folder,
        "dtype": start["dtype"],
        "enable_lora": True,
        "max_lora_rank": next((rank for rank in RANKS if rank >= options["max_rank"]), RANKS[-1]),
        "max_loras": slots,
        "max_cpu_loras": max(options["adapters"], slots),
        "max_num_seqs": start["max_rows"],
        "max_logprobs": MOST_LOGPROBS,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        # On a CPU graphs gain nothing (116 to 151 tokens a second beside 141 to 174), and compiling takes a minute.
        "enforce_eager": is_cpu,
    }
    if model.max_context_length:
        arguments["max_model_len"] = model.max_context_length
    if not is_cpu:
        arguments["kv_cache_memory_bytes"] = int(options["cache_gb"] * 1e9)
    return arguments


class VllmSampler:
    """One model on one engine of vLLM. Implements `adapters.Loader`."""

    def __init__(self, start: Mapping[str, Any], model: ModelInfo, *, is_cpu: bool) -> None:
        """Load the model, which takes from ten seconds to minutes. On the event loop that serves later."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**engine_arguments(start, model, is_cpu=is_cpu))
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._vocabulary = model.vocab_size
        self._probes = 0
        self._base: object = None
        """What requests of the base model name."""
        self.tokens_sampled = 0

    async def sample(
        self, number: int, spec: SampleSpec, adapters: Adapters, on_tokens: Callable[[Tokens], None]
    ) -> Sampled:
        """Run a request. When the task is cancelled, leaving `generate` aborts it in vLLM too."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_prompt(spec, self._vocabulary)
        arguments = sampling_arguments(spec, self._vocabulary)
        collector = Collector(spec)
        async with adapters.use(spec) as adapter:
            handle = self._base if adapter is None else adapter
            try:
                params = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
                # The salt keeps prompts of one tenant out of the prefix cache of another.
                prompt = {"prompt_token_ids": list(spec.prompt), "cache_salt": spec.tenant or "-"}
                async for out in self._llm.generate(prompt, params, str(number), lora_request=handle):
                    events = collector.add(out.outputs, out.num_cached_tokens)
                    if spec.is_streamed:
                        for event in events:
                            on_tokens(event)
            except ValueError as error:
                if is_dead(error):
                    raise
                raise EngineFault(f"The sampler (vLLM) rejects this request: {error}") from None
        self.tokens_sampled += collector.length
        return collector.result()

    async def add_null_adapter(self, home: Path) -> None:
        """Let requests of the base model name an adapter that changes nothing."""
        for layer in null_adapter.LAYERS:
            folder = home / f"base-{layer}"
            null_adapter.write(folder, layer)
            try:
                self._base = await self.add(null_adapter.NUMBER, folder)
                return
            except Exception as error:
                if is_dead(error) or layer == null_adapter.LAYERS[-1]:
                    raise

    async def add(self, number: int, folder: Path) -> object:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"adapter-{number}", number, str(folder))
        # Before a request names it: one that cannot be loaded inside a request ends the whole engine.
        if not await self._llm.add_lora(request):
            raise EngineFault("The sampler (vLLM) has rejected the weights.", "server")
        return request

    async def remove(self, number: int) -> None:
        await self._llm.remove_lora(number)

    async def logprobs(self, handle: object, tokens: Sequence[int]) -> list[float]:
        """A request for each token, whose prompt is those before it and which may draw no other.

        That is the way that samples take. Log-probabilities of a prompt take another one (`lack_reason`).
        """
        return list(
            await asyncio.gather(*(self._logprob(handle, tokens[:n], tokens[n]) for n in range(1, len(tokens))))
        )

    async def _logprob(self, adapter: object, prompt: Sequence[int], token: int) -> float:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._probes += 1
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            allowed_token_ids=[token],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        given = {"prompt_token_ids": list(prompt), "cache_salt": "-"}
        handle = self._base if adapter is None else adapter
        async for out in self._llm.generate(given, params, f"proof-{self._probes}", lora_request=handle):
            [drawn] = out.outputs
            return float(drawn.logprobs[0][token].logprob)
        raise EngineFault("vLLM ended a request without a result.", "server")

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=2.0)
