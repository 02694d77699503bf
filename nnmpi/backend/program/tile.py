"""Runs of calls that work row by row, done block by block, each while it is in the cache.

    calls                          tiled: rows 0 to 99         rows 100 to 199            ...
    multiply(x, x, out=a)          multiply(x0, x0, out=s)     multiply(x1, x1, out=s)
    add(a, 1, out=b)               add(s, 1, out=t)            add(s, 1, out=t)
    sqrt(b, out=y)                 sqrt(t, out=y0)             sqrt(t, out=y1)

A pass over a block in the cache takes a quarter of the time of a pass over memory. A result that is
used inside the run alone shrinks to a block (a to s, b to t). Each row is computed by the same
functions as before, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Shape
from nnmpi.backend.program.call import (
    ARRAYS,
    Allocation,
    ArrayRef,
    Call,
    address_of,
    copy_to,
    packed_strides,
    rebuilt,
)

# A block of this many float32 elements, its results and its scratch arrays fit 1 MiB, the smallest
# L2 cache of server processors.
ELEMENTS = 2**16

_KEYWORDS = {"out", "dtype", "casting", "axis", "keepdims"}
_REDUCTIONS = [
    getattr(owner, name) for owner in (np, np.ndarray) for name in ("sum", "mean", "max", "min")
]


class Rows(NamedTuple):
    """A call that works row by row.

    Attributes:
        call: of a universal function, or a reduction along rows.
        shape: of its operands after broadcasting.
        counts: the numbers of rows that it can be cut into, and how many axes are rows then.
    """

    call: Call
    shape: Shape
    counts: dict[int, int]

    def uses(self, count: int) -> Iterator[Use]:
        """Yield what it does with its arrays if it is cut into so many rows."""
        axes, out = self.counts[count], self.call.kwargs["out"]
        for x in (*self.call.args, out):
            if isinstance(x, ARRAYS):
                is_cut = x is out or _padded(x, self.shape)[:axes] == self.shape[:axes]
                yield Use(*_extent(x), is_cut, x is out)

    def part(
        self,
        count: int,
        start: int,
        stop: int,
        scratch: dict[Allocation, Allocation],
        number: int,
    ) -> Call:
        """Return the call for some of its rows."""
        axes, kwargs = self.counts[count], dict(self.call.kwargs)

        def cut(x: Any, given: Shape) -> Any:
            if given[:axes] != self.shape[:axes]:  # repeated for each row
                return _reshaped(x, given[axes:])
            return _rows(x, count, given[axes:], start, stop, scratch)

        out = kwargs["out"]
        args = rebuilt(self.call.args, lambda x: cut(x, _padded(x, self.shape)), ARRAYS)
        kwargs["out"] = cut(out, out.shape)
        if "axis" in kwargs:
            kwargs["axis"] = tuple(axis - axes + 1 for axis in _reduced(self.call))
        return Call(self.call.function, args, kwargs, number=number)


class Use(NamedTuple):
    """Bytes that a call uses: `is_cut` if its rows use a row each, rather than all of them."""

    memory: Any
    start: int
    stop: int
    is_cut: bool
    writes: bool

    def meets(self, other: Use) -> bool:
        """Whether one writes what the other uses, and not row by row."""
        return (
            self.memory is other.memory
            and (self.writes or other.writes)
            and self.start < other.stop
            and other.start < self.stop
            and not (self.is_cut and other.is_cut and self[1:3] == other[1:3])
        )


def rows_of(call: Call) -> Rows | None:
    """Return how a call can be cut into rows; None if it cannot be."""
    if call.function is np.copyto and len(call.args) == 2:
        target, x = call.args
        call = Call(copy_to, (x,), {**call.kwargs, "out": target}, number=call.number)
    function, out = call.function, call.kwargs.get("out")
    if not isinstance(out, ARRAYS) or call.kwargs.keys() - _KEYWORDS or not _is_packed(out):
        return None
    shape: Shape = out.shape
    most = len(shape)
    if function is copy_to:
        pass
    elif isinstance(function, np.ufunc):
        if function is np.vecdot and "axis" not in call.kwargs:  # along the last axis
            shape = np.broadcast_shapes(*(x.shape for x in call.args))
        elif function.signature is not None or len(call.args) != function.nin:
            return None
    elif getattr(function, "__name__", "") == "reduce" or function in _REDUCTIONS:
        if len(call.args) != 1 or not isinstance(call.args[0], ARRAYS):
            return None
        shape = call.args[0].shape
        most = min(_reduced(call), default=0)
    else:
        return None
    given = [(x, _padded(x, shape)) for x in call.args if isinstance(x, ARRAYS)]
    if any(len(item) > len(shape) for _, item in given):
        return None
    counts = {}
    for axes in range(1, most + 1):
        rows = shape[:axes]
        if prod(rows) > 1 and all(
            item[:axes] == (1,) * axes or (item[:axes] == rows and _is_packed(x))
            for x, item in given
        ):
            counts[prod(rows)] = axes
    result = Rows(call, shape, counts)
    if not counts:
        return None
    *inputs, target = result.uses(max(counts))
    return None if any(target.meets(use) for use in inputs) else result


def tile(calls: Sequence[Call]) -> list[Call]:
    """Return calls that do the same, with runs of row-wise calls cut into blocks of rows."""
    if all(prod(x.shape) <= ELEMENTS for call in calls for x in call.arrays()):
        return [*calls]
    names = Counter(ref.allocation for call in calls for ref in call.refs())
    result: list[Call] = []
    run: list[Rows] = []
    common: set[int] = set()  # the numbers of rows that the whole run can be cut into
    for call in calls:
        rows = rows_of(call)
        counts = set() if rows is None else {*rows.counts}
        if not common & counts:
            result += _tiled(run, names)
            run, common = [], counts
        if rows is None:
            result.append(call)
        else:
            run.append(rows)
            common &= counts
    return result + _tiled(run, names)


def _tiled(run: Sequence[Rows], names: Counter[Allocation]) -> list[Call]:
    most = max((prod(rows.shape) for rows in run), default=0)
    if len(run) < 2 or most <= ELEMENTS:
        return [rows.call for rows in run]
    count = max(set.intersection(*({*rows.counts} for rows in run)))
    seen: dict[int, list[Use]] = {}
    for i, rows in enumerate(run):
        for use in rows.uses(count):
            before = seen.setdefault(id(use.memory), [])
            if any(use.meets(other) for other in before):
                return _tiled(run[:i], names) + _tiled(run[i:], names)
            before.append(use)
    size = max(1, ELEMENTS * count // most)
    scratch = {}
    for uses in seen.values():
        memory, first = uses[0].memory, uses[0]
        if (
            isinstance(memory, Allocation)
            and memory.owner() is None
            and len(uses) == names[memory]
            and first.writes
            and {use[1:4] for use in uses} == {(first.start, first.stop, True)}
        ):
            scratch[memory] = Allocation((first.stop - first.start) // count * size, memory.number)
    return [
        rows.part(count, start, min(start + size, count), scratch, run[-1].call.number)
        for start in range(0, count, size)
        for rows in run
    ]


def _padded(x: Any, shape: Shape) -> Shape:
    return (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)


def _reduced(call: Call) -> tuple[int, ...]:
    """Return the axes of a reduction, counted from 0; none if it is along all."""
    axis, ndim = call.kwargs.get("axis"), len(call.args[0].shape)
    axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    return tuple(item % max(ndim, 1) for item in axes)


def _is_packed(x: Any) -> bool:
    strides = packed_strides(x.shape, x.dtype)
    pairs = zip(x.shape, x.strides, strides, strict=True)
    return all(length == 1 or given == step for length, given, step in pairs)


def _extent(x: Any) -> tuple[Any, int, int]:
    """Return an array's memory, and its first and last byte there.

    Arrays from outside of the step count as parts of one memory, since two may share a buffer.
    """
    steps = [(length - 1) * step for length, step in zip(x.shape, x.strides, strict=True)]
    is_ref = isinstance(x, ArrayRef)
    low = (x.offset if is_ref else address_of(x)) + sum(min(0, step) for step in steps)
    reach = x.dtype.itemsize + sum(map(abs, steps))
    return x.allocation if is_ref else None, low, low + reach


def _reshaped(x: Any, shape: Shape) -> Any:
    """Return an array with other axes of length 1."""
    if not isinstance(x, ArrayRef):
        return x.reshape(shape)
    kept = iter([step for n, step in zip(x.shape, x.strides, strict=True) if n != 1])
    return x._replace(shape=shape, strides=tuple(0 if n == 1 else next(kept) for n in shape))


def _rows(
    x: Any,
    count: int,
    rest: Shape,
    start: int,
    stop: int,
    scratch: dict[Allocation, Allocation],
) -> Any:
    """Return rows of a packed array, (rows, *rest), as they lie or in scratch memory."""
    if not isinstance(x, ArrayRef):
        return x.reshape(count, *rest)[start:stop]
    shape = (stop - start, *rest)
    strides = packed_strides(shape, x.dtype)
    if x.allocation in scratch:
        return ArrayRef(scratch[x.allocation], 0, shape, strides, x.dtype)
    offset = x.offset + start * x.dtype.itemsize * prod(rest)
    return ArrayRef(x.allocation, offset, shape, strides, x.dtype)
