"""How the work of a gang is divided, and what travels between its processes. With processes: `tests/cluster`."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.engine.oracle import Session, datum, randomise
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import LoraBuffers
from tinkex.engine.contract import EngineFault, LoraSpec
from tinkex.engine.frames import decode
from tinkex.engine.gang.lead import KnownAdapters
from tinkex.engine.gang.passes import item_frame, read_member_items, result_frame, set_results, split_rows
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.losses import LOSSES
from tinkex.engine.training.runner import Item


def items_of(model: Model, *lengths: int, loss: str = "cross_entropy") -> list[Item]:
    adapter = LoraBuffers(model, LoraSpec(rank=2))
    return [
        Item(
            adapter=adapter,
            loss=LOSSES[loss],
            config={"clip_low_threshold": 0.8},
            needs_gradient=index % 2 == 0,
            index=index,
            tokens_T=torch.arange(length),
            targets=torch.arange(2 * length).reshape(length, 2),
            inputs={"weights": torch.rand(length, 1).expand(length, 2)},
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_are_divided_evenly(tiny: Model, size: int) -> None:
    items = items_of(tiny, 9, 1, 30, 4, 4, 12, 2)
    shares = split_rows(items, size)
    assert sorted(item.index for share in shares for item in share) == list(range(len(items)))
    assert max(map(len, shares)) == math.ceil(len(items) / size)
    assert min(map(len, shares)) >= len(items) // size
    even = split_rows(items_of(tiny, *([8] * 4 * size)), size)
    assert {sum(item.length for item in share) for share in even} == {32}


def test_one_row_leaves_the_other_processes_none(tiny: Model) -> None:
    assert [len(share) for share in split_rows(items_of(tiny, 5), 3)] == [1, 0, 0]


def test_items_and_results_come_through_a_frame_unchanged(tiny: Model) -> None:
    items = items_of(tiny, 3, 5)
    adapter = items[0].adapter
    frame = item_frame({"op": "pass"}, items, {adapter: 7})
    read = read_member_items(decode(frame.encode()), {7: adapter})
    for item, copy in zip(items, read, strict=True):
        assert (copy.adapter, copy.loss, copy.config) == (item.adapter, item.loss, item.config)
        assert (copy.needs_gradient, copy.index) == (item.needs_gradient, item.index)
        assert torch.equal(copy.tokens_T, item.tokens_T)
        assert torch.equal(copy.targets, item.targets)
        assert copy.inputs.keys() == item.inputs.keys()
        assert torch.equal(copy.inputs["weights"], item.inputs["weights"])
    read[0].logprobs, read[0].metrics = torch.rand(3, 2), {"loss:sum": 1.5}
    read[1].fault = EngineFault("data[1]: too large", "user")
    set_results(items, decode(result_frame(read).encode()))
    assert torch.equal(items[0].logprobs, read[0].logprobs)
    assert items[0].metrics == {"loss:sum": 1.5}
    assert items[0].fault is None
    assert (str(items[1].fault), items[1].fault and items[1].fault.category) == ("data[1]: too large", "user")


def test_every_change_of_an_adapters_weights_is_noticed(tiny: Model, tmp_path: Path) -> None:
    """The members would compute with old weights otherwise."""
    session, known = Session(tiny), KnownAdapters()
    adapter = session.create()

    def has_changed() -> bool:
        """Whether it has changed since this was asked last."""
        changed = known.has_changed(adapter)
        known.note_sent(adapter)
        return changed

    assert has_changed()
    assert not has_changed()
    randomise(adapter)
    assert has_changed()
    session.passes([datum([1, 2, 3], target_tokens=[2, 3, 4])], "cross_entropy")
    assert not has_changed()
    session.optim(learning_rate=1e-3)
    assert has_changed()
    checkpoint.save(adapter, tmp_path / "saved", with_optimizer=True)
    assert not has_changed()
    session.run("load", folder=str(tmp_path / "saved"), with_optimizer=True)
    assert has_changed()
    assert not has_changed()


def test_the_members_are_told_once_which_adapters_have_left(tiny: Model) -> None:
    session, known = Session(tiny), KnownAdapters()
    numbers = [known.number_of(session.create(name)) for name in ("a", "b")]
    assert numbers == [0, 1]
    assert known.number_of(session.trainer.adapters["b"]) == 1
    session.run("drop", "a")
    gc.collect()
    assert known.take_dropped() == [0]
    assert known.take_dropped() == []
    assert known.number_of(session.create("a")) == 2


def test_one_device_imports_nothing_of_a_gang() -> None:
    code = (
        "import sys; from tinkex.engine.process import main; assert main._start_gang({'devices': 1}) is None;"
        "print([name for name in sys.modules if 'gang' in name or name == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
