"""Convolutions and poolings of which each rank computes some output channels, some input channels or some image rows.

                  column                                     row
    x whole  ->  kernels 0..1 | 2..3  ->  y channels cut  ->  kernels' inputs 0..1 | 2..3  -> add up -> z whole

    rows     rank 0   | rows 0..3 |--> halo --> conv --> | rows 0..3 |    kernels are replicated; their gradients are
             rank 1   | rows 4..7 |--> halo --> conv --> | rows 4..7 |    summed over the ranks

The exchanges of column and row are those of linear layers. With groups only output channels can be cut, and only
between groups: a rank then needs the input channels of its own groups alone, and a depthwise convolution of channels
that are cut already needs no exchange at all. Pooling works on any part of the channels as it is.

With rows, the ranks exchange the rows that their windows share, the halo:

    10 rows, kernel 3, padding 1, 3 ranks        rank 0 has 0..3     rank 1 has 4..6     rank 2 has 7..9

        rank 0    b 0 1 2 3 4                    b: border, filled with a value; a rank's own rows lie in the middle,
        rank 1          3 4 5 6 7                and 4 and 3 change places between ranks 0 and 1, 7 and 6 between
        rank 2                6 7 8 9 b          ranks 1 and 2

Output rows are dealt out as `shard.split` does it, and each rank needs the input rows under its windows, whatever
stride, kernel and number of rows are: they may come from several ranks, and a rank without output rows needs none. The
backward pass sends the gradients of borrowed rows home, where they are added up in rank order.
"""

from dataclasses import dataclass

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import is_low
from nnmpi.backend.windows import Pair, out_size
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.errors import ShapeError
from nnmpi.nn.conv import Conv2d, GlobalAvgPool2d, MaxPool2d, Pool2d
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.conv2d import conv2d, convolve
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction, Pool2dFunction, PoolWindows, pooled
from nnmpi.parallel.sharded.collectives import CATEGORY, copy, sum_over_ranks
from nnmpi.parallel.sharded.context import LayerContext, Part, Placed, Redistribute
from nnmpi.shard import part
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as, require_floating
from nnmpi.tensor.placement import REPLICATED, features, rows
from nnmpi.tensor.tensor import Tensor
from nnmpi.timeline import RECEIVE, span


@dataclass(frozen=True)
class RowWindows:
    """How windows go over the rows of images.

    Attributes:
        height: the rows of a whole image.
        reach: the rows that a window sees, from its first to its last.
        stride: the rows from one window to the next.
        padding: the rows of border above and below.
    """

    height: int
    reach: int
    stride: int
    padding: int

    @property
    def outputs(self) -> int:
        """How many windows there are, one for each row of the whole result."""
        return out_size(self.height, self.reach, self.stride, self.padding)

    def owned(self, size: int, rank: int) -> range:
        """Return the image rows that a rank has."""
        return part(self.height, size, rank)

    def needed(self, size: int, rank: int) -> range:
        """Return the image rows that a rank's windows see; below 0 and from `height` on there is border.

        A rank without windows gets border, one row too little for a window.
        """
        own = part(self.outputs, size, rank)
        if not own:
            return range(self.height, self.height + self.reach - 1)
        first = own.start * self.stride - self.padding
        return range(first, first + (len(own) - 1) * self.stride + self.reach)


