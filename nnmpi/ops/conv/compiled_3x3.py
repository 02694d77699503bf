"""3 x 3 convolution with padding 1 by numba's kernels: float32 on the CPU (`nnmpi.jit`).

    patches (16, tiles, c)  @  kernels (16, c, o)        alone, or with ReLU and 2 x 2 max-pooling

A forward or backward pass is one call. The kernels, in nnmpi/backend/jit/conv3x3.py, work on flat
arrays and allocate nothing: scratch arrays are arguments, so that a replayed step reuses them.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import load
from nnmpi.backend.planes import flattened
from nnmpi.ops.conv.algorithm import NO_POOL, ConvAlgorithm, Gradients, record_flat


class CompiledWinograd(ConvAlgorithm):
    """conv2d(x, weight, bias, padding=1), alone, or with ReLU and 2 x 2 pooling.

    Saved: the pooling's winners, and the transformed kernels.
    """

    def forward(
        self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> tuple[Array, ...]:
        xp, (kernels, sizes) = namespace(x), self._kernels(x, weight)
        corner = xp.empty(
            (0 if self.spec.pool == NO_POOL else y.size,), np.uint8
        )  # which of four pixels was the largest
        transformed = xp.empty((16 * sizes.c * sizes.o,), x.dtype)
        bias = xp.zeros(weight.shape[3:], np.float32) if bias is None else bias
        scratch = tuple([xp.empty((count,), x.dtype) for count in sizes.scratch(False)])
        record_flat(kernels.forward, (x, weight, bias), (y, corner, transformed, scratch))
        return corner, transformed

    def backward(
        self, grad: Array, x: Array, weight: Array, kept: tuple[Array, ...], out: Gradients
    ) -> None:
        xp, (kernels, sizes) = namespace(grad), self._kernels(x, weight)
        # the kernel always writes the bias gradient
        to_bias = xp.empty(weight.shape[3:], grad.dtype) if out.bias is None else out.bias
        expected = [
            xp.empty((0,), grad.dtype) if item is None else flattened(item)
            for item in (out.x, out.weight)
        ]
        scratch = tuple([xp.empty((count,), grad.dtype) for count in sizes.scratch(True)])
        reads = xp.ascontiguousarray(grad), x, *kept
        record_flat(kernels.backward, reads, ((*expected, to_bias), scratch))

    def _kernels(self, x: Array, weight: Array) -> tuple[Any, Any]:
        """Return the compiled pair for these images and kernels, and its sizes."""
        sizes = load().sizes(*x.shape[1:], weight.shape[3])
        return load().winograd(sizes, self.spec.pool != NO_POOL), sizes
