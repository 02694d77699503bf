"""Convolutions on the host in bf16: images, kernels and the result's gradient are rounded.

Sums are in float32, and neither the bias nor its gradient is rounded. The two algorithms give the
same numbers, up to the order of sums and to Winograd's transforms.
"""

from typing import Any

from nnmpi.backend import onednn
from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.backend.kernels import add_bias
from nnmpi.backend.precision import round_to_bfloat16
from nnmpi.backend.recording import call
from nnmpi.ops.conv.algorithm import ConvAlgorithm, Gradients
from nnmpi.ops.conv.im2col import bias_gradient
from nnmpi.ops.conv.winograd_numpy import WinogradNumpy


def rounding(exact: ConvAlgorithm, x: Shape, weight: Shape) -> ConvAlgorithm:
    """Return the algorithm for a convolution of rounded arrays.

    It is oneDNN's, unless that has no fast code for it. With AMX it is 1.4 to 7 times as fast as
    the others without rounding (Emerald Rapids), but for the gradients of 512 channels (0.8). Twice
    the speed of float32, which is AVX512-BF16's, is less than what Winograd's algorithm gains.

    Args:
        exact: the algorithm without rounding, without pooling.
        x, weight: shapes (n, h, w, c) and (kh, kw, c / groups, o).
    """
    library, spec = onednn.installed(), exact.spec
    if library is None or (library.unit == onednn.AVX512 and isinstance(exact, WinogradNumpy)):
        return Rounded(exact)
    y = (x[0], *spec.pooled_size(*x[1:3]), weight[3])
    return ByOnednn(spec) if onednn.convolves(x, weight, y, spec[1:5]) else Rounded(exact)


class Rounded(ConvAlgorithm):
    """A convolution of rounded arrays by another algorithm, without pooling."""

    def __init__(self, exact: ConvAlgorithm) -> None:
        super().__init__(exact.spec)
        self._exact = exact

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Any:
        images, kernels = round_to_bfloat16(x), round_to_bfloat16(weight)
        return self._exact.forward(images, kernels, bias, y, keep)

    def backward(self, grad: Array, x: Array, weight: Array, kept: Any, out: Gradients) -> None:
        grad = namespace(grad).ascontiguousarray(grad)
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        grad, images, kernels = (round_to_bfloat16(item) for item in (grad, x, weight))
        self._exact.backward(grad, images, kernels, kept, out._replace(bias=None))


class ByOnednn(ConvAlgorithm):
    """Any convolution without pooling, by oneDNN."""

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        call(onednn.convolve, (x, weight), (y, self.spec[1:5]))
        if bias is not None:
            add_bias(y, bias)

    def backward(self, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        grad, windows = namespace(grad).ascontiguousarray(grad), self.spec[1:5]
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        if out.x is not None:
            call(onednn.image_gradient, (grad, weight), (out.x, windows))
        if out.weight is not None:
            call(onednn.weight_gradient, (x, grad), (out.weight, windows))
