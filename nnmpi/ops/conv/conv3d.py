"""Three-dimensional convolution, as a two-dimensional one of planes side by side as channels.

    x        (n, depth, h, w, c) -> (n * out_depth, h, w, kernel_depth * c), copies
    weight   (kernel_depth, kh, kw, c, out) -> (kh, kw, kernel_depth * c, out)

So x is copied kernel_depth times, and the planes' sum is the product's own.
"""

from nnmpi.base.errors import ShapeError, UsageError, check_int, check_ints
from nnmpi.ops.conv.conv2d import conv2d
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.tensor import Tensor, stack

__all__ = ["conv3d"]

Triple = int | tuple[int, int, int]


def triple(name: str, value: Triple, least: int) -> tuple[int, int, int]:
    """Convert an integer or three (depth, rows, columns) to three; check them.

    Raises:
        UsageError: for a value below `least`, or another number of values.
    """
    values = check_ints(name, value if isinstance(value, tuple | list) else (value,) * 3, least)
    if len(values) != 3:
        raise UsageError(f"{name} must be one or three whole numbers, not {value!r}")
    return values


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
