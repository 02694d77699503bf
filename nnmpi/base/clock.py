"""The time, and sleeping: by the computer's clock, or by a simulated rank's clock.

Code that measures durations or sleeps on a rank uses these functions; so the same program reports
the seconds of its world. Time limits for files and other programs use the computer's clock instead.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class TimeSource(Protocol):
    """A replacement for the computer's clock."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary start."""

    def sleep(self, seconds: float) -> None:
        """Return when this many seconds have passed."""

    def reproducible(self, seconds: float) -> float:
        """Return a measured time if it is reproducible, else 0.0; see `reproducible` below."""


_clock: ContextVar[TimeSource | None] = ContextVar("nnmpi_clock", default=None)


def now() -> float:
    """Return the time in seconds since an arbitrary start; it never decreases."""
    clock = _clock.get()
    return time.perf_counter() if clock is None else clock.now()


def calendar() -> float:
    """Return the seconds since 1970; by a simulated clock, since the start of its run."""
    clock = _clock.get()
    return time.time() if clock is None else clock.now()


def sleep(seconds: float) -> None:
    """Return when this many seconds have passed."""
    clock = _clock.get()
    if clock is None:
        time.sleep(seconds)
    else:
        clock.sleep(seconds)


def reproducible(seconds: float) -> float:
    """Return `seconds`, or 0.0 in reproducible mode: no decision may depend on timing there.

    A simulated run can be repeated from its seed; a decision by measured seconds would break that.
    """
    clock = _clock.get()
    return seconds if clock is None else clock.reproducible(seconds)


@contextmanager
def using(clock: TimeSource) -> Iterator[None]:
    """Use another clock in the body."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
