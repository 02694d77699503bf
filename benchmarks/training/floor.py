"""What a step cannot be faster than here: its products of matrices alone, and the bytes that these must move.

The products are those that a step asks nnmpi for: noted while one runs, and then made again by themselves with the same
shapes and strides, by the same BLAS and into arrays that are there. Convolutions that are computed in other ways have
none, or fewer. Moved are their operands and results, once each, and the update (weights and gradients read, weights
written); the time for that is by the rate at which this machine copies long arrays at the same moment.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from nnmpi.backend import gemm

PASSES = 5
COPIED_BYTES = 2**26
Lies = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]


class Noting:
    """Stands for another BLAS, leaves all products to NumPy, and notes them."""

    def __init__(self) -> None:
        self.seen: list[tuple[Lies, Lies, Lies, bool]] = []

    def multiply(self, xp: Any, a: Any, b: Any, out: Any, add: bool) -> None:
        """Note a product."""
        if out is None:
            shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
            out = np.empty(shape, a.dtype)
        lies = [(x.shape, x.strides, x.dtype) for x in (a, b, out)]
        self.seen.append((lies[0], lies[1], lies[2], add))


def floor(step: Callable[[], Any], weights_bytes: int, barrier: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds that this rank's products take alone, and those that the bytes of a step take.

    Args:
        step: does one; what it multiplies is noted.
        weights_bytes: of this rank's parameters.
        barrier: waits for the other ranks.
    """
    noting = Noting()
    token = gemm._other.set(noting)  # type: ignore[arg-type]
    try:
        step()
    finally:
        gemm._other.reset(token)
    places = {lies: _place(lies) for product in noting.seen for lies in product[:3]}
    calls = [([places[lies] for lies in product[:3]], product[3]) for product in noting.seen]

    def multiply() -> None:
        for (a, b, out), add in calls:
            gemm.gemm(np, a, b, out, add)

    moved = sum(x.size * x.itemsize for arrays, _ in calls for x in arrays) + 3 * weights_bytes
    source, target = np.ones(COPIED_BYTES, np.uint8), np.empty(COPIED_BYTES, np.uint8)
    copied_s = _seconds(lambda: np.copyto(target, source), barrier)
    return {"products_s": _seconds(multiply, barrier), "traffic_s": moved * copied_s / (2 * COPIED_BYTES)}


def _place(lies: Lies) -> NDArray[Any]:
    """Return an array of these strides over memory of its own."""
    shape, strides, dtype = lies
    last = sum((n - 1) * abs(stride) for n, stride in zip(shape, strides, strict=True))
    return as_strided(np.zeros(last // dtype.itemsize + 1, dtype), shape, strides)


def _seconds(call: Callable[[], Any], barrier: Callable[[], Any]) -> float:
    call()
    taken = []
    for _ in range(PASSES):
        barrier()
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return median(taken)
