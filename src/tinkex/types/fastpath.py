"""Three byte tricks for the hot path of every training call, each with what it saves.

All of them look at one byte of every packed little-endian number instead of making Python numbers: a call carries
hundreds of thousands of them. Measured on 2,048 numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any


def has_negative(packed: bytes, width: int) -> bool:
    """Return whether one of the packed integers of `width` bytes is negative.

    The sign is the top bit of an integer's last byte, and a byte with its top bit set is not ASCII. Asking `isascii` is
    30 times faster than reading the numbers.
    """
    return not packed[width - 1 :: width].isascii()


def has_bool(values: Sequence[Any], packed: bytes) -> bool:
    """Return whether one of the values, packed as int32, is a bool.

    A bool packs as 0 or 1. Asking only the entries whose first byte is 0 or 1 for their type is 5 times faster than
    asking each, as long as they are few.
    """
    suspects = packed[0::4].translate(_IS_0_OR_1)
    if suspects.count(1) > len(values) // 16:
        return bool in set(map(type, values))
    position = suspects.find(1)
    while position >= 0:
        if type(values[position]) is bool:
            return True
        position = suspects.find(1, position + 1)
    return False


_IS_0_OR_1 = bytes((1, 1, *bytes(254)))


def first_not_finite(packed: bytes) -> int | None:
    """Return the index of the first NaN or infinity among packed float32 numbers, or None.

    NaN, infinity and numbers beyond 1e38 end in 0x7f or 0xff (sign and top of the exponent): looking for those bytes
    takes 1.5 µs for 2,048 numbers, where adding the numbers up takes 20.
    """
    top = packed[3::4]
    if 0x7F not in top and 0xFF not in top:
        return None
    numbers = struct.iter_unpack("<f", packed)
    return next((index for index, (number,) in enumerate(numbers) if not math.isfinite(number)), None)
