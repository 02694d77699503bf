"""Calls on arrays, as values.

    y = np.multiply(x, x)           multiply(x, x, out=%0)
    y += 1                          add(%0, 1, out=%0)

An array that the step makes is an `ArrayRef` into an `Allocation`: memory that has no place yet.
Any other array, such as a parameter, stands for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, is_array, namespace
from nnmpi.base.errors import ShapeError


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory for results of a recorded step.

    Attributes:
        size: in bytes.
        number: for display.
        owner: returns the array that has it while the step is recorded, or None if nobody but the
            calls holds that or a view of it.
        freed: the number of calls when nobody held the array any more.
    """

    size: int
    number: int
    owner: Callable[[], Any] = NoneType
    freed: int = 0


class ArrayRef(NamedTuple):
    """An array in an allocation; its offset and strides are in bytes."""

    allocation: Allocation
    offset: int
    shape: Shape
    strides: Shape
    dtype: Dtype

    def over(self, memory: Array, start: int) -> Array:
        """Return this array over bytes, in which its allocation begins at `start`."""
        if 0 in self.shape:  # such an array may have strides that fit no memory
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory.data, start + self.offset, self.strides)

    def __str__(self) -> str:
        return f"%{self.allocation.number}"


@dataclass(eq=False, slots=True)
class Call:
    """A call of a function.

    Attributes:
        function: for example one of NumPy's, or a compiled kernel.
        args, kwargs: references, arrays that outlive the step, and other values.
        result: where replays put what the function returns; None if it writes by itself.
        writes: the arguments to which it writes, if it says so; None if it may do all, and keep
            arrays that it gets, as a send does until its wait.
        number: its place in the order of recording.

    It does not change.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    writes: Sequence[Any] | None = ()
    number: int = 0
    _arrays: list[ArrayRef | Array] | None = field(default=None, init=False)

    def __call__(self) -> object:
        """Call the function; only for calls without references."""
        return self.function(*self.args, **self.kwargs)

    def target(self) -> Any:
        """Return what a NumPy function writes to besides its result: an array, a tuple or None."""
        # the function np.sort has the name of the method, but returns another array
        is_writer = self.result is None and getattr(self.function, "__name__", "") in _WRITERS
        return self.args[0] if is_writer else self.kwargs.get("out")

    def arrays(self) -> list[ArrayRef | Array]:
        """Return the arrays in it."""
        if self._arrays is None:
            self._arrays = items_of((self.function, self.args, self.kwargs, self.result), ARRAYS)
        return self._arrays

    def refs(self) -> list[ArrayRef]:
        """Return those that lie in allocations."""
        return [array for array in self.arrays() if type(array) is ArrayRef]

    def bound(self, place: Callable[[ArrayRef], Array]) -> Callable[[], object]:
        """Return the call on arrays, in its fastest form: a keyword costs 0.1 us."""
        function, args, kwargs, result = (
            rebuilt(item, place, ArrayRef, self.writes is not None)
            for item in (self.function, self.args, self.kwargs, self.result)
        )
        if function in _TAKE_NUMBERS and len(args) == 2:
            pairs = zip(args, reversed(args), strict=True)
            args = tuple(_operand(x, other) for x, other in pairs)
        if (
            isinstance(function, np.ufunc)
            and kwargs.keys() == {"out"}
            and (len(args), function.nout) == (function.nin, 1)
            and function not in _NAMED_OUT
        ):
            args, kwargs = (*args, kwargs["out"]), {}
        elif function in _METHODS and args and type(args[0]) is np.ndarray:
            function, args = getattr(args[0], function.__name__), args[1:]
        call = partial(function, *args, **kwargs) if args or kwargs else function
        return call if result is None else partial(_store, result, call)

    def __str__(self) -> str:
        words = [*map(_text, self.args), *(f"{k}={_text(v)}" for k, v in self.kwargs.items())]
        target = "" if self.result is None else f"{_text(self.result)} = "
        return f"{target}{name_of(self.function)}({', '.join(words)})"


def _operand(x: Any, other: Any) -> Any:
    """Return a number beside floats as an array without axes, which NumPy need not convert."""
    is_float = isinstance(other, np.ndarray) and other.dtype.kind == "f"
    return np.full((), x, other.dtype) if type(x) in (int, float) and is_float else x


ARRAYS = ArrayRef, np.ndarray
_DEEP = {tuple, list, dict, partial}  # what may have some within
# NumPy implements these by methods, which are faster to call; those need `out` by name
_METHODS = (np.take, np.put, np.argmax, np.argmin)
_NAMED_OUT = (np.maximum, np.minimum)
# Functions that compute in the dtype of an array beside a number
_TAKE_NUMBERS = (*_NAMED_OUT, np.add, np.subtract, np.multiply, np.divide, np.greater, np.less)
# Functions of NumPy's that write to their first argument
_WRITERS = frozenset(
    ["setitem", "copyto", "fill", "put", "putmask", "place", "fill_diagonal", "put_along_axis"]
    + ["at", "sort", "partition", "_raise_in_place"]
)
# What a search for items may meet. A recording searches the arguments of each call several times.
Kinds: TypeAlias = type | tuple[type, ...]


def rebuilt(x: Any, place: Callable[[Any], Any], kinds: Kinds, deep: bool = True) -> Any:
    """Return a value with `place` of each item of some types within it.

    Looks into tuples, partial calls and, if `deep`, lists and dictionaries.
    """
    kind = type(x)  # `isinstance` takes five times as long for a recorded array
    if issubclass(kind, kinds):
        return place(x)
    if kind is tuple or (deep and kind is list):
        return kind(
            [
                place(item)
                if issubclass(type(item), kinds)
                else (rebuilt(item, place, kinds, deep) if type(item) in _DEEP else item)
                for item in x
            ]
        )
    if kind is dict and deep:
        return {name: rebuilt(item, place, kinds, deep) for name, item in x.items()}
    if kind is partial:
        args = rebuilt((x.func, *x.args), place, kinds, deep)
        words = {name: rebuilt(item, place, kinds, deep) for name, item in x.keywords.items()}
        return partial(*args, **words)
    return x


def items_of(x: Any, kinds: Kinds) -> list[Any]:
    """Return the items of some types within a value, as `rebuilt` finds them."""
    found: list[Any] = []
    rebuilt(x, found.append, kinds)
    return found


def _store(targets: Any, call: Callable[[], Any]) -> None:
    results = call()
    if not isinstance(targets, tuple | list):
        targets, results = (targets,), (results,)
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            write(target, result)


def write(target: Array, result: Any) -> None:
    """Write a result that is computed again to its array, unless it is a view of that.

    Raises:
        ShapeError: when its shape differs from the recorded one: x[mask]'s shape, for example,
            depends on values.
    """
    if result.shape != target.shape:
        raise ShapeError(
            f"an operation of a compiled step gave {result.shape} in place of the {target.shape}"
            " that was recorded; shapes that depend on values, such as x[mask]'s, cannot be"
            " compiled"
        )
    if not (is_array(result) and namespace(target).may_share_memory(target, result)):
        target[...] = result


def owner_of(array: Array) -> Array:
    """Return the array that has an array's memory."""
    owner: Array = array
    base: Any = array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        # getattr: as_strided puts an object that is no array between a view and its base
        base = getattr(base, "base", None)
    return owner


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    return array.__array_interface__["data"][0]


def name_of(function: Any) -> str:
    """Return a function's name for display."""
    if isinstance(function, partial):
        return name_of(function.func)
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", None) or type(function).__name__
    if isinstance(owner, np.ufunc):
        return f"{owner.__name__}.{name}"
    return str(getattr(function, "__qualname__", name)).replace(".<locals>", "")


def _text(x: Any) -> str:
    if isinstance(x, ArrayRef):
        return f"{x}{_shape(x)}"
    if isinstance(x, np.ndarray):
        return f"{x}" if not x.ndim else f"array{_shape(x)}"
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))})"
    if isinstance(x, np.dtype):
        return x.name
    if isinstance(x, np.generic | float | int | str | bool | type(None) | slice):
        return f"{x}"
    return getattr(x, "__name__", None) or type(x).__name__


def _shape(x: Any) -> str:
    return f"[{' '.join(map(str, x.shape))}]"
