"""Shows the progress of transfers on stderr: a bar on a terminal, elsewhere a line every ten seconds.

    with ProgressBar() as bar:
        bar.update("model.safetensors", 10_000_000, 30_000_000)

`update` may be called on any thread and only stores the numbers; the screen's thread draws them. A slow terminal
never slows down the download.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Self

from tinkex.clock import REAL, Clock
from tinkex.terminal import screen
from tinkex.terminal.format import LinePart, bar, clean, cut, duration, fit, size
from tinkex.terminal.live import default_file

DRAW_S = 0.1
LINE_S = 10.0
RATE_S = 5.0
"""The rate is that of the last seconds: an average over hours says nothing about now."""


class Transfer(NamedTuple):
    """One file and how much of it has arrived."""

    name: str
    done_bytes: int
    total_bytes: int | None


class ProgressBar:
    """Shows one file after another. A finished file leaves a line with its size."""

    def __init__(self, file: Any = None, clock: Clock = REAL) -> None:
        self._file = default_file() if file is None else file
        self._clock = clock
        self._screen: screen.Screen | None = None
        self._latest: Transfer | None = None
        self._finished: deque[str] = deque()
        self._marks: deque[tuple[float, int]] = deque()
        self._line_at = clock.now()

    def __enter__(self) -> Self:
        self._screen = screen.show(self, self._file, None, DRAW_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last line behind and the cursor on a new one. Closing twice is allowed."""
        if self._screen is not None:
            self._screen.remove(self, "" if self._latest is None else _summary(self._latest))
        self._screen = None

    def update(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Store how much of a file has arrived. A total of None or 0 is unknown."""
        now, latest = self._clock.now(), self._latest
        if latest is None or latest.name != name or done_bytes < latest.done_bytes:
            self._marks.clear()  # another file, or the same one from the beginning
            if latest is not None and latest.name != name:
                self._finished.append(_summary(latest))
        self._latest = Transfer(name, done_bytes, total_bytes or None)
        self._marks.append((now, done_bytes))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_S:
            self._marks.popleft()

    def rate(self) -> float | None:
        """Return bytes per second over the last seconds; None before there are two measurements."""
        marks = list(self._marks)
        if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
            return None
        return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])

    # -- what the screen asks for -------------------------------------------------------------------------------------

    def live(self, width: int) -> str:
        return "" if (latest := self._latest) is None else fit(self._parts(latest, width, with_bar=True), width)

    def due(self) -> str | None:
        if (latest := self._latest) is None or self._clock.now() - self._line_at < LINE_S:
            return None
        self._line_at = self._clock.now()
        return fit(self._parts(latest, 1_000, with_bar=False), 1_000)

    def remarks(self) -> list[str]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _parts(self, transfer: Transfer, width: int, *, with_bar: bool) -> list[LinePart]:
        name, done, total = transfer
        rate = self.rate()
        return [
            LinePart(cut(clean(name), max(width // 3, 8))),
            LinePart(bar(done, total) if with_bar and total else "", 3),
            LinePart(f"{size(done)} of {size(total)} ({100 * done // total} %)" if total else size(done)),
            LinePart("" if rate is None else f"{size(rate)}/s", 2),
            LinePart(f"{duration((total - done) / rate)} left" if rate and total else "", 1),
        ]


def _summary(transfer: Transfer) -> str:
    name, done, total = transfer
    return f"{clean(name)}: {size(done) if total is None or done >= total else f'{size(done)} of {size(total)}'}"
