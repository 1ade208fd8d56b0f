"""Saves and snapshots are written beside the engine's work: the same bytes, in order, and only their own run waits."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.engine.oracle import Session, assert_equal, datum, good, randomise, state
from tinkex.clock import REAL
from tinkex.engine.adapters import tensor_files
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, pass_frame
from tinkex.engine.frames import Frame, decode
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.process.loop import Inbox, Loop
from tinkex.engine.runner_choice import choose_decoder
from tinkex.engine.sampling.sampler import Sampler
from tinkex.engine.training import saver as saver_module
from tinkex.engine.training.saver import PAUSE_PER_WORK, Saver

WITHIN_S = 60.0
MOST_TURNS = 10_000
DATA = [datum(range(n), target_tokens=range(1, n + 1)) for n in (5, 17)]


def a_pass(adapter: str) -> Frame:
    return decode(pass_frame("forward_backward", adapter, DATA, "cross_entropy", None).encode())


def a_step(adapter: str) -> Frame:
    return Frame({"op": "optim_step", "adapter": adapter, "learning_rate": 1e-2})


def a_save(adapter: str, folder: Path, op: str = "save") -> Frame:
    return Frame({"op": op, "adapter": adapter, "folder": str(folder), "with_optimizer": True})


def trained(session: Session, adapter: str = "a") -> Adapter:
    made = randomise(session.create(adapter))
    session.passes(DATA, "cross_entropy", adapter=adapter)
    session.optim(adapter, learning_rate=1e-2)
    return made


def turns(session: Session) -> dict[int, Frame | Exception]:
    """Give turns as long as there is something to do, as the loop does, and return the replies."""
    replies: dict[int, Frame | Exception] = {}
    for _ in range(MOST_TURNS):
        if not session.trainer.has_work:
            return replies
        replies.update(session.trainer.step())
    raise AssertionError("There is always something to do, and a loop would never sleep.")


class Held:
    """Keeps the saver's thread after the first block that it writes."""

    def __init__(self, saver: Saver) -> None:
        self.is_writing, self._may_go_on = threading.Event(), threading.Event()
        self._pace = saver._pace
        saver._pace = self._wait  # type: ignore[method-assign]

    def _wait(self) -> None:
        self.is_writing.set()
        assert self._may_go_on.wait(WITHIN_S)
        self._pace()

    def release(self) -> None:
        self._may_go_on.set()


@contextmanager
def held(session: Session) -> Iterator[Held]:
    holding = Held(session.trainer.saver)
    try:
        yield holding
    finally:
        holding.release()


# ── The bytes


