"""Between nnmpi's parameters and PyTorch's: the same numbers in another order.

linear       (in, out)                  <->  (out, in)
convolution  (kh, kw, in, out)          <->  (out, in, kh, kw)
linear behind images: its rows stand for (height, width, channels) here, for (channels, height, width) there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import CNN, Case

Arrays = list[NDArray[Any]]
CHANNELS = 64  # of the last convolution


def to_torch(case: Case, arrays: Sequence[NDArray[Any]]) -> Arrays:
    """Return nnmpi's parameters as PyTorch stores them, contiguous."""
    behind = _behind_images(case, arrays)
    return [np.ascontiguousarray(_turned(array, i == behind)) for i, array in enumerate(arrays)]


def from_torch(case: Case, flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> Arrays:
    """Return PyTorch's parameters as nnmpi stores them.

    Args:
        flat: all of PyTorch's, one after another.
        like: nnmpi's, for the shapes.
    """
    numbers = [np.arange(array.size).reshape(array.shape) for array in like]
    found, start = [], 0
    for array, places in zip(like, to_torch(case, numbers), strict=True):
        values = np.empty(array.size, flat.dtype)
        values[places.reshape(-1)] = flat[start : start + array.size]
        found.append(values.reshape(array.shape))
        start += array.size
    return found


def split(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> Arrays:
    """Return numbers that stand one after another as arrays of these shapes."""
    ends = np.cumsum([array.size for array in like])
    return [part.reshape(array.shape) for part, array in zip(np.split(flat, ends[:-1]), like, strict=True)]


def _turned(array: NDArray[Any], behind_images: bool) -> NDArray[Any]:
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    if array.ndim == 2 and behind_images:
        side = int((len(array) // CHANNELS) ** 0.5)
        return array.reshape(side, side, CHANNELS, -1).transpose(3, 2, 0, 1).reshape(array.shape[1], -1)
    return array.T if array.ndim == 2 else array


def _behind_images(case: Case, arrays: Sequence[NDArray[Any]]) -> int | None:
    if case.model != CNN:
        return None
    return next(i for i, array in enumerate(arrays) if array.ndim == 2)
