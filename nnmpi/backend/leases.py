"""Memory for the results of a recorded step, lent for as long as somebody still looks at them.

    recorded      a = f(x)      b = g(a)      (nobody needs a any more)      c = h(b)
    memory        [  a  ]       [  b  ]            given back                [  c  ] where a was

A result is an array over a lease, and so is every view of it. When the last of them goes away, as in an ordinary step,
the memory is lent again: a recorded step takes no more of it than one that is not recorded, and works in the same warm
cache. What is noted for later are aliases, arrays over the same memory that hold no lease: they keep the order of the
recording, so each finds what it expects.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from nnmpi.backend.array import Array

LEAST_BYTES = 1024  # smaller results have memory of their own
LINE_BYTES = 64


class Lease:
    """A block of memory that goes back to its pool with the last array over it."""

    def __init__(self, pool: Pool, block: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.pool, self.block = pool, block
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str if dtype.kind != "V" else f"<u{dtype.itemsize}",  # bfloat16's says nothing
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.pool.free.append(self.block)


class Pool:
    """Blocks of memory, those at hand and those that are lent."""

    def __init__(self) -> None:
        self.free: list[Array] = []
        self.size_bytes = 0  # of all blocks

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a C-contiguous array of any values, over a lease unless it is short."""
        bytes_needed = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if bytes_needed < LEAST_BYTES:
            return np.empty(shape, dtype)
        fitting = [i for i, block in enumerate(self.free) if bytes_needed <= block.size <= 2 * bytes_needed]
        if fitting:  # the tightest, and of these the one that was given back last
            block = self.free.pop(min(reversed(fitting), key=lambda i: self.free[i].size))
        else:
            block = _aligned(bytes_needed)
            self.size_bytes += block.size
        lent: Array = np.asarray(Lease(self, block, shape, dtype))
        return lent if lent.dtype == dtype else lent.view(dtype)


def alias(x: Any) -> Any:
    """Return the same call, array or value without its leases: the memory may then be lent again.

    Understood are arrays, their methods, and partial calls of these; anything else keeps what it holds.
    """
    if type(x) is np.ndarray:
        return _bare(x)
    if isinstance(x, partial):
        words = {name: alias(each) for name, each in x.keywords.items()}
        return partial(alias(x.func), *map(alias, x.args), **words)
    owner = getattr(x, "__self__", None)
    if type(owner) is np.ndarray:
        return getattr(_bare(owner), x.__name__)
    return x


def _bare(array: Array) -> Array:
    """Return an array over the same elements that holds no lease."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if not isinstance(base, Lease):
        return array
    block = base.block
    bare: Array = np.ndarray(array.shape, array.dtype, block.data, array.ctypes.data - block.ctypes.data, array.strides)
    return bare


def _aligned(count_bytes: int) -> Array:
    """Return bytes that begin where a line of the cache does."""
    whole = np.empty(-(-count_bytes // LINE_BYTES) * LINE_BYTES + LINE_BYTES, np.uint8)
    skip = -whole.ctypes.data % LINE_BYTES
    return whole[skip : skip + whole.size - LINE_BYTES]
