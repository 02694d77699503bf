"""Calls on arrays, as values.

    y = np.multiply(x, x)           multiply(x, x, out=%0)
    y += 1                          add(%0, 1, out=%0)

An array that the step makes is an `ArrayRef` into an `Allocation`: memory that has no place yet.
Any other array, such as a parameter, stands for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, is_array, namespace
from nnmpi.base.errors import ShapeError


class Allocation:
    """Memory for results of a recorded step.

    Args:
        size: in bytes.
        number: for display.
        address: of the memory while the step is recorded.
        owner: a weak reference to the array that has it then.

    Attributes:
        freed: the number of calls when nobody held the array any more.
    """

    __slots__ = ("_owner", "address", "freed", "number", "size")

    def __init__(
        self, size: int, number: int, address: int = 0, owner: Callable[[], Any] | None = None
    ) -> None:
        self.size, self.number, self.address, self._owner = size, number, address, owner
        self.freed = 0

    @property
    def owner(self) -> Array | None:
        """The array, if anybody but the calls still holds it or a view of it."""
        return None if self._owner is None else self._owner()


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
        keeps: whether the function may keep arrays that it gets, as a send does until its wait.
        number: its place in the order of recording.

    It does not change.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    keeps: bool = False
    number: int = 0
    _arrays: list[ArrayRef | Array] | None = field(default=None, init=False)

    def __call__(self) -> object:
        """Call the function; only for calls without references."""
        return self.function(*self.args, **self.kwargs)

    @property
    def target(self) -> Any:
        """The array, or tuple, that a function of NumPy's writes to besides its result, or None."""
        is_writer = getattr(self.function, "__name__", "") in _WRITERS
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
            rebuilt(item, place, _REFS, not self.keeps)
            for item in (self.function, self.args, self.kwargs, self.result)
        )
        if (
            isinstance(function, np.ufunc)
            and kwargs.keys() == {"out"}
            and (len(args), function.nout) == (function.nin, 1)
            and function not in _NAMED_OUT
        ):
            args, kwargs = (*args, kwargs["out"]), {}
        elif function in _METHODS and args and type(args[0]) is np.ndarray:
            function, args = getattr(args[0], function.__name__), args[1:]
        if function is copy_to:
            function, args = np.copyto, (kwargs.pop("out"), *args)
        call = partial(function, *args, **kwargs) if args or kwargs else function
        return call if result is None else partial(_store, result, call)

    def __str__(self) -> str:
        words = [*map(_text, self.args), *(f"{k}={_text(v)}" for k, v in self.kwargs.items())]
        target = "" if self.result is None else f"{_text(self.result)} = "
        return f"{target}{name_of(self.function)}({', '.join(words)})"


def copy_to(x: Array, out: Array, **kwargs: Any) -> None:
    """Do the same as np.copyto, with the target where universal functions have it."""
    np.copyto(out, x, **kwargs)


# NumPy implements these by methods, which are faster to call; those need `out` by name
_METHODS = (np.take, np.put, np.argmax, np.argmin)
_NAMED_OUT = (np.maximum, np.minimum)
# Functions of NumPy's that write to their first argument
_WRITERS = frozenset(
    ["setitem", "copyto", "fill", "put", "putmask", "place", "fill_diagonal", "put_along_axis"]
    + ["at", "sort", "partition", "_raise_in_place"]
)
# What a value may be in a search for items: none, an item, or something that may have some within
_OTHER, _ITEM, _ROW, _DICT, _PARTIAL = range(5)
_LIBRARIES = ("builtins", "functools", "numpy", "nnmpi")


class Kinds(dict[type, int]):
    """What values are in a search for items of some types, by their own type.

    A recording searches the arguments of each call several times. To ask each value by `isinstance`
    took a fifth of the whole recording.

    Args:
        kinds: the items' types.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds

    def __missing__(self, kind: type) -> int:
        way = (
            _ITEM * issubclass(kind, self._kinds)
            or _ROW * issubclass(kind, (tuple, list))
            or _DICT * issubclass(kind, dict)
            or _PARTIAL * issubclass(kind, partial)
        )
        if kind.__module__.partition(".")[0] in _LIBRARIES:  # a user's may be many
            self[kind] = way
        return way


HOST_ARRAYS, ARRAYS = Kinds(np.ndarray), Kinds(ArrayRef, np.ndarray)
_REFS = Kinds(ArrayRef)


def rebuilt(x: Any, place: Callable[[Any], Any], kinds: Kinds, deep: bool = True) -> Any:
    """Return a value with `place` of each item of some types within it.

    Looks into tuples, partial calls and, if `deep`, lists and dictionaries.
    """
    kind = type(x)
    way = kinds[kind]
    if way == _ITEM:
        return place(x)
    if not way:
        return x
    if kind is tuple or (deep and kind is list):
        return kind(
            [rebuilt(item, place, kinds, deep) if kinds[type(item)] else item for item in x]
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
    _collect(x, kinds, found)
    return found


def _collect(x: Any, kinds: Kinds, found: list[Any]) -> None:
    way = kinds[type(x)]
    if way == _ITEM:
        found.append(x)
        return
    if way == _DICT:
        x = x.values()
    elif way == _PARTIAL:
        x = (x.func, *x.args, *x.keywords.values())
    for item in x if way else ():
        way = kinds[type(item)]
        if way == _ITEM:
            found.append(item)
        elif way:
            _collect(item, kinds, found)


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


def packed_strides(shape: Shape, dtype: Dtype) -> Shape:
    """Return the strides of a C-contiguous array, in bytes."""
    strides, step = [], dtype.itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


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
