"""Numbers of a step or an evaluation, which the host reads at its end: all at once, if they lie on a device.

    microbatch 0    loss, right answers      [ loss 0 | right |        |         ]      a short array on the device
    microbatch 1    loss, right answers      [ loss 0 | right | loss 1 |         ]      right answers are added up
    gradients       sum of squares           [ loss 0 | right | loss 1 | squares ]  ->  one copy, one wait

To read a number from a device is to wait until it has done all that was asked of it before, and meanwhile nobody gives
it anything to do. So a step asks once. NumPy's numbers are there at once, and are taken as they come.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend

FIRST_PLACES = 64


class Readings:
    """Sums by name, in float64.

    Args:
        backend: where the numbers arise.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._host_values: dict[Hashable, float] = {}
        self._numbers: dict[Hashable, int] = {}  # of the places that are in use on the device
        self._slots: Array | None = None
        self._pinned: Any = None
        self._places: list[Array] = []

    def clear(self) -> None:
        """Forget all numbers."""
        self._host_values.clear()
        self._numbers.clear()

    def add(self, name: Hashable, value: Array | float) -> None:
        """Add a number to the sum of this name; nothing is waited for.

        Args:
            value: a Python number, or an array of one element, here or on the device.
        """
        if isinstance(value, float | int | np.generic | np.ndarray):
            self._host_values[name] = self._host_values.get(name, 0.0) + float(value)
        elif name in self._numbers:
            place = self.place(name)
            self._backend.xp.add(place, value.reshape(1), out=place)
        else:
            self.put(name, value)

    def put(self, name: Hashable, value: Array | float) -> None:
        """Let the sum of this name be this number; as `add` otherwise."""
        if isinstance(value, float | int | np.generic | np.ndarray):
            self._host_values[name] = float(value)
        else:
            self._backend.xp.copyto(self.place(name), value.reshape(1))

    def place(self, name: Hashable) -> Array:
        """Return where the number of this name lies on the device, for a kernel to write: (1,) float64.

        Before a name's first number anything lies there.
        """
        number = self._numbers.setdefault(name, len(self._numbers))
        if number >= len(self._places):
            self._grow()
        return self._places[number]

    def read(self) -> dict[Hashable, float]:
        """Return the sums by name. On a device this is the one wait of a step; without numbers there is none."""
        values = dict(self._host_values)
        if self._numbers:
            assert self._slots is not None
            count = len(self._numbers)
            self._backend.to_host_async(self._slots[:count], self._pinned[:count], self._backend.current_stream())
            self._backend.synchronize()
            for name, number in self._numbers.items():
                values[name] = values.get(name, 0.0) + float(self._pinned[number])
        return values

    def _grow(self) -> None:
        """Make room for twice as many numbers, and keep those that are there."""
        old, count = self._slots, max(FIRST_PLACES, 2 * len(self._places))
        self._slots = self._backend.zeros(count, "float64")
        if old is not None:
            self._backend.xp.copyto(self._slots[: len(old)], old)
        self._pinned = self._backend.empty_pinned(count, "float64")
        self._places = [self._slots[i : i + 1] for i in range(count)]
