"""Batches on a device: as bytes where the data set has bytes, scaled and normalized there.

The loader's threads make the next batches on the host meanwhile. A copy takes microseconds, and a step waits for the
device anyway, so copies are not queued beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.prefetch import Prefetch
from nnmpi.data.transform import Normalize, can_split, split_transform


def batches(loader: Loader, epoch: int, backend: Backend, start: int = 0) -> Prefetch[Batch] | Uploads:
    """Return a loader's batches of an epoch where a backend has its arrays; see `Loader.epoch`.

    Tokens are copied as they are. With a transform of the user's own the host does all arithmetic, and floats are
    copied in the place of bytes.

    Args:
        loader: makes the batches on the host.
        epoch: from 0.
        backend: where x and y shall be.
        start: the first batch that is wanted.
    """
    if not backend.is_device:
        return loader.epoch(epoch, start)
    dataset = loader.dataset
    if not isinstance(dataset, Dataset) or dataset.is_tokens or not can_split(loader.transform):
        return Uploads(loader.epoch(epoch, start), backend)
    finish = Finish(backend, dataset, loader.dtype, split_transform(loader.transform)[1])
    return Uploads(loader.epoch(epoch, start, stored=True), backend, finish)


class Finish:
    """What turns stored samples into input where they are needed: converting, scaling, and shifting to mean 0.

    The host would do the same operations in the same order, so the numbers are the same.

    Args:
        backend: where the samples are when it is called.
        dataset: that they are of.
        dtype: of the input.
        normalize: what is done last; None for nothing.
    """

    def __init__(self, backend: Backend, dataset: Dataset, dtype: DTypeLike, normalize: Normalize | None) -> None:
        self._xp, self._dtype = backend.xp, np.dtype(dtype)
        self._scale = float(dataset.scale)  # of the dtype, as a Python number among arrays is
        self._normal: tuple[Array, Array] | None = None
        if normalize is not None:
            mean, std = normalize.fitted(self._dtype, dataset.sample_shape)
            self._normal = backend.asarray(mean), backend.asarray(std)

    def __call__(self, x: Array) -> Array:
        """Return new floats made of stored samples."""
        result: Array = x.astype(self._dtype)
        if self._scale != 1:
            self._xp.multiply(result, self._scale, out=result)
        if self._normal is not None:
            mean, std = self._normal
            self._xp.subtract(result, mean, out=result)
            self._xp.divide(result, std, out=result)
        return result


class Uploads(Iterator[Batch]):
    """The batches of an iterator, their samples and labels on a device. The labels remain on the host as well.

    Args:
        batches: made on the host, in order; closed with this one.
        backend: of the device.
        finish: applied to the samples on the device; None if they are input already.
    """

    def __init__(self, batches: Prefetch[Batch], backend: Backend, finish: Finish | None = None) -> None:
        self._batches, self._backend, self._finish = batches, backend, finish

    def __next__(self) -> Batch:
        """Return the next batch; work on it can be asked for at once."""
        batch = next(self._batches)
        x, y = self._backend.asarray(batch.x), self._backend.asarray(batch.y)
        return replace(batch, x=x if self._finish is None else self._finish(x), y=y, host_y=batch.y)

    def close(self) -> None:
        """Stop what makes batches. May be called more than once."""
        self._batches.close()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
