"""The operations: their Functions, checks of shapes and dtypes, the choice of an algorithm.

    images (n, h, w, c)  +  kernels (kh, kw, c / groups, o)  +  bias (o,)
                                   |
                                   v  Conv2dFunction, by the algorithm that `choose` returns
           (n, out_h, out_w, o), with ReLU and max-pooling if they follow

The first row that fits is chosen (docs/speed.md has what each gains):

arrays                      convolution                            algorithm
NumPy, float32, in bf16     no pooling                             ByOnednn, or Rounded: one of the
                                                                   next, of rounded arrays
                            otherwise                              None
NumPy                       a group for each channel               Depthwise; with pooling: None
NumPy, float32, `jit` on    3 x 3, even size, no or 2 x 2          CompiledWinograd
                            pooling, unless WinogradNumpy does it
                            for large kernels or 8 to 15 channels
NumPy                       3 x 3, many channels or groups, size   WinogradNumpy, tiles of 4 x 4;
                            a multiple of 4, no or 2 x 2 pooling   with pooling: None
                            3 x 3 or 5 x 5, many channels or       WinogradNumpy, tiles of 2 x 2
                            groups, even size, no or 2 x 2 pooling
                            no pooling                             Im2col
CuPy                        no pooling                             by `on_device`
any library                 otherwise                              None: conv2d, max_pool2d and
                                                                   relu one by one

The choice depends on shapes, dtypes and switches alone, never on timings: a repeated run has the
same bits. In half precision a device computes in float16 or bfloat16. In fp16 NumPy computes in
float32 and rounds the result.

In three dimensions the planes of a volume lie side by side as channels of images. So x is copied
kernel_depth times, and the planes' sum is the product's own:

    x        (n, depth, h, w, c) -> (n * out_depth, h, w, kernel_depth * c), copies
    weight   (kernel_depth, kh, kw, c, out) -> (kh, kw, kernel_depth * c, out)

A transposed convolution goes from small images to large ones, as in a decoder. Its forward and
backward change places with those of an ordinary convolution C from (H, W, o) to (h, w, c), whose
algorithms compute both (Dumoulin and Visin, "A guide to convolution arithmetic for deep learning",
2016, section 4):

    x (n, h, w, c)  --each pixel times the kernel, added to its window of y-->  y (n, H, W, o)

    forward     y = C's input gradient for the output gradient x
    backward    dx = C(dy),     dW = C's weight gradient for images dy and output gradient x
"""

from math import prod

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import cast, kernels_of
from nnmpi.backend.precision import FLOAT32, rounds_products
from nnmpi.backend.windows import PairLike, RowsAndColumns, Triple, out_size, pair, triple
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.ops.activation import relu
from nnmpi.ops.conv.algorithm import NO_POOL, ConvAlgorithm, ConvSpec, Gradients
from nnmpi.ops.conv.compiled_3x3 import CompiledWinograd
from nnmpi.ops.conv.depthwise import CompiledDepthwise, Depthwise
from nnmpi.ops.conv.im2col import Im2col
from nnmpi.ops.conv.on_device import on_device
from nnmpi.ops.conv.rounded import rounding
from nnmpi.ops.conv.winograd_numpy import WinogradNumpy, places_per_image
from nnmpi.ops.linear import place_for
from nnmpi.ops.pool import max_pool2d
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Function, Grads, lowered
from nnmpi.tensor.operand import given, require_floating
from nnmpi.tensor.tensor import Tensor, stack
from nnmpi.tensor.traits import WRITTEN, Channels, Sample, Traits

__all__ = ["conv2d", "conv3d", "conv_relu_pool", "conv_transpose2d"]

