"""What the server and an engine agree on: records, commands and replies as frames, the `Engine` protocol. No torch.

A command is a `Frame` whose head has an `op`:

    create            adapter base rank seed train_attn train_mlp train_unembed          → {}
    restore           adapter folder            a snapshot, as `snapshot` wrote it       → {}
    snapshot          adapter folder            weights, moments, step, pending gradient → {"size_bytes"}
    drop              adapter                                                            → {}
    forward           adapter loss_fn config data + buffers                              → metrics, outputs + buffers
    forward_backward  the same; adds to the adapter's gradient                           → metrics, outputs + buffers
    optim_step        adapter learning_rate beta1 beta2 eps weight_decay grad_clip_norm  → metrics
    save              adapter base folder with_optimizer proof?                          → files, size_bytes
    load              adapter folder with_optimizer   replaces weights, clears gradient  → {}
    load_model        model (a ModelInfo)             a base model that is not loaded     → size_bytes, lora_sizes
    unload_model      base                            fails if anything uses it          → {}
    sample            base weights(folder or null) … see `SampleSpec`                    → events, then the result
    cancel            number                    a sample whose result is not wanted      (no reply)

Folders are absolute paths that the server chose; no client's text becomes a path. Commands of one adapter run in order
of arrival; passes of different adapters may share a micro-batch, where every tenant has an equal share.

The data of a pass are `[{"tokens": i, "inputs": {name: {"dtype", "shape", "data": i, "crow"?: i, "col"?: i}}}]`,
where every `i` is the index of a buffer: tokens int32, indices int64, values as their dtype says.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec, Protocol, TypeVar

from tinkex.engine.frames import Frame
from tinkex.errors import TinkexError, ValidationError
from tinkex.types.inputs import Datum, EncodedTextChunk
from tinkex.types.packed import Buffer, pack_floats, pack_tokens, unpack
from tinkex.types.sampling import TopkLogprobs
from tinkex.types.tensor import TensorData

P = ParamSpec("P")
R = TypeVar("R")
LORA_ALPHA = 32
_NOT_IN_HEAD = ("prompt", "tenant")
"""Fields of a `SampleSpec` that travel elsewhere: as a buffer, and in the packet's header."""


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
    parameters: int = 0
    """How many numbers its weights are, as its files say; 0 if they do not."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def model_info(fields: Mapping[str, Any]) -> ModelInfo:
    """Read a `ModelInfo` from JSON, which has lists where it has tuples."""
    tuples = {name: tuple(fields[name]) for name in ("aliases", "end_tokens")}
    return ModelInfo(**{**fields, **tuples})


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
class Proof:
    """The log-probabilities of some tokens with certain weights, as the engine that trained them computes them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of every token after the first."""
    base_logprobs: tuple[float, ...] = ()
    """The same of the base model, if they were computed."""


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
    proof: Proof | None = None
    """What another engine must see in the weights before it serves them (`proofs`), where their folder does not say."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens of sequence `index`, sent as they are drawn."""

    index: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, init=False)
