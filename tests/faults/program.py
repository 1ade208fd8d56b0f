"""What one tenant does: a list of steps that a number decides. Pure.

Programs are few, so that each needs to run undisturbed once: whatever breaks meanwhile, its results must be the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

PROGRAMS = 6
TRAINING_STEPS = 7
BRIEF, LONG = 100, 200
"""Programs from these numbers on have more of everything, for a cluster: 10 steps, so that four tenants have 40; and
40 steps, in which a run changes its home several times. Some commands have 5 MB: several targets at each position, so
that they compute little."""
TARGETS = 256

Kind = Literal["train", "forward", "save", "save_sampler", "sample", "load", "list", "intrude", "reconnect", "wait"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. `name` is a checkpoint's; `number` decides the data of a pass and the seed of a sample."""

    kind: Kind
    number: int = 0
    name: str = ""
    is_large: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name or self.number}"


@dataclass(frozen=True, kw_only=True)
class Program:
    number: int
    rank: int
    seed: int
    steps: tuple[Step, ...]


def program_of(number: int) -> Program:
    """Return a program: training steps with saves, loads, samples and lists between them, and a final checkpoint."""
    if number >= BRIEF:
        return _full_program(number)
    dice = random.Random(f"program {number}")
    steps: list[Step] = []
    saved: list[str] = []
    for step in range(TRAINING_STEPS):
        steps.append(Step(kind="train", number=step))
        if step in (1, 4):
            saved.append(f"state-{step}")
            steps.append(Step(kind="save", name=saved[-1]))
        steps += _between(dice, step, saved)
    steps += [Step(kind="wait"), Step(kind="intrude"), Step(kind="save", name="final"), Step(kind="list")]
    return Program(number=number, rank=dice.choice((2, 4, 8)), seed=number + 1, steps=tuple(steps))


@dataclass(frozen=True, kw_only=True)
class Places:
    """After which steps of a full program something else happens."""

    steps: int
    large: tuple[int, ...]
    saves: tuple[int, ...]
    samples: tuple[int, ...]
    load: int


_BRIEF = Places(steps=10, large=(3,), saves=(2, 7), samples=(5,), load=4)
_LONG = Places(steps=40, large=(11, 27), saves=(7, 19, 33), samples=(14, 30), load=23)


def steps_of(number: int) -> int:
    """Return how many training steps a full program has."""
    return (_LONG if number >= LONG else _BRIEF).steps


def _full_program(number: int) -> Program:
    """Return a program with a few calls in flight at a time, and some of everything else."""
    dice, places = random.Random(f"program {number}"), _LONG if number >= LONG else _BRIEF
    steps: list[Step] = []
    saved: list[str] = []
    for step in range(places.steps):
        steps.append(Step(kind="train", number=step, is_large=step in places.large))
        if step in places.saves:
            saved.append(f"state-{step}")
            steps.append(Step(kind="save", name=saved[-1]))
        if step in places.samples:
            steps += [Step(kind="save_sampler", name=f"sampler-{step}"), Step(kind="sample", number=step)]
        if step == places.load:
            steps.append(Step(kind="load", name=saved[-1]))
        if dice.random() < 0.3:
            steps.append(Step(kind="wait"))
        if dice.random() < 0.05:
            steps.append(Step(kind="reconnect"))
    steps += [Step(kind="wait"), Step(kind="intrude"), Step(kind="save", name="final"), Step(kind="list")]
    return Program(number=number, rank=dice.choice((2, 4, 8)), seed=number + 1, steps=tuple(steps))


def _between(dice: random.Random, step: int, saved: list[str]) -> list[Step]:
    """Return what a tenant does after a training step, besides training."""
    match dice.choice(("nothing", "nothing", "wait", "forward", "sample", "sample", "load", "intrude", "reconnect")):
        case "wait":
            return [Step(kind="wait")]
        case "forward":
            return [Step(kind="forward", number=step)]
        case "sample":
            return [Step(kind="save_sampler", name=f"sampler-{step}"), Step(kind="sample", number=step)]
        case "load" if saved:
            return [Step(kind="load", name=saved[-1])]
        case "intrude":
            return [Step(kind="wait"), Step(kind="intrude")]
        case "reconnect":
            return [Step(kind="reconnect")]
        case _:
            return []


def batch_of(program: int, step: int, *, is_large: bool = False) -> list[list[int]]:
    """Return the token rows of one pass."""
    dice = random.Random(f"batch {program} {step}")
    if is_large:
        return [[dice.randrange(5, 250) for _ in range(140)] for _ in range(12)]
    return [[dice.randrange(5, 250) for _ in range(dice.randrange(6, 20))] for _ in range(3)]
