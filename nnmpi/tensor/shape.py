"""Operations that move or pick elements: reshape, transpose, join, pad, sort, index."""

from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.sums import add_rows
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.placement import Placement, placement_if_uncut, same_placement, with_axis
from nnmpi.tensor.traits import WRITTEN, Sample, Traits


class Reshape(Function):
    """x with its elements, in order, in another shape."""

    __slots__ = ("new",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(Sample("reshape", lambda x: Reshape((len(x), 6))(x), ((3, 2, 3),)),),
    )

    views = True

    def __init__(self, new: Shape) -> None:
        self.new = new

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement, if the shards are ranges of complete units of a new axis.

        See `Placement.reshaped`.
        """
        (x,) = inputs
        shard, new = x.shard, self.new
        placement: Placement | None = shard.placement.reshaped(x.shape, new, shard.group.size)
        if placement is None:
            raise shard.error(self, f"of {x.shape} to {new} splits the ranks' parts")
        local = shard.local_length(placement)
        self.new = (*new[: placement.axis], local, *new[placement.axis + 1 :])
        return placement

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        return x.reshape(self.new)

    def backward(self, grad: Array) -> Grads:
        return (grad.reshape(self.saved[0]),)


class Transpose(Function):
    """x with its axes in another order."""

    __slots__ = ("axes",)

    traits = Traits(
        onnx=lambda f, y, x: x.transpose(*f.axes),
        samples=(Sample("transpose", lambda x: Transpose((0, 2, 1))(x), ((2, 3, 4),)),),
    )

    views = True

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement, with the sharded axis at its new position."""
        (x,) = inputs
        return with_axis(x, self.axes.index(x.shard.axis))

    def forward(self, x: Array) -> Array:
        return x.transpose(self.axes)

    def backward(self, grad: Array) -> Grads:
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return (grad.transpose(inverse),)


class Concatenate(Function):
    """Arrays joined along an axis."""

    __slots__ = ("axis",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample("concatenate", lambda a, b: Concatenate(1)(a, b), ((3, 2), (3, 4))),
            Sample("roll", lambda x: x.roll((1, -2), (1, 2)), ((2, 3, 4),)),
            Sample("repeat", lambda x: x.repeat(1, 2, 3), ((2, 2, 3),)),
        ),
    )

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return the placement of all inputs; it must be the same, along another axis."""
        first = same_placement(self, inputs, "joins tensors that are all sharded alike")
        return placement_if_uncut(self, first, (self.axis,), "along that axis needs all of each")

    def forward(self, *inputs: Array) -> Array:
        self.saved = tuple(x.shape[self.axis] for x in inputs)
        return kernels_of(inputs[0]).concatenate(inputs, self.axis)

    def backward(self, grad: Array) -> Grads:
        *stops, _ = accumulate(self.saved)
        return tuple(namespace(grad).split(grad, stops, self.axis))


class Pad(Function):
    """x with a border of a constant."""

    __slots__ = ("value", "widths")

    traits = Traits(
        onnx=lambda f, y, x: x.add("Pad", [*sum(zip(*f.widths, strict=True), ())], f.value),
        samples=(Sample("pad", lambda x: Pad(((0, 0), (1, 2)), 0.5)(x), ((3, 2),)),),
    )

    def __init__(self, widths: tuple[tuple[int, int], ...], value: float) -> None:
        self.widths, self.value = widths, value

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; a border along the sharded axis is refused."""
        bordered = [axis for axis, widths in enumerate(self.widths) if any(widths)]
        return placement_if_uncut(self, inputs[0], bordered, "adds elements along that axis")

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        return np.pad(x, self.widths, mode="constant", constant_values=self.value)

    def backward(self, grad: Array) -> Grads:
        (shape,) = self.saved
        return (grad[tuple(slice(a, a + n) for (a, _), n in zip(self.widths, shape, strict=True))],)


def order_of(x: Array, axis: int, descending: bool) -> Array:
    """Return the positions of the elements along an axis in sorted order; equal ones keep theirs.

    NaN counts as larger than any number.
    """
    if not descending:
        return _argsort(x, axis)
    # backwards twice, since equal elements of a reversed order would be reversed, too
    behind = _argsort(np.flip(x, axis), axis)
    return np.flip(x.shape[axis] - 1 - behind, axis)


