"""Operations that move elements without changing them: reshape, transpose, join, pad. Backward undoes the move."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import FLOAT32
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.convert import converted
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import mixes, unbroadcast
from nnmpi.tensor.placement import Placement, is_cut, moved, uncut

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class Reshape(Function):
    """x with its elements, in order, in another shape."""

    __slots__ = ("wanted",)

    replayable = True

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.wanted = wanted

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks, where some axis of it is cut between whole units."""
        (x,) = inputs
        cut, known = x.cut, prod(n for n in self.wanted if n != -1)
        new = tuple(x.size // known if n == -1 else n for n in self.wanted)
        placement: Placement | None = cut.placement.reshaped(x.shape, new, cut.group.size)
        if placement is None:
            raise cut.refuse(self, f"of {x.shape} to {new} tears the ranks' parts apart")
        self.wanted = (*new[: placement.axis], cut.own(placement), *new[placement.axis + 1 :])
        return placement

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        result: Array = self.xp.reshape(x, self.wanted)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.reshape(grad, self.saved[0]),)


class Transpose(Function):
    """x with its axes in another order."""

    __slots__ = ("axes",)

    replayable = True

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: the cut axis goes to its new place."""
        (x,) = inputs
        return moved(x, self.axes.index(x.cut.axis))

    def forward(self, x: Array) -> Array:
        return x.transpose(self.axes)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        inverse = [0] * len(self.axes)
        for i, axis in enumerate(self.axes):
            inverse[axis] = i
        return (grad.transpose(inverse),)


class BroadcastTo(Function):
    """x repeated along axes of length 1 and along new leading axes."""

    __slots__ = ("wanted",)

    replayable = True

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.wanted = wanted

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: the cut axis stays as long as it is."""
        (x,) = inputs
        cut, axis = x.cut, x.cut.axis + len(self.wanted) - x.ndim
        if self.wanted[axis] != cut.whole:
            raise cut.refuse(self, f"repeats axis {cut.axis}")
        self.wanted = (*self.wanted[:axis], cut.own(), *self.wanted[axis + 1 :])
        return moved(x, axis)

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        result: Array = self.xp.broadcast_to(x, self.wanted)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (unbroadcast(self.xp, grad, self.saved[0]),)


class Concatenate(Function):
    """Arrays one after another along an axis."""

    __slots__ = ("axis",)

    replayable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as all of the inputs, joined along another axis."""
        first = next(x for x in inputs if is_cut(x))
        if not all(is_cut(x) and x.cut.is_like(first.cut) for x in inputs):
            raise first.cut.refuse(self, "joins tensors that all lie on the ranks alike")
        return uncut(self, first, (self.axis,), "along that axis needs all of each")

    def forward(self, *inputs: Array) -> Array:
        self.saved = tuple(x.shape[self.axis] for x in inputs)
        result: Array = self.xp.concatenate(inputs, axis=self.axis)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        before: tuple[slice, ...] = (slice(None),) * self.axis
        pieces, start = [], 0
        for size in self.saved:
            pieces.append(grad[(*before, slice(start, start + size))])
            start += size
        return tuple(pieces)


class Pad(Function):
    """x with a border of a constant."""

    __slots__ = ("value", "widths")

    replayable = True

    def __init__(self, widths: tuple[tuple[int, int], ...], value: float) -> None:
        self.widths, self.value = widths, value

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the border is along other axes."""
        padded = [axis for axis, widths in enumerate(self.widths) if widths != (0, 0)]
        return uncut(self, inputs[0], padded, "puts a border around the whole")

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        result: Array = self.xp.pad(x, self.widths, mode="constant", constant_values=self.value)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,) = self.saved
        return (grad[tuple(slice(a, a + n) for (a, _), n in zip(self.widths, shape, strict=True))],)


class FlipFunction(Function):
    """x reversed along axes."""

    __slots__ = ("axes",)

    replayable = True

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where other axes are reversed."""
        return uncut(self, inputs[0], self.axes, "reverses the whole axis")

    def forward(self, x: Array) -> Array:
        result: Array = self.xp.flip(x, self.axes)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.flip(grad, self.axes),)


def reshape(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return x in another shape with the same number of elements; one size may be -1.

    Raises:
        ShapeError: when the sizes do not hold x's elements.
    """
    wanted, size = _numbers(shape), x.data.size if x.cut is None else x.size
    known = prod(n for n in wanted if n != -1)
    fits = size == known if -1 not in wanted else wanted.count(-1) == 1 and known > 0 and size % known == 0
    if not fits or any(n < -1 for n in wanted):
        raise ShapeError(f"reshape of {x.shape} ({size} elements) to {wanted} does not fit")
    return Reshape(wanted)(x)


