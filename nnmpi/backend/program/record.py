"""Recording by NumPy's own protocols.

    forward(x)        x is a `RecordedArray`: NumPy asks it what a function, an operator or a
                      method is to do
    y = x * x         computes at once, so an error appears at its line, and appends the call
    y[1:] += 1        views need no call; what is written in place is a call like any other

So an operation is written as one writes NumPy. A replay would freeze what Python decides by a value
(`if x.max() > 1`), and miss what works on the memory behind NumPy's back (`np.asarray(x)`). Such an
array is no subclass of NumPy's, which would let both pass in silence: it is asked for its values,
notes the reason, and gives them. The step goes on, and its results are right; only its recording is
dropped (`spoiled`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import getitem, setitem
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.program.call import (
    Allocation,
    ArrayRef,
    Call,
    address_of,
    items_of,
    name_of,
    owner_of,
    rebuilt,
)

active_calls: ContextVar[Any] = ContextVar("nnmpi_recorder", default=None)

# Functions that make arrays, and what they fill them with; None: as the argument says
_FILLS = {"zeros": 0, "ones": 1, "full": None}
_MAKERS = {f"{name}{like}" for name in ("empty", *_FILLS) for like in ("", "_like")}
# Functions that read an array's memory without asking it
_COPIES = {"array", "asarray", "ascontiguousarray", "asfortranarray", "copy"}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions with an argument `out`, besides universal functions and their reductions
_WITH_OUT = _names("""
    dot take argmax argmin mean sum prod std var max min amax amin any all cumsum cumprod clip round
    einsum concatenate stack choose trace
""")
# They look at shapes and types alone
_SHAPES = _names("shape ndim size result_type can_cast may_share_memory shares_memory common_type")
# The shapes of their results depend on values
_BY_VALUE = _names("""
    nonzero flatnonzero argwhere unique unique_values unique_counts unique_inverse unique_all
    extract compress bincount union1d intersect1d setdiff1d setxor1d trim_zeros histogram
