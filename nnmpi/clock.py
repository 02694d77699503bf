"""The time, and sleeping: by the computer's clock, or by a simulated rank's own.

Any rank that measures how long something takes, or waits for a while, does so by these two; then
the same program reports the seconds of the world that it is in. Not meant: time limits for files
and other programs, whose clock is the wall's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class TimeSource(Protocol):
    """A clock of your own."""

    def now(self) -> float:
        """Return the time in seconds, from any beginning."""

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""

    def reproducible(self, seconds: float) -> float:
        """Return the reproducible part of a measured time; see `reproducible` below."""


_clock: ContextVar[TimeSource | None] = ContextVar("nnmpi_clock", default=None)


def now() -> float:
    """Return the time in seconds, from any beginning; it never goes backwards."""
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

    A simulated run can be repeated by its seed, so there nothing may be decided by a time that is
    measured for real.
    """
    clock = _clock.get()
    return seconds if clock is None else clock.reproducible(seconds)


@contextmanager
def using(clock: TimeSource) -> Iterator[None]:
    """Let the body go by another clock."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
