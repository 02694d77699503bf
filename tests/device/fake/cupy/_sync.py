"""Counting what makes the host wait for the device without saying so: float(), bool(), item(), get()."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

COUNTS: Counter[str] = Counter()
_refusing: list[bool] = []


class HiddenSynchronization(RuntimeError):
    """The host waited for the device inside `no_synchronize()`."""


def synchronized(how: str) -> None:
    """Note that the host waits, in the given way."""
    COUNTS[how] += 1
    if _refusing:
        raise HiddenSynchronization(f"{how} makes the host wait for the device")


@contextmanager
def no_synchronize() -> Iterator[None]:
    """Refuse hidden synchronization inside the block."""
    _refusing.append(True)
    try:
        yield
    finally:
        _refusing.pop()
