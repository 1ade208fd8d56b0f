"""AdamW against torch's own, and what a step without a gradient or with odd settings does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.engine.oracle import Session, datum, randomise
from tinkex.engine.adapters import optimizer
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model

SETTINGS: dict[str, dict[str, float]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1, "learning_rate": 1e-2},
    "clip": {"grad_clip_norm": 0.5, "learning_rate": 1e-3},
    "all": {
        "learning_rate": 3e-3,
        "beta1": 0.8,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "grad_clip_norm": 2.0,
    },
}


def step(adapter: Adapter, settings: optimizer.AdamW) -> dict[str, float]:
    ((_, metrics),) = optimizer.step_adapters([adapter], settings)
    return metrics


@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_steps_equal_those_of_torch(tiny: Model, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "SLICE", 1000)  # so that this small adapter has several slices
    given = SETTINGS[name]
    adapter = randomise(Session(tiny).create(rank=3))
    twin = torch.nn.Parameter(adapter.weights_P.clone())
    torch_adamw = torch.optim.AdamW(
        [twin],
        lr=given.get("learning_rate", 1e-4),
        betas=(given.get("beta1", 0.9), given.get("beta2", 0.95)),
        eps=given.get("eps", 1e-12),
        weight_decay=given.get("weight_decay", 0.0),
    )
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 21):
        # From tiny to large, some exactly 0, as the gradients of A are in a first step.
        gradient = torch.randn(twin.shape, generator=generator) * 10 ** (count % 5 - 3)
        gradient[::7] = 0
        adapter.gradient_P.copy_(gradient)
        adapter.has_gradient = True
        twin.grad = gradient.clone()
        before, weights_before = float(gradient.norm()), adapter.weights_P.clone()
        if given.get("grad_clip_norm"):
            torch.nn.utils.clip_grad_norm_([twin], given["grad_clip_norm"])
        torch_adamw.step()
        metrics = step(adapter, optimizer.AdamW.read(given))
        torch.testing.assert_close(adapter.weights_P, twin.detach(), rtol=1e-5, atol=1e-7)
        assert metrics == pytest.approx(
            {
                "grad_norm:max": before,
                "update_norm:max": float((adapter.weights_P - weights_before).norm()),
                "weight_norm:max": float(adapter.weights_P.norm()),
                "step:max": count,
                "learning_rate:max": given.get("learning_rate", 1e-4),
                "no_gradient:max": 0,
            },
            rel=1e-4,
        )
    state = torch_adamw.state[twin]
    torch.testing.assert_close(adapter.exp_avg_P, state["exp_avg"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(adapter.exp_avg_sq_P, state["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_clipping_scales_the_whole_adapter_to_the_norm(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    session.passes([datum(range(9), target_tokens=range(1, 10))], "cross_entropy")
    gradient = adapter.gradient_P.clone()
    metrics = session.optim(grad_clip_norm=0.25, beta1=0.0)
    assert metrics["grad_norm:max"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    # With beta1 = 0 the first moment is the gradient that was used.
    assert float(adapter.exp_avg_P.norm()) == pytest.approx(0.25, rel=1e-5)
    torch.testing.assert_close(adapter.exp_avg_P, gradient * (0.25 / gradient.norm()), rtol=1e-4, atol=1e-8)


def test_a_step_clears_the_gradient_and_the_next_backward_starts_from_zero(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    data = [datum(range(9), target_tokens=range(1, 10))]
    session.passes(data, "cross_entropy")
    once = adapter.gradient_P.clone()
    session.optim(learning_rate=0.0)
    assert not bool(adapter.gradient_P.any()) and not adapter.has_gradient
    session.passes(data, "cross_entropy")
    assert torch.equal(adapter.gradient_P, once)


def test_gradients_accumulate_until_the_step(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    data = [datum(range(9), target_tokens=range(1, 10)), datum(range(5), target_tokens=range(1, 6))]
    session.passes(data, "cross_entropy")
    together = adapter.gradient_P.clone()
    session.optim(learning_rate=0.0)
    for example in data:
        session.passes([example], "cross_entropy")
    assert float((adapter.gradient_P - together).norm() / together.norm()) < 1e-5


def test_a_step_without_a_gradient_changes_nothing_and_says_so(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    session.passes([datum(range(9), target_tokens=range(1, 10))], "cross_entropy")
    session.optim()
    buffers = (adapter.weights_P, adapter.exp_avg_P, adapter.exp_avg_sq_P)
    before = [buffer.clone() for buffer in buffers]
    metrics = session.optim(weight_decay=0.1)
    assert metrics["no_gradient:max"] == 1.0 and metrics["update_norm:max"] == 0.0 and metrics["step:max"] == 1.0
    assert all(torch.equal(buffer, old) for buffer, old in zip(buffers, before, strict=True))


def test_a_gradient_of_zeros_is_a_gradient(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    session.passes([datum(range(3), target_tokens=range(1, 4), weights=[0, 0, 0])], "cross_entropy")
    metrics = session.optim()
    assert metrics["no_gradient:max"] == 0.0 and metrics["step:max"] == 1.0 and metrics["grad_norm:max"] == 0.0


def test_the_first_step_of_a_new_adapter_keeps_it_finite(tiny: Model) -> None:
    # B is 0, so A's gradient is exactly 0: 0 / (0 + eps) must not spoil it.
    session = Session(tiny)
    adapter = session.create()
    session.passes([datum(range(9), target_tokens=range(1, 10))], "cross_entropy")
    session.optim()
    assert bool(adapter.weights_P.isfinite().all())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": -1e-4}, "learning_rate is -0.0001; it must be a number from 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"learning_rate": 1e9}, "learning_rate is 1000000000.0"),
        ({"learning_rate": "fast"}, "learning_rate is fast"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"grad_clip_norm": -1}, "grad_clip_norm is -1"),
        ({"learning_rate": 1.0, "weight_decay": 2.0}, "flip the sign of every weight"),
    ],
)
def test_settings_that_would_ruin_a_run_are_rejected_and_keep_the_gradient(
    tiny: Model, settings: Any, words: str
) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    session.passes([datum(range(9), target_tokens=range(1, 10))], "cross_entropy")
    gradient, weights = adapter.gradient_P.clone(), adapter.weights_P.clone()
    with pytest.raises(EngineFault, match=words) as refused:
        step(adapter, optimizer.AdamW.read(settings))
    assert refused.value.category == "user"
    assert torch.equal(adapter.gradient_P, gradient) and torch.equal(adapter.weights_P, weights)
    assert session.optim()["step:max"] == 1.0


def test_waiting_steps_of_several_adapters_share_a_call_and_equal_each_alone(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the same settings, one of others, one without a gradient; and a second step of the first."""
    calls: list[int] = []
    kernel = vars(optimizer)["adamw"]
    monkeypatch.setattr(
        optimizer,
        "adamw",
        lambda weights, *given, **more: (calls.append(len(weights)), kernel(weights, *given, **more)),
    )
    rates = {"a": 1e-3, "b": 1e-3, "c": 1e-2, "d": 1e-3}
    found = []
    for is_together in (True, False):
        session = Session(tiny)
        adapters = {name: randomise(session.create(name, rank=2), place) for place, name in enumerate(rates)}
        for place, adapter in enumerate(adapters.values()):
            drawn = torch.Generator().manual_seed(place)
            adapter.gradient_P.copy_(torch.randn(adapter.gradient_P.shape, generator=drawn))
            adapter.has_gradient = place != 3
        commands = [
            Frame({"op": "optim_step", "adapter": name, "learning_rate": rates[name]}) for name in (*rates, "a")
        ]
        calls.clear()
        replies = session.send_all(commands) if is_together else [session.send(command) for command in commands]
        assert sorted(calls) == ([1, 2] if is_together else [1, 1, 1])
        found.append(([reply.head for reply in replies], [adapter.weights_P for adapter in adapters.values()]))
    (heads, weights), (heads_alone, weights_alone) = found
    assert heads == heads_alone
    assert heads[4]["metrics"]["no_gradient:max"] == heads[3]["metrics"]["no_gradient:max"] == 1
    assert all(torch.equal(one, other) for one, other in zip(weights, weights_alone, strict=True))


