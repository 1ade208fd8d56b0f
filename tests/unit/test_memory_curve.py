"""The report on memory of a long benchmark says by a rule whether memory was flat."""

from __future__ import annotations

from benchmarks.memory_curve import Reading, by_minute, memory_lines, verdict


def test_memory_that_fills_what_is_bounded_and_then_stays_is_flat() -> None:
    assert verdict([100.0, 150.0, 200.0, 200.0, 205.0, 210.0]) == "flat (+2%)"
    assert verdict([100.0] * 30 + [100.0] * 30 + [100.0] * 10 + [300.0] * 20) == "flat (+0%)", "peaks are no growth"
    assert verdict([100.0 + minute for minute in range(90)]) == "NOT FLAT (+23%)"
    assert verdict([100.0, 100.0]) == "not measured"


def test_the_curve_has_a_figure_for_each_minute_of_each_phase() -> None:
    readings = [Reading(float(second), 100.0 + second // 60, 500.0) for second in range(240)]
    assert by_minute(readings, 60.0, 180.0) == [Reading(1, 101.0, 500.0), Reading(2, 102.0, 500.0)]
    lines = memory_lines(readings, {"alone": (0.0, 60.0), "beside others": (60.0, 240.0)})
    assert lines[4:] == [
        "| alone, minute 1 | 100 MB | 500 MB |",
        "| alone: last third to middle third | flat (+0%) | flat (+0%) |",
        "| beside others, minute 1 | 101 MB | 500 MB |",
        "| beside others, minute 2 | 102 MB | 500 MB |",
        "| beside others, minute 3 | 103 MB | 500 MB |",
        "| beside others: last third to middle third | flat (+1%) | flat (+0%) |",
        "| at most | 103 MB | 500 MB |",
    ]
