"""Two recordings of a step: equal, or their first difference.

    x * float(a.sum())    call 3: multiply(%2[4], 0.5, out=%3[4]) is now multiply(%2[4], 0.7, ...)

A replay repeats what one call of a step has recorded. What Python has decided shows in the calls:
so a second recording is compared with the first one, and others from time to time. The same are

    results of the step           that the same call has made
    arrays from outside           in the same memory; those that are only read may have equal values
    numbers, texts, types         of equal value
    functions                     with one code, and what they hold
    other objects                 of one class, with the same attributes, but those that vary
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.program.call import ArrayRef, Call, address_of, owner_of
from nnmpi.backend.program.record import CallList
from nnmpi.base.errors import shortened
from nnmpi.base.lines import shown

# compared by their text: 0.0 is not -0.0, and NaN is NaN
_VALUES = (bool, int, float, complex, str, bytes, slice, range, Enum, np.dtype, np.generic)
_ROWS = (tuple, list, deque)
_VIEWS: tuple[type[Any], ...] = type({}.keys()), type({}.values()), type({}.items())


class Comparison:
    """Finds the first difference of two recordings.

    Args:
        old, new: the recordings.
        inputs: of the step, in each of them: arrays from outside, into which replays copy.
        is_same_step: False for two versions of a step, perhaps on two models: arrays from outside
            then correspond in the order of their use, and objects by their class.
    """

    def __init__(
        self,
        old: CallList,
        new: CallList,
        inputs: tuple[Sequence[Array], Sequence[Array]] = ((), ()),
        is_same_step: bool = True,
    ) -> None:
        self._lists, self._is_same_step = (old, new), is_same_step
        self._twins: dict[tuple[int, int], int] = {}  # of memory in one recording: in the other
        self._seen: set[tuple[int, int]] = set()
        self._differ: tuple[Any, Any] | None = None  # the innermost things
        for one, other in zip(*inputs, strict=False):
            self._pair(id(owner_of(one)), id(owner_of(other)))

    def difference(self, results: tuple[Any, Any] = (None, None)) -> str:
        """Return the first difference, also of the step's results, as text; nothing if none."""
        old, new = self._lists
        for number, (one, other) in enumerate(zip_longest(old.calls, new.calls)):
            if one is None or other is None or not self._same_calls(one, other):
                was, now = (f"{call or 'nothing'}" for call in (one, other))
                if was == now and self._differ is not None:
                    was, now = (f"{was} with {_text(item)}" for item in self._differ)
                line = ""
                if number < len(new.lines) and new.lines[number][0]:
                    file, place = new.lines[number]
                    line = f", at {shown(file)}:{place}"
                return f"call {number}: {was} is now {now}{line}"
        return "" if self.same(*results) else "the step returns other results"

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are the same for a replay."""
        if one is other or (type(one) is type(other) and self._same(one, other)):
            return True
        self._differ = self._differ or (one, other)
        return False

    def _same_calls(self, one: Call, other: Call) -> bool:
        target = one.target
        if type(target) is np.ndarray and type(other.target) is np.ndarray:
            # one that the step has made unseen would begin with what the last replay has left
            owners = owner_of(target), owner_of(other.target)
            is_same = owners[0] is owners[1] or (0, id(owners[0])) in self._twins
            if self._is_same_step and not is_same:
                self._differ = target, other.target
                return False
        return (
            self.same(one.args, other.args)
            and self.same(one.kwargs, other.kwargs)
            and self.same(one.result, other.result)
            and self.same(one.function, other.function)
        )

    def _same(self, one: Any, other: Any) -> bool:
        """Return whether two values of one type are the same."""
        if isinstance(one, ArrayRef):
            return self._pair(id(one.allocation), id(other.allocation)) and one[1:] == other[1:]
        if isinstance(one, _ROWS):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, _VALUES):
            return repr(one) == repr(other)
        if isinstance(one, np.ndarray):
            return self._same_arrays(one, other)
        if isinstance(one, set | frozenset | CodeType):
            return bool(one == other)
        if (id(one), id(other)) in self._seen:
            return True
        self._seen.add((id(one), id(other)))
        parts = [[*map(list, holders(x, self._is_same_step))] for x in (one, other)]
        if isinstance(one, FunctionType):
            parts[0].append([one.__code__])
            parts[1].append([other.__code__])
        return bool(parts[0]) and self._same(*parts)

    def _pair(self, one: int, other: int) -> bool:
        """Let memory of one recording stand for memory of the other, and return whether it does."""
        twins = self._twins
        return (
            twins.setdefault((0, one), other) == other and twins.setdefault((1, other), one) == one
        )

    def _same_arrays(self, one: Array, other: Array) -> bool:
        pair = one, other
        places = [calls.place_of(x) for calls, x in zip(self._lists, pair, strict=True)]
        if any(type(place) is ArrayRef for place in places):
            return type(places[0]) is type(places[1]) and self._same(*places)
        if (one.shape, one.strides, one.dtype) != (other.shape, other.strides, other.dtype):
            return False
        owners = owner_of(one), owner_of(other)
        places = [address_of(x) for x in pair]
        if not self._is_same_step:
            return self._pair(~places[0], ~places[1])
        ids = [id(owner) for owner in owners]
        offset, now = (x - address_of(y) for x, y in zip(places, owners, strict=True))
        if (0, ids[0]) in self._twins or (1, ids[1]) in self._twins:
            return self._pair(*ids) and offset == now
        return (ids[0] == ids[1] and offset == now) or one.tobytes() == other.tobytes()


def holders(x: Any, deep: bool = True) -> Iterator[Iterable[object]]:
    """Yield what an object consists of, in parts that can be looked at again later.

    A stranger is asked for its class alone. Nothing is yielded of one without attributes.

    Args:
        x: any object.
        deep: False for the class in place of attributes.
    """
    if isinstance(x, tuple | list | set | frozenset | deque | bytearray | array):
        yield x
    elif isinstance(x, dict):
        yield x
        yield dict.values(x)
    elif isinstance(x, MappingProxyType):
        yield x
        yield x.values()
    elif isinstance(x, _VIEWS):
        yield (x.mapping,)
    elif isinstance(x, ref):
        yield Reading(x)
    elif isinstance(x, ContextVar):
        yield Reading(partial(x.get, None))
    elif isinstance(x, FunctionType):
        yield ClosureCells(x.__closure__ or ()) if deep else ()
        yield x.__defaults__ or ()
        yield (x.__kwdefaults__ or {}).values()
    elif isinstance(x, MethodType):
        yield (x.__func__, x.__self__)
    elif isinstance(x, BuiltinMethodType):
        yield (x.__name__, x.__self__)
    elif isinstance(x, partial):
        yield (x.func, x.args, x.keywords)
    elif isinstance(x, staticmethod | classmethod):
        yield (x.__func__,)
    elif isinstance(x, property):
        yield (x.fget,)
    elif not isinstance(x, type | ModuleType | np.ufunc):
        bases = reversed(type(x).__mro__)
        members = {name: member for base in bases for name, member in vars(base).items()}
        if not deep:
            yield (type(x),)
        varies = members.get("varies", ())
        if deep and "__dict__" in members:
            held = object.__getattribute__(x, "__dict__")
            yield Kept(held, varies) if varies else held.values()
        if deep and "__slots__" in members:
            yield Slots(
                x,
                tuple(
                    member
                    for name, member in members.items()
                    if isinstance(member, MemberDescriptorType) and name not in varies
                ),
            )


class ClosureCells:
    """Iterates over what a closure's variables hold now, without those not assigned yet."""

    def __init__(self, cells: tuple[Any, ...]) -> None:
        self._cells = cells

    def __iter__(self) -> Iterator[object]:
        for cell in self._cells:
            try:
                yield cell.cell_contents
            except ValueError:
                continue


class Kept:
    """Iterates over the current attributes of an object, but those that vary."""

    def __init__(self, held: dict[str, object], varies: tuple[str, ...]) -> None:
        self._held, self._varies = held, varies

    def __iter__(self) -> Iterator[object]:
        return (value for name, value in self._held.items() if name not in self._varies)


class Reading:
    """Iterates over what a function returns now."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[object]:
        yield self._read()


class Slots:
    """Iterates over the current values of an object's slots; None stands for an empty one."""

    def __init__(self, item: object, members: tuple[Any, ...]) -> None:
        self._item, self._members = item, members

    def __iter__(self) -> Iterator[object]:
        for member in self._members:
            try:
                yield member.__get__(self._item)
            except AttributeError:
                yield None


def _text(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return shortened(f"{x}".replace("\n", " "))
    return shortened(f"{x!r}") if isinstance(x, _VALUES) else f"a {type(x).__name__}"
