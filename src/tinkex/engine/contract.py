"""What the server and an engine agree on: records, the names of the commands, and the `Engine` protocol. No torch here.

A command is a `Frame` whose head has an `op`; `engine/messages.py` writes and reads them.

    create            adapter base rank seed train_attn train_mlp train_unembed          → {}
    restore           adapter folder            a snapshot, as `snapshot` wrote it       → {}
    snapshot          adapter folder            weights, moments, step, pending gradient → {"size_bytes"}
    drop              adapter                                                            → {}
    forward           adapter loss_fn config data + buffers                              → metrics, outputs + buffers
    forward_backward  the same; adds to the adapter's gradient                           → metrics, outputs + buffers
    optim_step        adapter learning_rate beta1 beta2 eps weight_decay grad_clip_norm  → metrics
    save              adapter folder with_optimizer                                      → files, size_bytes
    load              adapter folder with_optimizer   replaces weights, clears gradient  → {}
    sample            base weights(folder or null) … see `SampleSpec`                    → events, then the result
    cancel            number                    a sample whose result is not wanted      (no reply)

Folders are absolute paths that the server chose; no client's text becomes a path. Commands of one adapter run in order
of arrival; passes of different adapters may share a micro-batch, where every tenant has an equal share.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from tinkex.engine.frames import Frame
from tinkex.errors import TinkexError, ValidationError

P = ParamSpec("P")
R = TypeVar("R")
LORA_ALPHA = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A base model that the service offers: its names, where its files are and what it can do."""

    name: str
    folder: str
    """A local folder with config.json, safetensors and tokenizer.json."""
    aliases: tuple[str, ...] = ()
    source: str = "folder"
    """`built-in`, `folder`, `hub` or `gguf` (then the weights are not the hub's)."""
    source_hash: str = ""
    arch: str = ""
    vocab_size: int = 0
    max_context_length: int = 0
    hidden_size: int = 0
    """The width of its layers, which bounds the rank of an adapter."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a sequence unless the request names its own."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """An adapter's shape and seed: all of it except its numbers."""

    rank: int = 32
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        return LORA_ALPHA / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """One sampling request for the engine. Its frame's head has these fields; the prompt travels as a buffer."""

    base: str
    weights: str | None = None
    """A folder with an adapter, or None for the base model."""
    tenant: str = ""
    """Who sent it: the prefix cache serves a prompt to its own tenant alone. Travels in the packet's header."""
    prompt: tuple[int, ...] = ()
    num_samples: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Always set: the server draws one if the client sent none."""
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    last_n: int | None = None
    """Return only the last n entries of the prompt's log-probabilities."""
    alt_k: int = 0
    """How many alternative tokens to draw at every prompt position after the first."""
    targets: tuple[tuple[int, ...], ...] | None = None
    """For every prompt position after the first: tokens whose log-probability to return (rows may differ in length)."""
    is_streamed: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens of sequence `index`, sent as they are drawn."""

    index: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """One finished sequence. `topk` has one ranked list of (token, logprob) per token."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A whole result. Prompt entries: one per prompt token, None where there is no value (the first, before last_n)."""

    sequences: list[SequenceOutput]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt: list[list[tuple[int, float]] | None] | None = None
    targets: list[list[float]] | None = None
    alternatives: list[list[tuple[int, float]]] | None = None
    cache_hit_tokens: int = 0
    prompt_tokens: int = 0


SampleEvent = Tokens | Sampled


class EngineFault(TinkexError):
    """The engine ran a command and it failed; the adapter is as it was before."""

    def __init__(self, message: str, category: str = "user") -> None:
        super().__init__(message)
        self.category = category


def checked(check: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Apply a rule in the engine: what it rejects is the user's fault, in the same words."""
    try:
        return check(*args, **kwargs)
    except ValidationError as error:
        raise EngineFault(str(error)) from None


class EngineDied(TinkexError):
    """The engine's process ended while it had the command. Its memory is lost; another process is started."""

    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The engine's state, for health checks, queue reasons and metrics."""

    is_ready: bool
    reason: str = ""
    generation: int = 0
    """Grows with every start: adapters of an earlier generation are lost."""
    pid: int = 0
    rss_bytes: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """The engine as the server sees it. All methods run on the server's event loop and do not block it."""

    @property
    def state(self) -> EngineState: ...

    async def start(self) -> None:
        """Return once models are loaded and the engine takes commands. Raises with the reason if it cannot start."""

    async def ready(self) -> None:
        """Wait until the engine takes commands; after a crash, until its successor does."""

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        """Run one command and return its reply. Raises EngineFault or EngineDied.

        Bytes are an encoded frame and reach the engine untouched. Passes name their tenant, for its share of a
        micro-batch.
        """

    def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        """Yield `Tokens` as they are drawn if the spec is streamed, then one `Sampled`. Closing it cancels."""

    async def close(self) -> None: ...
