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
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from operator import attrgetter, getitem, setitem
from threading import get_ident
from typing import Any
from zlib import crc32

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.program.call import (
    Allocation,
    ArrayRef,
    Call,
    Kinds,
    address_of,
    items_of,
    name_of,
    owner_of,
    rebuilt,
)
from nnmpi.base.lines import users_line

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
# The shapes or dtypes of their results depend on values
_BY_VALUE = _names("""
    nonzero flatnonzero argwhere unique unique_values unique_counts unique_inverse unique_all
    extract compress bincount union1d intersect1d setdiff1d setxor1d trim_zeros histogram
    histogram2d histogramdd histogram_bin_edges roots real_if_close resize
""")
# These, too, if the second argument is an array
_BY_INDEX = _names("repeat delete insert")
# They make views and do nothing else
_VIEWS = _names("""
    getitem reshape transpose permute_dims swapaxes moveaxis rollaxis squeeze expand_dims ravel view
    broadcast_to broadcast_arrays split array_split hsplit vsplit dsplit unstack diagonal astype
    atleast_1d atleast_2d atleast_3d flip fliplr flipud rot90 matrix_transpose real imag
    asarray array ascontiguousarray asfortranarray sliding_window_view
""")
_ROWS, _RESULTS = (tuple, list), (np.ndarray, np.generic)  # a union is made anew in each call
_ATTRIBUTES = _names("shape dtype ndim size nbytes itemsize strides flags base")


def bare(x: Any, deep: bool = True) -> Any:
    """Return a value with plain arrays in place of recorded ones; `deep` as for `rebuilt`."""
    return rebuilt(x, _array_of, RecordedArray, deep)


def viewed(function: Callable[..., Array], x: Array, **kwargs: Any) -> Array:
    """Return a view of an array that a function makes which NumPy does not dispatch."""
    result: Any = function(bare(x), **kwargs)
    return x._like(result) if isinstance(x, RecordedArray) else result


def has_recorded(x: Any) -> bool:
    """Whether there is a recorded array within a value."""
    return bool(items_of(x, RecordedArray))


class RecordedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a step that is being recorded, for operations: all that is done to it is noted.

    Args:
        array: with the values of this step.
        active: the list of calls where it is noted; none once that is complete.
    """

    __slots__ = ("__weakref__", "_active", "_array", "_place")
    __hash__ = None  # type: ignore[assignment]

    _array: Array
    _active: Sequence[CallList]
    _place: Any  # in the memory of the recording, once that is asked for

    def __init__(self, array: Array, active: Sequence[CallList] = ()) -> None:
        _set_array(self, array)
        _set_active(self, active)
        _set_place(self, None)

    __class__ = property(lambda _: np.ndarray)  # for `isinstance`
    # what is read most often, and asked for by the class alone
    shape, dtype, ndim, size = (
        property(attrgetter(f"_array.{name}")) for name in ("shape", "dtype", "ndim", "size")
    )

    @property
    def _value(self) -> Any:
        """What NumPy has in its place."""
        return self._array

    def _like(self, array: Array) -> Any:
        """Return a view of it."""
        return RecordedArray(array, self._active)

    def _recorder(self) -> Any:
        """Return the active recorder; another thread's misses what is done here."""
        recorder = active_calls.get()
        for calls in self._active:
            if calls.thread != get_ident():
                for item in {calls, recorder} - {None}:
                    item.spoil("another thread computes with an array")
        return recorder

    def _spoil(self, reason: str) -> None:
        if (recorder := self._recorder()) is not None:
            recorder.spoil(reason)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        for x in inputs:
            if hasattr(type(x), "requires_grad"):
                return NotImplemented  # a Tensor computes with the array
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        if isinstance(out := kwargs.get("out"), tuple) and len(out) == 1:
            kwargs["out"] = out[0]
        return _apply(self._recorder(), function, inputs, kwargs, method != "at")

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name, recorder = function.__name__, self._recorder()
        if recorder is not None and name in _MAKERS:
            return recorder.make(function, *args, **kwargs)
        # this one asks what is hidden in other containers than lists for its values
        own = getattr(function, "_implementation", function)
        if name in _SHAPES or recorder is None:
            return own(*_values(args), **_values(kwargs))
        if name == "putmask" and items_of(args, RecordedNumber):
            recorder.spoil("np.putmask casts a number, but no array without axes")
        if (
            name in _BY_VALUE
            or (name == "where" and len(args) == 1)
            or (name in _BY_INDEX and has_recorded((args[1:2], kwargs.get("obj"))))
        ):
            recorder.spoil(f"the shape of np.{name}'s result depends on values")
        return _apply(recorder, function, args, kwargs, name in _WITH_OUT, own)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        recorder = self._recorder()
        return np if recorder is None else recorder.module(np)

    def __getitem__(self, key: Any) -> Any:
        if any(item.dtype == bool for item in items_of(key, RecordedArray)):
            self._spoil("the shape of x[mask] depends on values")
        return _apply(self._recorder(), getitem, (self, key), {}, False)

    def __setitem__(self, key: Any, value: Any) -> None:
        _apply(self._recorder(), setitem, (self, key, value), {}, False)

    def __pow__(self, other: Any) -> Any:
        return self._power(_power, self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._power(_power, other, self)

    def __ipow__(self, other: Any) -> Any:
        return self._power(_raise_in_place, self, other)

    def _power(self, function: Any, *args: Any) -> Any:
        numbers = tuple([isinstance(x, RecordedNumber) for x in args])
        return _apply(self._recorder(), function, (*args, numbers), {}, False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._array, name)
        if isinstance(value, np.ndarray):  # a view, such as x.T
            return self._like(value)
        if callable(value):
            return partial(self._method, name)
        if name not in _ATTRIBUTES:
            self._spoil(f"x.{name} is read")
        return value

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "setflags":  # of this array, not of the replays' one
            return self._array.setflags(*args, **kwargs)
        if name in _BY_VALUE or (name in _BY_INDEX and has_recorded((args, kwargs))):
            self._spoil(f"the shape of x.{name}'s result depends on values")
        function = getattr(np.ndarray, name)
        return _apply(self._recorder(), function, (self, *args), kwargs, name in _WITH_OUT)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("real", "imag"):
            getattr(self, name)[...] = value
        else:
            self._spoil(f"x.{name} is assigned")
            setattr(self._array, name, bare(value))

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return repr(self._value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        self._spoil("a function that NumPy does not dispatch, such as np.asarray, reads an array")
        return np.array(self._array, dtype, copy=copy)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()


class RecordedNumber(RecordedArray):
    """A number of NumPy's, which it returns in place of an array without axes.

    Replays compute it as such an array. Unlike one it never changes: `n += 1` makes another.
    """

    __slots__ = ()

    __class__ = property(lambda self: self._array.dtype.type)  # for `isinstance`

    @property
    def _value(self) -> Any:
        return self._array[()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array_"):  # NumPy would read the number there
            raise AttributeError(name)
        if name in ("T", "real", "imag"):
            return getattr(np, {"T": "transpose"}.get(name, name))(self)
        value = getattr(self._value, name)
        if name in _ATTRIBUTES or name.startswith("__"):
            return value
        if not callable(value) or not hasattr(np.ndarray, name):
            self._spoil(f"x.{name} is read")
            return value
        return partial(self._method, name)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        function, own = getattr(np.ndarray, name), getattr(type(self._value), name)
        return _apply(self._recorder(), function, (self, *args), kwargs, False, own)

    def __getitem__(self, key: Any) -> Any:
        return self if isinstance(key, tuple) and not key else super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._value[key] = value  # raises

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._value, name, value)  # raises


def _reading(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        self._spoil(f"Python reads a value ({name.strip('_')})")
        return getattr(self._value, name)(*args)

    return method


for _name in _names("bool int float complex index contains round reduce_ex str format"):
    setattr(RecordedArray, f"__{_name}__", _reading(f"__{_name}__"))
setattr(RecordedNumber, "__hash__", _reading("__hash__"))  # noqa: B010
for _name in _names("add sub mul truediv floordiv mod pow lshift rshift and xor or matmul"):
    setattr(RecordedNumber, f"__i{_name}__", lambda *_: NotImplemented)


def _power(base: Any, exponent: Any, numbers: tuple[bool, bool]) -> Any:
    """Return a power as `**` has it.

    For numbers, and for some exponents, NumPy takes other functions than `np.power`.
    """
    base, exponent = (
        x[()] if is_one else x for x, is_one in zip((base, exponent), numbers, strict=True)
    )
    return base**exponent


def _raise_in_place(base: Any, exponent: Any, numbers: tuple[bool, bool]) -> Any:
    base **= exponent[()] if numbers[1] else exponent
    return base


def _values(x: Any) -> Any:
    """Return a value with what NumPy has in place of recorded arrays and numbers."""
    return rebuilt(x, _value_of, RecordedArray)


def _apply(
    recorder: Any,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_out: bool,
    own: Any = None,
) -> Any:
    """Call a function, or `own` in its place, and record the call."""
    out = kwargs.get("out")
    values, words = _values(args), _values(kwargs) if kwargs else kwargs
    if recorder is None:
        return _computed(function, own, values, words)
    recorder.look(values, words)
    try:
        result = _computed(function, own, values, words)
    except Exception as error:  # the step may go on in another way
        recorder.spoil(f"{name_of(function)} raised {type(error).__name__}")
        raise
    if result is None and args and isinstance(args[0], RecordedNumber):
        return result  # what would change an array does nothing to a number
    if out is None and result is not None:
        for arg, value in zip(args[1:], values[1:], strict=True):
            if value is result:  # `out` by position
                out = arg
    if isinstance(out, tuple) and any(item is None for item in out):
        return recorder.results(function, args, kwargs, (values, words), result, False)
    if result is None or out is not None:
        recorder.append(function, args, kwargs)
        return out
    return recorder.results(function, args, kwargs, (values, words), result, has_out)


def _computed(function: Any, own: Any, values: tuple[Any, ...], words: dict[str, Any]) -> Any:
    """Call a function, or `own`; what its arguments call is no call of the step.

    Functions among the arguments are called in each replay, too.
    """
    token = active_calls.set(None) if any(map(callable, values)) else None
    try:
        return (own or function)(*values, **words)
    finally:
        if token is not None:
            active_calls.reset(token)


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


_array_of, _value_of = attrgetter("_array"), attrgetter("_value")
_set_array, _set_active, _set_place = (  # past `__setattr__`
    vars(RecordedArray)[name].__set__ for name in ("_array", "_active", "_place")
)


class CallList:
    """The calls of a step in their order, and the memory that they fill.

    Attributes:
        calls: so far.
        spoiled: why a replay of them would be wrong; empty if it would not.
        lines: of the user's code, at which the calls were made, if it `notes_lines`.
        thread: in which they are recorded.
        active: itself, until the recording ends.
        errors: what operations want to hear of overflows and the like, for `np.errstate`.
        watched: checksums of arrays from outside as calls have left them, by the ids of owners.
        is_rehearsal: whether the step leaves nothing behind, see `recording.Rehearsal`.
    """

    is_rehearsal = False

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.lines: list[tuple[str, int]] = []
        self.notes_lines = False
        self.spoiled = ""
        self.thread = get_ident()
        self.active = [self]
        self.errors: dict[str, Any] = {}
        self.watched: dict[int, int] = {}
        self._errors: dict[str, Any] = {**np.geterr()}
        self._kinds: Kinds = (np.ndarray, RecordedArray)  # of which a call names the places
        self._allocations: dict[int, Allocation] = {}  # by the id of its array, which is alive
        self._count = 0

    def spoil(self, reason: str) -> None:
        """Note that a replay would be wrong."""
        self.spoiled = self.spoiled or reason

    def watch(self, arrays: Any) -> None:
        """Take the values that arrays have now; from now on only calls may change them."""
        for owner in map(owner_of, items_of(arrays, np.ndarray)):
            self.watched[id(owner)] = crc32(owner.tobytes())

    def look(self, *used: Any) -> None:
        """Note if watched arrays have been changed by what is no call, such as `array *= 2`."""
        for owner in map(owner_of, items_of(used, np.ndarray) if self.watched else ()):
            if self.watched.get(id(owner)) not in (None, crc32(owner.tobytes())):
                self.spoil("NumPy changes an array in a call without one of the step's")

    def wrap(self, x: Any) -> Any:
        """Return NumPy's arrays as recorded ones, anything else unchanged."""
        return RecordedArray(x, self.active) if type(x) is np.ndarray and not self.spoiled else x

    def outside(self, of: Callable[[Call], Any]) -> set[int]:
        """Return the ids of the owners of arrays from outside, `Call.arrays` or `Call.target`."""
        return {id(owner_of(x)) for x in items_of([*map(of, self.calls)], np.ndarray)}

    def held(self) -> dict[Allocation, Array]:
        """Return the step's own memory that somebody still holds, with the arrays that have it."""
        return {item: item.owner() for item in self._allocations.values()}

    def adopt(self, array: Array) -> Array:
        """Make a new array's memory the step's own; return the array."""
        if array.dtype.hasobject:  # bytes of a block are no objects
            self.spoil("an array has Python objects")
            return array
        owner = owner_of(array)
        key, calls, allocations = id(owner), self.calls, self._allocations

        def dropped(_: Any) -> None:
            allocation.freed = len(calls)
            del allocations[key]

        if key not in allocations:
            held = weakref.ref(owner, dropped)
            allocation = allocations[key] = Allocation(owner.nbytes, self._count, held)
            self._count += 1
        return array

    def append(
        self,
        function: Any,
        args: Any = (),
        kwargs: Any = None,
        result: Any = None,
        writes: Any = (),
    ) -> None:
        """Add a call that was made.

        A function that may do anything may also change its lists and dictionaries, so these stay
        the same objects.
        """
        errors = np.geterr()
        if errors != self._errors:
            self._note_errors(errors)
        place, kinds, deep = self.place_of, self._kinds, writes is not None
        args = rebuilt(args, place, kinds, deep)
        kwargs = rebuilt(kwargs, place, kinds, deep) if kwargs else {}
        if result is not None:
            result = rebuilt(result, place, kinds, deep)
        writes = rebuilt(writes, place, kinds)
        self.calls.append(Call(function, args, kwargs, result, writes, len(self.calls)))
        if self.watched:
            written = items_of(self.calls[-1].target(), np.ndarray)
            self.watch([x for x in written if id(owner_of(x)) in self.watched])
        if self.notes_lines:
            self.lines.append(users_line())

    def _note_errors(self, errors: Mapping[str, Any]) -> None:
        changed = {kind: how for kind, how in errors.items() if how != self._errors[kind]}
        self.errors |= changed
        if {"raise", "call"} & {*changed.values()}:
            self.spoil("an operation waits for errors of floating point")

    def place_of(self, x: Any) -> Any:
        """Return an array's place in the step's memory; an array from outside stands for itself."""
        if issubclass(type(x), RecordedArray):
            if x._active is not self.active:  # of another recording
                return self.place_of(x._array)
            if x._place is None:
                _set_place(x, self.place_of(x._array))
            return x._place
        owner = owner_of(x)
        allocation = self._allocations.get(id(owner))
        if allocation is None:
            return x
        offset = 0 if owner is x else address_of(x) - address_of(owner)
        return ArrayRef(allocation, offset, x.shape, x.strides, x.dtype)

    def results(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Any,
        result: Any,
        has_out: bool,
    ) -> Any:
        """Record a call that returned arrays; return them as recorded ones.

        Args:
            values: the arguments with plain arrays.
            has_out: whether the function takes `out`.
        """
        is_single = not isinstance(result, _ROWS)
        targets: list[Any] = []  # what a replay computes; None for a view of what is there
        results: list[RecordedArray] = []
        for item in (result,) if is_single else result:
            if not isinstance(item, _RESULTS):
                self.spoil(f"{name_of(function)} returns {type(result).__name__}")
                return result
            array = np.asarray(item)
            kind = RecordedNumber if isinstance(item, np.generic) else RecordedArray
            recorded = kind(array, self.active)
            results.append(recorded)
            if self._is_given(array, values):
                targets.append(None)
            else:
                self.adopt(array)
                targets.append(recorded)
        if all(target is None for target in targets):
            self._note_views(function, args, kwargs, results)
        else:
            target = targets[0] if is_single else tuple(targets)
            self._note_made(function, args, kwargs, target, has_out)
        if is_single:
            return results[0]
        return getattr(type(result), "_make", type(result))(results)

    def _note_made(
        self, function: Any, args: Any, kwargs: dict[str, Any], target: Any, has_out: bool
    ) -> None:
        """Add a call whose results are new arrays, which replays write in place if they can."""
        # in float16 a mean is computed in float32 only if there is no `out`
        if has_out and (isinstance(function, np.ufunc) or target.dtype != np.float16):
            self.append(function, args, {**kwargs, "out": target})
        else:
            self.append(function, args, kwargs, target)

    def _note_views(
        self, function: Any, args: Any, kwargs: dict[str, Any], results: Sequence[RecordedArray]
    ) -> None:
        """Add a call that returned views, unless it does nothing else; they stay the same ones."""
        if function.__name__ not in _VIEWS:  # it may have written to what it returns
            self.append(function, args, kwargs)
        owners = {id(owner_of(item._array)) for item in results}
        for index in items_of((args[1:], kwargs), RecordedArray):
            if index.dtype.kind in "biu" and id(owner_of(index._array)) not in owners:
                self.spoil("values decide of which part of an array a view is")

    def _is_given(self, array: Array, values: Any) -> bool:
        """Whether a result lies in the memory of the step, or of an argument."""
        owner = owner_of(array)
        if id(owner) in self._allocations:
            return True
        args, words = values
        if owner is array and id(array) not in map(id, (*args, *words.values())):
            return False  # the usual case: no argument need be looked into
        return any(owner is owner_of(item) for item in items_of(values, np.ndarray))

    def make(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Make an array that is filled in each replay, unless it is an uninitialized one."""
        array = self.adopt(function(*_values(args), **_values(kwargs)))
        name = function.__name__.removesuffix("_like")
        if name in _FILLS:
            value = _FILLS[name]
            if name == "full":
                value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
            if isinstance(value, bool | int | float):
                self.append(np.ndarray.fill, (array, value))
            else:
                self.append(np.copyto, (array, value), {"casting": "unsafe"})
        return RecordedArray(array, self.active)

    def copied(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads an array's memory."""
        values = _values((args, kwargs))
        result = function(*values[0], **values[1])
        if not has_recorded((args, kwargs)):
            return result
        return self.results(function, args, kwargs, values, result, False)
