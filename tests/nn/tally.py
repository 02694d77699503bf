"""Counts how often a compiled step is done, where no recording looks."""

from ctypes import c_long


class Tally:
    """A counter: called, it counts. A recording would notice a number of Python's that changes.

    Attributes:
        call_count: so far.
    """

    def __init__(self):
        self._count = c_long()

    def __call__(self):
        self._count.value += 1

    @property
    def call_count(self):
        """The calls so far."""
        return self._count.value
