"""How far a download has come, on stderr: a bar where that is a terminal, elsewhere a line now and then.

`update` may be called from any thread and only notes the numbers; `draw`, on the caller's own thread, writes them: a
terminal that is slow to scroll never slows the download down.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO

from tinkex.clock import REAL, Clock
from tinkex.terminal.output import clean, size

if TYPE_CHECKING:
    from tinkex.client.download import Progress

DRAW_S = 0.1
LINE_S = 10.0
RATE_S = 5.0
"""The rate is that of the last seconds: an average over hours tells nothing about now."""
BAR = 24


class ProgressBar:
    """One file after the other."""

    def __init__(self, stream: TextIO | None = None, clock: Clock = REAL) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._latest: Progress | None = None
        self._ended: deque[str] = deque()
        self._marks: deque[tuple[float, int]] = deque()
        self._said_at = clock.now()
        self._is_drawn = False

    def update(self, progress: Progress) -> None:
        """Note where a file stands."""
        now = self._clock.now()
        latest = self._latest
        if latest is None or latest.file != progress.file or progress.done_bytes < latest.done_bytes:
            self._marks.clear()  # another file, or the same from its beginning
            if latest is not None and latest.file != progress.file:
                self._ended.append(_summary(latest))
        self._latest = progress
        self._marks.append((now, progress.done_bytes))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_S:
            self._marks.popleft()

    def draw(self) -> None:
        """Show the latest numbers, if it is time to."""
        while self._ended:
            self._line(self._ended.popleft())
        if self._latest is None:
            return
        if self._is_terminal:
            self._stream.write("\r\x1b[K" + self._bar(self._latest))
            self._stream.flush()
            self._is_drawn = True
        elif self._clock.now() - self._said_at >= LINE_S:
            self._said_at = self._clock.now()
            self._line(f"{clean(self._latest.file)}: {self._numbers(self._latest)}")

    def finish(self) -> None:
        """Leave the last line behind and the cursor on a fresh one."""
        if self._latest is not None:
            self._ended.append(_summary(self._latest))
        self._latest = None
        self.draw()

    def _line(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._is_drawn else "") + text + "\n")
        self._stream.flush()
        self._is_drawn = False

    def _bar(self, progress: Progress) -> str:
        import shutil

        width = shutil.get_terminal_size((80, 24)).columns
        name, numbers = clean(progress.file), self._numbers(progress)
        drawn = ""
        if progress.total_bytes:
            full = min(BAR * progress.done_bytes // progress.total_bytes, BAR)
            drawn = f" [{'#' * full}{'.' * (BAR - full)}]"
        # A wrapped line could not be drawn over: the bar gives way first, then the name.
        if len(name) + len(drawn) + len(numbers) + 1 >= width:
            drawn = ""
        room = max(width - len(drawn) - len(numbers) - 2, 8)
        shown = name if len(name) <= room else f"…{name[1 - room :]}"
        return f"{shown}{drawn} {numbers}"[: width - 1]

    def _numbers(self, progress: Progress) -> str:
        done, total, rate = progress.done_bytes, progress.total_bytes, self.rate()
        parts = [f"{size(done)} of {size(total)} ({100 * done // total} %)" if total else size(done)]
        if rate is not None:
            parts.append(f"{size(rate)}/s")
            if total and rate > 0:
                parts.append(f"{_time((total - done) / rate)} left")
        return ", ".join(parts)

    def rate(self) -> float | None:
        """Bytes per second over the last seconds; None when there is nothing to tell it from."""
        marks = list(self._marks)
        if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
            return None
        return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


class Fetching:
    """Shows how far the making of a base model has come. Called on one thread, which is also the one that draws."""

    def __init__(self, stream: TextIO | None = None, clock: Clock = REAL) -> None:
        self._bar = ProgressBar(stream, clock)
        self._clock = clock
        self._drawn_at = -DRAW_S

    def update(self, what: str, done_bytes: int, total_bytes: int) -> None:
        from tinkex.client.download import Progress

        self._bar.update(Progress(what, done_bytes, total_bytes or None))
        if self._clock.now() - self._drawn_at >= DRAW_S:
            self._drawn_at = self._clock.now()
            self._bar.draw()

    def finish(self) -> None:
        self._bar.finish()


def _summary(progress: Progress) -> str:
    done, total = progress.done_bytes, progress.total_bytes
    what = size(done) if total is None or done >= total else f"{size(done)} of {size(total)}"
    return f"{clean(progress.file)}: {what}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
