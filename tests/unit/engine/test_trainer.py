"""What the trainer promises besides numbers: turns, isolation, and nothing half-done after a failure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.oracle import Session, assert_equal, datum, randomise, state
from tinkex.engine.contract import EngineFault, pass_frame, read_outputs
from tinkex.engine.frames import Frame, decode
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.runner import Item
from tinkex.types.inputs import Datum

pytestmark = pytest.mark.usefixtures("runner")

DATA = [datum(range(n), target_tokens=range(1, n + 1)) for n in (5, 17, 9, 30)]


def test_gradients_are_added_in_place_to_one_flat_buffer(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    session.passes(DATA, "cross_entropy")
    leaves = [leaf for pair in adapter.lora.pairs.values() for leaf in pair]
    at = adapter.gradient_P.data_ptr()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.data_ptr() == at
        at += leaf.numel() * 4
    assert at == adapter.gradient_P.data_ptr() + adapter.gradient_P.numel() * 4
    assert torch.equal(torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]), adapter.gradient_P)


def test_forward_leaves_no_gradient(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    reply = session.passes(DATA, "cross_entropy", op="forward")
    assert not adapter.has_gradient and not bool(adapter.gradient_P.any())
    assert reply.head["metrics"] == session.passes(DATA, "cross_entropy").head["metrics"]


def test_outputs_come_in_the_order_of_the_data_whatever_the_batches(tiny: Model) -> None:
    session = Session(tiny, token_budget=20)
    session.create()
    assert [len(lp) for lp in session.logprobs(DATA)] == [5, 17, 9, 30]


def train(session: Session, adapter: str, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        example = datum(range(step, step + 12), target_tokens=range(step + 1, step + 13))
        session.passes([example, DATA[step % 4]], "cross_entropy", adapter=adapter)
        session.optim(adapter, learning_rate=1e-2, weight_decay=0.01)


def test_two_runs_interleaved_equal_each_alone_bit_for_bit(tiny: Model) -> None:
    alone = []
    for seed, rank in ((1, 4), (2, 8)):
        session = Session(tiny, token_budget=16)
        session.create(seed=seed, rank=rank)
        train(session, "a", 4)
        alone.append(state(session))
    session = Session(tiny, token_budget=16)
    session.create("one", seed=1, rank=4)
    session.create("two", seed=2, rank=8)
    for step in range(4):
        train(session, "one", 1, step)
        train(session, "two", 1, step)
    assert_equal(state(session, "one"), alone[0])
    assert_equal(state(session, "two"), alone[1])


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Within 1e-5: sums in another order, no more."""
    return all(
        bool((one - other).norm() <= 1e-5 * max(float(other.norm()), 1e-6))
        for one, other in zip(found, wanted, strict=True)
    )


def alone(tiny: Model, seed: int, rank: int, data: Sequence[Datum] = DATA, op: str = "forward_backward") -> Any:
    session = Session(tiny)
    randomise(session.create(seed=seed, rank=rank))
    reply = session.passes(data, "cross_entropy", op=op)
    return state(session), reply


@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_passes_of_several_adapters_in_one_micro_batch_equal_each_alone(tiny: Model, budget: int) -> None:
    ranks = {"one": 4, "two": 8, "three": 1}
    session = Session(tiny, token_budget=budget)
    for seed, (name, rank) in enumerate(ranks.items()):
        randomise(session.create(name, seed=seed, rank=rank))
    replies = session.send_all([pass_frame("forward_backward", name, DATA, "cross_entropy", None) for name in ranks])
    for seed, (name, rank) in enumerate(ranks.items()):
        wanted, reply = alone(tiny, seed, rank)
        assert close(state(session, name), wanted)
        assert replies[seed].head["metrics"]["loss:sum"] == pytest.approx(reply.head["metrics"]["loss:sum"], rel=1e-5)
        lps = [[output["logprobs"].to_torch() for output in read_outputs(one)] for one in (replies[seed], reply)]
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*lps, strict=True))


def test_forward_and_forward_backward_share_a_pass_and_only_one_leaves_a_gradient(tiny: Model) -> None:
    session = Session(tiny)
    for seed, name in enumerate(("one", "two")):
        randomise(session.create(name, seed=seed))
    first = pass_frame("forward", "one", DATA, "cross_entropy", None)
    replies = session.send_all([first, pass_frame("forward_backward", "two", DATA, "cross_entropy", None)])
    assert not session.trainer.adapters["one"].has_gradient and not bool(state(session, "one")[1].any())
    wanted, _ = alone(tiny, 1, 4)
    assert close(state(session, "two"), wanted)
    _, reply = alone(tiny, 0, 4, op="forward")
    assert replies[0].head["metrics"]["loss:sum"] == pytest.approx(reply.head["metrics"]["loss:sum"], rel=1e-5)


