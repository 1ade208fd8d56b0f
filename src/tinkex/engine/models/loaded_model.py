"""A base model in memory: loaded once, frozen, shared by trainer and sampler.

The rest of the engine needs two calls: `hidden` (tokens to final hidden states) and `logits` (some of the hidden states
to logits in float32). Both take the adapters of the rows.

Axes: B rows of the batch, T tokens, N flat tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraHooks, Role, Segment, Site, find_sites
from tinkex.engine.contract import EngineFault, ModelInfo, OutOfMemory, first_line, is_out_of_memory

logger = logging.getLogger("tinkex.engine")


class Model:
    """One base model with its LoRA hooks."""

    def __init__(self, info: ModelInfo, module: Any, device: torch.device) -> None:
        self.info = info
        self.device = device
        self.packed: Any = None
        """Set by `runner_choice.packed_weights`: the weights in the packed layout, False if the model cannot run
        packed, None until it is asked for. Untyped, because this package does not import `packed`."""
        self.gather: Callable[[str], Tensor] | None = None
        """Set by `gang`, where each process has a part of every weight: returns a whole one by its name."""
        self.module = module.eval().requires_grad_(False).to(device)
        self._body = self.module.base_model
        self._head = self.module.get_output_embeddings()
        config = self.module.config.get_text_config()
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._softcap = getattr(config, "final_logit_softcapping", None)
        # Two rows, to find layers that see them in another shape: there LoRA could not tell the rows apart.
        tokens_BT = torch.arange(2, 14, device=device).reshape(2, 6) % self.vocab_size
        shapes, expected_NV = self._run_own_forward(tokens_BT)
        self.sites = self._usable_sites(shapes, tokens_BT.shape)
        self.hooks = LoraHooks(module, self.sites)
        self._check_logits(tokens_BT, expected_NV)

    @property
    def vocab_size(self) -> int:
        return int(self._head.out_features)

    def weight(self, name: str) -> Tensor | None:
        """Return a weight of the base model by its name; None if there is none of that name."""
        own: Tensor | None = self.module.state_dict().get(name)
        return own if own is None or self.gather is None else self.gather(name)

    def hidden(
        self,
        tokens_BT: Tensor,
        segments: Sequence[Segment] = (),
        *,
        mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return final hidden states [B, T, D]. With a cache (transformers' `Cache`) the tokens follow those in it."""
        with self.hooks.active(segments):
            out = self._body(
                input_ids=tokens_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden_ND: Tensor, segments: Sequence[Segment] = ()) -> Tensor:
        """Return logits [N, V] in float32; `segments` are ranges of the N axis."""
        with self.hooks.active(segments):
            logits_NV: Tensor = self._head(hidden_ND).float()
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def _run_own_forward(self, tokens_BT: Tensor) -> tuple[dict[str, torch.Size], Tensor]:
        """Run the model's own forward. Returns the shape in which each site saw the tokens, and the logits [N, V]."""
        shapes: dict[str, torch.Size] = {}
        modules = dict(self.module.named_modules())

        def record_shape(name: str) -> Any:
            return lambda module, args: shapes.__setitem__(name, args[0].shape[:-1])

        sites = find_sites(self.module)
        handles = [modules[site.name].register_forward_pre_hook(record_shape(site.name)) for site in sites]
        try:
            with torch.inference_mode():
                return shapes, self.module(input_ids=tokens_BT).logits.flatten(0, 1).float()
        finally:
            for handle in handles:
                handle.remove()

    def _usable_sites(self, shapes: dict[str, torch.Size], expected: torch.Size) -> list[Site]:
        """Return the sites that a pass over text runs through (not those of an image tower, for instance)."""
        used = [site for site in find_sites(self.module) if site.name in shapes]
        mixed = [site.name for site in used if shapes[site.name] != expected]
        missing = [role for role in Role if all(site.role is not role for site in used)]
        if mixed or missing:
            reason = f"{mixed[0]} mixes the rows of a batch" if mixed else f"no linear layer was found for {missing[0]}"
            raise EngineFault(
                f"{self.info.name}: LoRA cannot train its architecture ({type(self.module).__name__}): {reason}. "
                "Dense models with linear layers work; mixtures of experts do not yet.",
                "server",
            )
        return used

    def _check_logits(self, tokens_BT: Tensor, expected_NV: Tensor) -> None:
        """Raise if `hidden` and `logits` differ from the model's own forward: all numbers would be silently wrong."""
        with torch.inference_mode():
            logits_NV = self.logits(self.hidden(tokens_BT).flatten(0, 1))
        difference = (expected_NV - logits_NV).abs().max().item()
        # In half precision the model scales or caps its logits before they become float32, and `logits` after.
        tolerance = max(1e-3, 8 * torch.finfo(self.module.dtype).eps)
        if not difference <= tolerance * expected_NV.abs().max().item():
            raise EngineFault(
                f"{self.info.name}: its architecture ({type(self.module).__name__}) turns hidden states into logits in "
                f"a way that tinkex does not know (differs by {difference:.2g}). Please report it; use another model.",
                "server",
            )


def load(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> Model:
    """Load a model from its folder. Downloads nothing (`registry` did that), runs no code from it, opens no pickle."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # rejected below, by name
            output_loading_info=True,
        )
        module, report = loaded
        # transformers only warns, and continues with random numbers for these.
        missing = [*report["missing_keys"], *(str(name) for name, *_ in report["mismatched_keys"])]
        if missing:
            raise EngineFault(
                f"{info.name}: {len(missing)} of its weights are missing or of another shape ({min(missing)}). "
                "Fetch or convert the model again.",
                "server",
            )
        return Model(info, module, device)
    except EngineFault:
        raise
    except Exception as error:  # an edge: transformers may raise anything for a model that it cannot run
        if is_out_of_memory(error):
            raise OutOfMemory(f"There is not enough memory to load {info.name}.", "server") from None
        logger.debug("Loading %s failed", info.name, exc_info=True)
        reason = first_line(error, 300)
        raise EngineFault(
            f"{info.name} ({info.arch or 'unknown architecture'}) cannot be loaded: {reason.rstrip('.')}. "
            "Choose a causal language model that the installed transformers supports.",
            "server",
        ) from error
