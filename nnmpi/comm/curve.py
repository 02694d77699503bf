"""Seconds as a function of bytes, in straight pieces: the price of a message, or of adding up.

seconds |              /          a message that is short is sent at once, a longer one after a handshake (the
        |            /            step between the pieces), and a very long one does not fit the caches
        |       ___/
        |   ___/                  below the first point: its value    beyond the last: its slope goes on
        |__/
        +------------------ bytes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nnmpi.errors import UsageError

# Where a line's second point lies: so far out that the slope computed from the two has every digit of beta.
_FAR_BYTES = 2.0**40


@dataclass(frozen=True, slots=True)
class Curve:
    """A function from bytes to seconds that is linear between points.

    Args:
        points: (bytes, seconds) with growing bytes. Beyond the last one the last slope goes on (level if it falls);
            below the first one its value holds; a single point is a constant.

    Raises:
        UsageError: for no points, bytes that do not grow, or numbers that are negative or not finite.
    """

    points: tuple[tuple[float, float], ...]
    _bytes: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _seconds: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _slopes: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the points and work the slopes out."""
        points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in self.points)
        if not points or any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
            raise UsageError(f"a curve needs points with growing bytes, but has {list(points)}")
        if not all(math.isfinite(number) and number >= 0 for point in points for number in point):
            raise UsageError(f"a curve's bytes and seconds are finite and not negative, but it has {list(points)}")
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        slopes.append(max(slopes[-1], 0.0) if slopes else 0.0)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "_bytes", np.array([x for x, _ in points]))
        object.__setattr__(self, "_seconds", np.array([y for _, y in points]))
        object.__setattr__(self, "_slopes", np.array(slopes))

    @classmethod
    def line(cls, alpha_s: float, beta_s: float) -> "Curve":
        """Return alpha_s + beta_s * bytes, the textbooks' price of a message; beta_s in seconds per byte."""
        return cls(((0.0, alpha_s), (_FAR_BYTES, alpha_s + beta_s * _FAR_BYTES)))

    @property
    def alpha_s(self) -> float:
        """What the shortest message costs."""
        return self.points[0][1]

    def beta(self, nbytes: float) -> float:
        """Return the seconds per byte of a message of this length (more than 0), latency taken off."""
        return (self(nbytes) - self.alpha_s) / nbytes

    @overload
    def __call__(self, nbytes: float) -> float: ...

    @overload
    def __call__(self, nbytes: NDArray[Any]) -> NDArray[np.float64]: ...

    def __call__(self, nbytes: float | NDArray[Any]) -> float | NDArray[np.float64]:
        """Return the seconds for a number of bytes, or for each of an array of them."""
        if isinstance(nbytes, np.ndarray):
            return self._of_array(nbytes)
        x0, y0, slope = self.points[0][0], self.points[0][1], 0.0
        for (x, y), ahead in zip(self.points, self._slopes, strict=True):
            if x <= nbytes:
                x0, y0, slope = x, y, float(ahead)
        return y0 + slope * (max(nbytes, x0) - x0)

    def _of_array(self, nbytes: NDArray[Any]) -> NDArray[np.float64]:
        above = np.maximum(nbytes, self._bytes[0])
        piece: Any = 0
        if len(self.points) > 2 or above.max(initial=0.0) >= self._bytes[-1]:
            piece = np.searchsorted(self._bytes, above, side="right") - 1
        seconds: NDArray[np.float64] = self._seconds[piece] + self._slopes[piece] * (above - self._bytes[piece])
        return seconds

    def to_json(self) -> list[list[float]]:
        """Return the points as JSON values."""
        return [list(point) for point in self.points]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[float]]) -> "Curve":
        """Return the curve that `to_json` gave the points of."""
        return cls(tuple((float(nbytes), float(seconds)) for nbytes, seconds in value))
