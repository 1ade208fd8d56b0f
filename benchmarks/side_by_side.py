"""Ours and theirs in one run: every round does both, one after the other; the ratio is taken round by round."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.client_cost import commit, cpu_model

RESULTS = Path(__file__).parent / "results"


@dataclass
class Question:
    """One line of a table: the same work done by both, in tokens."""

    name: str
    tokens: int
    ours: Callable[[], object]
    plain: Callable[[], object]
    must: float | None = None
    aim: float | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Of every round, ours and the plain loop's."""

    @property
    def ratios(self) -> list[float]:
        return [plain / ours for ours, plain in self.seconds]

    @property
    def rate(self) -> float:
        """Our tokens per second, the median."""
        return self.tokens / statistics.median(ours for ours, _ in self.seconds)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(questions: Sequence[Question], rounds: int) -> None:
    for question in questions:
        question.ours()  # what is done once, such as laying weights out, is not the question
        question.plain()
    for number in range(rounds):
        for question in questions:
            question.seconds.append((timed(question.ours), timed(question.plain)))
            print(
                f"round {number + 1} of {rounds}: {question.name}: {question.ratios[-1]:.2f}",
                file=sys.stderr,
                flush=True,
            )


def surroundings() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return (
        f"{dt.date.today()}: {os.cpu_count()} cores, {cpu_model()}, Python {platform.python_version()}, {packages}, "
        f"commit {commit()}"
    )


def table(questions: Sequence[Question]) -> str:
    lines = [
        "| work | ours, tokens/s | plain loop | ratio (smallest … largest) | must | aim |",
        "|---|---|---|---|---|---|",
    ]
    for question in questions:
        plain = question.tokens / statistics.median(plain for _, plain in question.seconds)
        ratios = sorted(question.ratios)
        must = "" if question.must is None else f"{question.must}"
        lines.append(
            f"| {question.name} | {question.rate:.0f} | {plain:.0f} | **{statistics.median(ratios):.2f}** "
            f"({ratios[0]:.2f} … {ratios[-1]:.2f}) | {must} | {question.aim or ''} |"
        )
    return "\n".join(lines)


def write(name: str, title: str, module: str, body: str) -> None:
    text = f"# {title}\n\nWritten by `python -m benchmarks.{module}` on {surroundings()}.\n\n{body}\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