# {side of a tile: channels}. With fewer channels WinogradNumpy's transforms cost more than the
# products that they save. Measured for 32 images of 32 x 32, forward and backward (Xeon): from 24
# to 12 channels, tiles of 4 take 10.4 ms and im2col 21.5; from 8 to 8 channels, 4.6 and 6.9 ms. For
# kernels of 5 x 5 and images of 16 x 16: from 16 to 32 channels 12.6 and 13.1 ms, from 64 to 192
# half of im2col's time.
FEW_CHANNELS = {2: 16, 4: 8}
# The transforms of a larger image take too much memory. Below, they are faster than im2col even
# beyond the cache: 2 images of 224 x 224 with 64 channels take 289 ms instead of 514.
LARGE_BYTES = 1 << 26
# With so many channels (input times output) transformed kernels take much of the time and memory:
# compiled kernels, whose blocks are smaller, are slower, and for few pixels tiles of 2 x 2 as fast
# as those of 4 x 4. For 32 images of 8 x 8 (Xeon), tiles of 4 and compiled: 128 to 128 channels
# 11.8 and 11.6 ms, 256 to 256 channels 55.6 and 64.6 ms.
LARGE_KERNELS, FEW_PIXELS = 1 << 16, 1024
# With fewer channels compiled products are slower: for 32 images of 32 x 32, from 12 to 24 channels
# 21.3 ms and tiles of 4 in 14.2; from 16 to 16 channels 8.9 and 10.4 ms.
COMPILED_CHANNELS = 16

# Compilers unroll loops over fewer outputs instead of vectorizing them, which is half as fast as
# NumPy.
FEWEST_OUTPUTS = 9


class Conv2dFunction(Function):
    """Convolution without flipped kernels, with a bias, perhaps with ReLU and pooling.

    Args:
        algorithm: computes its `spec`.
    """

    __slots__ = ("algorithm",)

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.FIRST,
        products=lambda f, y, x, weight, *_: (
            weight.size
            * len(x)
            * prod(f.algorithm.spec._replace(pool=(1, 1)).pooled_size(*x.shape[1:3]))
        ),
        samples=(
            Sample(
                "conv2d",
                lambda x, weight, bias: conv2d(x, weight, bias, padding=1),
                ((2, 5, 4, 3), (3, 3, 3, 2), (2,)),
                parameters=2,
            ),
            Sample(
                "conv2d groups",
                lambda x, weight: conv2d(x, weight, None, (2, 1), (0, 2), (1, 2), 2),
                ((2, 5, 4, 4), (2, 3, 2, 6)),
                parameters=1,
            ),
            Sample(
                "conv2d depthwise",
                lambda x, weight: conv2d(x, weight, padding=1, groups=3),
                ((2, 4, 4, 3), (3, 3, 1, 3)),
                parameters=1,
            ),
        ),
    )

    computes = "product"

    def __init__(self, algorithm: ConvAlgorithm) -> None:
        self.algorithm = algorithm

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, algorithm, dtype = self.xp, self.algorithm, x.dtype
        x, weight = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
        x = x if self.product_dtype is None else cast(x, self.product_dtype)
        bias = None if bias is None else xp.ascontiguousarray(bias)
        y = xp.empty((len(x), *algorithm.spec.pooled_size(*x.shape[1:3]), weight.shape[3]), x.dtype)
        saved = algorithm.forward(x, weight, bias, y, True in self.needs)
        self.saved = (x, weight, saved, dtype)
        return y

    def backward(self, grad: Array) -> Grads:
        x, weight, saved, dtype = self.saved
        out = Gradients(
            self.xp.empty(x.shape, x.dtype) if self.needs[0] else None,
            *(
                place_for(self, i, shape, weight.dtype) if self.needs[i] else None
                for i, shape in ((1, weight.shape), (2, weight.shape[3:]))
            ),
        )
        self.algorithm.backward(grad, x, weight, saved, out)
        return out if out.x is None else out._replace(x=cast(out.x, dtype))


def choose(x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvSpec) -> ConvAlgorithm | None:
    """Return the algorithm for a convolution; None if none computes all of it at once.

    Args:
        x: images (n, h, w, c).
        weight: (kh, kw, c / groups, o); its shape fits x.
        bias: (o,), or None.
        spec: the convolution.
    """
    if not (rounds_products(x._data) and x.dtype == FLOAT32):
        return _choose_exact(x, weight, bias, spec)
    # alone: a pooling in a block of tiles would round otherwise than one by itself
    exact = _choose_exact(x, weight, bias, spec) if spec.pool == NO_POOL else None
    return None if exact is None else rounding(exact, x.shape, weight.shape)