def test_passes_that_share_micro_batches_share_their_time_by_tokens(tiny: Model) -> None:
    session = Session(tiny)
    frames = []
    for name, rows in (("one", 1), ("two", 3)):
        session.create(name)
        data = [datum(range(8), target_tokens=range(1, 9), weights=[1.0] * 8)] * rows
        frames.append(pass_frame("forward_backward", name, data, "cross_entropy", None))
    one, two = (reply.head["seconds"] for reply in session.send_all(frames))
    assert two == pytest.approx(3 * one) and one > 0


def test_a_datum_that_fails_fails_its_own_pass_alone(tiny: Model) -> None:
    session = Session(tiny)
    for seed, name in enumerate(("good", "bad")):
        randomise(session.create(name, seed=seed))
    session.passes(DATA[:1], "cross_entropy", adapter="bad")
    before = state(session, "bad")
    policy = {"logprobs": [-500.0] * 5, "advantages": [1.0] * 5}
    wrong = [DATA[1], datum(range(5), target_tokens=range(1, 6), **policy)]
    session.trainer.add(0, decode(pass_frame("forward_backward", "good", DATA, "cross_entropy", None).encode()))
    session.trainer.add(
        1, decode(pass_frame("forward_backward", "bad", wrong[1:], "importance_sampling", None).encode())
    )
    replies: dict[int, Any] = {}
    while session.trainer.has_work:
        replies.update(session.trainer.step())
    assert isinstance(replies[0], Frame) and isinstance(replies[1], EngineFault)
    assert_equal(state(session, "bad"), before)
    assert close(state(session, "good"), alone(tiny, 0, 4)[0])


def test_commands_of_one_adapter_run_in_order_while_others_share_their_passes(tiny: Model) -> None:
    session = Session(tiny, token_budget=16)
    for name in ("one", "two"):
        session.create(name)
    frames = [
        pass_frame("forward_backward", "one", DATA, "cross_entropy", None),
        Frame({"op": "optim_step", "adapter": "one", "learning_rate": 1e-2}),
        pass_frame("forward_backward", "two", DATA[:1], "cross_entropy", None),
        Frame({"op": "optim_step", "adapter": "two", "learning_rate": 1e-2}),
        pass_frame("forward", "one", DATA, "cross_entropy", None),
    ]
    replies = session.send_all(frames)
    assert replies[1].head["metrics"]["step:max"] == replies[3].head["metrics"]["step:max"] == 1.0
    assert replies[4].head["metrics"]["loss:sum"] < replies[0].head["metrics"]["loss:sum"]


class Failing:
    """A runner whose n-th micro-batch fails half-way, as one that runs out of memory does."""

    def __init__(self, runner: Any, at: int, problem: Exception, guilty: str | None = None) -> None:
        self._runner, self._left, self._problem, self._guilty = runner, at, problem, guilty
        self.cost_tokens = runner.cost_tokens

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        self._left -= 1
        yield from self._runner.run(items)
        if self._left == 0 or (self._guilty and any(item.adapter.spec.seed == 13 for item in items)):
            raise self._problem


def broken(session: Session, tiny: Model, at: int, problem: Exception, guilty: str | None = None) -> None:
    runners = session.trainer._runners
    runners[tiny] = Failing(runners[tiny], at, problem, guilty)


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:125] . DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["python", "cpu", "gpu"],
)
def test_running_out_of_memory_half_way_leaves_the_gradient_as_it_was(
    tiny: Model, problem: Exception, has_gradient: bool
) -> None:
    session = Session(tiny, token_budget=16)
    adapter = randomise(session.create())
    if has_gradient:
        session.passes(DATA[:1], "cross_entropy")
    before = state(session)
    broken(session, tiny, 2, problem)
    with pytest.raises(
        EngineFault, match=r"Out of memory in a pass over 4 datums.*30 tokens.*max-batch-tokens"
    ) as failed:
        session.passes(DATA, "cross_entropy")
    assert failed.value.category == "server"
    assert adapter.has_gradient == has_gradient
    assert_equal(state(session), before)
    session.passes(DATA, "cross_entropy")
    assert adapter.has_gradient


