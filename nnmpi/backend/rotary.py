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
    """The rotation of heads (batch, heads, positions, features).

    With the halves of each head exchanged it is two products of whole heads:

        [a' b'] = [a b] [cos cos] + [b a] [-sin sin]

    Attributes:
        cos, sin: the factors above, (positions, features).
    """

    cos: Array
    sin: Array

    def of(self, x: Array, back: bool = False) -> Array:
        """Return x turned, or turned back, in new memory (batch, positions, heads, features)."""
        rows = x.swapaxes(1, 2)  # the order of a projection, along which its memory is read
        halves = (*rows.shape[:3], 2, rows.shape[3] // 2)
        exchanged = namespace(x).reshape(rows, halves)[..., ::-1, :]
        far = exchanged * namespace(x).reshape(self.sin, (len(self.sin), 1, *halves[3:]))
        result = rows * self.cos[:, None]
        combine = np.subtract if back else np.add
        combine(result, namespace(x).reshape(far, rows.shape), out=result)
        return result.swapaxes(1, 2)


@lru_cache(64)
def _rotation(
    xp: ModuleType, frequencies: tuple[float, ...], positions: tuple[range, ...], dtype: str
) -> Rotation:
    places = np.fromiter(chain.from_iterable(positions), "float64")
    angles = places[:, None] * np.array(frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    tables = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return Rotation(*(xp.asarray(table.astype(dtype)) for table in tables))
