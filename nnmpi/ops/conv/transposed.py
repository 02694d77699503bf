"""Transposed convolution: from small images to large ones, as in a decoder.

    x (n, h, w, c)  --each pixel times the kernel, added to its window of y-->  y (n, H, W, o)

Forward and backward change places with an ordinary convolution C from (H, W, o) to (h, w, c):

    forward     y = C's input gradient for the output gradient x
    backward    dx = C(dy),     dW = C's weight gradient for images dy and output gradient x

So the algorithms of convolutions compute both. Dumoulin and Visin, "A guide to convolution
arithmetic for deep learning", 2016, section 4.
"""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import cast
from nnmpi.backend.windows import PairLike, RowsAndColumns, pair
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.ops.conv.algorithm import ConvAlgorithm, ConvSpec, Gradients
from nnmpi.ops.conv.im2col import Im2col
from nnmpi.ops.conv.on_device import on_device
from nnmpi.ops.linear import place_for
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import given, require_floating
from nnmpi.tensor.tensor import Tensor

__all__ = ["conv_transpose2d"]


class ConvTranspose2dFunction(Function):
    """See the head of this file.

    Args:
        spec: the ordinary convolution from y to x.
        size: rows and columns of the result.
    """

    __slots__ = ("size", "spec")

    computes = "product"

    def __init__(self, spec: ConvSpec, size: RowsAndColumns) -> None:
        self.spec, self.size = spec, size

    def forward(self, x: Array, weight: Array) -> Array:
        xp, dtype = self.xp, x.dtype
        x, weight = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
        x = x if self.product_dtype is None else cast(x, self.product_dtype)
        y = xp.empty((len(x), *self.size, weight.shape[2] * self.spec.groups), x.dtype)
        convolution = _algorithm(y, self.spec, x.shape[3])
        convolution.backward(x, y, weight, None, Gradients(y, None, None))
        self.saved = (x, weight, dtype)
        return y

    def backward(self, grad: Array) -> Grads:
        (x, weight, dtype), xp = self.saved, self.xp
        grad, to_x, to_weight = xp.ascontiguousarray(grad), None, None
        convolution = _algorithm(grad, self.spec, x.shape[3])
        if self.needs[0]:
            to_x = xp.empty(x.shape, x.dtype)
            convolution.forward(grad, weight, None, to_x, False)
            to_x = cast(to_x, dtype)
        if self.needs[1]:
            to_weight = place_for(self, 1, weight.shape, weight.dtype)
            convolution.backward(x, grad, weight, None, Gradients(None, to_weight, None))
        return to_x, to_weight


def _algorithm(y: Array, spec: ConvSpec, outputs: int) -> ConvAlgorithm:
    """Return the algorithm for the ordinary convolution of y."""
    return Im2col(spec) if isinstance(y, np.ndarray) else on_device(y, spec, outputs)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PairLike = 1,
    padding: PairLike = 0,
    output_padding: PairLike = 0,
    dilation: PairLike = 1,
    groups: int = 1,
) -> Tensor:
    """Transposed convolution: (n, h, w, c) -> (n, H, W, o).

    H = (h - 1) stride - 2 padding + reach + extra.

    Args:
        x: (n, h, w, c).
        weight: (kh, kw, o / groups, c).
        bias: (o,), or None.
        stride, padding, dilation: one number, or one for rows and one for columns, of the
            convolution from y to x.
        output_padding: extra rows and columns of y at its end, fewer than stride.
        groups: channels are split into this many groups that do not mix.

    Raises:
        ShapeError: when shapes do not fit one another.
        UsageError: for options out of range.
        DtypeError: when x, weight and bias differ in dtype.
    """
    may_meet("conv_transpose2d", require_floating("conv_transpose2d", x), weight, *given(bias))
    steps = pair("stride", stride, 1)
    border = pair("padding", padding, 0)
    spread = pair("dilation", dilation, 1)
    extra = pair("output_padding", output_padding, 0)
    if extra[0] >= steps[0] or extra[1] >= steps[1]:
        raise UsageError(
            f"output_padding {output_padding} is not below stride {stride}; give 0, or a larger"
            " stride"
        )
    if (
        x.ndim != 4
        or weight.ndim != 4
        or x.shape[3] != weight.shape[3]
        or x.shape[3] % check_int("groups", groups)
    ):
        raise ShapeError(
            "conv_transpose2d needs images (n, h, w, c) and a weight (kh, kw, o / groups, c), c a"
            f" multiple of groups, not {x.shape} and {weight.shape} with {groups} groups"
        )
    if bias is not None and bias.shape != (weight.shape[2] * groups,):
        raise ShapeError(
            f"conv_transpose2d's bias has shape {bias.shape}; give ({weight.shape[2] * groups},)"
        )
    axes = zip(x.shape[1:3], weight.shape[:2], steps, border, spread, extra, strict=True)
    rows, columns = (
        (n - 1) * step - 2 * edge + apart * (k - 1) + 1 + more
        for n, k, step, edge, apart, more in axes
    )
    if min(rows, columns) < 1:
        raise ShapeError(
            f"images {x.shape} would become {rows} x {columns} pixels; use less padding"
        )
    spec = ConvSpec((weight.shape[0], weight.shape[1]), steps, border, spread, groups)
    y = ConvTranspose2dFunction(spec, (rows, columns))(x, weight)
    return y if bias is None else y + bias
