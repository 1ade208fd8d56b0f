"""The other side of every comparison: plain transformers and PEFT, and a driver for the trainer's generators."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import pass_frame, read_outputs
from tinkex.engine.frames import Frame, decode
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.runner_choice import choose_runner
from tinkex.engine.training.trainer import Trainer
from tinkex.types.inputs import Datum, ModelInput

SAVED_WITHIN_S = 60.0
RUNNER = "auto"
"""Which runner a session's trainer prefers; a module's fixture sets it to run its tests on both."""
FLAGS = ("train_attn", "train_mlp", "train_unembed")


class Session:
    """A trainer, spoken to in frames that went through bytes."""

    def __init__(self, model: Model, *, token_budget: int = 4096) -> None:
        self.model = model
        models = dict.fromkeys(model.info.names, model)
        self.trainer = Trainer(models, choose_runner=partial(choose_runner, prefer=RUNNER), token_budget=token_budget)
        self.saved = threading.Event()
        self.trainer.saver.on_done = self.saved.set

    def send(self, command: Frame) -> Frame:
        """Run one command to its end; what it raises is raised."""
        return self.send_all([command])[0]

    def send_all(self, commands: Sequence[Frame]) -> list[Frame]:
        """Several at once, as a server's tenants send them."""
        for number, command in enumerate(commands):
            self.trainer.add(number, decode(command.encode()))
        replies = self.finish()
        return [decode(good(replies[number]).encode()) for number in range(len(commands))]

    def finish(self) -> dict[int, Frame | Exception]:
        """Give turns until nothing is queued and nothing is being written. Returns all replies."""
        replies: dict[int, Frame | Exception] = {}
        while self.trainer.has_work or self.trainer.saver.names:
            if not self.trainer.has_work:
                assert self.saved.wait(SAVED_WITHIN_S)
            self.saved.clear()
            replies.update(self.trainer.step())
        return replies

    def run(self, op: str, adapter: str = "a", **fields: Any) -> Frame:
        return self.send(Frame({"op": op, "adapter": adapter, **fields}))

    def create(self, adapter: str = "a", *, rank: int = 4, seed: int = 0, **flags: bool) -> Adapter:
        given = {**dict.fromkeys(FLAGS, True), **flags}
        self.run("create", adapter, base=self.model.info.name, rank=rank, seed=seed, **given)
        return self.trainer.adapters[adapter]

    def passes(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: Any = None,
        *,
        op: str = "forward_backward",
        adapter: str = "a",
    ) -> Frame:
        return self.send(pass_frame(op, adapter, data, loss_fn, config))

    def logprobs(self, data: Sequence[Datum], adapter: str = "a") -> list[Tensor]:
        reply = self.passes(data, "cross_entropy", op="forward", adapter=adapter)
        return [output["logprobs"].to_torch() for output in read_outputs(reply)]

    def optim(self, adapter: str = "a", **settings: float) -> dict[str, float]:
        metrics: dict[str, float] = self.run("optim_step", adapter, **settings).head["metrics"]
        return metrics


def good(reply: Frame | Exception) -> Frame:
    if isinstance(reply, Exception):
        raise reply
    return reply


def randomise(adapter: Adapter, seed: int = 7) -> Adapter:
    """Give B numbers other than 0, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b_OR in adapter.lora.pairs.values():
            b_OR.copy_(torch.randn(b_OR.shape, generator=generator) * 0.02)
    return adapter


def datum(tokens: Sequence[int], **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(list(tokens)), inputs)


def state(session: Session, adapter: str = "a") -> list[Tensor]:
    """Copies of all buffers of an adapter."""
    trained = session.trainer.adapters[adapter]
    buffers = (trained.weights_P, trained.gradient_P, trained.exp_avg_P, trained.exp_avg_sq_P)
    return [buffer.clone() for buffer in buffers]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal bit for bit."""
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


COMPARED_LENGTHS = (5, 17, 9, 17, 30)


def both(model: Model, monkeypatch: pytest.MonkeyPatch, loss_fn: str = "cross_entropy", **inputs: Any) -> list[Any]:
    """Log-probabilities and gradients by the packed and by the general runner."""
    found = []
    for name in ("auto", "general"):
        monkeypatch.setattr(f"{__name__}.RUNNER", name)
        session = Session(model)
        adapter = randomise(session.create(rank=3))
        data = []
        for length in COMPARED_LENGTHS:
            tokens = [(7 * at + length) % 90 for at in range(length + 1)]
            given = {key: [value] * length for key, value in inputs.items()}
            data.append(datum(tokens[:-1], target_tokens=tokens[1:], **given))
        reply = session.passes(data, loss_fn)
        logprobs = torch.cat([output["logprobs"].to_torch() for output in read_outputs(reply)])
        found.append((logprobs, adapter.gradient_P.clone()))
    return found


def assert_alike(found: list[Any]) -> None:
    (one, gradient), (other, wanted) = found
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert float((gradient - wanted).norm() / wanted.norm()) <= 1e-4
    assert float(wanted.norm()) > 0


def plain_model(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The base model as any transformers user would load it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()


class Oracle:
    """A PEFT model that carries the same A and B as an adapter. One at a time: the next one takes the model over."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
        self.model = _peft_model(
            adapter.model.info.folder, tuple(site.name for site in adapter.sites), adapter.spec.rank, dtype
        )
        self._leaves = dict(self.model.named_parameters())
        self._sites = [site.name for site in adapter.sites]
        with torch.no_grad():
            for name in self._sites:
                for leaf, value in zip(self._pair(name), adapter.lora.pairs[name], strict=True):
                    leaf.copy_(value)

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities [T, V] of every next token."""
        logits: Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits.double().log_softmax(-1).to(logits.dtype)

    def gradients(self, loss: Callable[[Oracle], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Of A and B at every site."""
        self.model.zero_grad()
        loss(self).backward()
        found = {}
        for name in self._sites:
            a_RD, b_OR = self._pair(name)
            assert a_RD.grad is not None and b_OR.grad is not None
            found[name] = (a_RD.grad.clone(), b_OR.grad.clone())
        return found

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        a_RD, b_OR = (self._leaves[f"base_model.model.{name}.lora_{letter}.default.weight"] for letter in "AB")
        return a_RD, b_OR


@functools.lru_cache(maxsize=4)
def _peft_model(folder: str, names: tuple[str, ...], rank: int, dtype: torch.dtype) -> Any:
    config = LoraConfig(r=rank, lora_alpha=32, target_modules=list(names), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the unembedding is tied: here it stays as it is
        return get_peft_model(plain_model(folder, dtype), config).eval().to(dtype)


def assert_gradients_equal(adapter: Adapter, expected: dict[str, tuple[Tensor, Tensor]], within: float = 1e-4) -> None:
    """Relative to each tensor's own norm."""
    for name, pair in expected.items():
        for letter, leaf, wanted in zip("AB", adapter.lora.pairs[name], pair, strict=True):
            assert leaf.grad is not None
            difference = float((leaf.grad - wanted).norm() / wanted.norm())
            assert difference <= within, f"{name} {letter}: {difference:.2g}"