def _choose_exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvSpec
) -> ConvAlgorithm | None:
    """Return the algorithm of `choose` for arrays that are not rounded before."""
    (n, h, w, c), o, kernels = x.shape, weight.shape[3], kernels_of(x._data)
    kernel, alone = spec.kernel[0], spec.pool == NO_POOL
    same = (kernel, kernel), (1, 1), (kernel // 2, kernel // 2), (1, 1)
    # a tile of 2 x 2 results is also a window of the pooling
    plain = kernel in (3, 5) and spec[:4] == same and (alone or spec.pool == (2, 2))
    if not isinstance(x._data, np.ndarray):
        return on_device(x._data, spec, o) if alone else None
    single = all(item is None or item.dtype == FLOAT32 for item in (weight, bias))
    if 1 < spec.groups == c == o and x.dtype.kind == "f":
        each = CompiledDepthwise if kernels.convolves and single and x.size else Depthwise
        return each(spec) if alone else None
    if plain and not h % 2 and not w % 2 and min(h, w, c) > 0:
        many = spec.groups > 1  # im2col takes one group after another
        large = c * o >= LARGE_KERNELS * spec.groups
        few = large and n * h * w < FEW_PIXELS
        side = 2 if kernel == 5 or h % 4 or w % 4 or few else 4
        image = places_per_image(h, w, side, kernel) * (c + o) * x.dtype.itemsize
        enough = (many or min(c, o) >= FEW_CHANNELS[side]) and image <= LARGE_BYTES
        tiled = n > 0 and x.dtype.kind == "f" and enough
        if (
            kernels.convolves
            and kernel == 3
            and not many
            and single
            and o >= FEWEST_OUTPUTS
            and not (tiled and (large or min(c, o) < COMPILED_CHANNELS))
            and kernels.has_products()
        ):
            return CompiledWinograd(spec)
        if tiled:  # with a pooling of its own, tiles of 4 take 0.7 of the time of fused tiles of 2
            return WinogradNumpy(spec, side) if alone or side == 2 else None
    return Im2col(spec) if alone else None


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PairLike = 1,
    padding: PairLike = 0,
    dilation: PairLike = 1,
    groups: int = 1,
) -> Tensor:
    """Return the two-dimensional convolution of images with a bank of kernels.

    Args:
        x: images, (batch, height, width, in).
        weight: kernels, (kernel_height, kernel_width, in / groups, out).
        bias: (out,), or None.
        stride, padding, dilation: one number, or one for rows and one for columns. Padding is with
            zeros.
        groups: the channels are split into this many groups that do not mix.

    Returns:
        (batch, out_height, out_width, out), out_height = (height + 2 padding - dilation (kernel -
        1) - 1) / stride + 1.

    Raises:
        ShapeError: when the shapes do not fit one another, or the kernel does not fit the image.
        DtypeError: when x, weight and bias differ in dtype.
        UsageError: for a stride or dilation below 1, a negative padding, or groups that do not
            divide the channels.

    Example:
        >>> x, kernel = np.ones((1, 5, 5, 2), "float32"), np.ones((3, 3, 2, 4), "float32")
        >>> y = ops.conv2d(nnmpi.Tensor(x), nnmpi.Tensor(kernel), padding=1)
        >>> y.shape, y.numpy()[0, 2, 2, 0].item(), y.numpy()[0, 0, 0, 0].item()
        ((1, 5, 5, 4), 18.0, 8.0)
    """
    return convolve(
        x, weight, bias, checked_spec(x, weight, bias, stride, padding, dilation, groups)
    )


