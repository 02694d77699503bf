"""3 x 3 convolution with padding 1 by numba's kernels: float32 on the CPU (`nnmpi.jit`).

    CompiledWinograd    patches (16, tiles, c)  @  kernels (16, c, o)
                        alone, or with ReLU and 2 x 2 max-pooling
    CompiledDirect      4 x 4 pixels per pooling window, times 9 kernel elements, for many outputs
                        at a time: no matrices. With ReLU and pooling, for few channels, and
                        without an input gradient

A forward or backward pass is one call. The kernels, in nnmpi/backend/jit/conv3x3.py, work on flat
arrays and allocate nothing: scratch arrays are arguments, so that a replayed step reuses them.
"""

from abc import abstractmethod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import load
from nnmpi.backend.planes import flattened
from nnmpi.ops.conv.algorithm import NO_POOL, ConvAlgorithm, Gradients, record_flat

# a compiled pair, and the numbers of elements of the transformed kernels and the scratch arrays
CompiledPair: TypeAlias = tuple[Any, int, tuple[int, ...]]


class Compiled3x3(ConvAlgorithm):
    """conv2d(x, weight, bias, padding=1), alone, or with ReLU and 2 x 2 pooling.

    Saved: the pooling's winners, and the transformed kernels.
    """

    @abstractmethod
    def plan(self, sizes: tuple[int, ...], gradients: bool) -> CompiledPair:
        """Return the plan.

        Args:
            sizes: (h, w, c, o), of images and channels.
            gradients: whether to return the backward pass's scratch arrays.
        """

    def forward(
        self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> tuple[Array, ...]:
        xp = namespace(x)
        kernels, places, counts = self.plan((*x.shape[1:], weight.shape[3]), False)
        corner = xp.empty(
            (0 if self.spec.pool == NO_POOL else y.size,), np.uint8
        )  # which of four pixels was the largest
        u = xp.empty((places,), x.dtype)
        bias = xp.zeros(weight.shape[3:], np.float32) if bias is None else bias
        scratch = _scratch(xp, counts, x.dtype)
        record_flat(kernels.forward, (x, weight, bias), (y, corner, u, scratch))
        return corner, u

    def backward(
        self, grad: Array, x: Array, weight: Array, kept: tuple[Array, ...], out: Gradients
    ) -> None:
        xp = namespace(grad)
        kernels, _, counts = self.plan((*x.shape[1:], weight.shape[3]), True)
        # the kernel always writes the bias gradient
        to_bias = xp.empty(weight.shape[3:], grad.dtype) if out.bias is None else out.bias
        expected = [
            xp.empty((0,), grad.dtype) if item is None else flattened(item)
            for item in (out.x, out.weight)
        ]
        scratch = _scratch(xp, counts, grad.dtype)
        reads = xp.ascontiguousarray(grad), x, *kept
        record_flat(kernels.backward, reads, ((*expected, to_bias), scratch))


class CompiledDirect(Compiled3x3):
    """With ReLU and pooling; for few channels and no input gradient: a network's first layer."""

    def plan(self, sizes: tuple[int, ...], gradients: bool) -> CompiledPair:
        """See `Compiled3x3.plan`."""
        h, w, c, o = sizes
        return load().direct(*sizes), 0, ((9 * c + 1) * o, (h + 2) * (w + 2) * c)


class CompiledWinograd(Compiled3x3):
    """Alone, or with ReLU and pooling."""

    def plan(self, sizes: tuple[int, ...], gradients: bool) -> CompiledPair:
        """See `Compiled3x3.plan`."""
        z = load().sizes(*sizes)
        return (
            load().winograd(z, self.spec.pool != NO_POOL),
            16 * z.c * z.o,
            z.scratch(gradients),
        )


def _scratch(xp: Any, counts: tuple[int, ...], dtype: Any) -> tuple[Array, ...]:
    return tuple([xp.empty((count,), dtype) for count in counts])