class Halo(Function):
    """The rows that a rank's windows see, from all ranks' rows and a border of one value."""

    __slots__ = ("windows", "group", "value")

    def __init__(self, group: Group, windows: RowWindows, value: float) -> None:
        self.group, self.windows, self.value = group, windows, value

    def _common(self, owner: int, user: int) -> range:
        """Return the rows that one rank has and another one needs."""
        has, needs = self.windows.owned(self.group.size, owner), self.windows.needed(self.group.size, user)
        return range(max(has.start, needs.start), max(min(has.stop, needs.stop), has.start, needs.start))

    def _transfer(self, away: dict[int, Array], home: dict[int, tuple[int, ...]], like: Array) -> dict[int, Array]:
        """Send arrays to ranks and return those that come from others, of the shapes given."""
        xp = namespace(like)
        room: dict[int, Array] = {rank: xp.empty(shape, dtype=like.dtype) for rank, shape in home.items()}
        bytes_sent = sum(array.nbytes for array in away.values())
        with span("halo", CATEGORY, RECEIVE, {"bytes": bytes_sent}):
            send_and_receive(self.group, list(away.items()), list(room.items()))
        return room

    def _peers(self, borrowing: bool) -> dict[int, range]:
        """Return the rows that this rank gets from each other one, or (not borrowing) gives to it."""
        rank = self.group.rank
        pairs = {r: self._common(r, rank) if borrowing else self._common(rank, r) for r in range(self.group.size)}
        return {r: rows for r, rows in pairs.items() if r != rank and rows}

    def forward(self, x: Array) -> Array:
        size, rank = self.group.size, self.group.rank
        has, needs = self.windows.owned(size, rank), self.windows.needed(size, rank)
        n, h, w, c = x.shape
        if h != len(has):
            raise ShapeError(
                f"rank {rank} of {size} has {h} rows of images, not the {len(has)} of a height of "
                f"{self.windows.height} that the model was sharded for; shard it with the sample's shape that it gets"
            )
        xp = namespace(x)
        y: Array = xp.full((n, len(needs), w, c), self.value, dtype=x.dtype)
        away = {r: xp.ascontiguousarray(_rows(x, rows, has.start)) for r, rows in self._peers(False).items()}
        borrowed = self._peers(True)
        came = self._transfer(away, {r: (n, len(rows), w, c) for r, rows in borrowed.items()}, x)
        own = self._common(rank, rank)
        _rows(y, own, needs.start)[...] = _rows(x, own, has.start)
        for r, from_there in borrowed.items():
            _rows(y, from_there, needs.start)[...] = came[r]
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        size, rank = self.group.size, self.group.rank
        has, needs = self.windows.owned(size, rank), self.windows.needed(size, rank)
        n, _, w, c = grad.shape
        xp = namespace(grad)
        away = {r: xp.ascontiguousarray(_rows(grad, rows, needs.start)) for r, rows in self._peers(True).items()}
        lent = self._peers(False)
        came = self._transfer(away, {r: (n, len(rows), w, c) for r, rows in lent.items()}, grad)
        to_x: Array = xp.zeros((n, len(has), w, c), dtype=grad.dtype)
        own = self._common(rank, rank)
        for r in range(size):
            if r == rank:
                _rows(to_x, own, has.start)[...] += _rows(grad, own, needs.start)
            elif r in lent:
                _rows(to_x, lent[r], has.start)[...] += came[r]
        return (to_x,)


def halo(x: Tensor, group: Group, windows: RowWindows, value: float = 0.0) -> Tensor:
    """Return the image rows that this rank's windows see: (batch, own rows, w, c) -> (batch, needed rows, w, c).

    Args:
        value: of the border.

    Raises:
        ShapeError: when this rank's rows are not its part of the height.
    """
    return Halo(group, windows, value)(x)


def _rows(images: Array, rows: range, first: int) -> Array:
    """Return a view of some rows of images whose first row has that number."""
    return images[:, rows.start - first : rows.stop - first]


class ColumnConv2d(Part, Conv2d):
    """Some output channels of a convolution: whole images -> (batch, out_h, out_w, this rank's outputs).

    With groups it takes images with the input channels of this rank's groups.
    """


class RowConv2d(Part, Conv2d):
    """Some input channels of a convolution: (batch, h, w, this rank's inputs) -> whole images. The bias is whole."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        y = conv2d(self.enter(x), self.weight, None, self.stride, self.padding, self.dilation)
        whole = y.astype("float32") if is_low(y.dtype) else y
        return sum_over_ranks(whole, self.group, self.bias).astype(y.dtype)


def place_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[2] * layer.groups
    if context.sharding is Sharding.ROWS:
        return place_rows_conv(layer, context)
    if context.sharding is Sharding.COLUMN:
        outputs, whole = layer.weight.shape[3], layer.groups == 1
        result = features(outputs) if whole else features(layer.groups, outputs // layer.groups)
        own = result.width(context.group.size, context.group.rank)
        parts = {
            "weight": context.sharder.cut(layer.weight, result, 3),
            "bias": context.sharder.cut(layer.bias, result, 0),
        }
        groups = 1 if whole else own // result.unit  # all outputs of a group belong to one rank
        return ColumnConv2d(layer, _enter(layer, context, inputs), groups=groups, **parts), result
    if context.sharding is Sharding.ROW:
        if layer.groups > 1:
            raise context.refuse(
                f"has {layer.groups} groups, whose input channels are not added up over ranks; choose Sharding.COLUMN"
            )
        ready = not context.placement.is_replicated and not context.placement.has_rows
        cut = context.placement if ready else features(inputs)
        weight = context.sharder.cut(layer.weight, cut.resolve(inputs), axis=2)
        return RowConv2d(layer, context.to_parts(cut), weight=weight, group=context.group), REPLICATED
    if context.sharding is Sharding.VOCAB:
        raise context.refuse("is a convolution and has no vocabulary; choose Sharding.COLUMN, ROW, ROWS or REPLICATED")
    return context.on_replicated(layer, inputs)


def _enter(layer: Conv2d, context: LayerContext, inputs: int) -> Redistribute:
    """Return what gives a rank the input channels that its outputs need."""
    if layer.groups == 1:
        return context.to_each(inputs)
    if layer.groups < context.group.size:
        raise context.refuse(
            f"has {layer.groups} groups, too few to give each of {context.group.size} ranks one; choose Sharding.ROWS "
            "or REPLICATED"
        )
    return context.to_parts(features(layer.groups, inputs // layer.groups))


class RowsConv2d(Part, Conv2d):
    """Some rows of a convolution: (batch, this rank's rows, w, inputs) -> (batch, this rank's rows, out_w, outputs)."""

    group: Group
    windows: RowWindows  # as they go over the rows of a whole image

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the convolution.

        Raises:
            ShapeError: when the images are not those that the model was sharded for.
            DtypeError: when x and the weight differ in dtype.
        """
        x = self.enter(x)
        if x.ndim != 4 or x.shape[3] != self.weight.shape[2] * self.groups:
            raise ShapeError(f"a convolution of images {x.shape} does not fit a weight of {self.weight.shape}")
        read_as("conv2d", x, self.weight, self.bias)
        seen = halo(x, self.group, self.windows)
        weight = copy(self.weight, self.group)
        bias = None if self.bias is None else copy(self.bias, self.group)
        # not `conv2d`, which checks that a window fits: a rank may have no rows
        kernel, border = (weight.shape[0], weight.shape[1]), (0, self.padding[1])  # `halo` has put the rows' border
        return convolve(seen, weight, bias, ConvSpec(kernel, self.stride, border, self.dilation, self.groups))