def transpose(x: Tensor, *axes: int | Sequence[int]) -> Tensor:
    """Return x with its axes in the given order; without axes, reversed.

    Raises:
        ShapeError: when `axes` is no permutation of x's axes.
    """
    ndim = x.data.ndim
    order = _numbers(axes) if axes else tuple(range(ndim))[::-1]
    if sorted(i + ndim if i < 0 else i for i in order) != list(range(ndim)):
        raise ShapeError(f"transpose to {order} is no permutation of the {ndim} axes of shape {x.data.shape}")
    return Transpose(tuple(i % ndim for i in order))(x)


def swapaxes(x: Tensor, a: int, b: int) -> Tensor:
    """Return x with its axes a and b exchanged.

    Raises:
        ShapeError: when x has no such axis.
    """
    _check_axes(x, a, b)
    order = list(range(x.data.ndim))
    order[a], order[b] = order[b], order[a]
    return transpose(x, order)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x repeated to the given shape, by NumPy's broadcasting rules.

    Raises:
        ShapeError: when x does not broadcast to it.
    """
    wanted = tuple(shape)
    fits = len(wanted) >= x.data.ndim and all(n in (1, m) for n, m in zip(x.shape[::-1], wanted[::-1], strict=False))
    if not fits or any(m < 0 for m in wanted):
        raise ShapeError(f"shape {x.shape} does not broadcast to {wanted}")
    return BroadcastTo(wanted)(x)


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """Return x with a new axis of length 1 at position `axis`.

    Raises:
        ShapeError: when the result would have no such axis.
    """
    shape = list(x.shape)
    if not -len(shape) - 1 <= axis <= len(shape):
        raise ShapeError(f"axis {axis} does not fit an array of {len(shape)} dimensions with one more")
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 1)
    return reshape(x, shape)


def squeeze(x: Tensor, axis: int) -> Tensor:
    """Return x without an axis of length 1.

    Raises:
        ShapeError: when the axis is longer than 1.
    """
    shape = list(x.shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != 1:
        raise ShapeError(f"axis {axis} of shape {x.shape} has not length 1")
    del shape[axis]
    return reshape(x, shape)


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """Return x with the axes from `start` on made into one, row by row; by default all but the batch axis."""
    shape = x.shape
    return reshape(x, (*shape[:start], prod(shape[start:])))


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return the tensors one after another along an axis.

    Raises:
        ShapeError: for an empty sequence, or shapes that differ elsewhere than along the axis.
        DtypeError: for dtypes that differ.
    """
    if not tensors:
        raise ShapeError("concatenate of no tensors has no shape")
    shapes, dtypes = [x.shape for x in tensors], {x.dtype for x in tensors}
    ndim = len(shapes[0])
    if len(dtypes) > 1 and mixes(*dtypes):
        tensors = [converted(x, FLOAT32) for x in tensors]
    elif len(dtypes) > 1:
        raise DtypeError(f"concatenate of {sorted(map(str, dtypes))} would change a dtype; convert with astype")
    if not -ndim <= axis < ndim or len({s[: axis % ndim] + s[axis % ndim + 1 :] + (len(s),) for s in shapes}) > 1:
        raise ShapeError(f"concatenate of shapes {shapes} along axis {axis} does not fit")
    return Concatenate(axis % ndim)(*tensors)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return tensors of one shape along a new axis. Errors are those of `concatenate`."""
    return concatenate([expand_dims(x, axis) for x in tensors], axis)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return x with a border.

    Args:
        x: any shape.
        widths: (before, after) for every axis, in elements.
        value: of the border's elements.

    Raises:
        ShapeError: when there is not one non-negative pair per axis.
    """
    pairs = tuple((int(a), int(b)) for a, b in widths)
    if len(pairs) != x.data.ndim or any(a < 0 or b < 0 for a, b in pairs):
        raise ShapeError(f"pad needs one non-negative (before, after) per axis of shape {x.data.shape}, not {pairs}")
    return Pad(pairs, value)(x) if pairs else x  # nothing goes around a single number


def flip(x: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """Return x reversed along an axis or several.

    Raises:
        ShapeError: when x has no such axis.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    _check_axes(x, *axes)
    return FlipFunction(axes)(x)


def _numbers(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Accept both f(2, 3) and f((2, 3))."""
    given = arguments[0] if len(arguments) == 1 and hasattr(arguments[0], "__iter__") else arguments
    return tuple(index(n) for n in given)


def _check_axes(x: Tensor, *axes: int) -> None:
    ndim = x.data.ndim
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ShapeError(f"axis {axis} does not fit an array of {ndim} dimensions")