def test_a_failed_step_is_retried_alone_and_does_not_undo_the_others(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "SLICE", 10_000)  # an adapter each
    session = Session(tiny)
    adapters = [randomise(session.create(name, rank=2), place) for place, name in enumerate("abc")]
    for adapter in adapters:
        adapter.gradient_P.fill_(2.0)
        adapter.has_gradient = True
    before = [adapter.weights_P.clone() for adapter in adapters]
    empty = torch.empty
    asked: list[int] = []

    def scarce(*shape: Any, **given: Any) -> torch.Tensor:
        if shape[0] == 2:
            asked.append(1)
            if len(asked) in (2, 3):  # the second adapter, together and alone
                raise MemoryError
        return empty(*shape, **given)

    monkeypatch.setattr(torch, "empty", scarce)
    for number, name in enumerate("abc"):
        session.trainer.add(number, Frame({"op": "optim_step", "adapter": name, "grad_clip_norm": 1.0}))
    replies: dict[int, Any] = {}
    while session.trainer.has_work:
        replies.update(session.trainer.step())
    assert isinstance(replies[1], MemoryError)
    assert torch.equal(adapters[1].weights_P, before[1]) and bool((adapters[1].gradient_P == 2.0).all())
    assert adapters[1].has_gradient and adapters[1].step == 0
    for place in (0, 2):
        assert replies[place].head["metrics"]["step:max"] == adapters[place].step == 1
        assert not torch.equal(adapters[place].weights_P, before[place]) and not adapters[place].has_gradient