def place_rows_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the layer for some rows of the images."""
    height, _, _ = context.sample()
    reach = (_reach(layer, 0), _reach(layer, 1))
    windows = _windows(context, reach, layer.stride, layer.padding)
    conv = RowsConv2d(layer, context.to_parts(rows(height)), group=context.group, windows=windows)
    return conv, rows(windows.outputs)


def _reach(layer: Conv2d, axis: int) -> int:
    """Return how many rows or columns a window sees, from its first to its last."""
    return layer.dilation[axis] * (layer.weight.shape[axis] - 1) + 1


def _windows(context: LayerContext, reach: Pair, stride: Pair, padding: Pair) -> RowWindows:
    """Return how windows go over the rows of the images that come to the layer, whose columns must hold one, too."""
    height, width, _ = context.sample()
    sides = zip((height, width), reach, stride, padding, ("rows", "columns"), strict=True)
    for size, seen, each, border, what in sides:
        if out_size(size, seen, each, border) < 1:
            raise context.refuse(f"has windows of {seen} {what}, which do not fit images of {size} {what}")
    return RowWindows(height, reach[0], stride[0], padding[0])


class RowsPool2d(Module):
    """Some rows of a pooling: (batch, this rank's rows, w, channels) -> (batch, this rank's rows, out_w, channels).

    Args:
        operation: what is made of each window.
        group: the ranks that share the rows.
        windows: how they go over the rows of a whole image.
        over: how they go over one.
        border: the value around the images.
    """

    def __init__(
        self,
        operation: type[Pool2dFunction],
        group: Group,
        windows: RowWindows,
        over: PoolWindows,
        border: float,
    ) -> None:
        self._operation, self._group, self._rows, self._border = operation, group, windows, border
        self._over = over._replace(padding=(0, over.padding[1]))  # `halo` puts the rows' border

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the result."""
        require_floating("pooling", x)
        return pooled(self._operation, halo(x, self._group, self._rows, self._border), self._over)


class RowsGlobalAvgPool2d(Part, GlobalAvgPool2d):
    """The mean of each channel over images whose rows lie on several ranks: -> whole (batch, channels)."""

    group: Group
    height: int  # of a whole image

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        own = x.sum(axis=(1, 2)) * (1 / (self.height * x.shape[2]))
        return sum_over_ranks(own, self.group)


def place_pool(layer: Pool2d, context: LayerContext) -> Placed:
    """Return the layer for what comes to it: as it is if channels are cut, with a halo exchange if rows are."""
    if context.sharding is Sharding.REPLICATED:
        return context.on_replicated(layer)
    if not (context.placement.has_rows or context.sharding is Sharding.ROWS):
        return layer, context.placement
    height, _, _ = context.sample()
    if not context.placement.has_rows:
        raise context.refuse("has no rows before it; give the convolution before it Sharding.ROWS")
    windows = _windows(context, *layer.over)
    is_largest = isinstance(layer, MaxPool2d)
    operation, border = (MaxPool2dFunction, -float("inf")) if is_largest else (AvgPool2dFunction, 0.0)
    return RowsPool2d(operation, context.group, windows, layer.over, border), rows(windows.outputs)


def place_global_pool(layer: GlobalAvgPool2d, context: LayerContext) -> Placed:
    """Return the layer for what comes to it: as it is if channels are cut, with a sum over the ranks if rows are."""
    if context.sharding is Sharding.REPLICATED:
        return context.on_replicated(layer)
    if context.placement.has_rows:
        height, _, _ = context.sample()
        return RowsGlobalAvgPool2d(layer, group=context.group, height=height), REPLICATED
    return layer, context.placement
