"""Turns: each side gets half of the time; none starves, none saves up turns."""

from __future__ import annotations

import random

import pytest

from tinkex.engine.process.turns import EngineTurn, Turns


def shares(turns: Turns, until_s: float, batch_s: float, step_s: float) -> dict[EngineTurn, float]:
    """The time each side got while both had work all along."""
    spent = dict.fromkeys(EngineTurn, 0.0)
    while sum(spent.values()) < until_s:
        turn = turns.choose(can_train=True, can_decode=True)
        assert turn is not None
        seconds = batch_s if turn is EngineTurn.TRAIN else step_s
        turns.charge(turn, seconds)
        spent[turn] += seconds
    return spent


def test_without_work_there_is_no_turn() -> None:
    assert Turns().choose(can_train=False, can_decode=False) is None


def test_a_side_alone_has_every_turn() -> None:
    turns = Turns()
    for _ in range(5):
        assert turns.choose(can_train=True, can_decode=False) is EngineTurn.TRAIN
        turns.charge(EngineTurn.TRAIN, 1.0)
    for _ in range(5):
        assert turns.choose(can_train=False, can_decode=True) is EngineTurn.DECODE
        turns.charge(EngineTurn.DECODE, 1.0)


@pytest.mark.parametrize(("batch_s", "step_s"), [(2.0, 0.03), (0.01, 0.01), (0.005, 1.0)])
def test_each_side_gets_half_of_the_time_however_long_its_turns(batch_s: float, step_s: float) -> None:
    spent = shares(Turns(), 200.0, batch_s, step_s)
    assert spent[EngineTurn.DECODE] / sum(spent.values()) == pytest.approx(0.5, abs=0.02)


def test_neither_side_waits_longer_than_the_others_longest_turn_twice() -> None:
    rng, turns = random.Random(7), Turns()
    waited = dict.fromkeys(EngineTurn, 0.0)
    for _ in range(5000):
        turn = turns.choose(can_train=True, can_decode=True)
        assert turn is not None
        seconds = rng.uniform(0.01, 1.0)
        turns.charge(turn, seconds)
        other = EngineTurn.DECODE if turn is EngineTurn.TRAIN else EngineTurn.TRAIN
        waited[turn], waited[other] = 0.0, waited[other] + seconds
        assert waited[other] <= 2.0


def test_on_a_tie_training_goes_first() -> None:
    assert Turns().choose(can_train=True, can_decode=True) is EngineTurn.TRAIN


def test_an_hour_alone_makes_no_debt() -> None:
    turns = Turns()
    turns.choose(can_train=True, can_decode=False)
    turns.charge(EngineTurn.TRAIN, 3600.0)
    spent = shares(turns, 20.0, 0.1, 0.1)
    assert spent[EngineTurn.TRAIN] == pytest.approx(spent[EngineTurn.DECODE], abs=0.2)


def test_an_idle_side_saves_up_nothing() -> None:
    turns = Turns()
    shares(turns, 1.0, 100.0, 0.1)  # decoding is owed 100 s
    turns.choose(can_train=True, can_decode=False)  # and then wants none
    assert turns.choose(can_train=True, can_decode=True) is EngineTurn.TRAIN


def test_short_gaps_between_long_passes_do_not_starve_decoding() -> None:
    turns, spent = Turns(), dict.fromkeys(EngineTurn, 0.0)
    for _ in range(50):  # a client that sends the next pass one decode step after the last one was done
        while True:
            turn = turns.choose(can_train=True, can_decode=True)
            assert turn is not None
            seconds = 10.0 if turn is EngineTurn.TRAIN else 0.05
            turns.charge(turn, seconds)
            spent[turn] += seconds
            if turn is EngineTurn.TRAIN:
                break
        assert turns.choose(can_train=False, can_decode=True) is EngineTurn.DECODE
        turns.charge(EngineTurn.DECODE, 0.05)
        spent[EngineTurn.DECODE] += 0.05
    assert spent[EngineTurn.DECODE] / sum(spent.values()) > 0.45