def _argsort(x: Array, axis: int) -> Array:
    """Return the order of the elements along an axis; equal ones keep theirs, NaN is the largest.

    On a device by Batcher's bitonic network (1968), of elementwise steps that a graph can hold:
    CuPy's own sort waits for the device. It takes log(n) (log(n) + 1) / 2 steps.
    """
    if isinstance(x, np.ndarray):
        return np.argsort(x, axis, kind="stable")
    xp, length = namespace(x), x.shape[axis]
    if not x.size:
        return xp.zeros(x.shape, np.int64)
    moved = np.moveaxis(x, axis, -1)
    rows, width = moved.reshape(-1, length), 1 << (length - 1).bit_length()
    is_nan = rows != rows
    # float64 would round whole numbers, and int64 has not all of uint64's
    kind = {"b": np.int64, "i": np.int64, "u": np.uint64}.get(x.dtype.kind, np.float64)
    most = np.inf if kind is np.float64 else np.iinfo(kind).max
    keys = xp.full((len(rows), width), most, kind)
    keys[:, :length] = xp.where(is_nan, most, rows)
    # of equal keys: numbers first, then NaN, then what fills the rows up, each by its position
    ties = xp.zeros((len(rows), width), np.int64) + xp.arange(width)
    ties[:, :length] += width * is_nan
    ties[:, length:] += 2 * width
    size = 2
    while size <= width:
        distance = size // 2
        while distance:
            pairs = len(rows), width // (2 * distance), 2, distance
            # every second run of `size` elements falls, so that two runs are a bitonic one
            falls = (xp.arange(pairs[1]) * 2 * distance // size % 2 == 1)[:, None]
            (low, high), (first, second) = (
                (part[:, :, 0], part[:, :, 1])
                for part in (keys.reshape(pairs), ties.reshape(pairs))
            )
            swaps = ((high < low) | ((high == low) & (second < first))) != falls
            keys, ties = _exchanged(low, high, swaps), _exchanged(first, second, swaps)
            distance //= 2
        size *= 2
    order = (ties[:, :length] % width).reshape(moved.shape)
    return np.moveaxis(order, -1, axis)


def _exchanged(a: Array, b: Array, swaps: Array) -> Array:
    """Return rows in which a and b lie in turns, each pair exchanged where `swaps` says so."""
    xp, (count, pairs, distance) = namespace(a), a.shape
    result = xp.empty((count, pairs, 2, distance), a.dtype)
    result[:, :, 0], result[:, :, 1] = xp.where(swaps, b, a), xp.where(swaps, a, b)
    return result.reshape(count, -1)


class Sort(Function):
    """The elements along an axis in order; equal ones keep theirs, and NaN is the largest."""

    __slots__ = ("axis", "descending")

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample("sort", lambda x: x.sort(), ((2, 5),), values="distinct"),
            Sample(
                "sort descending",
                lambda x: x.sort(1, descending=True),
                ((2, 4, 2),),
                values="distinct",
            ),
        ),
    )

    computes = "float32"
    is_call = True  # its backward pass reads the order, which the values decide

    def __init__(self, axis: int, descending: bool) -> None:
        self.axis, self.descending = axis, descending

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; a sort along the sharded axis is refused."""
        return placement_if_uncut(self, inputs[0], (self.axis,), "needs all elements of that axis")

    def forward(self, x: Array) -> Array:
        order = order_of(x, self.axis, self.descending)
        self.saved = (order,)
        return np.take_along_axis(x, order, self.axis)

    def backward(self, grad: Array) -> Grads:
        places = _argsort(self.saved[0], self.axis)  # of the elements in the sorted order
        return (np.take_along_axis(grad, places, self.axis),)


Index: TypeAlias = tuple[Any, ...]  # an item per axis, as NumPy reads it


def is_basic(key: Index) -> bool:
    """True for a key of numbers, slices and new axes, which gives a view."""
    return all(
        part is None
        or part is Ellipsis
        or isinstance(part, int | slice)
        and not isinstance(part, bool)
        for part in key
    )


class GetItem(Function):
    """x[key] for a key with arrays or booleans; an element that it selects twice gets the sum of
    both gradients.

    CuPy wraps an index out of range around instead of raising IndexError. So `check` lets NumPy
    validate a key in the host's memory first. A key on the device is not validated: the host would
    have to wait for its values.
    """

    __slots__ = ("key",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(Sample("getitem", lambda x: x[:, np.array([2, 0, 2])], ((2, 3),)),),
    )

    computes = "float32"
    is_call = views = True

    def __init__(self, key: Index) -> None:
        self.key = key

    @property
    def captured(self) -> bool:  # type: ignore[override]
        """Whether the key needs no copy from the host, nor a look at its values."""
        return not any(
            isinstance(part, np.ndarray | list)
            or getattr(getattr(part, "dtype", None), "kind", "") == "b"
            for part in self.key
        )

    def check(self, shape: Shape) -> None:
        """Raise IndexError for a key that does not fit the shape, unless it is on the device."""
        if not any(hasattr(part, "__cuda_array_interface__") for part in self.key):
            np.broadcast_to(False, shape)[self.key]

    def placed(self, *inputs: Any) -> Placement:
        """Refuse a shard."""
        raise inputs[0].shard.error("x[...]", "picks elements by an array")

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape, x.dtype)
        return x[self.key]

    def backward(self, grad: Array) -> Grads:
        shape, dtype = self.saved
        xp = namespace(grad)
        spread, (first, *more) = xp.zeros(shape, dtype), self.key
        if more or not isinstance(first, np.ndarray):
            xp.add.at(spread, self.key, grad)
        elif first.dtype.kind == "b":  # selects no element twice
            spread[first] = grad
        else:
            add_rows(spread, first, grad)
        return (spread,)


class View(Function):
    """x[key] for a key of numbers and slices, a view of x.

    Backward adds to a part of the gradient of the operation before it. An array of the size of x
    for each key would make a loop over time steps quadratic in their number. A leaf gets such
    arrays.
    """

    __slots__ = ("key",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(Sample("getitem view", lambda x: x[:, 1:, None, ::-2], ((2, 3, 4),)),),
    )

    views = True

    def __init__(self, key: Index) -> None:
        self.key = key

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement: the key takes the full sharded axis, or complete repeats.

        It also rewrites the key, whose slice of the sharded axis becomes one of the local shard.
        """
        (x,) = inputs
        shard, key = x.shard, self._expanded(x.ndim)
        # the position in the key of the sharded axis; new axes (None) are none of x's
        at = [i for i, item in enumerate(key) if item is not None][shard.axis]
        local = key[at]
        start, stop, step = local.indices(shard.length) if isinstance(local, slice) else (0, 0, 1)
        placement: Placement | None = shard.placement.sliced(start, stop) if step == 1 else None
        if placement is None:
            raise shard.error(
                "x[...]", f"picks {local} of that axis, not whole groups of its parts"
            )
        repeat = shard.local_length() // (shard.placement.repeats or 1)
        key[at] = slice(
            start // shard.placement.once * repeat, stop // shard.placement.once * repeat
        )
        self.key = tuple(key)
        removed = sum(isinstance(item, int) for item in key[:at])
        return replace(placement, axis=at - removed)

    def _expanded(self, ndim: int) -> list[Any]:
        """Return the key with its Ellipsis expanded."""
        parts = list(self.key)
        missing = [slice(None)] * (
            ndim - sum(part is not None and part is not Ellipsis for part in parts)
        )
        at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
        return [*parts[:at], *missing, *parts[at + 1 :]]

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape, x.dtype)
        return self._part(x)

    def backward(self, grad: Array) -> Grads:
        (shape, dtype), edge = self.saved, self.edges and self.edges[0]
        if isinstance(edge, Function) and edge.edges is not None:
            part = self._part(edge.own_grad(self.xp))
            part += grad
            return (None,)
        spread = self.xp.zeros(shape, dtype)
        np.copyto(self._part(spread), grad)
        return (spread,)

    def _part(self, x: Array) -> Array:
        """Return x[key]; a view, not a number, for a key that names one element."""
        return x[self.key if Ellipsis in self.key else (*self.key, Ellipsis)]
