"""Recording: a training step's calls to its array library as a flat, repeatable list.

    first time    y = xp.matmul(x, w)               computes, and notes  matmul(x, w, out=y)
                  xp.add(y, b, out=y)               computes, and notes  add(y, b, out=y)
    later         for call in calls: call()         the same calls on the same arrays

While a recorder is active, operations get `recorder.module(numpy)` in NumPy's place. A result
becomes the place into which the noted call writes; views of it stay valid, so they need no call.
Whatever is no arithmetic of the array library (an optimizer's step, an exchange between ranks) is
noted whole, by `perform`.

Results have memory from a pool, which is taken back as soon as nobody uses a result any more.

    recorded      a = f(x)      b = g(a)      (nobody needs a any more)      c = h(b)
    memory        [  a  ]       [  b  ]            back in the pool          [  c  ] where a was

Each result is an array over a block of the pool, and so is every view of it. When the last of them
goes away, as in an ordinary step, the block is free for another result: a recorded step takes no
more memory than one that is not recorded, and works in the same warm cache. The recorded calls must
not keep blocks from being used again within the step. So they keep aliases, bare arrays over the
same memory which do not count as its users. That is safe because a replay makes the same calls in
the same order: whatever overwrites a result comes after its last use.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, is_array, namespace
from nnmpi.errors import UsageError

Call = Callable[[], object]

_active: ContextVar[Recorder | None] = ContextVar("nnmpi_recorder", default=None)

# What makes an array without computing anything, and what makes constants.
_EMPTY = frozenset({"empty", "empty_like"})
_FILLED = frozenset({"zeros", "zeros_like", "full", "full_like"})
_CONSTANT = frozenset({"ones", "ones_like", "arange"})

# Functions besides the universal ones that write to an array if they are given one, and which of
# them CuPy's do not; functions that NumPy defines by the method of the same name, which is faster
# to call; and universal functions that want `out` by name.
_WITH_OUT = frozenset(
    {"dot", "matmul", "take", "argmax", "argmin", "mean", "sum", "einsum", "concatenate", "clip"}
)
_WITHOUT_ON_DEVICE = frozenset({"einsum"})
_METHODS = frozenset({"take", "put", "argmax", "argmin"})
_NAMED_OUT = frozenset({"maximum", "minimum"})


def active() -> Recorder | None:
    """Return the recorder that notes what is computed now, if there is one."""
    return _active.get()


def perform(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and make a recording repeat the whole call; return its result now."""
    recorder = _active.get()
    return function(*args) if recorder is None else recorder.perform(function, *args)


def feed(function: Callable[..., Array], *args: Any) -> Array:
    """Return a function's array; in a recording, a buffer that each replay fills by a call."""
    recorder = _active.get()
    if recorder is None:
        return function(*args)
    place = recorder.copy(recorder.alone(function, *args))
    recorder.note(_fill, place, partial(function, *args))
    return place


def _fill(place: Array, function: Callable[[], Any]) -> None:
    place[...] = function()


def refuse(what: str) -> None:
    """Refuse to return a Python number while recording: it would stay the first step's.

    Raises:
        UsageError: when a step is being recorded.
    """
    if _active.get() is not None:
        raise UsageError(
            f"{what} inside a compiled step would be that of the first step for ever; return the"
            " tensor from the step and look at it outside, or do not compile this step"
        )


def refuse_inside(what: str) -> None:
    """Refuse what does steps of its own while a step is recorded: none of it would be noted.

    Raises:
        UsageError: when a step is being recorded.
    """
    if _active.get() is not None:
        raise UsageError(
            f"{what} cannot be part of a compiled step, whose replays would leave it out; call it"
            " outside"
        )


