"""Between nnmpi's parameters and PyTorch's: the same numbers in another order.

linear       (in, out)                  <->  (out, in)
convolution  (kh, kw, in, out)          <->  (out, in, kh, kw)
linear after images: its rows are (height, width, channels) here, (channels, height, width) there
embedding    the same; it comes first, and in a GPT the positions' after the tokens'
lstm         gates i, f, o, g           <->  i, f, g, o
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import CNN, GPT, LSTM, Case

Arrays = list[NDArray[Any]]
CHANNELS = 64  # of the last convolution
TABLES: Mapping[str, int] = {GPT: 2, LSTM: 1}
GATED = 3  # parameters of an LSTM's layer


def to_torch(case: Case, arrays: Sequence[NDArray[Any]]) -> Arrays:
    """Return nnmpi's parameters as PyTorch stores them, contiguous."""
    behind, tables = _behind_images(case, arrays), TABLES.get(case.model, 0)
    gated = range(tables, tables + GATED * case.sizes[2]) if case.model == LSTM else ()
    turned = (
        _turned(_gates(array) if i in gated else array, i == behind)
        for i, array in enumerate(arrays)
    )
    return [
        np.ascontiguousarray(arrays[i] if i < tables else array) for i, array in enumerate(turned)
    ]


def from_torch(case: Case, flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> Arrays:
    """Return PyTorch's parameters as nnmpi stores them.

    Args:
        flat: all of PyTorch's, one after another.
        like: nnmpi's, for the shapes.
    """
    numbers = [np.arange(array.size).reshape(array.shape) for array in like]
    result, start = [], 0
    for array, places in zip(like, to_torch(case, numbers), strict=True):
        values = np.empty(array.size, flat.dtype)
        values[places.reshape(-1)] = flat[start : start + array.size]
        result.append(values.reshape(array.shape))
        start += array.size
    return result


def split(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> Arrays:
    """Return concatenated numbers as arrays of these shapes."""
    ends = np.cumsum([array.size for array in like])
    return [
        part.reshape(array.shape)
        for part, array in zip(np.split(flat, ends[:-1]), like, strict=True)
    ]


def _turned(array: NDArray[Any], behind_images: bool) -> NDArray[Any]:
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    if array.ndim == 2 and behind_images:
        side = int((len(array) // CHANNELS) ** 0.5)
        return (
            array.reshape(side, side, CHANNELS, -1)
            .transpose(3, 2, 0, 1)
            .reshape(array.shape[1], -1)
        )
    return array.T if array.ndim == 2 else array


def _gates(array: NDArray[Any]) -> NDArray[Any]:
    i, f, o, g = np.split(array, 4, -1)
    return np.concatenate([i, f, g, o], -1)


def _behind_images(case: Case, arrays: Sequence[NDArray[Any]]) -> int | None:
    if case.model != CNN:
        return None
    return next(i for i, array in enumerate(arrays) if array.ndim == 2)
