"""How much memory a process had over time: a figure for each minute, and whether it was flat.

Used by `benchmarks/hostile_load.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MINUTE_S = 60.0
FLAT_RATIO = 1.05
"""Memory is flat if its floor grows by less from the middle third of a time to the last. The first third fills what is
bounded. The floor is the tenth percentile: bombs and large results make peaks, a leak raises what is always there."""
FLAT_RULE = "flat: the tenth percentile of the last third is at most 5 % above that of the middle third"


class Reading(NamedTuple):
    """The memory of server and engine (RSS), at a moment."""

    at: float
    server_mb: float
    engine_mb: float


def growth(values: Sequence[float]) -> float:
    """Return the floor of the last third of some readings, as a multiple of that of the middle third."""
    third = len(values) // 3
    if not third:
        return 0.0
    middle, last = sorted(values[-2 * third : -third]), sorted(values[-third:])
    return last[third // 10] / max(middle[third // 10], 1e-9)


def verdict(values: Sequence[float]) -> str:
    """Say whether some readings are flat, and by how much the last third differs from the middle one."""
    if not (ratio := growth(values)):
        return "not measured"
    return f"{'flat' if ratio <= FLAT_RATIO else 'NOT FLAT'} ({ratio - 1:+.0%})"


def by_minute(readings: Sequence[Reading], began: float, ended: float) -> list[Reading]:
    """Return a reading for each minute of a time, whose `at` is its minute: the medians, as bombs make peaks."""
    minutes: dict[int, list[Reading]] = {}
    for reading in readings:
        if began <= reading.at < ended:
            minutes.setdefault(int((reading.at - began) // MINUTE_S), []).append(reading)
    return [
        Reading(
            minute + 1,
            statistics.median(reading.server_mb for reading in rows),
            statistics.median(reading.engine_mb for reading in rows),
        )
        for minute, rows in sorted(minutes.items())
    ]


def memory_lines(readings: Sequence[Reading], phases: dict[str, tuple[float, float]]) -> list[str]:
    """Return the part of a report on memory: the curve by minutes, and a verdict on each phase."""
    lines = [f"Memory (RSS), medians of each minute; {FLAT_RULE}.", "", "| memory | server | engine |", "|---|---|---|"]
    for phase, (began, ended) in phases.items():
        lines += [
            f"| {phase}, minute {minute.at:.0f} | {minute.server_mb:.0f} MB | {minute.engine_mb:.0f} MB |"
            for minute in by_minute(readings, began, ended)
        ]
        rows = [reading for reading in readings if began <= reading.at < ended]
        server, engine = ([reading[column] for reading in rows] for column in (1, 2))
        lines.append(f"| {phase}: last third to middle third | {verdict(server)} | {verdict(engine)} |")
    if readings:
        most = [max(reading[column] for reading in readings) for column in (1, 2)]
        lines.append(f"| at most | {most[0]:.0f} MB | {most[1]:.0f} MB |")
    return lines
