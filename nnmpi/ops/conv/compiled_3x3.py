"""Convolution with 3 x 3 kernels and a border of 1 by numba's kernels: float32 on the CPU (see `nnmpi.jit`).

    CompiledWinograd    patches (16, tiles, c)  @  kernels (16, c, o)        alone, with ReLU, with 2 x 2 max-pooling
    CompiledDirect      4 x 4 pixels per window, times 9 kernel elements,    with ReLU and pooling; few channels,
                        for many outputs at a time: no matrices              and no gradient of the images

A whole pass, forward or backward, is one call. The kernels are in nnmpi/backend/jit/conv3x3.py; they work on flat
arrays, and every scratch array is given to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import load
from nnmpi.backend.recording import perform
from nnmpi.ops.conv.algorithm import NO_POOL, Algorithm, Gradients


class CompiledDirect(Algorithm):
    """max_pool2d(relu(conv2d(x, weight, bias, padding=1)), 2) of images that need no gradient; keeps the winners."""

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Array:
        (_, h, w, c), o = x.shape, weight.shape[3]
        corner: Array = xp.empty((y.size,), np.uint8)  # which of the four pixels was the largest
        sums, border = xp.empty((4 * o,), x.dtype), xp.empty(((h + 2) * (w + 2) * c,), x.dtype)
        bias = xp.zeros((o,), np.float32) if bias is None else bias
        _perform(load().direct(h, w, c, o).forward, x, weight, bias, y, corner, sums, border)
        return corner

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array, out: Gradients) -> None:
        (_, h, w, c), o, dtype = x.shape, weight.shape[3], grad.dtype
        # the kernel writes both gradients, wanted or not
        to_weight = xp.empty(weight.shape, dtype) if out.weight is None else out.weight
        to_bias = xp.empty((o,), dtype) if out.bias is None else out.bias
        part, border = xp.empty((9 * c * o + o,), dtype), xp.empty(((h + 2) * (w + 2) * c,), dtype)
        kernel = load().direct(h, w, c, o).backward
        _perform(kernel, xp.ascontiguousarray(grad), x, kept, to_weight, to_bias, part, border)


class CompiledWinograd(Algorithm):
    """conv2d(x, weight, bias, padding=1), then ReLU and pooling over 2 x 2 pixels, or ReLU, or nothing.

    Kept are the result, from which the ReLU's gradient is seen, the pooling's winners, and the kernels' 16 places.
    """

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> tuple[Array, ...]:
        z, pools, dtype = load().sizes(*x.shape[1:], weight.shape[3]), self.spec.pool != NO_POOL, x.dtype
        corner = xp.empty((y.size if pools else 0,), np.uint8)
        u = xp.empty((16 * z.c * z.o,), dtype)  # the kernels' places, (16, c, o)
        bias = xp.zeros((z.o,), np.float32) if bias is None else bias
        kernel = load().winograd(z, pools, self.spec.relu).forward
        _perform(kernel, x, weight, bias, y, corner, u, z.scratch(xp, dtype))
        return y, corner, u

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: tuple[Array, ...], out: Gradients) -> None:
        z, pools, dtype = load().sizes(*x.shape[1:], weight.shape[3]), self.spec.pool != NO_POOL, grad.dtype
        to_bias = xp.empty((z.o,), dtype) if out.bias is None else out.bias  # the kernel writes it, wanted or not
        wanted = [xp.empty((0,), dtype) if each is None else _flat(each) for each in (out.x, out.weight)]
        kernel = load().winograd(z, pools, self.spec.relu).backward
        scratch = z.scratch(xp, dtype, gradients=True)
        _perform(kernel, xp.ascontiguousarray(grad), x, *kept, (*wanted, to_bias), scratch)


def _perform(kernel: Any, *args: Any) -> None:
    """Call a kernel with flat arrays, and tuples of such."""
    perform(kernel, *(each if isinstance(each, tuple) else _flat(each) for each in args))


def _flat(array: Array) -> Array:
    """Return an array without gaps as a view in one axis."""
    return array.reshape(array.size)