def conv_relu_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PairLike = 1,
    padding: PairLike = 0,
    dilation: PairLike = 1,
    groups: int = 1,
    pool: PairLike = 2,
) -> Tensor:
    """Return max_pool2d(relu(conv2d(...)), pool), where that pays as one operation.

    Args:
        x, weight, bias, stride, padding, dilation, groups: as for `conv2d`.
        pool: the window of the pooling, whose stride is its size; one number, or one for rows and
            one for columns. Rows and columns that fill no window are left out.

    Raises:
        ShapeError, DtypeError, UsageError, DeviceError: see `conv2d` and `max_pool2d`.
    """
    sizes = pair("pool", pool, 1)
    require_floating("conv_relu_pool", x)
    spec = checked_spec(x, weight, bias, stride, padding, dilation, groups)._replace(pool=sizes)
    if sizes == NO_POOL or min(spec.pooled_size(*x.shape[1:3])) < 1:
        y = relu(convolve(x, weight, bias, spec._replace(pool=NO_POOL)))
        # too few pixels: the pooling refuses its own input in its own words
        return y if sizes == NO_POOL else max_pool2d(y, sizes)
    return convolve(x, weight, bias, spec)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvSpec) -> Tensor:
    """Return the convolution `spec`, by the algorithm of `choose`.

    Shapes must fit one another. There may be no images and no rows of windows: a rank's shard of
    images may be empty.

    Args:
        x: images (n, h, w, c).
        weight: (kh, kw, c / groups, o).
        bias: (o,), or None.
        spec: the convolution.

    Raises:
        DtypeError: when x, weight and bias differ in dtype, and the precision does not allow it.
    """
    # here, since the choice depends on the dtype
    inputs, low = Conv2dFunction(Im2col(spec)).raised((x, weight, bias))
    return lowered(_convolve(spec, *inputs), low)


def _convolve(spec: ConvSpec, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    algorithm = choose(x, weight, bias, spec)
    if algorithm is not None:
        return Conv2dFunction(algorithm)(x, weight, bias)
    y = _convolve(spec._replace(pool=NO_POOL), x, weight, bias)
    # pooling before ReLU: then nothing of the larger array is saved
    return relu(max_pool2d(y, spec.pool))


def checked_spec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: PairLike,
    padding: PairLike,
    dilation: PairLike,
    groups: int,
) -> ConvSpec:
    """Return the specification of `conv2d`'s arguments; errors are its own."""
    may_meet("conv2d", x, weight, *given(bias))
    steps = pair("stride", stride, 1)
    border = pair("padding", padding, 0)
    spread = pair("dilation", dilation, 1)
    if x.ndim != 4:
        raise ShapeError(
            f"conv2d needs images (batch, height, width, channels), not an array of shape {x.shape}"
        )
    if weight.ndim != 4:
        raise ShapeError(
            f"conv2d needs a weight (kernel_height, kernel_width, in, out), not {weight.shape}"
        )
    if x.shape[3] % check_int("groups", groups) or weight.shape[3] % groups:
        raise UsageError(
            f"groups {groups} does not divide {x.shape[3]} input and {weight.shape[3]} output"
            " channels; give a divisor"
        )
    if weight.shape[2] * groups != x.shape[3]:
        first = x.shape[1] == weight.shape[2] * groups
        hint = (
            "; channels come last here: x.transpose(0, 2, 3, 1) brings PyTorch's images over"
            if first
            else ""
        )
        raise ShapeError(
            f"conv2d of images {x.shape} with {groups} groups needs a weight (.., ..,"
            f" {x.shape[3] // groups}, ..), not {weight.shape}{hint}"
        )
    if bias is not None and bias.shape != weight.shape[3:]:
        raise ShapeError(
            f"conv2d's bias has shape {bias.shape}; the weight {weight.shape} needs"
            f" {weight.shape[3:]}"
        )
    for axis, name in ((0, "height"), (1, "width")):
        kernel, size = weight.shape[axis], x.shape[axis + 1]
        if out_size(size, kernel, steps[axis], border[axis], spread[axis]) < 1:
            reach = spread[axis] * (kernel - 1) + 1
            raise ShapeError(
                f"a kernel that spans {reach} pixels does not fit a {name} of {size} + 2 *"
                f" {border[axis]}"
            )
    return ConvSpec((weight.shape[0], weight.shape[1]), steps, border, spread, groups)


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Triple = 1,
    padding: Triple = 0,
    dilation: Triple = 1,
    groups: int = 1,
) -> Tensor:
    """Return the three-dimensional convolution of volumes with a bank of kernels.

    Args:
        x: (batch, depth, height, width, in).
        weight: (kernel_depth, kernel_height, kernel_width, in / groups, out).
        bias: (out,), or None.
        stride, padding, dilation: one number, or one for each axis. Padding is with zeros.
        groups: see `conv2d`.

    Returns:
        (batch, out_depth, out_height, out_width, out), sizes as for `conv2d`.

    Same errors as `conv2d`.
    """
    (step, *steps), (border, *borders), (gap, *gaps) = (
        triple(*item)
        for item in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    )
    for item in (x, weight):
        require_floating("conv3d", item)
    if x.ndim != 5 or weight.ndim != 5:
        raise ShapeError(
            f"conv3d of {x.shape} and a weight {weight.shape} needs (batch, depth, height, width,"
            " channels) and (kernel_depth, kernel_height, kernel_width, in / groups, out)"
        )
    if border:
        x = x.pad(((0, 0), (border, border), (0, 0), (0, 0), (0, 0)))
    groups, (n, depth, h, w, c), (kernel, *sides, per, out) = (
        check_int("groups", groups), x.shape, weight.shape
    )  # fmt: skip
    planes = (depth - gap * (kernel - 1) - 1) // step + 1
    if planes < 1 or c != per * groups:
        raise ShapeError(f"conv3d of kernels {weight.shape} does not fit volumes {x.shape}")
    # within each group of channels, so that groups stay together
    taps = [
        x[:, i * gap : i * gap + step * (planes - 1) + 1 : step].reshape(
            n * planes, h, w, groups, per
        )
        for i in range(kernel)
    ]
    y = conv2d(
        stack(taps, 4).reshape(n * planes, h, w, kernel * c),
        weight.transpose(1, 2, 0, 3, 4).reshape(*sides, kernel * per, out),
        bias,
        (steps[0], steps[1]),
        (borders[0], borders[1]),
        (gaps[0], gaps[1]),
        groups,
    )
    return y.reshape(n, planes, *y.shape[1:])


