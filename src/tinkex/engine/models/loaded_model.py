"""A base model in memory: loaded once, frozen, shared by trainer and sampler.

Two calls are all that the rest of the engine needs: `hidden` (tokens to final hidden states) and `logits` (hidden
states, only those wanted, to logits in float32). Both take the adapters that act on the rows.

Axes: B rows of the batch, T tokens, N flat tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import Hooks, Role, Segment, Site, sites_of
from tinkex.engine.contract import EngineFault, ModelInfo

if TYPE_CHECKING:
    from tinkex.engine.packed.weights import Weights

logger = logging.getLogger("tinkex.engine")


class Model:
    """One base model with its hooks."""

    def __init__(self, info: ModelInfo, module: Any, device: torch.device) -> None:
        self.info = info
        self.device = device
        self.packed: Weights | Literal[False] | None = None
        """Laid out for the packed runner, False if that cannot be, None if nobody has asked (`runners`)."""
        self.module = module.eval().requires_grad_(False).to(device)
        self._body = self.module.base_model
        self._head = self.module.get_output_embeddings()
        config = self.module.config.get_text_config()
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._softcap = getattr(config, "final_logit_softcapping", None)
        # Two rows: a layer that sees them in another shape could not tell the adapters of a batch apart.
        probe_BT = torch.arange(2, 14, device=device).reshape(2, 6) % self.vocab_size
        shapes, own_NV = self._own_pass(probe_BT)
        self.sites = self._usable_sites(shapes, probe_BT.shape)
        self.hooks = Hooks(module, self.sites)
        self._prove(probe_BT, own_NV)

    @property
    def vocab_size(self) -> int:
        return int(self._head.out_features)

    def hidden(
        self,
        tokens_BT: Tensor,
        segments: Sequence[Segment] = (),
        *,
        mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Final hidden states [B, T, D]. With a cache (transformers' `Cache`) the tokens follow what it holds."""
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
        """Logits [N, V] in float32; `segments` cut the N axis."""
        with self.hooks.active(segments):
            logits_NV: Tensor = self._head(hidden_ND).float()
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def _own_pass(self, tokens_BT: Tensor) -> tuple[dict[str, torch.Size], Tensor]:
        """The model's own forward: the shape in which each site saw the tokens, and the logits."""
        shapes: dict[str, torch.Size] = {}
        modules = dict(self.module.named_modules())

        def note(name: str) -> Any:
            return lambda module, args: shapes.__setitem__(name, args[0].shape[:-1])

        handles = [modules[site.name].register_forward_pre_hook(note(site.name)) for site in sites_of(self.module)]
        try:
            with torch.inference_mode():
                return shapes, self.module(input_ids=tokens_BT).logits.flatten(0, 1).float()
        finally:
            for handle in handles:
                handle.remove()

    def _usable_sites(self, shapes: dict[str, torch.Size], expected: torch.Size) -> list[Site]:
        """The sites that a pass over text goes through (not those of an image tower, for instance)."""
        used = [site for site in sites_of(self.module) if site.name in shapes]
        bent = [site.name for site in used if shapes[site.name] != expected]
        lacking = [role for role in Role if all(site.role is not role for site in used)]
        if bent or lacking:
            what = f"{bent[0]} mixes the rows of a batch" if bent else f"no linear layer was found for {lacking[0]}"
            raise EngineFault(
                f"{self.info.name}: adapters cannot act on its architecture ({type(self.module).__name__}): {what}. "
                "Dense models with linear layers work; mixtures of experts do not yet.",
                "server",
            )
        return used

    def _prove(self, tokens_BT: Tensor, own_NV: Tensor) -> None:
        """Our two calls must give what the model's own forward gives, or its numbers would be silently wrong."""
        with torch.inference_mode():
            ours_NV = self.logits(self.hidden(tokens_BT).flatten(0, 1))
        worst = (own_NV - ours_NV).abs().max().item()
        # Half precision: the model scales or caps its logits before they become float32, we after.
        tolerance = max(1e-3, 8 * torch.finfo(self.module.dtype).eps)
        if not worst <= tolerance * own_NV.abs().max().item():
            raise EngineFault(
                f"{self.info.name}: its architecture ({type(self.module).__name__}) turns hidden states into logits in "
                f"a way that tinkex does not know (differs by {worst:.2g}). Please report it; another model will do.",
                "server",
            )


def load(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> Model:
    """Read a model's folder. Nothing is fetched (`engine.models` did that), no code is run, no pickle opened."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
        module, found = loaded
        # transformers only warns, and goes on with random numbers in their place.
        absent = [*found["missing_keys"], *(str(name) for name, *_ in found["mismatched_keys"])]
        if absent:
            raise EngineFault(
                f"{info.name}: {len(absent)} of its weights are absent or of another shape ({min(absent)}). "
                "Fetch or convert the model again.",
                "server",
            )
        return Model(info, module, device)
    except EngineFault:
        raise
    except Exception as error:  # an edge: for a model that it cannot run, transformers raises anything
        logger.debug("Loading %s failed", info.name, exc_info=True)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise EngineFault(
            f"{info.name} ({info.arch or 'unknown architecture'}) cannot be loaded: {reason.rstrip('.')}. "
            "Choose a causal language model that the installed transformers supports.",
            "server",
        ) from error
