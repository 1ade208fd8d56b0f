"""A long run of numbers that exists as a list only piece by piece. Its maker says how a piece is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

PIECE_NUMBERS: Final = 1 << 16
"""Numbers handled in one call: a millisecond, during which no other thread runs."""


class NumberPieces(Sequence[Any]):
    """Numbers that are read again, a piece at a time, whenever they are iterated over.

    A number in a list takes 40 bytes, its text in JSON two: a body of 256 MB would become 4 GB.
    """

    __slots__ = ("_length", "_read")

    def __init__(self, length: int, read: Callable[[], Iterator[list[Any]]]) -> None:
        self._length = length
        self._read = read

    def pieces(self) -> Iterator[list[Any]]:
        """Read the numbers. Keep no piece: the lists are what takes memory."""
        return self._read()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._read())

    def __getitem__(self, index: Any) -> Any:
        """Read up to one number. Only the first ones are cheap."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        return next(islice(self, index, None))

    def __repr__(self) -> str:
        return f"of {self._length} entries"


def pieces_of(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values in pieces of a length that one call may handle."""
    if isinstance(values, NumberPieces):
        yield from values.pieces()
    elif len(values) <= PIECE_NUMBERS:
        yield values
    else:
        for start in range(0, len(values), PIECE_NUMBERS):
            yield values[start : start + PIECE_NUMBERS]
