"""Convolution and pooling sharded by image rows; for channels see `linear`.

    rows     rank 0   | rows 0..3 |--> halo --> conv --> | rows 0..3 |
             rank 1   | rows 4..7 |--> halo --> conv --> | rows 4..7 |

Kernels are replicated, and their gradients are summed over the ranks. The ranks exchange the rows
that several ranks' windows read, the halo. Pooling of sharded channels needs no exchange.

    10 rows, kernel 3, padding 1, 3 ranks     rank 0 has 0..3     rank 1 has 4..6    rank 2 has 7..9

        rank 0    b 0 1 2 3 4                    b: border, filled with a value
        rank 1          3 4 5 6 7                ranks 0 and 1 exchange rows 3 and 4,
        rank 2                6 7 8 9 b          ranks 1 and 2 rows 6 and 7

`shard.split` divides the output rows among the ranks, and each rank needs the input rows under its
windows. Any stride, kernel and number of rows are possible: the needed rows may belong to several
ranks, and a rank without output rows needs none. The backward pass sends the gradients of borrowed
rows to their owners, which add them in rank order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.windows import RowsAndColumns, out_size
from nnmpi.base.errors import ShapeError
from nnmpi.base.shard import common, part
from nnmpi.comm.group import Group
from nnmpi.nn.conv import Conv2d, GlobalAvgPool2d, MaxPool2d, Pool2d
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.collectives import CATEGORY, copy, sum_over_ranks
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.convolution import convolve
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction, Pool2dFunction
from nnmpi.parallel.sharded.context import LayerContext, Placed, part_of
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import REPLICATED, rows
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits


@dataclass(frozen=True)
class RowWindows:
    """The windows of a convolution or pooling over the rows of images.

    Attributes:
        height: the rows of a full image.
        reach: the number of rows from a window's first to its last; more than the kernel's with
            dilation.
        stride: the number of rows from one window to the next.
        padding: the number of border rows above the image, and as many below.
        extra: the number of border rows beyond these, below the image.
    """

    height: int
    reach: int
    stride: int
    padding: int
    extra: int = 0

    @property
    def outputs(self) -> int:
        """The number of windows, one for each row of the full result."""
        return out_size(self.height + self.extra, self.reach, self.stride, self.padding)

    def owned(self, size: int, rank: int) -> range:
        """Return a rank's image rows."""
        return part(self.height, size, rank)

    def needed(self, size: int, rank: int) -> range:
        """Return the rows that a rank's windows read.

        Numbers below 0 and from `height` on stand for border rows. A rank without windows gets
        reach - 1 of them: too few for a window, so its output has 0 rows.
        """
        windows = part(self.outputs, size, rank)
        if not windows:
            return range(self.height, self.height + self.reach - 1)
        first = windows.start * self.stride - self.padding
        return range(first, first + (len(windows) - 1) * self.stride + self.reach)


class Halo(Function):
    """Gather the rows under a rank's windows from their owners; border rows have one value."""

    __slots__ = ("borrowed", "group", "lent", "needed", "owned", "value")

    traits = Traits(
        onnx=OF_RANKS,
        tested_in="tests/parallel/sharded/test_conv.py",
    )

    is_call = True

    def __init__(self, group: Group, windows: RowWindows, value: float) -> None:
        self.group, self.value = group, value
        size, rank = group.size, group.rank
        owned = [windows.owned(size, r) for r in range(size)]
        needs = [windows.needed(size, r) for r in range(size)]
        self.owned, self.needed = owned[rank], needs[rank]
        self.lent = [common(owned[rank], need) for need in needs]
        self.borrowed = [common(item, needs[rank]) for item in owned]

    def forward(self, x: Array) -> Array:
        n, _, w, c = x.shape
        y = namespace(x).full((n, len(self.needed), w, c), self.value, x.dtype)
        for some, values in self._exchange(x, self.owned, self.lent, self.borrowed):
            _rows(y, some, self.needed)[...] = values
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        n, _, w, c = grad.shape
        to_x = namespace(grad).zeros((n, len(self.owned), w, c), grad.dtype)
        for some, values in self._exchange(grad, self.needed, self.borrowed, self.lent):
            _rows(to_x, some, self.owned)[...] += values
        return (to_x,)

    def _exchange(
        self, images: Array, present: range, sent: Sequence[range], received: Sequence[range]
    ) -> Iterator[tuple[range, Array]]:
        """Send each rank the rows `sent` to it; yield the ranges `received`, with their values.

        Args:
            images: (batch, rows `present`, w, c).
            sent, received: for each rank a range of rows, numbered as in the full image.
        """
        parts = [_rows(images, rows, present) for rows in sent]
        shapes = [(len(images), len(rows), *images.shape[2:]) for rows in received]
        rows = self.group.all_to_all_v(parts, shapes, "halo", CATEGORY, check=False)
        return zip(received, rows, strict=True)