def test_passes_of_a_failed_micro_batch_run_again_one_by_one_and_only_the_cause_fails(tiny: Model) -> None:
    session = Session(tiny)
    randomise(session.create("good", seed=0))
    randomise(session.create("bad", seed=13))
    broken(session, tiny, -1, MemoryError(), "bad")
    for number, name in enumerate(("good", "bad")):
        frame = pass_frame("forward_backward", name, DATA, "cross_entropy", None)
        session.trainer.add(number, decode(frame.encode()))
    replies: dict[int, Any] = {}
    while session.trainer.has_work:
        replies.update(session.trainer.step())
    assert isinstance(replies[0], Frame) and "Out of memory" in str(replies[1])
    assert not bool(state(session, "bad")[1].any())
    assert_equal(state(session, "good"), alone(tiny, 0, 4)[0])


def test_a_bug_in_the_engine_is_not_taken_for_lack_of_memory(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    broken(session, tiny, 1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        session.passes(DATA, "cross_entropy")


@pytest.mark.parametrize("op", ["forward", "forward_backward"])
def test_a_loss_that_is_not_finite_names_its_datum_and_changes_nothing(tiny: Model, op: str) -> None:
    session = Session(tiny)
    randomise(session.create())
    good = datum(range(3), target_tokens=range(1, 4), logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    bad = datum(range(3), target_tokens=range(1, 4), logprobs=[-1.0, -999.0, -1.0], advantages=[1.0] * 3)
    session.passes([good], "importance_sampling")
    before = state(session)
    with pytest.raises(EngineFault, match=r"data\[1\]: loss:sum is -inf") as failed:
        session.passes([good, bad], "importance_sampling", op=op)
    assert failed.value.category == "user"
    assert_equal(state(session), before)


def test_a_gradient_beyond_float32_is_never_added(tiny: Model) -> None:
    session = Session(tiny)
    randomise(session.create())
    session.passes(DATA, "cross_entropy")
    before = state(session)
    huge = datum(range(3), target_tokens=range(1, 4), weights=[1e30] * 3)
    with pytest.raises(EngineFault, match="beyond the range of float32") as failed:
        session.passes([huge], "cross_entropy")
    assert failed.value.category == "user"
    assert_equal(state(session), before)


def test_diverged_weights_are_named_as_the_cause(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    with torch.no_grad():
        adapter.weights_P.mul_(1e30)
    with pytest.raises(EngineFault, match=r"data\[0\]: the model's log-probabilities are not finite"):
        session.passes(DATA[:1], "cross_entropy")


def test_no_data_and_unknown_adapters_bases_and_operations_are_rejected(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    with pytest.raises(EngineFault, match="There is no data"):
        session.passes([], "cross_entropy")
    with pytest.raises(EngineFault, match="Base model 'gpt' is not loaded"):
        session.run("create", "b", base="gpt", rank=1, seed=0)
    for op, adapter, words in (
        ("optim_step", "b", "Adapter b is not in this engine"),
        ("dance", "a", "no operation 'dance'"),
    ):
        with pytest.raises(EngineFault, match=words) as refused:
            session.run(op, adapter)
        assert refused.value.category == "server"


def test_dropped_adapters_are_gone_and_may_be_dropped_again(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    session.run("drop")
    session.run("drop")
    assert not session.trainer.adapters


def test_a_tenant_with_many_long_passes_does_not_keep_another_waiting(tiny: Model) -> None:
    session = Session(tiny, token_budget=40)
    names = [f"a{number}" for number in range(6)]
    for name in (*names, "b"):
        session.create(name)
    long = datum(range(40), target_tokens=range(1, 41))
    for number, name in enumerate((*names, "b")):
        frame = pass_frame("forward_backward", name, [long] if name != "b" else DATA[:1], "cross_entropy", None)
        frame.head["tenant"] = name[0]
        session.trainer.add(number, decode(frame.encode()))
    order: list[int] = []
    while session.trainer.has_work:
        order += [number for number, _ in session.trainer.step()]
    assert order.index(6) <= 1


def test_short_commands_that_keep_coming_do_not_keep_a_pass_waiting(tiny: Model) -> None:
    session = Session(tiny)
    for name in ("a", "b"):
        session.create(name)
    session.trainer.add(0, decode(pass_frame("forward_backward", "a", DATA, "cross_entropy", None).encode()))
    for number in range(1, 40):
        session.trainer.add(number, Frame({"op": "optim_step", "adapter": "b"}))
        if any(done == 0 for done, _ in session.trainer.step()):
            return
    raise AssertionError("it never ran")