class Recorder:
    """Notes calls in their order.

    Args:
        pool: the memory of the results; recordings that are replayed one at a time may share it.

    Attributes:
        calls: what was noted so far.
        leaves: by id, the leaf tensors that the calls read, as they were at recording, for `holds`
            to compare: the leaf, its data, its gradient's buffer, whether it needs a gradient, its
            hook and guard, and its gradient (False where the step zeroes it first, so that any will
            do).
        loose: leaves without flat storage, and the arrays in which calls compute their gradients.
        made: the tensors that the step's operations have made.
        cleared: the ids of leaves whose gradients the step itself zeroes.
        pool: as given.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self.calls: list[Call] = []
        self.leaves: dict[int, tuple[Any, Array, Array | None, bool, Any, Any, Any]] = {}
        self.loose: list[tuple[Any, Array]] = []
        self.made: WeakSet[Any] = WeakSet()
        self.cleared: set[int] = set()
        self.pool = MemoryPool() if pool is None else pool
        self._modules: dict[str, _Namespace] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what is computed in this block."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
            # they refer to this recorder: it goes, with its memory, when nobody holds it
            self._modules.clear()
            self.made.clear()

    def module(self, xp: ModuleType) -> Any:
        """Return what stands in for an array library: its functions, which note their calls."""
        if xp.__name__ not in self._modules:
            self._modules[xp.__name__] = _Namespace(self, xp)
        return self._modules[xp.__name__]

    def note(self, function: Callable[..., object], *args: Any) -> None:
        """Add a call to the list, without making it now."""
        self.calls.append(alias(partial(function, *args) if args else function))

    def saw(self, leaf: Any) -> None:
        """Remember a leaf of the graph as it is now, when it is first seen."""
        if id(leaf) not in self.leaves:
            grad = False if id(leaf) in self.cleared else leaf.grad
            self.leaves[id(leaf)] = (
                leaf,
                leaf.data,
                leaf.buffer,
                leaf.requires_grad,
                leaf.hook,
                leaf.guard,
                grad,
            )

    def holds(self) -> bool:
        """Return whether all leaves are still as the calls expect them."""
        for leaf, data, buffer, needed, hook, guard, grad in self.leaves.values():
            if (
                leaf.data is not data
                or leaf.buffer is not buffer
                or leaf.hook is not hook
                or leaf.guard is not guard
            ):
                return False
            if leaf.requires_grad is not needed or grad is not False and leaf.grad is not grad:
                return False
        return True

    def hand_out(self) -> None:
        """Give leaves without gradient buffers copies, which the next replay leaves alone."""
        for leaf, place in self.loose:
            if type(leaf.grad) is type(place) and namespace(place).may_share_memory(
                leaf.grad, place
            ):
                leaf.grad = leaf.grad.copy()

    def copy(self, array: Array) -> Array:
        """Return a copy, in the recording's memory if possible, with the same element order."""
        place = self.place_like(array)
        return array.copy(order="K") if place is array else place

    def place_like(self, array: Array, copied: bool = True) -> Array:
        """Return an array like this over the recording's memory; itself if it is not NumPy's."""
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return array
        place = self.pool.allocate(array.shape, array.dtype)
        if copied:
            np.copyto(place, array)
        return place

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as if nothing were recorded."""
        token = _active.set(None)
        try:
            return function(*args)
        finally:
            _active.reset(token)

    def perform(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as if nothing were recorded, note it, and return its result."""
        result = self.alone(function, *args)
        self.note(function, *args)
        return result


class _Namespace:
    """An array library whose functions note their calls."""

    def __init__(self, recorder: Recorder, xp: ModuleType) -> None:
        self._recorder, self._xp = recorder, xp

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._xp, name)
        if callable(value) and not isinstance(value, type):
            value = _Noting(self._recorder, self._xp, name, value)
        setattr(self, name, value)  # the next look finds it without coming here
        return value