class ConvTranspose2dFunction(Function):
    """A convolution of images (n, h, w, c) from small to large, see the head of this file.

    Args:
        spec: the ordinary convolution from y to x.
        size: rows and columns of the result.
    """

    __slots__ = ("size", "spec")

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.FIRST,
        products=lambda f, y, x, weight: weight.size * prod(x.shape[:3]),
        samples=(
            Sample(
                "conv_transpose2d",
                lambda x, weight, bias: conv_transpose2d(x, weight, bias, (2, 3), 1, (1, 2)),
                ((2, 3, 4, 2), (3, 3, 3, 2), (3,)),
                parameters=2,
            ),
        ),
    )

    computes = "product"

    def __init__(self, spec: ConvSpec, size: RowsAndColumns) -> None:
        self.spec, self.size = spec, size

    def _convolution(self, y: Array, weight: Array) -> ConvAlgorithm:
        """Return the algorithm for the ordinary convolution of y."""
        if not isinstance(y, np.ndarray):
            return on_device(y, self.spec, weight.shape[3])
        exact = Im2col(self.spec)
        return rounding(exact, y.shape, weight.shape) if self.rounds else exact

    def forward(self, x: Array, weight: Array) -> Array:
        xp, dtype = self.xp, x.dtype
        x, weight = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
        x = x if self.product_dtype is None else cast(x, self.product_dtype)
        y = xp.empty((len(x), *self.size, weight.shape[2] * self.spec.groups), x.dtype)
        convolution = self._convolution(y, weight)
        convolution.backward(x, y, weight, None, Gradients(y, None, None))
        self.saved = (x, weight, dtype)
        return y

    def backward(self, grad: Array) -> Grads:
        (x, weight, dtype), xp = self.saved, self.xp
        grad, to_x, to_weight = xp.ascontiguousarray(grad), None, None
        convolution = self._convolution(grad, weight)
        if self.needs[0]:
            to_x = xp.empty(x.shape, x.dtype)
            convolution.forward(grad, weight, None, to_x, False)
            to_x = cast(to_x, dtype)
        if self.needs[1]:
            to_weight = place_for(self, 1, weight.shape, weight.dtype)
            convolution.backward(x, grad, weight, None, Gradients(None, to_weight, None))
        return to_x, to_weight


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
