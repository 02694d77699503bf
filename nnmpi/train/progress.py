"""What a run prints: plain lines, without colour or moving parts, the same on a terminal and in a log file.

Under MPI no rank can know whether its output is a terminal (Open MPI gives every rank one), so nothing depends on it.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Console:
    """Prints lines on one rank and nothing on the others.

    A reader that goes away (`| head`, a closed session), or a full disk, ends the printing, not the training.
    """

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        """Print to `stream` (standard output when None) unless `quiet`."""
        self._stream = sys.stdout if stream is None else stream
        self._quiet = quiet or self._stream is None  # Python has no standard output when it was closed before the start

    def say(self, *lines: str) -> None:
        """Print the lines at once."""
        if self._quiet:
            return
        try:
            for line in lines:
                print(line, file=self._stream)
            self._stream.flush()
        except (OSError, ValueError):  # no reader, a full disk; ValueError: the stream is closed
            self._quiet = True
            self._drop()

    def _drop(self) -> None:
        """Let what is still in the stream go nowhere: Python would try once more at the end, and fail."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class Pace:
    """Says when the next line of progress is due: `seconds` after the last one."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start now."""
        self._seconds, self._clock = seconds, clock
        self._last = clock()

    def due(self) -> bool:
        """Return whether it is time, and start again if so."""
        now = self._clock()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True

    def restart(self) -> None:
        """Start again: a line of another kind was just printed."""
        self._last = self._clock()


def duration(seconds: float) -> str:
    """Return a time for people: 0.4 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """Return a share as per cent with two digits: 0.98056 -> 98.06 %."""
    return f"{100 * share:.2f} %"
