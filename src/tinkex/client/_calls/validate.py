"""Rejects a call that cannot succeed, before anything is sent: which datum, which key, what to do.

The rules themselves are in `tinkex.rules`, where the service reads them too; here are the checks that only a caller of
Python functions needs. Only what is certain is rejected: a loss the client does not know passes, and so do its inputs.
Nothing here does I/O; every check costs microseconds, so that it runs on each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tinkex.client._calls.sample_call import SampleCall
from tinkex.errors import ContextOverflow
from tinkex.rules import losses, ranges
from tinkex.rules.checkpoint_names import check_name as check_name
from tinkex.rules.checkpoint_names import check_ttl as check_ttl
from tinkex.rules.ranges import reject
from tinkex.types.coerce import describe
from tinkex.types.inputs import Datum, DmelChunk, EncodedTextChunk, ModelInput
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.types.training import AdamParams, DimuonParams, LoraConfig, OptimParams, OptimParamsBase


def check_data(data: Sequence[Datum], loss_fn: str | None) -> list[Datum]:
    """Return a new list of the data, if the loss can use them.

    None stands for a function of the caller, whose inputs may have any name and shape.
    """
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        _reject("data", f"must be a list of Datum, got {_kind(data)}. Pass a list, [datum] for a single one.")
    if not data:
        raise losses.no_data_error()
    if loss_fn is not None and (not isinstance(loss_fn, str) or not loss_fn):
        _reject(
            "loss_fn",
            f"must be the name of a loss, such as 'cross_entropy', got {_kind(loss_fn)}. "
            "A custom function goes to forward_backward_custom.",
        )
    name = loss_fn or losses.CALLERS_FUNCTION
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            _reject(f"data[{index}]", f"must be a Datum, got {_kind(datum)}.")
        losses.check_datum(index, input_length(datum.model_input), datum.loss_fn_inputs, name)
    return list(data)


def check_loss_config(config: Mapping[str, Any] | None, loss_fn: str = "") -> dict[str, float | str] | None:
    """Return the loss's settings as plain numbers and texts, the only things a service takes there."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        _reject("loss_fn_config", f"must be a dict of numbers, got {_kind(config)}.")
    plain: dict[str, float | str] = {}
    for key, value in config.items():
        if not isinstance(key, str):
            _reject("loss_fn_config", f"must have str keys, got {_kind(key)}.")
        if isinstance(value, str):
            plain[key] = value
            continue
        # A scalar of numpy or torch has the shape (); anything with an axis is a tensor in the wrong argument.
        if isinstance(value, TensorData) or getattr(value, "shape", ()) != () or not hasattr(value, "__float__"):
            _reject(
                f"loss_fn_config[{key!r}]",
                f"must be a number, got {_kind(value)}. Values per token go into each Datum's loss_fn_inputs, under "
                "the same name.",
            )
        plain[key] = float(value)
        losses.check_setting(key, plain[key])
    if loss_fn in losses.LOSSES:
        losses.check_config(loss_fn, plain, allows_unknown=True)
    else:
        losses.check_thresholds(plain)
    return plain


def check_sampling(sample: SampleCall, max_context_length: int | None = None) -> SampleCall:
    """Return the sample, if a service could serve it; its parameters may have come as a mapping of their names."""
    prompt, params = sample.prompt, sample.params
    if not isinstance(prompt, ModelInput):
        _reject(
            "prompt",
            f"must be a ModelInput, got {_kind(prompt)}. Use ModelInput.from_ints(tokens), or "
            "ModelInput.from_text(text, tokenizer).",
        )
    if not isinstance(params, SamplingParams):
        if not isinstance(params, Mapping):
            _reject("sampling_params", f"must be SamplingParams, got {_kind(params)}.")
        params = SamplingParams(**params)
        sample = sample._replace(params=params)
    tokens = input_length(prompt)
    ranges.check_sample(
        tokens,
        sample.num_samples,
        params,
        has_prompt_logprobs=bool(sample.include_prompt_logprobs),
        topk_prompt_logprobs=sample.topk_prompt_logprobs,
        topk_sample_logprobs=sample.topk_sample_logprobs,
        target_prompt_logprobs=sample.target_prompt_logprobs,
        prompt_alt_tokens_k=sample.prompt_alt_tokens_k,
        prompt_logprobs_last_n=sample.prompt_logprobs_last_n,
    )
    ranges.check_seed(params.seed)
    if max_context_length is not None and tokens is not None:
        wanted = params.max_tokens if params.max_tokens is not None else 1
        if tokens + wanted > max_context_length:
            raise ContextOverflow(tokens, wanted, max_context_length)
    return sample


