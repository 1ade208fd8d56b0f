"""The trainer's promises besides the numbers: seeds, turns, isolation, and nothing half-done after a failure."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.oracle import Session, datum, randomise
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame, decode
from tinkex.engine.messages import pass_frame, read_outputs
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training import datum_tensors, losses
from tinkex.engine.training.micro_batches import Pass, next_micro_batch
from tinkex.engine.training.runner import Item
from tinkex.types.inputs import Datum
from tinkex.types.tensor import TensorData

pytestmark = pytest.mark.usefixtures("runner")

DATA = [datum(range(n), target_tokens=range(1, n + 1)) for n in (5, 17, 9, 30)]


def state(session: Session, adapter: str = "a") -> list[Tensor]:
    held = session.trainer.adapters[adapter]
    return [buffer.clone() for buffer in (held.weights_P, held.gradient_P, held.exp_avg_P, held.exp_avg_sq_P)]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(tiny: Model) -> None:
    session = Session(tiny)
    one, same, other = (session.create(name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", -4)))
    assert torch.equal(one.weights_P, same.weights_P) and not torch.equal(one.weights_P, other.weights_P)


def test_a_new_adapter_has_a_uniform_within_its_bound_and_b_zero(tiny: Model) -> None:
    adapter = Session(tiny).create(rank=64)
    for site in adapter.sites:
        a_RD, b_OR = (leaf.detach() for leaf in adapter.lora.pairs[site.name])
        bound = 1 / math.sqrt(site.d_in)
        assert 0.98 * bound < float(a_RD.abs().max()) <= bound and not bool(b_OR.any())
        assert float(a_RD.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_flags_choose_the_layers(tiny: Model) -> None:
    session = Session(tiny)
    names = {site.name.rpartition(".")[2] for site in session.create(train_mlp=False, train_unembed=False).sites}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    names = {site.name.rpartition(".")[2] for site in session.create(train_attn=False).sites}
    assert names == {"gate_proj", "up_proj", "down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "rank 0 is not possible.*from 1 to 512"),
        ({"rank": 100_000}, "rank 100000 is not possible"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "leave nothing to train"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(tiny: Model, given: Any, words: str) -> None:
    with pytest.raises(EngineFault, match=words) as refused:
        Session(tiny).create(**given)
    assert refused.value.category == "user"


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

    name = "failing"

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


def test_a_shared_micro_batch_that_fails_is_run_again_one_by_one_and_the_guilty_fails_alone(tiny: Model) -> None:
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
def test_a_loss_that_is_no_number_fails_alone_and_names_its_datum(tiny: Model, op: str) -> None:
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


def test_weights_that_have_run_away_are_named_as_the_cause(tiny: Model) -> None:
    session = Session(tiny)
    adapter = randomise(session.create())
    with torch.no_grad():
        adapter.weights_P.mul_(1e30)
    with pytest.raises(EngineFault, match=r"data\[0\]: the model's log-probabilities are not finite"):
        session.passes(DATA[:1], "cross_entropy")


BAD_DATA: dict[str, tuple[Datum, str, str]] = {
    "no tokens": (datum([], target_tokens=[]), "cross_entropy", r"data\[1\].model_input is empty"),
    "token out of range": (
        datum([1, 263], target_tokens=[1, 2]),
        "cross_entropy",
        r"data\[1\].model_input: entry 1 is 263, no token of tinkex/tiny, which has tokens 0 to 262",
    ),
    "target out of range": (
        datum([1, 2], target_tokens=[500, 2]),
        "cross_entropy",
        r"data\[1\].loss_fn_inputs\['target_tokens'\]: entry 0 is 500",
    ),
    "negative target": (datum([1, 2], target_tokens=[-100, 2]), "cross_entropy", "entry 0 is -100"),
    "no targets": (datum([1, 2], weights=[1, 1]), "cross_entropy", r"\['target_tokens'\] is missing"),
    "too few targets": (datum([1, 2], target_tokens=[2]), "cross_entropy", r"has shape \[1\].*has 2 tokens"),
    "float targets": (
        datum([1, 2], target_tokens=TensorData([1.0, 2.0], "float32")),
        "cross_entropy",
        "token ids are integers",
    ),
    "too long": (datum([1] * 2049, target_tokens=[1] * 2049), "cross_entropy", "2049 tokens.*at most 2048"),
    "weights too short": (
        datum([1, 2], target_tokens=[1, 2], weights=[1.0]),
        "cross_entropy",
        r"\['weights'\] has shape \[1\], but target_tokens has \[2\]",
    ),
    "nan": (
        datum([1, 2], target_tokens=[1, 2], weights=TensorData([1.0, math.nan])),
        "cross_entropy",
        r"\['weights'\]: entry 1 is nan",
    ),
    "no advantages": (
        datum([1, 2], target_tokens=[1, 2], logprobs=[-1.0, -1.0]),
        "ppo",
        r"\['advantages'\] is missing: ppo needs target_tokens, logprobs, advantages",
    ),
    "2-D for ppo": (
        datum([1], target_tokens=[[1, 2]], logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]]),
        "ppo",
        "ppo takes one target per position",
    ),
    "empty rows": (datum([1], target_tokens=TensorData([], "int64", [1, 0])), "cross_entropy", r"has shape \[1, 0\]"),
    "crossed thresholds": (
        datum(
            [1],
            target_tokens=[1],
            logprobs=[-1.0],
            advantages=[1.0],
            clip_low_threshold=[2.0],
            clip_high_threshold=[1.0],
        ),
        "ppo",
        "above clip_high_threshold",
    ),
    "far too many sparse targets": (
        datum([1], target_tokens=TensorData.from_buffer(b"", "int64", [1, 2**40], [0, 0], [])),
        "cross_entropy",
        "more than 67,108,864 for one call",
    ),
    "far too many sparse weights": (
        datum([1], target_tokens=[1], weights=TensorData.from_buffer(b"", "float32", [1, 2**40], [0, 0], [])),
        "cross_entropy",
        "more than 67,108,864 entries",
    ),
    "a place listed twice": (
        datum([1], target_tokens=TensorData.from_buffer(bytes(16), "int64", [1, 5], [0, 2], [3, 3])),
        "cross_entropy",
        "listed twice",
    ),
    "gspo without a mask": (
        datum([1], target_tokens=[1], logprobs=[-1.0], advantages=[1.0], sequence_ratio_mask=[0.0]),
        "gspo",
        r"data\[1\]: sequence_ratio_mask is 0 everywhere",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_with_datum_and_key_and_leave_no_trace(tiny: Model, case: str) -> None:
    bad, loss_fn, words = BAD_DATA[case]
    session = Session(tiny)
    session.create()
    needed = {} if loss_fn == "cross_entropy" else {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    good = datum(range(3), target_tokens=range(1, 4), **needed)
    session.passes([good], loss_fn)
    before = state(session)
    with pytest.raises(EngineFault, match=words) as refused:
        session.passes([good, bad], loss_fn)
    assert refused.value.category == "user"
    assert_equal(state(session), before)
    session.passes([good], loss_fn)


def test_a_shape_that_does_not_hold_its_values_is_refused(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    frame = pass_frame("forward", "a", [datum([1, 2], target_tokens=[1, 2])], "cross_entropy", None)
    for shape, words in (([3], "does not hold 2 values"), ([-1, -2], "negative extent"), ([2, 2], "does not hold")):
        frame.head["data"][0]["inputs"]["target_tokens"]["shape"] = shape
        with pytest.raises(EngineFault, match=words):
            session.send(frame)


def test_sparse_indices_that_do_not_fit_are_refused(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    sparse = TensorData.from_buffer(bytes(16), "int64", [2, 5], [0, 1, 2], [3, 4])
    for key, values in (("crow", [0, 2, 1]), ("crow", [0, 2]), ("col", [3, 5]), ("col", [-1, 0]), ("col", [1])):
        frame = pass_frame("forward", "a", [datum([1, 2], target_tokens=sparse)], "cross_entropy", None)
        buffers = list(frame.buffers)
        buffers[frame.head["data"][0]["inputs"]["target_tokens"][key]] = torch.tensor(values).numpy().tobytes()
        with pytest.raises(EngineFault, match="sparse indices do not fit"):
            session.send(Frame(frame.head, buffers))


def test_no_data_and_unknown_adapters_bases_and_operations_are_refused(tiny: Model) -> None:
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


def test_inputs_that_a_loss_does_not_know_are_refused_unless_only_log_probabilities_are_wanted(tiny: Model) -> None:
    # The forward pass of a loss of the caller's own carries what that loss needs; early clients send it along.
    session = Session(tiny)
    session.create()
    extra = [datum(range(5), target_tokens=range(1, 6), reward=[[math.inf, 2.0]])]
    plain = session.passes(DATA[:1], "cross_entropy", op="forward")
    assert session.passes(extra, "cross_entropy", op="forward").head["metrics"] == plain.head["metrics"]
    with pytest.raises(EngineFault, match=r"data\[0\]\.loss_fn_inputs\['reward'\]: cross_entropy has no such input"):
        session.passes(extra, "cross_entropy")


def test_weights_of_a_2d_target_may_come_flat_as_early_clients_send_them(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    square = datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.1, 0.2], [0.3, 0.4]])
    flat = datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[0.1, 0.2, 0.3, 0.4])
    found = [session.passes([example], "cross_entropy").head["metrics"] for example in (square, flat)]
    assert found[0] == found[1]


def test_dropped_adapters_are_gone_and_may_be_dropped_again(tiny: Model) -> None:
    session = Session(tiny)
    session.create()
    session.run("drop")
    session.run("drop")
    assert not session.trainer.adapters


class Whole:
    """A runner that counts tokens and runs nothing."""

    name = "whole"

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        return total

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        yield


def passes_of(tiny: Model, lengths: dict[str, list[int]], parties: dict[str, str] | None = None) -> list[Pass]:
    adapter = Session(tiny).create()
    loss = losses.find_loss("cross_entropy")
    found = []
    for name, given in lengths.items():
        data = [
            datum_tensors.DatumTensors(n, torch.zeros(size, dtype=torch.long), torch.zeros(size), {})
            for n, size in enumerate(given)
        ]
        items = [Item(adapter, one, loss, {}, False) for one in data]
        found.append(Pass(0, name, items, (parties or {}).get(name, name)))
    return found


def sizes(tiny: Model, budget: int, lengths: dict[str, list[int]], parties: dict[str, str] | None = None) -> Any:
    passes = passes_of(tiny, lengths, parties)
    next_micro_batch(passes, budget, Whole())
    return {one.adapter_name: [item.length for item in one.running] for one in passes}


@pytest.mark.parametrize(
    ("lengths", "budget", "first"),
    [
        ([4, 4, 4], 8, [4, 4]),
        ([1, 9, 2, 8], 18, [9, 8]),
        ([100, 1, 1], 10, [100]),
        ([5], 1, [5]),
    ],
)
def test_a_micro_batch_takes_the_longest_first_and_keeps_the_budget(
    tiny: Model, lengths: list[int], budget: int, first: list[int]
) -> None:
    assert sizes(tiny, budget, {"a": lengths}) == {"a": first}


def test_a_short_pass_is_in_the_next_micro_batch_beside_a_long_one(tiny: Model) -> None:
    assert sizes(tiny, 100, {"long": [10] * 50, "short": [10]}) == {"long": [10] * 9, "short": [10]}


def test_parties_share_by_tokens_however_many_passes_and_datums_they_have(tiny: Model) -> None:
    lengths = {"a1": [10] * 9, "a2": [10] * 9, "a3": [10] * 9, "b": [30, 30, 30]}
    found = sizes(tiny, 120, lengths, {"a1": "a", "a2": "a", "a3": "a", "b": "b"})
    assert sum(found["b"]) == 60 and [sum(found[name]) for name in ("a1", "a2", "a3")] == [30, 20, 10]


def test_a_datum_longer_than_the_budget_runs_when_its_pass_has_waited_longest(tiny: Model) -> None:
    assert sizes(tiny, 100, {"huge": [500], "small": [10]}) == {"huge": [500], "small": []}


def test_a_party_with_many_long_passes_does_not_keep_another_waiting(tiny: Model) -> None:
    session = Session(tiny, token_budget=40)
    names = [f"a{number}" for number in range(6)]
    for name in (*names, "b"):
        session.create(name)
    long = datum(range(40), target_tokens=range(1, 41))
    for number, name in enumerate((*names, "b")):
        frame = pass_frame("forward_backward", name, [long] if name != "b" else DATA[:1], "cross_entropy", None)
        frame.head["party"] = name[0]
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