class SequenceOutput:
    """One finished sequence. Its numbers stay packed from the engine to the response: a result may have millions.

    `topk` has the likeliest tokens at the position of every token.
    """

    packed_tokens: Buffer
    packed_logprobs: Buffer
    stop_reason: str
    topk: TopkLogprobs | None

    def __init__(
        self,
        *,
        tokens: Sequence[int] | Buffer,
        logprobs: Sequence[float] | Buffer,
        stop_reason: str,
        topk: TopkLogprobs | None = None,
    ) -> None:
        """Takes lists, or little-endian int32 and float32."""
        put = object.__setattr__
        put(self, "packed_tokens", tokens if isinstance(tokens, Buffer) else pack_tokens(tokens))
        put(self, "packed_logprobs", logprobs if isinstance(logprobs, Buffer) else pack_floats(logprobs))
        put(self, "stop_reason", stop_reason)
        put(self, "topk", topk)

    @property
    def length(self) -> int:
        return len(self.packed_tokens) // 4

    @property
    def tokens(self) -> list[int]:
        return unpack("i", self.packed_tokens)

    @property
    def logprobs(self) -> list[float]:
        return unpack("f", self.packed_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A whole result. Prompt entries: one per prompt token, None where there is no value (the first, before last_n)."""

    sequences: list[SequenceOutput]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt: TopkLogprobs | None = None
    """One row per prompt token; fillers where there is no value."""
    targets: Buffer | None = None
    """The log-probabilities of all targets end to end, float32."""
    alternatives: TopkLogprobs | None = None
    """One row per prompt token after the first: not ranked, but of the same form."""
    cache_hit_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its packed numbers."""
        matrices = [self.topk_prompt, self.alternatives, *(row.topk for row in self.sequences)]
        ranked = sum(8 * matrix.length * matrix.k for matrix in matrices if matrix is not None)
        return ranked + len(self.targets or b"") + sum(8 * row.length for row in self.sequences)


SampleEvent = Tokens | Sampled


class EngineFault(TinkexError):
    """The engine ran a command and it failed; the adapter is as it was before."""

    def __init__(self, message: str, category: str = "user") -> None:
        super().__init__(message)
        self.category = category


_OUT_OF_MEMORY_SIGNS = (
    "out of memory",  # a GPU
    "allocate memory",  # torch, and the system
    "bad_alloc",
    "could not create a primitive",  # oneDNN, which does not say why
    "could not execute a primitive",
)


class OutOfMemory(EngineFault):
    """The engine had too little memory for a command. It may work after other adapters have left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or Python means that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)


class ProofMissing(EngineFault):
    """The weights' folder has no proof, and the sample brought none."""


class EngineUnusable(EngineFault):
    """The engine cannot start, so the service ends: accepted operations wait in the journal for its next start."""


def checked(check: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Apply a rule in the engine: what it rejects is the user's fault, in the same words."""
    try:
        return check(*args, **kwargs)
    except ValidationError as error:
        raise EngineFault(str(error)) from None


def first_line(error: BaseException, limit: int) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:limit]


_NUMBER_BYTES = 4 * 4
"""Of one number of an adapter: its weight, its gradient and two moments, in float32."""


def adapter_bytes(sizes: Mapping[str, int], lora: Mapping[str, Any]) -> int:
    """Return what an adapter takes in the engine's memory. `sizes` are those of its base model (`lora_sizes`)."""
    return int(lora["rank"]) * sum(count for group, count in sizes.items() if lora[group]) * _NUMBER_BYTES


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
    lora_sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Base model → group of layers (`train_attn`, …) → numbers of an adapter of rank 1 there. Empty until known."""
    models: Mapping[str, int] | None = None
    """Base models that are loaded, or will be once the engine is ready → their bytes. None: all, and they stay."""
    silent_s: float = 0.0
    """How long a ready engine has sent nothing, not even a beat."""
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


def pass_frame(
    op: str, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None
) -> Frame:
    """Make the frame of a `forward` or `forward_backward`. The server has checked that the data contain only text.

    Names are sorted: protobuf returns the entries of a map in another order in every process, and a request that is
    repeated after a restart has to make the same frame.
    """
    buffers: list[Buffer] = []

    def add_buffer(buffer: Buffer) -> int:
        buffers.append(buffer)
        return len(buffers) - 1

    rows = []
    for datum in data:
        chunks = [chunk.packed() for chunk in datum.model_input.chunks if isinstance(chunk, EncodedTextChunk)]
        tokens = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        inputs = {name: _tensor_entry(tensor, add_buffer) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        rows.append({"tokens": add_buffer(tokens), "inputs": inputs})
    head = {
        "op": op,
        "adapter": adapter,
        "loss_fn": loss_fn,
        "config": dict(sorted((config or {}).items())),
        "data": rows,
    }
    return Frame(head, buffers)


def _tensor_entry(tensor: TensorData, add_buffer: Callable[[Buffer], int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "data": add_buffer(tensor.buffer)}
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        entry["crow"] = add_buffer(_pack_indices(tensor.sparse_crow_indices))
        entry["col"] = add_buffer(_pack_indices(tensor.sparse_col_indices))
    return entry


def read_outputs(reply: Frame) -> list[dict[str, TensorData]]:
    """Read the outputs of a pass: one dict of tensors per datum."""
    return [
        {
            name: TensorData.from_buffer(reply.buffers[entry["data"]], entry["dtype"], entry["shape"])
            for name, entry in datum.items()
        }
        for datum in reply.head["outputs"]
    ]


def sample_frame(spec: SampleSpec) -> Frame:
    """Make the frame of a sample. The tenant is not in it: it travels in the packet's header."""
    head = {entry.name: getattr(spec, entry.name) for entry in fields(spec) if entry.name not in _NOT_IN_HEAD}
    proof = None if spec.proof is None else [spec.proof.tokens, spec.proof.logprobs, spec.proof.base_logprobs]
    return Frame({"op": "sample", **head, "proof": proof}, [pack_tokens(spec.prompt)])


def read_sample(frame: Frame) -> SampleSpec:
    values = {entry.name: frame.head[entry.name] for entry in fields(SampleSpec) if entry.name in frame.head}
    for name in ("stop_tokens", "stop_strings"):
        values[name] = tuple(values.get(name, ()))
    if values.get("targets") is not None:
        values["targets"] = tuple(tuple(row) for row in values["targets"])
    if values.get("proof") is not None:
        tokens, logprobs, base = map(tuple, values["proof"])
        values["proof"] = Proof(tokens=tokens, logprobs=logprobs, base_logprobs=base)
    return SampleSpec(prompt=tuple(unpack("i", frame.buffers[0])), **values)


def event_frame(event: SampleEvent) -> Frame:
    """Make the frame of some tokens of a sample, or of its whole result."""
    if isinstance(event, Tokens):
        return Frame({"tokens": event.tokens, "logprobs": event.logprobs, "index": event.index})
    buffers: list[Buffer] = []

    def add_matrix(matrix: TopkLogprobs | None) -> list[int] | None:
        if matrix is None:
            return None
        buffers.extend(matrix.packed())
        return [len(buffers) - 2, matrix.length, matrix.k]

    sequences = []
    for row in event.sequences:
        buffers += (row.packed_tokens, row.packed_logprobs)
        sequences.append({"at": len(buffers) - 2, "stop_reason": row.stop_reason, "topk": add_matrix(row.topk)})
    head = {
        "sequences": sequences,
        "topk_prompt": add_matrix(event.topk_prompt),
        "alternatives": add_matrix(event.alternatives),
        "prompt_logprobs": event.prompt_logprobs,
        "cache_hit_tokens": event.cache_hit_tokens,
        "prompt_tokens": event.prompt_tokens,
        "has_targets": event.targets is not None,
    }
    return Frame(head, [*buffers, *(() if event.targets is None else (event.targets,))])


def read_event(frame: Frame) -> SampleEvent:
    """Read an event. Large numbers of numbers stay where they are: the result looks into the frame's buffers."""
    head, buffers = frame.head, frame.buffers
    if "sequences" not in head:
        return Tokens(head["index"], head["tokens"], head["logprobs"])

    def matrix(entry: list[int] | None) -> TopkLogprobs | None:
        if entry is None:
            return None
        at, length, k = entry
        return TopkLogprobs.from_buffers(buffers[at], buffers[at + 1], length, k)

    sequences = [
        SequenceOutput(
            tokens=buffers[row["at"]],
            logprobs=buffers[row["at"] + 1],
            stop_reason=row["stop_reason"],
            topk=matrix(row["topk"]),
        )
        for row in head["sequences"]
    ]
    return Sampled(
        sequences=sequences,
        targets=buffers[-1] if head["has_targets"] else None,
        topk_prompt=matrix(head["topk_prompt"]),
        alternatives=matrix(head["alternatives"]),
        prompt_logprobs=head["prompt_logprobs"],
        cache_hit_tokens=head["cache_hit_tokens"],
        prompt_tokens=head["prompt_tokens"],
    )


def _pack_indices(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
