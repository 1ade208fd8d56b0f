"""An adapter merged into its base model, as a plain Hugging Face folder, and proved right.

What was written is loaded again from the disk and must give the log-probabilities of base and adapter; else it is
removed.

Axes: T tokens, V vocabulary, R rank, D in, O out.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.lora import LoraWeights, Role, Segment
from tinkex.engine.contract import EngineFault, ModelInfo
from tinkex.engine.models.loaded_model import Model, load

TOLERANCE = 1e-3
"""Largest difference of a log-probability, in float32. Rounding gave 4e-5 on SmolLM2, one layer left out 2e-2."""
LIKELY = 50
"""Tokens compared at every position, besides the next one. Very unlikely ones differ more, by rounding alone."""
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(",
    "Q: What is the capital of France? A: It is Paris, on the river Seine.",
)
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_NOT_COPIED = ("config.json", "tinkex_source.json", "README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What came of a merge. Differences are the largest over all log-probabilities of the prompts."""

    folder: Path
    base_model: str
    difference: float
    """Merged against base and adapter."""
    effect: float
    """Base and adapter against the base alone: 0 means that the adapter does nothing."""
    tokens: int
    is_untied: bool
    """The unembedding was one with the embedding; it was given weights of its own, because an adapter acts on it."""


def merge(info: ModelInfo, adapter: Path, out: Path) -> Merged:
    """Write base + adapter to `out`, a new folder, in float32. If it is not right, raises and leaves no folder."""
    import transformers

    noise: Any = transformers.utils.logging
    noise.disable_progress_bar()  # three bars for one command; the caller says what is going on
    model = load(info, torch.device("cpu"), torch.float32)
    weights = checkpoint.read_weights(adapter, model)
    prompts = _prompts(info)
    plain = [_logprobs(model, tokens, None) for tokens in prompts]
    wanted = [_logprobs(model, tokens, weights) for tokens in prompts]
    is_untied = _add(model, weights)
    try:
        model.module.save_pretrained(out)
        _copy_tokenizer(Path(info.folder), out)
        del model  # two copies of a large model may not fit
        difference = _worst(prompts, wanted, _read_again(out, prompts))
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
        effect=_worst(prompts, wanted, plain),
        tokens=sum(len(tokens) for tokens in prompts),
        is_untied=is_untied,
    )


def _add(model: Model, weights: LoraWeights) -> bool:
    """Put scale·B·A into the layers' own weights. True if the unembedding had to be untied for it."""
    modules: dict[str, Any] = dict(model.module.named_modules())
    roles = {site.name: site.role for site in model.sites}
    is_untied = False
    with torch.no_grad():
        for name, (a_RD, b_OR) in weights.pairs.items():
            layer = modules[name]
            if roles[name] is Role.UNEMBED and layer.weight is model.module.get_input_embeddings().weight:
                # The adapter acts on the output side only; added to the shared matrix it would change the input too.
                _untie(model.module, layer)
                is_untied = True
            layer.weight += weights.spec.scale * (b_OR @ a_RD).to(layer.weight.dtype)
    return is_untied


def _untie(module: Any, head: Any) -> None:
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in {id(part): part for part in (module.config, module.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    # What was tied is noted when the model is made (transformers 5); saving would leave the unembedding out.
    module.all_tied_weights_keys = {}


def _logprobs(model: Model, tokens_T: Tensor, weights: LoraWeights | None) -> Tensor:
    count = len(tokens_T)
    batch = [] if weights is None else [Segment(weights, 0, 1)]
    flat = [] if weights is None else [Segment(weights, 0, count)]
    with torch.inference_mode():
        hidden_TD = model.hidden(tokens_T[None], batch)[0]
        return model.logits(hidden_TD, flat).log_softmax(-1)


def _read_again(folder: Path, prompts: list[Tensor]) -> list[Tensor]:
    """What a stranger gets who loads the folder with transformers: no code of ours is in the way."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    module.eval()
    with torch.inference_mode():
        return [module(input_ids=tokens_T[None]).logits[0].float().log_softmax(-1) for tokens_T in prompts]


def _worst(prompts: list[Tensor], wanted: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, over each next token and the likely ones; NaN gives NaN, which no tolerance lets pass."""
    worst = []
    for tokens_T, wanted_TV, found_TV in zip(prompts, wanted, found, strict=True):
        next_T1 = tokens_T.roll(-1)[:, None]
        likely_TK = wanted_TV.topk(min(LIKELY, wanted_TV.shape[1])).indices
        compared_TK = torch.cat([next_T1, likely_TK], 1)
        worst.append((wanted_TV.gather(1, compared_TK) - found_TV.gather(1, compared_TK)).abs().max())
    return float(torch.stack(worst).max())


def _prompts(info: ModelInfo) -> list[Tensor]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(info.folder) / "tokenizer.json"))
    return [torch.tensor(tokenizer.encode(text).ids[: info.max_context_length]) for text in PROMPTS]


def _copy_tokenizer(base: Path, out: Path) -> None:
    """Everything of the base that is neither weights nor about them: tokenizer, chat template, generation settings."""
    for file in sorted(base.iterdir()):
        is_weights = file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")
        if file.is_file() and not (is_weights or file.name in _NOT_COPIED or file.name.startswith(".")):
            shutil.copyfile(file, out / file.name)