class _Noting:
    """A function of an array library that notes its calls; so are its methods, such as
    `add.reduce`.
    """

    def __init__(
        self, recorder: Recorder, xp: ModuleType, name: str, function: Callable[..., Any]
    ) -> None:
        self._recorder, self._xp, self._name, self._function = recorder, xp, name, function

    def __getattr__(self, name: str) -> Any:
        return _Noting(
            self._recorder, self._xp, f"{self._name}.{name}", getattr(self._function, name)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        note = self._recorder.note
        if self._name in _EMPTY:
            return self._recorder.place_like(result, copied=False)
        if self._name in _FILLED:
            result = self._recorder.place_like(result)
            if self._name.startswith("zeros"):
                note(result.fill, 0)  # a device clears memory without a kernel
            else:
                note(
                    self._xp.copyto,
                    result,
                    kwargs["fill_value"] if "fill_value" in kwargs else args[1],
                )
            return result
        if self._name in _CONSTANT:
            if isinstance(result, np.ndarray):
                result.flags.writeable = False  # CuPy's have no such flag
            return result
        if result is None or kwargs.get("out") is not None:
            note(_bound(self._xp, self._name, self._function, args, kwargs))
            return result
        return self._keep(result, args, kwargs)

    def _keep(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
        """Note the call that writes a new result's place, unless it is a view; return the result,
        always an array.
        """
        if isinstance(result, tuple | list):
            raise UsageError(
                f"{self._name} gives several arrays, which a compiled step cannot keep; ask one"
                " by one"
            )
        place: Array = self._xp.asarray(result)
        if any(is_array(arg) and self._xp.may_share_memory(arg, place) for arg in args):
            return place
        place = self._recorder.place_like(place)
        if _writes_out(self._xp, self._name, self._function):
            self._recorder.note(
                _bound(self._xp, self._name, self._function, args, {**kwargs, "out": place})
            )
        else:
            self._recorder.note(_fill, place, partial(self._function, *args, **kwargs))
        return place


def _writes_out(xp: ModuleType, name: str, function: Callable[..., Any]) -> bool:
    """Return whether a function takes `out`: universal functions, their reductions, and some others
    do.
    """
    owner = getattr(function, "__self__", None)
    return (
        _is_universal(function)
        or (_is_universal(owner) and name.endswith(".reduce"))
        or (name in _WITH_OUT and (xp is np or name not in _WITHOUT_ON_DEVICE))
    )


def _is_universal(function: Any) -> bool:
    return isinstance(function, np.ufunc) or type(function).__name__ == "ufunc"


def _bound(
    xp: ModuleType,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Return a call with all its arguments, in the form that takes least time to make: names cost
    0.1 us each.
    """
    if xp is np and name in _METHODS and type(args[0]) is np.ndarray:
        function, args = getattr(args[0], name), args[1:]
    elif (
        isinstance(function, np.ufunc)
        and name not in _NAMED_OUT
        and (len(args), *kwargs) == (function.nin, "out")
    ):
        return partial(function, *args, kwargs["out"])
    return partial(function, *args, **kwargs)


LEAST_BYTES = 1024  # smaller results have memory of their own
LINE_BYTES = 64
# small chunks at the beginning of pages would want the same lines of the cache
LEAST_MAPPED_BYTES = 128 * 1024


class ChunkPart(NamedTuple):
    """Some bytes of a chunk of memory."""

    chunk: int
    start: int
    stop: int


class PooledBlock:
    """A block of memory that goes back to its pool when the last array over it goes away.

    NumPy makes an array over it by `__array_interface__`, and the array and its views then keep
    this object alive.

    Args:
        pool: where the block comes from.
        span: where it is.
        block: its bytes, at least as many as the array needs.
        shape: of the array, C-contiguous.
        dtype: of the array; bfloat16 appears as 16-bit integers, since the interface has no word
            for it.
    """

    def __init__(
        self, pool: MemoryPool, span: ChunkPart, block: Array, shape: Shape, dtype: Dtype
    ) -> None:
        self.pool, self.span, self.block = pool, span, block
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            # bfloat16's own says nothing
            "typestr": dtype.str if dtype.kind != "V" else f"<u{dtype.itemsize}",
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.pool.returned.append(self.span)


class MemoryPool:
    """Memory in chunks, of which parts are in use, and others free.

    A result gets the tightest part that is free, and of these the one that was given back last,
    whose lines may still be in the cache. What it does not need stays free, and parts that meet
    become one again. So a pass of fewer rows finds room among what one of more rows has left. Where
    no part is long enough, there is a new chunk.

    Attributes:
        returned: parts over which there is no array any more, since the last result.
        size_bytes: of all chunks together.
    """

    def __init__(self) -> None:
        # A collection of garbage may give back at any time: nothing is joined there.
        self.returned: list[ChunkPart] = []
        self.size_bytes = 0
        self._chunks: list[Array] = []
        self._free: list[ChunkPart] = []

    def allocate(self, shape: Shape, dtype: Dtype) -> Array:
        """Return a C-contiguous array of any values, over memory of the pool unless it is short."""
        bytes_needed = dtype.itemsize * prod(shape)
        if bytes_needed < LEAST_BYTES:
            return np.empty(shape, dtype)
        span = self._take(-(-bytes_needed // LINE_BYTES) * LINE_BYTES)
        block = self._chunks[span.chunk][span.start : span.stop]
        array: Array = np.asarray(PooledBlock(self, span, block, shape, dtype))
        return array if array.dtype == dtype else array.view(dtype)

    def _take(self, count_bytes: int) -> ChunkPart:
        """Return this many bytes that are free."""
        while self.returned:
            self._join(self.returned.pop(0))
        fitting = [span for span in self._free if span.stop - span.start >= count_bytes]
        if not fitting:
            self._chunks.append(_aligned(count_bytes))
            self.size_bytes += count_bytes
            return ChunkPart(len(self._chunks) - 1, 0, count_bytes)
        chunk, start, stop = result = min(
            reversed(fitting), key=lambda span: span.stop - span.start
        )
        self._free.remove(result)
        if stop - start > count_bytes:
            self._free.append(ChunkPart(chunk, start + count_bytes, stop))
        return ChunkPart(chunk, start, start + count_bytes)

    def _join(self, span: ChunkPart) -> None:
        """Let a part be free, as one with those beside it."""
        for other in [item for item in self._free if item.chunk == span.chunk]:
            if other.stop == span.start or other.start == span.stop:
                self._free.remove(other)
                span = ChunkPart(
                    span.chunk, min(span.start, other.start), max(span.stop, other.stop)
                )
        self._free.append(span)


def alias(x: Any) -> Any:
    """Return the same call, array or value over bare memory, which the pool may then use again.

    Understood are arrays, their methods, tuples of arrays, and partial calls of these; anything
    else keeps what it holds.
    """
    if type(x) is np.ndarray:
        return _bare(x)
    if isinstance(x, partial):
        words = {name: alias(keyword) for name, keyword in x.keywords.items()}
        return partial(alias(x.func), *map(alias, x.args), **words)
    if type(x) is tuple:
        return tuple(map(alias, x))
    owner = getattr(x, "__self__", None)
    if type(owner) is np.ndarray:
        return getattr(_bare(owner), x.__name__)
    return x


def _bare(array: Array) -> Array:
    """Return an array over the same elements that does not keep its block in use."""
    base: Any = array
    while base is not None and not isinstance(base, PooledBlock):
        # windows have one between them and their array that is no array itself
        base = getattr(base, "base", None)
    if base is None:
        return array
    block = base.block
    return np.ndarray(
        array.shape, array.dtype, block.data, array.ctypes.data - block.ctypes.data, array.strides
    )


def _aligned(count_bytes: int) -> Array:
    """Return bytes that begin where a line of the cache does.

    Many are a mapping of their own: between what malloc gives and takes back while a step is
    recorded they would leave holes, which nobody uses later.
    """
    if count_bytes >= LEAST_MAPPED_BYTES:
        return np.frombuffer(
            mmap.mmap(-1, count_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
        )
    full = np.empty(count_bytes + LINE_BYTES, np.uint8)
    skip = -full.ctypes.data % LINE_BYTES
    return full[skip : skip + count_bytes]
