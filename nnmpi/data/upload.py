"""Batches on a device, each copied there while the one before is worked on.

    loader's threads    make 1 | make 2 | make 3 | ...               on the host; bytes, where the data set has them
    copies                       | 1 -> a |  | 2 -> b |  | 3 -> a |  from pinned memory, by a stream of their own
    training                                | step 1 |   | step 2 |  scales and normalizes, then works

There are two buffers, a and b, in pinned memory and on the device. Events keep the order: a step waits for its copy, a
copy for the step that worked on what lay there before, and the host for the copy out of the memory that it writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.prefetch import Prefetch
from nnmpi.data.transform import Normalize, can_split, split_transform

ALIGNMENT_BYTES = 256


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
    """The batches of an iterator, their samples and labels on a device.

    What a batch holds there stays until the next but one is asked for. The labels remain on the host as well.

    Args:
        batches: made on the host, in order; closed with this one.
        backend: of the device.
        finish: applied to the samples on the device; None if they are input already.
    """

    def __init__(self, batches: Prefetch[Batch], backend: Backend, finish: Finish | None = None) -> None:
        self._batches, self._backend, self._finish = batches, backend, finish
        self._stream = backend.new_stream()
        self._free = [_Buffer(backend), _Buffer(backend)]
        # Memory that a copy reads or writes goes to nobody else before it is done, also where nobody calls `close`.
        weakref.finalize(self, self._stream.synchronize).atexit = False
        self._coming: _Flight | None = None  # on its way
        self._out: _Flight | None = None  # with the consumer

    def __next__(self) -> Batch:
        """Return the next batch; work on it can be asked for at once."""
        if self._out is not None:
            self._out.buffer.release()
            self._free.append(self._out.buffer)
            self._out = None
        flight = self._coming or self._send(next(self._batches))
        self._out, self._coming = flight, None
        flight.buffer.arrive()
        x = flight.x if self._finish is None else self._finish(flight.x)
        if self._batches.is_made:  # else this one is not to wait for it
            self._coming = self._send(next(self._batches))
        return replace(flight.batch, x=x, y=flight.y, host_y=flight.batch.y)

    def _send(self, batch: Batch) -> _Flight:
        buffer = self._free.pop(0)
        x, y = buffer.send([batch.x, batch.y], self._stream)
        return _Flight(batch, buffer, x, y)

    def close(self) -> None:
        """Stop what makes batches, and wait for the copies that are under way. May be called more than once."""
        self._batches.close()
        self._stream.synchronize()  # copies may be under way of batches that were handed out long ago
        self._coming = self._out = None
        self._free = [_Buffer(self._backend), _Buffer(self._backend)]

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Flight:
    """A batch and where its arrays lie on the device."""

    def __init__(self, batch: Batch, buffer: _Buffer, x: Array, y: Array) -> None:
        self.batch, self.buffer, self.x, self.y = batch, buffer, x, y


class _Buffer:
    """Memory for one batch on both sides, as long as the longest batch so far."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._host: Any = np.empty(0, np.uint8)
        self._device: Any = None
        self._arrived, self._released = backend.new_event(), backend.new_event()
        self._under_way = False

    def send(self, arrays: list[Array], stream: Any) -> list[Array]:
        """Begin to copy arrays to the device, by this stream; return where they will be."""
        starts = np.cumsum([0, *(-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in arrays)]).tolist()
        total = starts[-1]
        if self._under_way:
            self._arrived.synchronize()
        if total > len(self._host):
            self._host = self._backend.empty_pinned(total, "uint8")
            self._device = self._backend.zeros(total, "uint8")
            self._released.record()  # when the zeros are written
        places = []
        for start, each in zip(starts, arrays, strict=False):
            part = slice(start, start + each.nbytes)
            self._host[part] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
            places.append(self._place(part, each))
        if total:
            stream.wait(self._released)
            self._backend.from_host_async(self._host[:total], self._device[:total], stream)
        self._arrived.record(stream)
        self._under_way = True
        return places

    def _place(self, part: slice, like: Array) -> Array:
        if not like.size:
            return self._backend.zeros(like.shape, like.dtype)
        place: Array = self._device[part].view(like.dtype).reshape(like.shape)
        return place

    def arrive(self) -> None:
        """Let what is asked of the device from now on wait for the copy."""
        self._backend.current_stream().wait(self._arrived)

    def release(self) -> None:
        """Let the next copy wait for what was asked of the device up to now."""
        self._released.record()