def check_lora(config: LoraConfig) -> None:
    """Reject an adapter that no model could have."""
    parts = {name: getattr(config, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    ranges.check_lora(config.rank, **parts)


def check_sampler_path(path: str) -> None:
    """Reject a path that holds no weights for sampling."""
    kind = _path_kind(path, "model_path")
    if kind in ("weights", "external_weights"):
        _reject(
            "model_path",
            f"{path} is a {'training checkpoint' if kind == 'weights' else 'download'}; sampling needs a "
            "sampler_weights/ path. Save one with training_client.save_weights_for_sampler(name).",
        )


def check_state_path(path: str) -> None:
    """Reject a path that holds no training state."""
    kind = _path_kind(path, "path")
    if kind in ("sampler_weights", "external_weights"):
        _reject(
            "path",
            f"{path} holds weights for {'sampling' if kind == 'sampler_weights' else 'download'} only; training needs "
            "a weights/ path. Save one with training_client.save_state(name).",
        )


def _path_kind(path: str, what: str) -> str:
    if not isinstance(path, str):
        _reject(what, f"must be a str, got {_kind(path)}.")
    # The grammar is run/kind/name; some services leave the kind out, so only what is certainly wrong is rejected.
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) < 2 or not all(parts):
        _reject(
            what,
            f"must be the path of a checkpoint, got {describe(path)}. It looks like tinker://<run>/weights/<name> (for "
            "training) or tinker://<run>/sampler_weights/<name> (for sampling); a model of the service goes to "
            "base_model.",
        )
    return parts[1]


def check_adam(params: OptimParams | Mapping[str, Any]) -> OptimParams:
    """Return the step's settings, unless they can only destroy the weights. A mapping of their names will do."""
    if isinstance(params, Mapping):
        kinds: dict[Any, type[OptimParams]] = {None: AdamParams, "dimuon": DimuonParams}
        params = kinds.get(params.get("type"), OptimParamsBase)(**params)
    if not isinstance(params, OptimParams):
        _reject("optim_params", f"must be AdamParams, got {_kind(params)}. Use AdamParams(learning_rate=...).")
    if isinstance(params, (AdamParams, DimuonParams)):
        settings = {name: getattr(params, name, None) for name in ranges.ADAMW}
        ranges.check_adamw(settings, type(params).__name__)
    return params


def check_metadata(metadata: Mapping[str, str] | None, what: str = "user_metadata") -> None:
    """Reject metadata other than texts by name: the service would accept the call and fail on it later."""
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        _reject(what, f"must be a dict of texts, got {_kind(metadata)}.")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            _reject(f"{what}[{key!r}]", f"must map a str to a str, got {describe(value)}. Use str(...).")


def input_length(model_input: ModelInput) -> int | None:
    """Return how many tokens the input takes in the model; None if only the service knows the size of an image."""
    total = 0
    for chunk in model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            total += chunk.length
            continue
        if isinstance(chunk, DmelChunk):
            return None
        tokens = chunk.expected_tokens if chunk.expected_tokens is not None else chunk.tokens
        if tokens is None:
            return None
        total += tokens
    return total


def _kind(value: object) -> str:
    """Describe a value by its type and, where it has one, its shape: a tensor's numbers do not help."""
    shape = getattr(value, "shape", None)
    name = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    return f"a {name}" if shape is None else f"a {name} of shape {list(shape)}"


def _reject(what: str, why: str) -> NoReturn:
    reject(what, why, "invalid")
