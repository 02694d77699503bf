"""Which algorithm a convolution takes: here, and nowhere else.

arrays on a device, kernels on                                      DeviceIm2col
NumPy, float32, `jit` on          3 x 3, ReLU and pooling, few      CompiledDirect
                                  channels, x needs no gradient
                                  3 x 3, no or 2 x 2 pooling        CompiledWinograd
NumPy                             3 x 3, many channels, even size   WinogradNumpy
any library                       ReLU, one group, stride 1         Im2colReluPool
                                  no ReLU                           Im2col
                                  otherwise                         None: conv2d, relu and max_pool2d one by one
"""

from typing import Any

import numpy as np

from nnmpi.backend.kernels import compiled_kernels, kernels_for
from nnmpi.ops.conv.algorithm import NO_POOL, Algorithm, ConvSpec
from nnmpi.ops.conv.compiled_3x3 import CompiledDirect, CompiledWinograd
from nnmpi.ops.conv.device_im2col import DeviceIm2col
from nnmpi.ops.conv.im2col import Im2col, Im2colReluPool
from nnmpi.ops.conv.winograd_numpy import WinogradNumpy, image_bytes
from nnmpi.tensor.function import recording
from nnmpi.tensor.tensor import Tensor

# WinogradNumpy, measured against im2col
FEW_CHANNELS = 16  # below, the transforms cost more than the products that they save
LARGE_BYTES = 1 << 23  # of one image's transforms: above, they would come from memory and not from a cache

# compiled kernels
DIRECT_CHANNELS = 4  # input channels, up to which the direct kernel is taken where it can be
FEWEST_OUTPUTS = 9  # loops over fewer numbers are unrolled instead of vectorized: half as fast as the plain operations


def choose_on_device(x: Tensor, spec: ConvSpec, dtype: np.dtype[Any]) -> DeviceIm2col | None:
    """Return the algorithm for images on a device; None for NumPy's, and where a device's kernels are switched off.

    Args:
        x: images (n, h, w, c).
        spec: what is computed.
        dtype: in which products read their inputs.
    """
    kernels = None if type(x.data) is np.ndarray else kernels_for(x.data, "functions")
    return None if kernels is None else DeviceIm2col(spec, dtype, kernels.functions)


def choose(x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvSpec) -> Algorithm | None:
    """Return the algorithm that computes through the array library or by numba; None where none does all of it at once.

    Args:
        x: images (n, h, w, c).
        weight: (kh, kw, c / groups, o); shapes fit one another.
        bias: (o,), or None.
        spec: what is computed.
    """
    if fits_compiled(x, weight, bias, spec):
        compiled = compiled_kernels()
        assert compiled is not None  # as it fits
        kind = CompiledDirect if _is_direct(x, spec) else CompiledWinograd
        return kind(spec, compiled.functions)
    if fits_winograd(x, weight, spec):
        return WinogradNumpy(spec)
    if not spec.relu:
        return Im2col(spec)
    return Im2colReluPool(spec) if spec.groups == 1 and spec.reversible else None


def fits_compiled(x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvSpec) -> bool:
    """Return whether numba's kernels are switched on and one of them computes this; arguments are those of `choose`."""
    compiled = compiled_kernels()
    if compiled is None or not _is_plain_3x3(spec):
        return False
    _, h, w, c = x.shape
    if h % 2 or w % 2 or min(h, w, c) == 0 or weight.shape[3] < FEWEST_OUTPUTS:  # a tile of the result is 2 x 2
        return False
    return all(map(_is_float32, (x, weight, bias))) and (_is_direct(x, spec) or compiled.functions.has_products())


def fits_winograd(x: Tensor, weight: Tensor, spec: ConvSpec) -> bool:
    """Return whether `WinogradNumpy` computes this, and faster than im2col; arguments are those of `choose`."""
    if not _is_plain_3x3(spec):
        return False
    (n, h, w, c), o = x.shape, weight.shape[3]
    if h % 2 or w % 2 or min(c, o) < FEW_CHANNELS or type(x.data) is not np.ndarray or x.dtype.kind != "f":
        return False
    return n > 0 and image_bytes(h, w, c, o, x.dtype.itemsize) <= LARGE_BYTES


def _is_plain_3x3(spec: ConvSpec) -> bool:
    """Return whether Winograd's tiles serve: 3 x 3, stride 1, a border of 1, one group, and pooling over tiles."""
    return spec[:5] == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and spec.pool in (NO_POOL, (2, 2))


def _is_direct(x: Tensor, spec: ConvSpec) -> bool:
    """Return whether the direct kernel serves, which gives no gradient of the images."""
    return x.shape[3] <= DIRECT_CHANNELS and spec.pool == (2, 2) and not (x.requires_grad and recording())


def _is_float32(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == np.float32 and type(tensor.data) is np.ndarray)
