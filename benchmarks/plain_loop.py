"""What everybody would write without us: transformers and PEFT, padded batches, full logits, `generate`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

SITES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PlainLoop:
    """One model with one adapter of rank 8 on attention and MLP, in float32."""

    def __init__(self, folder: str, rank: int = 8) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=SITES, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = get_peft_model(base, config).eval()

    def forward_backward(self, rows: Sequence[Sequence[int]]) -> float:
        loss = -self._logprobs(rows).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def forward(self, rows: Sequence[Sequence[int]]) -> float:
        with torch.no_grad():
            return float(-self._logprobs(rows).sum())

    def in_micro_batches(self, rows: Sequence[Sequence[int]], count: int) -> None:
        for at in range(0, len(rows), count):
            self.forward_backward(rows[at : at + count])

    def generate(self, rows: Sequence[Sequence[int]], tokens: int, samples: int = 1) -> int:
        """Prompts of one length; how many tokens were drawn."""
        given = torch.tensor([list(row) for row in rows])
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                num_return_sequences=samples,
                pad_token_id=0,
            )
        return int(found.shape[0] * (found.shape[1] - given.shape[1]))

    def _logprobs(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Of every row's tokens after its first."""
        longest = max(len(row) for row in rows)
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        logits = self.model(input_ids=padded[:, :-1], attention_mask=mask[:, :-1]).logits
        found = logits.log_softmax(-1).gather(2, padded[:, 1:, None])[..., 0]
        return found * mask[:, 1:]  # type: ignore[no-any-return]
