"""Rotary positions: queries and keys are turned by their position (Su et al., "RoFormer", 2021).

The features of a head are pairs (a, b): an element of the first half, and that of the second. Each
pair has a frequency. At a position it turns by the angle position * frequency,

    a' = a cos - b sin          b' = b cos + a sin

so the product of a query and a key depends on the distance of their positions alone. A gradient is
turned back. Angles are computed in float64, and cosines are rounded once: in float32 an angle at
position 100,000 would be off by 0.004.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import ModuleType

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.program.record import bare


@dataclass(frozen=True)
class Rotary:
    """How heads are turned at each position.

    Attributes:
        frequencies: of the pairs, (features / 2,), in radians per position.
    """

    frequencies: tuple[float, ...]

    def at(self, positions: Sequence[range], like: Array) -> Rotation:
        """Return the rotation at these positions, one after another.

        Its arrays are of an array's library and dtype; for half precision they are float32.
        """
        dtype = FLOAT32 if is_low(like.dtype) else like.dtype
        # of the library itself, since tables are made once, and no replay makes them again
        return _rotation(namespace(bare(like)), self.frequencies, tuple(positions), dtype.name)


@dataclass(frozen=True)
class Rotation:
    """The rotation of heads (..., positions, features).

    Attributes:
        cos, sin: of each position and pair, (positions, features / 2).
    """

    cos: Array
    sin: Array

    def write(self, x: Array, out: Array, scale: float = 1.0, back: bool = False) -> None:
        """Write x, turned and scaled, to `out`, which shares no memory with it; or turned back."""
        half = x.shape[-1] // 2
        cos, sin = (self.cos, self.sin) if scale == 1 else (self.cos * scale, self.sin * scale)
        (a, b), (to_a, to_b) = ((item[..., :half], item[..., half:]) for item in (x, out))
        np.multiply(a, cos, out=to_a)
        np.multiply(b, cos, out=to_b)
        if back:
            a, to_a, b, to_b = b, to_b, a, to_a
        np.subtract(to_a, b * sin, out=to_a)
        np.add(to_b, a * sin, out=to_b)

    def of(self, x: Array, back: bool = False) -> Array:
        """Return x turned, or turned back, in new memory."""
        result = np.empty(x.shape, x.dtype, like=x)
        self.write(x, result, back=back)
        return result


@lru_cache(64)
def _rotation(
    xp: ModuleType, frequencies: tuple[float, ...], positions: tuple[range, ...], dtype: str
) -> Rotation:
    places = np.fromiter(chain.from_iterable(positions), "float64")
    angles = places[:, None] * np.array(frequencies)
    return Rotation(
        *(xp.asarray(table.astype(dtype)) for table in (np.cos(angles), np.sin(angles)))
    )
