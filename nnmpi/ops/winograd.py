"""Compiled convolution with 3 x 3 kernels, by Winograd's transforms or, of few channels, directly (see `nnmpi.jit`).

`conv2d`, `conv_relu` and `conv_relu_pool` use it where it fits: float32 on the CPU, stride 1, a border of 1, one group,
even height and width, and pooling over 2 x 2 pixels or none. The kernels are in nnmpi/backend/kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.active import kernels
from nnmpi.backend.kernels.tiling import Sizes, sizes
from nnmpi.backend.windows import Pair
from nnmpi.ops.columns import Frame
from nnmpi.tensor.function import Function, recording
from nnmpi.tensor.tensor import Tensor

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels
    from nnmpi.backend.kernels.table import Pair as Compiled

FEW = 4  # input channels, up to which the direct kernel is taken where it can be
FEWEST_OUTPUTS = 9  # loops over fewer numbers are unrolled instead of vectorised: half as fast as the plain operations


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, frame: Frame, groups: int) -> bool:
    """Return whether compiled kernels are switched on and one of them computes this; shapes fit one another."""
    compiled = kernels()
    if compiled is None or frame[:4] != ((3, 3), (1, 1), (1, 1), (1, 1)) or groups != 1:
        return False
    _, h, w, c = x.shape
    if h % 2 or w % 2 or min(h, w, c) == 0 or weight.shape[3] < FEWEST_OUTPUTS or frame.pool not in ((1, 1), (2, 2)):
        return False
    return all(map(_plain, (x, weight, bias))) and (_is_direct(x, frame.pool) or compiled.has_products)


def compiled_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Pair = (1, 1), relu: bool = True) -> Tensor:
    """Return max_pool2d(relu(conv2d(x, weight, bias, padding=1)), pool), for arguments that fit.

    Args:
        x: images, (batch, height, width, in).
        weight: (3, 3, in, out).
        bias: (out,), or None.
        pool: (2, 2), or (1, 1) for none.
        relu: whether there is one; before a pooling there must be.
    """
    compiled = kernels()
    assert compiled is not None  # `fits` said so
    if _is_direct(x, pool):
        return Direct(compiled)(x, weight, bias)
    return Winograd(compiled, pool == (2, 2), relu)(x, weight, bias)


class Direct(Function):
    """max_pool2d(relu(conv2d(x, weight, bias, padding=1)), 2) of images that need no gradient."""

    __slots__ = ("kernels",)

    replayable = True

    def __init__(self, compiled: Kernels) -> None:
        self.kernels = compiled

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, (n, h, w, c), o = self.xp, x.shape, weight.shape[3]
        x = _flat(xp, x)
        y: Array = xp.empty((n, h // 2, w // 2, o), x.dtype)
        corner = xp.empty((y.size,), np.uint8)
        sums, border = xp.empty((4 * o,), x.dtype), xp.empty(((h + 2) * (w + 2) * c,), x.dtype)
        kernel = self.kernels.direct(h, w, c, o).forward
        self.invoke(kernel, x, _flat(xp, weight), _bias(xp, bias, o), y.reshape(y.size), corner, sums, border)
        self.saved = (x, corner, weight.shape, (h, w, c, o))
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, corner, shape, (h, w, c, o) = self.saved
        xp, dtype = self.xp, grad.dtype
        to_weight, to_bias = _place(xp, self.into(1), shape, dtype), _place(xp, self.into(2), (o,), dtype)
        part, border = xp.empty((9 * c * o + o,), dtype), xp.empty(((h + 2) * (w + 2) * c,), dtype)
        kernel = self.kernels.direct(h, w, c, o).backward
        self.invoke(kernel, _flat(xp, grad), x, corner, to_weight.reshape(9 * c * o), to_bias, part, border)
        return None, to_weight if self.needs[1] else None, to_bias if self.needs[2] else None


class Winograd(Function):
    """conv2d(x, weight, bias, padding=1), then ReLU and pooling over 2 x 2 pixels, or ReLU, or nothing."""

    __slots__ = ("kernels", "pooled", "relu")

    replayable = True

    def __init__(self, compiled: Kernels, pooled: bool, relu: bool) -> None:
        self.kernels, self.pooled, self.relu = compiled, pooled, relu

    def _kernels(self, z: Sizes) -> Compiled:
        return self.kernels.winograd(z, self.pooled, self.relu)

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, dtype, (n, h, w, c), o = self.xp, x.dtype, x.shape, weight.shape[3]
        z = sizes(h, w, c, o)
        y: Array = xp.empty((n, h // 2, w // 2, o) if self.pooled else (n, h, w, o), dtype)
        corner = xp.empty((y.size if self.pooled else 0,), np.uint8)
        u, (v, m, border) = xp.empty((16 * c * o,), dtype), _scratch(xp, z, dtype)
        given = _flat(xp, x), _flat(xp, weight), _bias(xp, bias, o)
        flat = y.reshape(y.size)
        self.invoke(self._kernels(z).forward, *given, flat, corner, u, v, m, border)
        self.saved = (given[0], flat, corner, u, z, x.shape, weight.shape)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, y, corner, u, z, shape, kernel_shape = self.saved
        xp, dtype, o = self.xp, grad.dtype, kernel_shape[3]
        for_x, for_weight = self.needs[0], self.needs[1]
        to_x = xp.empty(shape if for_x else (0,), dtype)
        to_weight, to_bias = _place(xp, self.into(1), kernel_shape, dtype), _place(xp, self.into(2), (o,), dtype)
        gradients = to_x.reshape(to_x.size), to_weight.reshape(to_weight.size), to_bias
        sums, du, ut = xp.empty((o,), dtype), xp.empty(u.shape, dtype), xp.empty(u.shape, dtype)
        v, m, border = _scratch(xp, z, dtype)
        spread = xp.empty(border.shape, dtype)
        scratch = sums, du, ut, v, m, border, spread
        self.invoke(
            self._kernels(z).backward, _flat(xp, grad), x, y, corner, u, *gradients, *scratch, for_x, for_weight
        )
        return to_x if for_x else None, to_weight if for_weight else None, to_bias if self.needs[2] else None


def _plain(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == np.float32 and type(tensor.data) is np.ndarray)


def _is_direct(x: Tensor, pool: Pair) -> bool:
    return x.shape[3] <= FEW and pool == (2, 2) and not (x.requires_grad and recording())


def _flat(xp: Any, array: Array) -> Array:
    flat: Array = xp.reshape(xp.ascontiguousarray(array), (array.size,))
    return flat


def _bias(xp: Any, bias: Array | None, o: int) -> Array:
    result: Array = xp.zeros((o,), np.float32) if bias is None else _flat(xp, bias)
    return result


def _place(xp: Any, into: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return where a gradient goes: its own place, if kernels can write there."""
    result: Array = into if into is not None and into.flags.c_contiguous else xp.empty(shape, dtype)
    return result


def _scratch(xp: Any, z: Sizes, dtype: Any) -> list[Array]:
    return [xp.empty((size,), dtype) for size in z.scratch]