""")
_ATTRIBUTES = _names("shape dtype ndim size nbytes itemsize strides flags base")


def bare(x: Any, deep: bool = True) -> Any:
    """Return a value with plain arrays in place of recorded ones; `deep` as for `rebuilt`."""
    return rebuilt(x, lambda item: item._array, RecordedArray, deep)


def viewed(function: Callable[..., Array], x: Array, **kwargs: Any) -> Array:
    """Return a view of an array that a function makes which NumPy does not dispatch."""
    result: Any = function(bare(x), **kwargs)
    if has_recorded(x):
        result = RecordedArray(result)
    return result


def has_recorded(x: Any) -> bool:
    """Whether there is a recorded array within a value."""
    return next(items_of(x, RecordedArray), None) is not None


class RecordedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a step that is being recorded, for operations: all that is done to it is noted.

    Args:
        array: with the values of this step.
    """

    __slots__ = ("_array",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, array: Array) -> None:
        self._array = array

    __class__ = property(lambda _: np.ndarray)  # for `isinstance`

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        if isinstance(out := kwargs.get("out"), tuple) and len(out) == 1:
            kwargs["out"] = out[0]
        return _apply(function, inputs, kwargs, method != "at")

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name, recorder = function.__name__, active_calls.get()
        if recorder is not None and name in _MAKERS:
            return recorder.make(function, *args, **kwargs)
        if name in _SHAPES or recorder is None:
            return function(*bare(args), **bare(kwargs))
        if name in _BY_VALUE or (name == "where" and len(args) == 1):
            recorder.spoil(f"the shape of np.{name}'s result depends on values")
        return _apply(function, args, kwargs, name in _WITH_OUT)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        recorder = active_calls.get()
        return np if recorder is None else recorder.module(np)

    def __getitem__(self, key: Any) -> Any:
        masks = [item for item in items_of(key, np.ndarray) if item.dtype == bool]
        if has_recorded(masks):
            _spoil("the shape of x[mask] depends on values")
        return _apply(getitem, (self, key), {}, False)

    def __setitem__(self, key: Any, value: Any) -> None:
        _apply(setitem, (self, key, value), {}, False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._array, name)
        if isinstance(value, np.ndarray):  # a view, such as x.T
            return RecordedArray(value)
        if callable(value):
            if name in _BY_VALUE:
                _spoil(f"the shape of x.{name}'s result depends on values")
            return partial(_method, getattr(np.ndarray, name), name in _WITH_OUT, self)
        if name not in _ATTRIBUTES:
            _spoil(f"x.{name} is read")
        return value

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return repr(self._array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        _spoil("a function that NumPy does not dispatch, such as np.asarray, reads an array")
        return np.array(self._array, dtype, copy=copy)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()


def _reading(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        _spoil(f"Python reads a value ({name.strip('_')})")
        return getattr(self._array, name)(*args)

    return method


for _name in ("bool", "int", "float", "complex", "index", "contains"):
    setattr(RecordedArray, f"__{_name}__", _reading(f"__{_name}__"))


def _spoil(reason: str) -> None:
    recorder = active_calls.get()
    if recorder is not None:
        recorder.spoil(reason)


def _method(function: Any, has_out: bool, *args: Any, **kwargs: Any) -> Any:
    return _apply(function, args, kwargs, has_out)


def _apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_out: bool) -> Any:
    """Call a function, and record the call."""
    recorder, given = active_calls.get(), kwargs.get("out")
    values, words = bare(args), bare(kwargs)
    result = function(*values, **words)
    if recorder is None:
        return result
    if given is None:  # perhaps by position
        given = next((arg for arg in args[1:] if result is not None and bare(arg) is result), None)
    if result is None or given is not None:
        # the functions that return nothing write to their first argument
        recorder.check_written([*values, *words.values()][:1] if given is None else bare(given))
        recorder.append(function, values, words)
        return given
    is_item = function is getitem and has_recorded(args[1:])
    return recorder.results(function, values, words, result, has_out, is_item)


class Makers:
    """NumPy, but the arrays that it makes are recorded ones.

    Args:
        recorder: the active one.
    """

    __name__ = "numpy"

    def __init__(self, recorder: CallList) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name in _MAKERS:
            return partial(self._recorder.make, function)
        return partial(self._recorder.copied, function) if name in _COPIES else function


class CallList:
    """The calls of a step in their order, and the memory that they fill.

    Attributes:
        calls: so far.
        spoiled: why a replay of them would be wrong; empty if it would not.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.spoiled = ""
        self._allocations: dict[int, Allocation] = {}  # by the id of its array, which is alive
        self._written: dict[int, Array] = {}  # arrays that outlive the step, and that it writes to
        self._count = 0

    def spoil(self, reason: str) -> None:
        """Note that a replay would be wrong."""
        self.spoiled = self.spoiled or reason

    def wrap(self, x: Any) -> Any:
        """Return NumPy's arrays as recorded ones, anything else unchanged."""
        return RecordedArray(x) if type(x) is np.ndarray else x

    def writable(self, array: Array) -> Any:
        """Return an array that outlives the step, such as a gradient's, to write to."""
        owner = owner_of(array)
        self._written[id(owner)] = owner
        return self.wrap(array)

    def check_written(self, x: Any) -> None:
        """Refuse to replay a write to an array from outside: it would begin with other values."""
        for array in items_of(x, np.ndarray):
            owner = id(owner_of(array))
            if owner not in self._allocations and owner not in self._written:
                self.spoil("an operation writes to an array that self.xp has not made")

    def adopt(self, array: Array) -> Array:
        """Make a new array's memory the step's own; return the array."""
        owner = owner_of(array)
        key, calls, allocations = id(owner), self.calls, self._allocations

        def dropped(_: Any) -> None:
            allocation.freed = len(calls)
            del allocations[key]

        if key not in allocations:
            held = weakref.ref(owner, dropped)
            allocation = Allocation(owner.nbytes, self._count, address_of(owner), held)
            allocations[key] = allocation
            self._count += 1
        return array

    def append(
        self,
        function: Any,
        args: Any = (),
        kwargs: Any = None,
        result: Any = None,
        keeps: bool = False,
    ) -> None:
        """Add a call that was made.

        A function that may keep what it gets may also change it, so its lists and dictionaries stay
        the same objects.
        """
        args, result = (rebuilt(x, self._ref, np.ndarray, not keeps) for x in (args, result))
        kwargs = rebuilt(kwargs or {}, self._ref, np.ndarray)
        self.calls.append(Call(function, args, kwargs, result, keeps, len(self.calls)))

    def _ref(self, x: Any) -> Any:
        array = x._array if type(x) is RecordedArray else x
        allocation = self._allocations.get(id(owner_of(array)))
        if allocation is None:
            return array
        offset = address_of(array) - allocation.address
        return ArrayRef(allocation, offset, array.shape, array.strides, array.dtype)

    def results(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        has_out: bool,
        is_item: bool = False,
    ) -> Any:
        """Record a call that returned arrays; return them as recorded ones.

        Args:
            has_out: whether the function takes `out`.
            is_item: whether values decided where the result lies in the argument.
        """
        owners = {id(owner_of(array)) for array in items_of((args, kwargs), np.ndarray)}
        is_single = not isinstance(result, tuple | list)
        items = (result,) if is_single else result
        if not all(isinstance(item, np.ndarray | np.generic) for item in items):
            self.spoil(f"{name_of(function)} returns {type(result).__name__}")
            return result
        targets, arrays = [], []
        for item in items:
            array = np.asarray(item)
            if is_item and id(owner_of(array)) in owners:
                array = array.copy()
            is_view = id(owner_of(array)) in owners
            targets.append(None if is_view else self.adopt(array))
            arrays.append(RecordedArray(array))
        if any(target is not None for target in targets):
            target = targets[0] if is_single else tuple(targets)
            if has_out:
                self.append(function, args, {**kwargs, "out": target})
            else:
                self.append(function, args, kwargs, target)
        if is_single:
            return arrays[0]
        make = getattr(type(result), "_make", type(result))
        return make(arrays)

    def make(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Make an array that is filled in each replay, unless it is an uninitialized one."""
        array = self.adopt(function(*bare(args), **bare(kwargs)))
        name = function.__name__.removesuffix("_like")
        if name in _FILLS:
            value = kwargs.get("fill_value", args[1:2]) if name == "full" else _FILLS[name]
            value = value[0] if isinstance(value, tuple) else value
            fill = np.copyto if isinstance(value, np.ndarray | list) else np.ndarray.fill
            self.append(fill, (array, bare(value)))
        return RecordedArray(array)

    def copied(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads an array's memory."""
        values, words = bare(args), bare(kwargs)
        result = function(*values, **words)
        if not has_recorded((args, kwargs)):
            return result
        return self.results(function, values, words, result, False)
