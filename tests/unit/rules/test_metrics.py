"""Metrics of several chunks become those of one call.

The figures under `OFFICIAL` were recorded by running the combine step of tinker 0.36.0 and 0.4.1 on the same chunks.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.rules import metrics as rules
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput


def chunk(count: int, metrics: dict[str, float]) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData([0.0])}] * count
    # Without checks, so that integers stay integers whatever the type's field says.
    return ForwardBackwardOutput.model_construct(loss_fn_output_type="", loss_fn_outputs=outputs, metrics=metrics)


def combine(chunks: list[ForwardBackwardOutput]) -> dict[str, float]:
    return rules.combine((output.metrics, len(output.loss_fn_outputs)) for output in chunks)


THREE = [
    chunk(3, {"l:mean": 1.25, "l:sum": 10.5, "l:min": -2.0, "l:max": 4.0, "l:slack": 2.0, "c:unique": 7.0,
              "h:hash2": 12345.0, "h:hash_unordered": 12345.0}),
    chunk(1, {"l:mean": 3.25, "l:sum": -4.25, "l:min": -1.0, "l:max": 9.0, "l:slack": 6.0, "c:unique": 8.0,
              "h:hash2": -7.0, "h:hash_unordered": 99.0}),
    chunk(2, {"l:mean": 0.5, "l:sum": 0.0, "l:min": 0.0, "l:max": 0.0, "l:slack": 1.0, "c:unique": 7.0,
              "h:hash2": 9007199254740991.0, "h:hash_unordered": 9007199254740991.0}),
]  # fmt: skip
OFFICIAL_THREE = {
    "l:mean": 1.3333333333333333, "l:sum": 6.25, "l:min": -2.0, "l:max": 9.0, "l:slack": 3.6666666666666665,
    "c:unique": 7.0, "c:unique_1": 8.0, "c:unique_2": 7.0, "h:hash2": 9007199254753329,
    "h:hash_unordered": -4.812733539436735e18,
}  # fmt: skip
ONE = [
    chunk(2, {"l:mean": 1.5, "l:sum": 2.5, "l:slack": 4.0, "c:unique": 1.0, "h:hash2": -1.0, "h:hash_unordered": 5.0})
]
OFFICIAL_ONE = {
    "l:mean": 1.5, "l:sum": 2.5, "l:slack": 0.0, "c:unique": 1.0, "h:hash2": 18446744073709551615,
    "h:hash_unordered": -7.813438383599367e18,
}  # fmt: skip


@pytest.mark.parametrize(("chunks", "official"), [(THREE, OFFICIAL_THREE), (ONE, OFFICIAL_ONE)])
def test_ordinary_metrics_combine_as_in_the_official_clients(
    chunks: list[ForwardBackwardOutput], official: dict[str, float]
) -> None:
    combined = combine(chunks)
    assert list(combined) == list(official)
    # The official 0.4.1 squeezes this hash through float64; ours keeps the integer.
    assert float(combined.pop("h:hash_unordered")) == official["h:hash_unordered"]
    assert combined == pytest.approx({key: value for key, value in official.items() if key in combined}, rel=1e-15)


def test_hashes_are_exact_integers() -> None:
    large = [2**53 - 1, 2**53 - 3, 12345678901234567]
    combined = combine([chunk(1, {"h:hash2": value, "h:hash_unordered": value}) for value in large])
    assert combined["h:hash2"] == sum(large) and isinstance(combined["h:hash2"], int)
    assert combined["h:hash_unordered"] == hash(tuple(sorted(large))) and isinstance(combined["h:hash_unordered"], int)


def test_an_unordered_hash_does_not_depend_on_the_order_of_chunks() -> None:
    chunks = [chunk(1, {"h:hash_unordered": value}) for value in (5.0, 1.0, 9.0)]
    assert combine(chunks) == combine(chunks[::-1])
    assert combine(chunks) != combine(chunks[:2])


def test_hash2_wraps_at_64_bits() -> None:
    assert combine([chunk(1, {"h:hash2": 2**64 - 1}), chunk(1, {"h:hash2": 3})]) == {"h:hash2": 2}


def test_counts_are_summed_as_integers() -> None:
    combined = combine([chunk(1, {"n:sum": 2**53}), chunk(1, {"n:sum": 1})])
    assert combined["n:sum"] == 2**53 + 1 and isinstance(combined["n:sum"], int)


def test_a_sum_of_floats_is_not_spoilt_by_its_order() -> None:
    assert combine([chunk(1, {"x:sum": value}) for value in (1e16, 1.0, -1e16)]) == {"x:sum": 1.0}


def test_a_key_without_a_reducer_survives() -> None:
    assert combine([chunk(1, {"plain": 3.0})]) == {"plain": 3.0}
    assert combine([chunk(1, {"plain": 3.0}), chunk(1, {"plain": 3.0})]) == {"plain": 3.0}
    assert combine([chunk(1, {"plain": 3.0}), chunk(1, {"plain": 4.0})]) == {"plain": 4.0}, "the last chunk speaks"


def test_a_key_with_an_unknown_reducer_survives() -> None:
    assert combine([chunk(1, {"x:median": 3.0}), chunk(1, {"x:median": 4.0})]) == {"x:median": 4.0}


def test_a_key_with_several_colons_is_reduced_by_its_last_word() -> None:
    assert combine([chunk(1, {"a:b:sum": 3.0}), chunk(1, {"a:b:sum": 4.0})]) == {"a:b:sum": 7.0}


def test_a_key_that_one_chunk_lacks_is_combined_over_the_others() -> None:
    combined = combine(
        [chunk(1, {"a:sum": 1.0, "m:mean": 2.0}), chunk(9, {"b:sum": 5.0}), chunk(3, {"a:sum": 2.0, "m:mean": 6.0})]
    )
    assert combined == {"a:sum": 3.0, "m:mean": 5.0, "b:sum": 5.0}


def test_zero_outputs_never_divide_by_zero() -> None:
    assert combine([]) == {}
    assert combine([chunk(0, {"m:mean": 2.0, "s:slack": 1.0})]) == {"m:mean": 2.0, "s:slack": 0.0}
    assert combine([chunk(0, {"m:mean": 2.0}), chunk(0, {"m:mean": 4.0})]) == {"m:mean": 3.0}


def test_a_chunk_without_outputs_does_not_spoil_the_mean_of_the_others() -> None:
    assert combine([chunk(0, {"m:mean": math.nan}), chunk(2, {"m:mean": 4.0})]) == {"m:mean": 4.0}


def test_a_numbered_unique_value_never_hides_a_reported_one() -> None:
    combined = combine([chunk(1, {"c:unique_1": 50.0, "c:unique": 1.0}), chunk(1, {"c:unique": 2.0})])
    assert combined == {"c:unique_1": 50.0, "c:unique": 1.0}


def test_nan_shows_wherever_it_stands() -> None:
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        combined = combine([chunk(1, {f"x:{reducer}": value for reducer in ("min", "max", "sum")}) for value in values])
        assert all(map(math.isnan, combined.values()))
    assert math.isnan(combine([chunk(1, {"h:hash2": math.nan})])["h:hash2"])


def test_infinities_of_both_signs_add_up_to_nan_and_not_to_a_crash() -> None:
    assert math.isnan(combine([chunk(1, {"x:sum": math.inf}), chunk(1, {"x:sum": -math.inf})])["x:sum"])
    assert combine([chunk(1, {"x:sum": 1e308}), chunk(1, {"x:sum": 1e308})]) == {"x:sum": math.inf}


reducers = st.sampled_from(["mean", "sum", "min", "max", "slack", "unique", "hash2", "hash_unordered", "new", ""])
values = st.one_of(st.floats(), st.integers(-(2**63), 2**64 - 1))
metrics = st.dictionaries(st.tuples(st.sampled_from("ab"), reducers).map(":".join), values)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(0, 3), metrics), max_size=4))
def test_no_metrics_of_a_service_can_fail_a_call(reported: list[tuple[int, dict[str, float]]]) -> None:
    combined = combine([chunk(count, found) for count, found in reported])
    assert {key for _, found in reported for key in found} <= combined.keys()
