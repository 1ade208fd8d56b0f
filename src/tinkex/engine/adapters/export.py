"""Merges an adapter into its base model, writes the result as a plain Hugging Face folder, and checks it.

The folder is loaded again from the disk and must give the log-probabilities of base and adapter; otherwise it is
deleted.

Axes: T tokens, K compared tokens, V vocabulary, R rank, D in, O out.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.lora import LoraWeights, Role, segments_of
from tinkex.engine.contract import EngineFault, ModelInfo
from tinkex.engine.models.loaded_model import Model, load

TOLERANCE = 1e-3
"""Largest allowed difference of a log-probability, in float32. Rounding gave 4e-5 on SmolLM2, leaving one layer out
2e-2."""
LIKELY = 50
"""Most likely tokens compared at every position, besides the next one. Very unlikely ones differ more, by rounding
alone."""
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(",
    "Q: What is the capital of France? A: It is Paris, on the river Seine.",
)
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_NOT_COPIED = ("config.json", "tinkex_source.json", "README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge. Differences are the largest over all compared log-probabilities of the prompts."""

    folder: Path
    base_model: str
    difference: float
    """Of the merged model from base and adapter."""
    effect: float
    """Of base and adapter from the base alone: 0 means that the adapter changes nothing."""
    tokens: int
    is_untied: bool
    """Whether the unembedding shared its weights with the embedding and got a copy, because the adapter trains it."""


def merge(info: ModelInfo, adapter: Path, out: Path) -> Merged:
    """Write base + adapter to `out`, a new folder, in float32. If the check fails, raises and leaves no folder."""
    import transformers

    transformers_logging: Any = transformers.utils.logging
    transformers_logging.disable_progress_bar()  # it would draw three; the caller reports progress
    model = load(info, torch.device("cpu"), torch.float32)
    weights = checkpoint.read_weights(adapter, model)
    prompts = _encode_prompts(info)
    base_logprobs = [_all_logprobs(model, tokens, None) for tokens in prompts]
    adapter_logprobs = [_all_logprobs(model, tokens, weights) for tokens in prompts]
    is_untied = _add_adapter(model, weights)
    try:
        model.module.save_pretrained(out)
        _copy_tokenizer(Path(info.folder), out)
        del model  # two copies of a large model may not fit
        difference = _largest_difference(prompts, adapter_logprobs, _reload_logprobs(out, prompts))
        if not difference <= TOLERANCE:
            raise EngineFault(
                f"The merged model differs from base and adapter by up to {difference:.2g} in a log-probability "
                f"(allowed: {TOLERANCE:g}), so it was not kept. Please report it, with the name of the model.",
                "server",
            )
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return Merged(
        folder=out,
        base_model=info.name,
        difference=difference,
        effect=_largest_difference(prompts, adapter_logprobs, base_logprobs),
        tokens=sum(len(tokens) for tokens in prompts),
        is_untied=is_untied,
    )


def _add_adapter(model: Model, weights: LoraWeights) -> bool:
    """Add scale·B·A to the layers' own weights. Returns whether the unembedding had to be untied for it."""
    modules: dict[str, Any] = dict(model.module.named_modules())
    roles = {site.name: site.role for site in model.sites}
    is_untied = False
    with torch.no_grad():
        for name, (a_RD, b_OR) in weights.pairs.items():
            layer = modules[name]
            if roles[name] is Role.UNEMBED and layer.weight is model.module.get_input_embeddings().weight:
                # The adapter changes the output side only; added to the shared matrix it would change the input too.
                _untie_head(model.module, layer)
                is_untied = True
            layer.weight += weights.spec.scale * (b_OR @ a_RD).to(layer.weight.dtype)
    return is_untied


def _untie_head(module: Any, head: Any) -> None:
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in {id(part): part for part in (module.config, module.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    # transformers 5 notes what is tied when it creates the model, and would not save the unembedding.
    module.all_tied_weights_keys = {}


def _all_logprobs(model: Model, tokens_T: Tensor, weights: LoraWeights | None) -> Tensor:
    """Return the log-probabilities [T, V] of every next token."""
    with torch.inference_mode():
        hidden_TD = model.hidden(tokens_T[None], segments_of([weights]))[0]
        return model.logits(hidden_TD, segments_of([weights], [len(tokens_T)])).log_softmax(-1)


def _reload_logprobs(folder: Path, prompts: list[Tensor]) -> list[Tensor]:
    """Return what any user gets who loads the folder with transformers: none of our code runs."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    module.eval()
    with torch.inference_mode():
        return [module(input_ids=tokens_T[None]).logits[0].float().log_softmax(-1) for tokens_T in prompts]


def _largest_difference(prompts: list[Tensor], expected: list[Tensor], actual: list[Tensor]) -> float:
    """Return the largest difference over each next token and the likely ones. NaN gives NaN, which is within no
    tolerance."""
    differences = []
    for tokens_T, expected_TV, actual_TV in zip(prompts, expected, actual, strict=True):
        next_T1 = tokens_T.roll(-1)[:, None]
        likely_TK = expected_TV.topk(min(LIKELY, expected_TV.shape[1])).indices
        compared_TK = torch.cat([next_T1, likely_TK], 1)
        differences.append((expected_TV.gather(1, compared_TK) - actual_TV.gather(1, compared_TK)).abs().max())
    return float(torch.stack(differences).max())


def _encode_prompts(info: ModelInfo) -> list[Tensor]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(info.folder) / "tokenizer.json"))
    return [torch.tensor(tokenizer.encode(text).ids[: info.max_context_length]) for text in PROMPTS]


def _copy_tokenizer(base: Path, out: Path) -> None:
    """Copy all files of the base that are not about weights: tokenizer, chat template, generation settings."""
    for file in sorted(base.iterdir()):
        is_weights = file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")
        if file.is_file() and not (is_weights or file.name in _NOT_COPIED or file.name.startswith(".")):
            shutil.copyfile(file, out / file.name)
