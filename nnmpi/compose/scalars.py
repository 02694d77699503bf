"""The numbers of a step, read from a device all at once at its end.

Reading a number from a device waits for all work queued before, and the device is idle until the
host queues more. So a step's losses, scores and the squares of its gradient are summed where they
are computed, and read at its end, in one copy. NumPy's numbers are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from nnmpi.backend.array import HOST_NUMBERS, Array, namespace, zeros
from nnmpi.backend.kernels import to_float32
from nnmpi.comm.buffers import room_for, start_fetch

# names of sums
LOSS, SCORE, WEIGHTS = "loss", "score", "class weights"
SQUARES = "squares"  # of the gradient

SLOTS = 64  # numbers of a device's vector, which is read as a whole


class DeferredScalars:
    """Sums by name, in float64, of numbers from the host or a device.

    A device's numbers are added there, to vectors that stay where they are: additions that a
    recorded step repeats without Python arrive, too.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, float] = {}
        self._places: dict[Hashable, int] = {}
        self._vectors: list[Array] = []
        self._hosts: list[list[Array]] = [[], []]  # page-locked; two may be in use

    def clear(self) -> None:
        """Set all sums to 0, and forget the names of the host's."""
        self._values = {}
        for vector in self._vectors:
            vector.fill(0)

    def add(self, name: Hashable, value: Array | float) -> None:
        """Add a number to the sum of this name, without waiting.

        Args:
            value: a Python number, or an array of one element, on the host or the device.
        """
        if isinstance(value, HOST_NUMBERS):
            self._values[name] = self._values.get(name, 0.0) + float(value)
            return
        xp = namespace(value)
        total = self.place(name, xp)
        xp.add(total, to_float32(value).reshape(1), out=total)

    def place(self, name: Hashable, xp: Any) -> Array:
        """Return a sum on a device, (1,) in float64, to which the caller adds."""
        number, place = divmod(self._places.setdefault(name, len(self._places)), SLOTS)
        if number == len(self._vectors):
            self._vectors.append(zeros(xp, SLOTS, "float64"))
            for hosts in self._hosts:
                hosts.append(room_for(xp, SLOTS, "float64"))
        return self._vectors[number][place : place + 1]

    def send(self) -> Callable[[], dict[Hashable, float]]:
        """Begin to copy the sums as they are now; return a function that waits and returns them.

        Of a device's sums at most two copies may be under way.
        """
        values, places = self._values, self._places
        if not self._vectors:
            return lambda: values
        self._hosts.reverse()
        hosts = self._hosts[0]
        arrive = start_fetch(list(zip(self._vectors, hosts, strict=True)))

        def read() -> dict[Hashable, float]:
            arrive()
            numbers = [number for host in hosts for number in host.tolist()]
            return {name: numbers[place] for name, place in places.items()} | values

        return read

    def read(self) -> dict[Hashable, float]:
        """Return the sums by name; waits once for a device, not at all without its numbers."""
        return self.send()()