def plain_save(adapter: Adapter, folder: Path) -> None:
    """The tensor files of a checkpoint and of a snapshot as safetensors itself writes them."""
    tensors = {
        f"base_model.model.{site.name}.lora_{letter}.weight": tensor.detach()
        for site in adapter.sites
        for letter, tensor in zip("AB", adapter.lora.pairs[site.name], strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    moments = {"exp_avg": adapter.exp_avg_P, "exp_avg_sq": adapter.exp_avg_sq_P, "step": torch.tensor(adapter.step)}
    save_file(moments, folder / "optimizer.safetensors")
    gradient = {"gradient": adapter.gradient_P} if adapter.has_gradient else {}
    save_file({**adapter.state, **gradient}, folder / "state.safetensors")


@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("is_pending", [False, True], ids=["after a step", "with a pending gradient"])
def test_the_files_are_those_that_safetensors_writes(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, is_pending: bool
) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(tensor_files, "PART_BYTES", 5 * block_bytes)
    session = Session(tiny)
    adapter = trained(session)
    if is_pending:
        session.passes(DATA, "cross_entropy")
    reply = session.send(a_save("a", tmp_path / "saved"))
    size = session.send(a_save("a", tmp_path / "kept", "snapshot")).head["size_bytes"]
    plain_save(adapter, tmp_path)
    for folder, names in (("saved", ("adapter_model", "optimizer")), ("kept", ("state",))):
        for name in names:
            file = f"{name}.safetensors"
            written, plain = tmp_path / folder / file, tmp_path / file
            assert written.read_bytes() == plain.read_bytes() and written.stat().st_mode == plain.stat().st_mode
    assert size == sum(path.stat().st_size for path in (tmp_path / "kept").iterdir())
    assert list(reply.head["files"]) == sorted(path.name for path in (tmp_path / "saved").iterdir())
    for name, entry in reply.head["files"].items():
        content = (tmp_path / "saved" / name).read_bytes()
        assert entry == {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_what_is_written_is_read_from_the_adapters_own_memory() -> None:
    tensor = torch.zeros(1000)
    blocks = list(tensor_files._blocks({"t": tensor}, None))
    tensor.fill_(1.0)
    assert blocks[1].cast("f").tolist() == [1.0] * 1000


# ── The order


@pytest.mark.parametrize("op", ["save", "snapshot"])
def test_a_save_has_the_state_of_its_place_in_the_run_and_changes_nothing(tiny: Model, tmp_path: Path, op: str) -> None:
    plain = Session(tiny)
    trained(plain)
    wanted_saved = state(plain)
    plain.send_all([a_pass("a"), a_step("a"), a_pass("a")])
    session = Session(tiny)
    trained(session)
    with held(session) as holding:
        for number, command in enumerate([a_save("a", tmp_path / "saved", op), a_pass("a"), a_step("a"), a_pass("a")]):
            session.trainer.add(number, decode(command.encode()))
        assert turns(session) == {}
        assert holding.is_writing.wait(WITHIN_S)
        assert turns(session) == {}  # its own run waits, and the loop may sleep
        assert_equal(state(session), wanted_saved)
        holding.release()
        assert [number for number, _ in sorted(session.finish().items())] == [0, 1, 2, 3]
    assert_equal(state(session), state(plain))
    other = Session(tiny)
    if op == "save":
        other.create()
        other.run("load", folder=str(tmp_path / "saved"), with_optimizer=True)
    else:
        other.run("restore", folder=str(tmp_path / "saved"))
    assert_equal(state(other), wanted_saved)


def test_other_runs_go_on_while_one_is_written(tiny: Model, tmp_path: Path) -> None:
    alone = Session(tiny)
    trained(alone, "b")
    alone.send_all([a_pass("b"), a_step("b")])
    session = Session(tiny)
    trained(session, "a")
    trained(session, "b")
    with held(session) as holding:
        for number, command in enumerate([a_save("a", tmp_path / "saved"), a_pass("b"), a_step("b"), a_pass("a")]):
            session.trainer.add(number, command)
        replies = turns(session)
        assert set(replies) == {1, 2} and all(good(reply) for reply in replies.values())
        assert holding.is_writing.wait(WITHIN_S)
        assert session.trainer.saver.names == {"a"} and not (tmp_path / "saved").exists()
        holding.release()
        assert set(session.finish()) == {0, 3}
    assert_equal(state(session, "b"), state(alone, "b"))
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("op", ["drop", "create"])
def test_an_adapter_leaves_only_when_it_has_been_written(tiny: Model, tmp_path: Path, op: str) -> None:
    """`drop` is an eviction; `create` puts another adapter in its place."""
    session = Session(tiny)
    adapter = trained(session)
    (tmp_path / "plain").mkdir()
    plain_save(adapter, tmp_path / "plain")
    with held(session) as holding:
        session.trainer.add(0, a_save("a", tmp_path / "saved"))
        session.trainer.add(1, Frame({"op": op, "adapter": "a", "base": tiny.info.name, "rank": 4, "seed": 0}))
        assert turns(session) == {} and session.trainer.adapters["a"] is adapter
        holding.release()
        session.finish()
    assert session.trainer.adapters.get("a") is not adapter
    for name in ("adapter_model", "optimizer"):
        file = f"{name}.safetensors"
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_several_saves_are_written_one_after_the_other(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    names = [f"a{number}" for number in range(5)]
    for name in names:
        trained(session, name)
    partial: list[int] = []
    pace = session.trainer.saver._pace

    def count() -> None:
        partial.append(len(list(tmp_path.glob("*.partial"))))
        pace()

    session.trainer.saver._pace = count  # type: ignore[method-assign]
    session.send_all([a_save(name, tmp_path / name, "snapshot") for name in names])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert set(partial) == {1}


# ── Failures


def failing_after(blocks: int, error: OSError) -> Callable[[int, Any], int]:
    write, left = os.write, [blocks]

    def fail(descriptor: int, content: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return write(descriptor, content)

    return fail


@pytest.mark.parametrize("op", ["save", "snapshot"])
@pytest.mark.parametrize("blocks", [0, 2])
def test_a_full_disk_fails_the_save_alone_and_leaves_the_run_as_it_was(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, blocks: int
) -> None:
    session = Session(tiny)
    trained(session, "a")
    trained(session, "b")
    session.passes(DATA, "cross_entropy")
    before = state(session)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", failing_after(blocks, OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(
            EngineFault, match="disk is full, so nothing was written; the run itself is unharmed"
        ) as full:
            session.send(a_save("a", tmp_path / "saved", op))
    assert full.value.category == "server" and list(tmp_path.iterdir()) == []
    assert_equal(state(session), before)
    session.send_all([a_save("a", tmp_path / "saved", op), a_save("b", tmp_path / "other"), a_step("a")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved"]


def test_short_writes_go_on_where_they_stopped(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tiny)
    adapter = trained(session)
    plain_save(adapter, tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:1000]))
    session.send(a_save("a", tmp_path / "kept", "snapshot"))
    assert (tmp_path / "kept/state.safetensors").read_bytes() == (tmp_path / "state.safetensors").read_bytes()


def test_a_save_of_an_unknown_adapter_fails_at_once(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    with pytest.raises(EngineFault, match="Adapter a is not in this engine"):
        session.send(a_save("a", tmp_path / "saved"))
    assert not session.trainer.saver.names


def test_a_thread_that_cannot_start_fails_the_save_and_the_next_one_has_another_try(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tiny)
    trained(session)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            session.send(a_save("a", tmp_path / "saved"))
    session.send_all([a_save("a", tmp_path / "saved"), a_step("a")])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# ── The loop


class Over(BaseException):
    """Ends the loop."""


def test_the_loop_wakes_when_an_adapter_has_been_written(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    trained(session)
    inbox: Inbox = queue.Queue()
    replies: list[tuple[int, bool]] = []

    def hear(number: int, frame: Frame) -> None:
        if number:
            replies.append((number, frame.head["ok"]))
            if len(replies) == 3:
                raise Over

    loop = Loop(session.trainer, Sampler({}, choose_decoder=choose_decoder), hear)
    holding = Held(session.trainer.saver)
    for number, command in enumerate((a_save("a", tmp_path / "saved"), Frame({"op": "ping"}), a_step("a"))):
        inbox.put((number + 1, command))
    release = threading.Timer(0.2, holding.release)  # the loop waits by then, and nothing else will come
    too_late = threading.Timer(WITHIN_S, inbox.put, [(4, Frame({"op": "ping"}))])
    for timer in (release, too_late):
        timer.start()
    with pytest.raises(Over):
        loop.serve(inbox)
    too_late.cancel()
    assert replies == [(2, True), (1, True), (3, True)]


@pytest.mark.parametrize(
    ("is_busy", "saves", "rest"), [(False, 1, 0.0), (True, 1, PAUSE_PER_WORK), (True, 5, PAUSE_PER_WORK / 5)]
)
def test_the_thread_pauses_while_the_engine_computes(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool, saves: int, rest: float
) -> None:
    cpu_s, paused = [0.0], []
    monkeypatch.setattr(saver_module, "thread_cpu_s", lambda: cpu_s[0])
    monkeypatch.setattr(REAL, "pause", paused.append)
    saver = Saver()
    saver._names = {str(number) for number in range(saves)}
    saver.is_engine_busy = is_busy
    for _ in range(8):
        cpu_s[0] += 0.0005  # half of the least that it pauses for
        saver._pace()
    assert sum(paused) == pytest.approx(0.004 * rest) and len(paused) in (0, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is of Linux")
def test_a_file_goes_to_the_disk_in_parts_and_two_at_once_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, int]] = []

    class Libc:
        def __init__(self, name: None) -> None: ...

        def sync_file_range(self, descriptor: int, start: ctypes.c_int64, size: ctypes.c_int64, flags: int) -> None:
            calls.append((start.value >> 20, size.value >> 20, flags))

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    tensor_files.write_tensors(tmp_path / "file", {"t": torch.zeros((28 << 20) // 4)})
    begin, wait = 2, 7
    assert calls == [(0, 8, begin), (8, 8, begin), (0, 8, wait), (16, 8, begin), (8, 8, wait)]


def test_a_save_that_failed_does_not_keep_its_adapter_in_memory() -> None:
    """Before: the thread kept the error, its trace the frame, and that the adapter, until the next save."""

    class Weights:
        """Stands for an adapter's memory."""

    def failing(weights: Weights) -> Callable[[Any], Frame]:
        def save(pace: object) -> Frame:
            assert weights is not None
            raise OSError(errno.ENOSPC, "No space left on device")

        return save

    saver, done = Saver(), threading.Event()
    saver.on_done = done.set
    weights = Weights()
    freed = weakref.ref(weights)
    saver.start(1, "a", failing(weights))
    del weights
    assert done.wait(WITHIN_S)
    [(number, reply)] = saver.take_done()
    assert number == 1 and isinstance(reply, OSError)
    del reply
    end_s = REAL.now() + WITHIN_S
    while freed() is not None and REAL.now() < end_s:  # the thread has a line left
        REAL.pause(0.001)
    assert freed() is None
