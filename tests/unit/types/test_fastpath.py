"""The byte tricks say what a plain look at the numbers says."""

from __future__ import annotations

import math
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinkex.types.packed import first_not_finite, has_bool, has_negative


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.booleans())
def test_a_negative_number_is_seen_by_its_last_byte(numbers: list[int], is_short: bool) -> None:
    numbers = [number >> 32 for number in numbers] if is_short else numbers
    packed = struct.pack(f"<{len(numbers)}{'i' if is_short else 'q'}", *numbers)
    assert has_negative(packed, 4 if is_short else 8) == any(number < 0 for number in numbers)


@given(st.lists(st.integers(0, 600) | st.booleans()))
def test_a_bool_among_tokens_is_found(values: list[Any]) -> None:
    packed = struct.pack(f"<{len(values)}i", *values)
    assert has_bool(values, packed) == any(type(value) is bool for value in values)


@given(st.lists(st.floats(width=32)))
def test_the_first_nan_or_infinity_is_found(numbers: list[float]) -> None:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    assert first_not_finite(packed) == next((n for n, number in enumerate(numbers) if not math.isfinite(number)), None)
