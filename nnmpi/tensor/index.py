"""Indexing: slices, integers, masks and integer arrays, and picking along an axis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import refuse
from nnmpi.errors import DtypeError, LayoutError, ShapeError
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import whole_values
from nnmpi.tensor.placement import Placement, aligned, uncut
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class GetItem(Function):
    """x[key]; elements that the key names twice get both gradients."""

    __slots__ = ("basic", "key")

    def __init__(self, key: Any) -> None:
        parts = key if isinstance(key, tuple) else (key,)
        self.key = key
        self.basic = all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: the key takes all of the cut axis, or some of its repeats."""
        (x,) = inputs
        cut, key = x.cut, self._expanded(x.ndim)
        if key is None:
            raise cut.refuse(self, "picks elements by an array")
        places = [i for i, each in enumerate(key) if each is not None]  # of x's axes
        own = key[places[cut.axis]]
        start, stop, step = own.indices(cut.whole) if isinstance(own, slice) else (0, 0, 1)
        placement: Placement | None = cut.placement.sliced(start, stop) if step == 1 else None
        if placement is None:
            raise cut.refuse(self, f"picks {own} of that axis, no whole groups of its parts")
        repeat = cut.own() // (cut.placement.repeats or 1)
        key[places[cut.axis]] = slice(start // cut.placement.once * repeat, stop // cut.placement.once * repeat)
        self.key = tuple(key)
        gone = sum(isinstance(each, int) for each in key[: places[cut.axis]])
        return replace(placement, axis=places[cut.axis] - gone)

    def _expanded(self, ndim: int) -> list[Any] | None:
        """Return the key as slices, integers and None alone; None for one with arrays."""
        parts = list(self.key) if isinstance(self.key, tuple) else [self.key]
        if not self.basic or any(isinstance(part, bool) for part in parts):
            return None
        missing = [slice(None)] * (ndim - sum(part is not None and part is not Ellipsis for part in parts))
        at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
        return [*parts[:at], *missing, *parts[at + 1 :]]

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape, x.dtype)
        result: Array = x[self.key]
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype = self.saved
        xp = namespace(grad)
        spread: Array = xp.zeros(shape, dtype=dtype)
        if self.basic:
            spread[self.key] = grad
        else:
            xp.add.at(spread, self.key, grad)
        return (spread,)


class TakeAlongAxis(Function):
    """x picked by an index array of the same number of dimensions, along one axis."""

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the indices are the same all along the cut axis."""
        x, _ = inputs
        uncut(self, x, (self.axis,), "picks from all of that axis")
        return aligned(self, inputs)

    def forward(self, x: Array, indices: Array) -> Array:
        self.saved = (x.shape, x.dtype, self._places(x, indices))
        result: Array = x[self.saved[2]]
        return result

    def _places(self, x: Array, indices: Array) -> tuple[Array, ...]:
        """Return index arrays for all axes of x that broadcast to the shape of the result."""
        xp, ndim = namespace(x), x.ndim
        places = [xp.arange(n).reshape([-1 if i == j else 1 for j in range(ndim)]) for i, n in enumerate(x.shape)]
        places[self.axis] = indices
        return tuple(places)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype, places = self.saved
        xp = namespace(grad)
        spread: Array = xp.zeros(shape, dtype=dtype)
        xp.add.at(spread, places, grad)
        return spread, None


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return x[key], the key being integers, slices, None, Ellipsis, boolean masks or integer arrays.

    Raises:
        ShapeError: when the key does not fit x.
    """
    parts = key if isinstance(key, tuple) else (key,)
    parts = tuple(_plain(part) for part in parts)
    try:
        function = GetItem(parts if isinstance(key, tuple) else parts[0])
        return function(x) if function.basic else in_float32(function, x)
    except IndexError as error:
        raise ShapeError(f"index {key!r} does not fit shape {x.data.shape}: {error}") from None


def take_along_axis(x: Tensor, indices: Any, axis: int) -> Tensor:
    """Return elements of x picked along one axis: result[i, j] = x[i, indices[i, j]] for axis 1 of two.

    Along the other axes x and the indices must have the same length, or one of them length 1.

    Raises:
        DtypeError: when the indices are not integers.
        ShapeError: when the numbers of dimensions differ or an index is out of range.
    """
    given = whole_values("take_along_axis", indices)
    places = given if isinstance(indices, Variable) else namespace(x.data).asarray(given)
    if places.dtype.kind not in "iu":
        raise DtypeError(f"take_along_axis needs integer indices, not {places.dtype}")
    ndim = x.data.ndim
    if places.ndim != ndim or not -ndim <= axis < ndim:
        raise ShapeError(f"take_along_axis of shape {x.data.shape} by {places.shape} along axis {axis} does not fit")
    try:
        return in_float32(TakeAlongAxis(axis % ndim), x, places)
    except LayoutError:
        raise
    except (IndexError, ValueError) as error:
        raise ShapeError(f"take_along_axis of shape {x.data.shape} along axis {axis}: {error}") from None


def _plain(part: Any) -> Any:
    values = whole_values("an index", part)
    if hasattr(values, "dtype") and getattr(values, "ndim", 1) == 0 and values.dtype.kind in "iu":
        if isinstance(part, Variable):
            refuse("an index that is a tensor's number")
        return int(values)
    return values