def halo(x: Tensor, group: Group, windows: RowWindows, value: float = 0.0) -> Tensor:
    """Exchange halos: (batch, own rows, w, c) -> (batch, needed rows, w, c).

    Args:
        value: of the border.

    Raises:
        ShapeError: when this rank's number of rows is not its part of `windows.height`.
    """
    height = len(windows.owned(group.size, group.rank))
    if x._data.shape[1] != height:
        raise ShapeError(
            f"rank {group.rank} of {group.size} has {x._data.shape[1]} rows of images, but the"
            f" model was sharded for a height of {windows.height}, {height} rows here; shard it"
            " for the sample's shape"
        )
    return Halo(group, windows, value)(x)


def _rows(images: Array, rows: range, present: range) -> Array:
    return images[:, rows.start - present.start : rows.stop - present.start]


class RowsConv2d(Conv2d, read_once="stride padding dilation"):
    """A convolution's shard of rows: (batch, own rows, w, in) -> (batch, own rows, out_w, out)."""

    group: Group
    windows: RowWindows  # over the rows of a full image

    def bordered(self, x: Tensor) -> Tensor:
        """Return rows with extra columns; extra rows are in the halo."""
        columns = self.extra_padding[1]
        return x.pad(((0, 0), (0, 0), (0, columns), (0, 0))) if columns else x

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the convolution.

        Raises:
            ShapeError: when the images have another height than `shard`'s sample, or other channels
                than the weight.
        """
        x = self.product_input(x)
        if x.ndim != 4 or x.shape[3] != self.weight.shape[2] * self.groups:
            raise ShapeError(
                f"a convolution of images {x.shape} does not fit a weight of {self.weight.shape}"
            )
        with_halo = self.bordered(halo(x, self.group, self.windows))
        weight = copy(self.weight, self.group)
        bias = None if self.bias is None else copy(self.bias, self.group)
        # Not `conv2d`: it refuses images smaller than a window, and a rank may have no rows. `halo`
        # has added the border above and below, so only the one left and right remains.
        kernel, border = (weight.shape[0], weight.shape[1]), (0, self.padding[1])
        return convolve(
            with_halo,
            weight,
            bias,
            ConvSpec(kernel, self.stride, border, self.dilation, self.groups),
        )


def place_rows_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the convolution of this rank's rows."""
    over = layer.weight.shape[:2], layer.stride, layer.padding, layer.dilation
    windows = _windows(context, *over, layer.extra_padding)
    product_input = context.to_parts(rows(windows.height))
    conv = part_of(
        layer, RowsConv2d, product_input=product_input, group=context.group, windows=windows
    )
    return conv, rows(windows.outputs)


def _windows(
    context: LayerContext,
    kernel: Sequence[int],
    stride: RowsAndColumns,
    padding: RowsAndColumns,
    dilation: RowsAndColumns = (1, 1),
    extra: RowsAndColumns = (0, 0),
) -> RowWindows:
    """Return the windows over image rows; refuse images smaller than one window."""
    windows = []
    for axis, unit in enumerate(("rows", "columns")):
        size, reach = context.sample()[axis], dilation[axis] * (kernel[axis] - 1) + 1
        windows.append(RowWindows(size, reach, stride[axis], padding[axis], extra[axis]))
        if windows[axis].outputs < 1:
            raise context.error(
                f"has windows of {reach} {unit}, which do not fit images of {size} {unit}"
            )
    return windows[0]


class RowsPool2d(Pool2d):
    """A pooling's shard of rows: (batch, own rows, w, c) -> (batch, own rows, out_w, c)."""

    group: Group
    windows: RowWindows  # over the rows of a full image
    operation: type[Pool2dFunction]
    border: float

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the result."""
        require_floating("pooling", x)
        over = self.over._replace(padding=(0, self.over.padding[1]))  # `halo` pads the rows
        return self.operation(over)(halo(x, self.group, self.windows, self.border))


class RowsGlobalAvgPool2d(GlobalAvgPool2d):
    """The mean of each channel over images sharded by rows, on every rank: (batch, channels)."""

    group: Group
    height: int  # of a full image

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        local = x.sum(axis=(1, 2)) * (1 / (self.height * x.shape[2]))
        return sum_over_ranks(local, self.group)


def place_pool(layer: Pool2d, context: LayerContext) -> Placed:
    """Return the pooling for its input: unchanged for sharded channels, with halos for rows."""
    if not (context.placement.has_rows or context.sharding is Sharding.ROWS):
        return layer, context.placement
    context.sample()
    if not context.placement.has_rows:
        raise context.error(
            "gets an input that is not sharded by rows; give the convolution before it"
            " Sharding.ROWS"
        )
    windows = _windows(context, *layer.over)
    is_largest = isinstance(layer, MaxPool2d)
    operation, border = (
        (MaxPool2dFunction, -float("inf")) if is_largest else (AvgPool2dFunction, 0.0)
    )
    changes = {"group": context.group, "windows": windows, "operation": operation, "border": border}
    return part_of(layer, RowsPool2d, **changes), rows(windows.outputs)


def place_global_pool(layer: GlobalAvgPool2d, context: LayerContext) -> Placed:
    """Return the pooling for its input: unchanged for sharded channels, a sum for rows."""
    if context.placement.has_rows:
        height, _, _ = context.sample()
        return part_of(layer, RowsGlobalAvgPool2d, group=context.group, height=height), REPLICATED
    return layer, context.placement
