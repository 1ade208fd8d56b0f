"""The engine's loop: an idle engine waits a moment for company, and nothing delays its work for longer."""

from __future__ import annotations

import queue
import threading
from time import perf_counter
from typing import Any

import pytest

from tests.unit.engine.oracle import datum
from tinkex.engine.contract import SampleSpec, pass_frame, sample_frame
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.process.loop import MOMENTS, PATIENCE, Inbox, Loop, moment_s
from tinkex.engine.runner_choice import choose_decoder, choose_runner
from tinkex.engine.sampling.sampler import Sampler
from tinkex.engine.training.trainer import Trainer

TOKENS = [5, 6, 7, 8, 9]


class Over(BaseException):
    """Ends the loop, which else runs until its process ends."""


class Engine:
    """A loop on the real tiny model, whose micro-batches are counted."""

    def __init__(self, model: Model, moment_s: float) -> None:
        models = {model.info.name: model}
        self.base = model.info.name
        self.trainer = Trainer(models, choose_runner=choose_runner)
        self.batches = 0
        self.replies: dict[int, dict[str, Any]] = {}
        self.inbox: Inbox = queue.Queue()
        self._awaited = 0
        self._loop = Loop(self.trainer, Sampler(models, choose_decoder=choose_decoder), self._hear, moment_s)
        begin = self.trainer._start_micro_batch

        def count() -> Any:
            self.batches += 1
            return begin()

        self.trainer._start_micro_batch = count  # type: ignore[method-assign]

    def send(self, number: int, frame: Frame) -> None:
        self.inbox.put((number, frame))

    def sample(self, number: int) -> None:
        spec = SampleSpec(base=self.base, prompt=tuple(TOKENS), max_tokens=1)
        self.send(number, sample_frame(spec))

    def take(self) -> None:
        """Take what was sent, as an idle loop does."""
        self._loop._take(self.inbox, wait=True)

    def create(self, *names: str) -> None:
        for number, name in enumerate(names):
            self.send(number + 1, Frame({"op": "create", "adapter": name, "base": self.base, "rank": 2, "seed": 0}))
        self.until(len(names))

    def until(self, awaited: int) -> None:
        """Run until so many replies have come."""
        self._awaited = awaited
        self.replies.clear()
        with pytest.raises(Over):
            self._loop.serve(self.inbox)

    def _hear(self, number: int, frame: Frame) -> None:
        if number:
            self.replies[number] = frame.head
            if len(self.replies) == self._awaited:
                raise Over


def a_pass(adapter: str) -> Frame:
    data = [datum(TOKENS[:-1], target_tokens=TOKENS[1:], weights=[1.0] * 4)]
    return pass_frame("forward_backward", adapter, data, "cross_entropy", None)


@pytest.mark.parametrize(("moment_s", "batches"), [(5.0, 1), (0.0, 2)])
def test_what_arrives_a_moment_later_shares_the_micro_batch(tiny: Model, moment_s: float, batches: int) -> None:
    engine = Engine(tiny, moment_s)
    engine.create("a", "b")
    engine.send(1, a_pass("a"))
    # The second is on its way while the engine looks: later than a pass on the tiny model takes.
    late = threading.Timer(0.2, engine.send, (2, a_pass("b")))
    # Nothing follows it: a ping ends the looking, as it comes with no more to wait for.
    more = [threading.Timer(0.3, engine.send, (3 + k, Frame({"op": "ping"}))) for k in range(MOMENTS)]
    for timer in (late, *more):
        timer.start()
    engine.until(2 + MOMENTS)
    assert all(reply["ok"] for reply in engine.replies.values())
    assert engine.batches == batches


def test_a_sample_never_waits_for_the_next_command(tiny: Model) -> None:
    """A wait for company that had just run out could block until the next command: one of a thousand, for minutes."""
    engine = Engine(tiny, moment_s=1e-9)
    engine.sample(1)
    engine.take()  # a sample is there and gains from company

    def look_for_company() -> None:
        for number in range(20_000):
            engine.send(2 + number, Frame({"op": "ping"}))
            engine.take()

    looking = threading.Thread(target=look_for_company, daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive()
    engine.send(0, Frame({"op": "cancel", "number": 1}))
    engine.take()


@pytest.mark.timing
def test_runs_that_went_together_are_waited_for_a_little_longer(tiny: Model) -> None:
    moment_s = 0.5
    engine = Engine(tiny, moment_s)
    engine.create("a", "b")
    for late_s, batches in ((0.0, 1), (2 * moment_s, 1)):  # the second time one is late, but within their patience
        engine.batches = 0
        engine.send(1, a_pass("a"))
        late = threading.Timer(late_s, engine.send, (2, a_pass("b")))
        late.start()
        engine.until(2)
        late.join()
        assert all(reply["ok"] for reply in engine.replies.values())
        assert engine.batches == batches
    # Who comes alone after that is waited for once, not for good.
    waited = []
    for _ in range(2):
        engine.send(1, a_pass("a"))
        began = perf_counter()
        engine.until(1)
        waited.append(perf_counter() - began)
    assert waited[0] > PATIENCE * moment_s > waited[1]


@pytest.mark.timing
def test_a_run_alone_never_waits_for_company(tiny: Model) -> None:
    engine = Engine(tiny, 5.0)
    engine.create("a")
    engine.send(1, a_pass("a"))
    began = perf_counter()
    engine.until(1)
    assert perf_counter() - began < 4


@pytest.mark.timing
def test_commands_that_keep_coming_do_not_keep_it_from_working(tiny: Model) -> None:
    engine = Engine(tiny, 5.0)
    engine.create("a", "b")
    engine.send(1, a_pass("a"))
    for number in range(MOMENTS):
        engine.send(2 + number, Frame({"op": "ping"}))
    began = perf_counter()
    engine.until(1 + MOMENTS)
    assert perf_counter() - began < 4
    assert engine.replies[1]["ok"]


def test_a_moment_is_short_beside_the_reading_of_the_weights() -> None:
    assert moment_s(540_000_000, "cpu") == pytest.approx(0.0027)
    assert moment_s(60_000_000_000, "cpu") == 0.02
    assert moment_s(15_000_000_000, "cuda") == pytest.approx(0.0015)
