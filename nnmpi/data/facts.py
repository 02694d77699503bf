"""What must be known of all samples: mean, standard deviation and largest value, by blocks of rows.

The rows are cut into segments, the same ones whoever reads them, and segments are merged in their
order: so the numbers do not depend on how many processes share the reading. Sums of bytes are exact
whole numbers, which do not depend on the order of the rows either.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Integers
from nnmpi.base.shard import part
from nnmpi.data.lazy import Chosen
from nnmpi.data.team import ALONE, Team

SEGMENTS, SEGMENT_ROWS = 64, 4096  # at most so many, of at least so many rows
FLOAT_BYTES = 2**25  # of a block of rows in float64
BYTE_ROWS, BYTE_ELEMENTS = 256, 2**18  # of a block of bytes, whose sums are exact in float32


@dataclass(frozen=True)
class Moments:
    """Statistics of samples as they are stored, before their scale.

    Attributes:
        mean, std: in float64: of images, (n, height, width, channels), per channel; else of each
            element of a sample.
        top: the largest value.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    top: float

    @property
    def values(self) -> list[Any]:
        """Its fields as JSON values."""
        return [self.mean.tolist(), self.std.tolist(), self.top]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Self:
        """Return what has these values."""
        mean, std, top = values
        return cls(np.array(mean, np.float64), np.array(std, np.float64), float(top))


def moments(x: Any, places: Integers | None = None, team: Team = ALONE) -> Moments:
    """Measure samples. Collective for a team.

    Args:
        x: (n, ...), bytes or floats.
        places: of the samples where they are stored; they are read in this order.
        team: of the ranks that share the reading.
    """
    shape = x.shape[3:] if x.ndim == 4 else x.shape[1:]
    is_bytes = x.dtype == np.uint8
    if places is not None:
        x = Chosen(x, np.argsort(places))
    segments = _segments(len(x))
    with team.agreed():
        own = [
            (_byte_sums if is_bytes else _sums)(x, segments[number], shape)
            for number in team.share(len(segments))
        ]
    parts = [
        (count, np.array(first), np.array(second), top)
        for count, first, second, top in chain.from_iterable(team.gather(_as_lists(own)))
    ]
    top = max(item[3] for item in parts)
    if is_bytes:
        count = sum(item[0] for item in parts)
        first, second = (np.sum([item[at] for item in parts], 0).reshape(-1) for at in (1, 2))
        # in whole numbers of any length, and rounded once
        variance = [
            (count * of_squares - of_values**2) / count**2
            for of_values, of_squares in zip(map(int, first), map(int, second), strict=True)
        ]
        mean = np.array([int(value) / count for value in first])
        return Moments(mean.reshape(shape), np.sqrt(variance).reshape(shape), top)
    total = parts[0][:3]
    for each in parts[1:]:
        total = _merged(total, each[:3])
    count, mean, squares = total
    return Moments(mean.reshape(shape), np.sqrt(squares / count).reshape(shape), top)


def content(x: Any, team: Team = ALONE) -> str:
    """Return a hash of an array. Collective for a team.

    It is of the checksums of segments, so that the ranks of a team can share the reading; or of one
    that is known.
    """
    sums: Any = getattr(x, "checksum", None)
    if sums is None:
        segments = _segments(len(x))
        with team.agreed():
            own = [_checksum(x, segments[number]) for number in team.share(len(segments))]
        sums = [*chain.from_iterable(team.gather(own))]
    return sha256(f"{x.dtype} {tuple(x.shape)} {sums}".encode()).hexdigest()


def _segments(count: int) -> list[range]:
    number = max(1, min(SEGMENTS, -(-count // SEGMENT_ROWS)))
    return [part(count, number, index) for index in range(number)]


def _as_lists(parts: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [[count, *(item.tolist() for item in arrays), top] for count, *arrays, top in parts]


def _merged(a: Any, b: Any) -> tuple[int, Any, Any]:
    """Return count, mean and sum of squared deviations of two parts together."""
    (n, mean, squares), (more, other, others) = a, b
    gap, total = other - mean, n + more
    return total, mean + gap * (more / total), squares + others + gap * gap * (n * (more / total))


def _sums(x: Any, rows: range, shape: tuple[int, ...]) -> tuple[int, Any, Any, float]:
    """Return count, mean, sum of squared deviations and largest value of some rows."""
    step = max(1, FLOAT_BYTES // (8 * max(1, prod(x.shape[1:]))))
    total, tops = None, []
    for first in range(rows.start, rows.stop, step):
        values = x[first : min(first + step, rows.stop)].astype(np.float64)
        tops.append(float(values.max()))
        axes = tuple(range(values.ndim - len(shape)))
        count = prod(values.shape[axis] for axis in axes)
        mean = values.sum(axes) / count
        one = count, mean, np.square(values - mean).sum(axes)
        total = one if total is None else _merged(total, one)
    assert total is not None
    return *total, max(tops)


def _byte_sums(x: Any, rows: range, shape: tuple[int, ...]) -> tuple[int, Any, Any, float]:
    """Return count, sum, sum of squares and largest value of some rows of bytes."""
    width = prod(x.shape[1:])
    first, second, top = np.zeros(width), np.zeros(width), 0
    step = max(1, min(BYTE_ROWS, BYTE_ELEMENTS // max(1, width)))
    for start in range(rows.start, rows.stop, step):
        values = x[start : min(start + step, rows.stop)].reshape(-1, width)
        top = max(top, int(values.max(initial=0)))
        floats = values.astype(np.float32)
        first += floats.sum(axis=0)
        second += np.einsum("ij,ij->j", floats, floats)
    features = prod(shape)
    count = len(rows) * (width // features)
    first, second = (item.reshape(-1, features).sum(0).reshape(shape) for item in (first, second))
    return count, first, second, float(top)


def _checksum(x: Any, rows: range) -> int:
    result, step = 0, max(1, 2**20 // max(1, prod(x.shape[1:]) * x.dtype.itemsize))
    for start in range(rows.start, rows.stop, step):
        values = np.ascontiguousarray(x[start : min(start + step, rows.stop)])
        result = zlib.crc32(values.reshape(-1).view(np.uint8).data, result)
    return result
