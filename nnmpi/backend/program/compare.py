"""Two recordings of a step: equal, or their first difference.

    x * float(a.sum())    call 3: multiply(%2[4], 0.5, out=%3[4]) is now multiply(%2[4], 0.7, ...)

A replay repeats what one call of a step has recorded. What Python has decided shows in the calls:
so a second recording is compared with the first one, and others from time to time. The same are

    results of the step           that the same call has made
    arrays from outside           in the same memory; those that are only read may have equal values
    numbers, texts, types         of equal value
    functions                     with one code, and what they hold
    other objects                 of one class, with the same attributes, but those that vary; where
                                  nothing can be seen, as in a date, if they say that they equal
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.program.call import ArrayRef, Call, address_of, owner_of
from nnmpi.backend.program.record import CallList
from nnmpi.backend.recording import Box
from nnmpi.base.errors import is_own, shortened
from nnmpi.base.lines import shown

# compared by their text: 0.0 is not -0.0, and NaN is NaN
_VALUES = (bool, int, float, complex, str, bytes, slice, range, Enum, np.dtype, np.generic)
_ROWS = tuple, list, deque


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
                file, line = new.lines[number] if number < len(new.lines) else ("", 0)
                at = f", at {shown(file)}:{line}" if file else ""
                return f"call {number}: {was} is now {now}{at}"
        return "" if self.same(*results) else "the step returns other results"

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are the same for a replay."""
        if one is other or (type(one) is type(other) and self._same(one, other)):
            return True
        self._differ = self._differ or (one, other)
        return False

    def _same_calls(self, one: Call, other: Call) -> bool:
        target, now = one.target(), other.target()
        if type(target) is np.ndarray and type(now) is np.ndarray and self._is_same_step:
            # one that the step has made unseen would begin with what the last replay has left
            owner = owner_of(target)
            if owner is not owner_of(now) and (0, id(owner)) not in self._twins:
                self._differ = target, now
                return False
        return (
            self.same(one.args, other.args)
            and self.same(one.kwargs, other.kwargs)
            and self.same(one.result, other.result)
            and self.same(one.function, other.function)
        )

    def _same(self, one: Any, other: Any) -> bool:
        """Return whether two values of one type are the same."""
        if type(one) is ArrayRef:
            return self._pair(id(one.allocation), id(other.allocation)) and one[1:] == other[1:]
        if type(one) is Box:
            return self._pair(id(one), id(other))
        if isinstance(one, _ROWS):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, dict):
            return self._same([*one, *dict.values(one)], [*other, *dict.values(other)])
        if isinstance(one, _VALUES):
            return repr(one) == repr(other)
        if isinstance(one, np.ndarray):
            return self._same_arrays(one, other)
        if isinstance(one, set | frozenset | CodeType):
            return bool(one == other)
        if (id(one), id(other)) in self._seen:
            return True
        self._seen.add((id(one), id(other)))
        if not (self._is_same_step or isinstance(one, _CALLABLES)):
            return True
        parts = [_parts(x, self._is_same_step) for x in (one, other)]
        return self._same(*parts) if parts[0] else _are_equal(one, other)

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
        if not self._is_same_step:
            return self._pair(~address_of(one), ~address_of(other))
        owners = owner_of(one), owner_of(other)
        offset, now = (address_of(x) - address_of(owner_of(x)) for x in pair)
        ids = id(owners[0]), id(owners[1])
        if (0, ids[0]) in self._twins or (1, ids[1]) in self._twins:
            return self._pair(*ids) and offset == now
        return (ids[0] == ids[1] and offset == now) or one.tobytes() == other.tobytes()


_CALLABLES = FunctionType, MethodType, BuiltinMethodType, partial


def referents(x: Any) -> list[Any]:
    """Return what an object refers to, as the garbage collector sees it.

    So there is no list of kinds of containers, and a stranger is asked for its class alone. With
    attributes an object refers to the dictionary of these; all refer to their class, or to nothing.
    """
    if type(x).__dictoffset__:
        object.__getattribute__(x, "__dict__")  # without a look at it there is none yet
    return gc.get_referents(x)


def _parts(x: Any, deep: bool) -> list[Any]:
    """Return what objects of a class must have in common; nothing if that cannot be seen."""
    if isinstance(x, type | ModuleType):
        return []
    if isinstance(x, FunctionType):
        return [x.__code__, x.__defaults__, x.__kwdefaults__, deep and x.__closure__]
    if isinstance(x, BuiltinMethodType):
        return [x.__name__, x.__self__]
    own = [vars(base) for base in type(x).__mro__ if is_own(base)]
    if varies := {name for names in own for name in names.get("varies", ())}:
        state: Any = object.__getstate__(x)
        parts = state if isinstance(state, tuple) else (state,)  # attributes and slots, or None
        items = [item for part in parts for item in (part or {}).items()]
        return [[(name, value) for name, value in items if name not in varies]]
    return [part for part in referents(x) if part is not type(x)]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether objects without parts that can be seen, such as dates, say that they equal."""
    try:
        return bool(one == other)
    except Exception:  # of a stranger's own method
        return False


def _text(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return shortened(f"{x}".replace("\n", " "))
    return shortened(f"{x!r}") if isinstance(x, _VALUES) else f"a {type(x).__name__}"
