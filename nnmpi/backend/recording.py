"""Recording: a training step's calls to its array library as a flat, repeatable list.

    first time    y = xp.matmul(x, w)               computes, and records  matmul(x, w, out=y)
                  xp.add(y, b, out=y)               computes, and records  add(y, b, out=y)
    later         for call in calls: call()         the same calls on the same arrays

While a recorder is active, operations get `recorder.module(numpy)` instead of NumPy. The first
result's array becomes the `out` of the recorded call. Views of it stay valid, so views need no
call. Work outside the array library (an optimizer's step, an exchange between ranks) is recorded as
one call by `record_call`.

Results are allocated from a pool, and freed as in an eager step:

    recorded      a = f(x)      b = g(a)      a is freed              c = h(b)
    memory        [  a  ]       [  b  ]       [  a  ] to the pool     [  c  ] in the memory of a

Each result is an array over a block of the pool, and so is every view of it. When the last of them
is freed, the block serves another result. So a recorded step needs no more memory than an eager
one, and reuses memory that is still in the cache. The recorded calls must not keep blocks in use.
So they hold aliases, arrays over the same memory that do not own it. That is safe because a replay
makes the same calls in the same order: a result is overwritten only after its last use.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from operator import itemgetter
from types import ModuleType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import numpy as np

from nnmpi.backend.array import LINE_BYTES, Array, Dtype, Shape, empty, is_array, namespace
from nnmpi.base.errors import UsageError

Call = Callable[[], object]

_active: ContextVar[Recorder | None] = ContextVar("nnmpi_recorder", default=None)

# Functions that allocate arrays: uninitialized, filled (again in each replay), constant.
_EMPTY = frozenset({"empty", "empty_like"})
_FILLED = frozenset({"zeros", "zeros_like", "full", "full_like"})
_CONSTANT = frozenset({"ones", "ones_like", "arange"})

# _WITH_OUT: functions with an argument `out`, besides universal functions; CuPy's versions of
# _WITHOUT_ON_DEVICE lack it. _METHODS: functions that NumPy implements by a method of the same
# name, which is faster to call. _NAMED_OUT: universal functions that need `out` by name.
_WITH_OUT = frozenset(
    {"dot", "matmul", "take", "argmax", "argmin", "mean", "sum", "einsum", "concatenate", "clip"}
)
_WITHOUT_ON_DEVICE = frozenset({"einsum"})
_METHODS = frozenset({"take", "put", "argmax", "argmin"})
_NAMED_OUT = frozenset({"maximum", "minimum"})
_SETTINGS = (bool, int, float, str, tuple, type(None))


def active() -> Recorder | None:
    """Return the active recorder, or None."""
    return _active.get()


def record_call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and return its result; a recording repeats it as one call."""
    recorder = _active.get()
    return function(*args) if recorder is None else recorder.record_call(function, *args)


def record_launch(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that only computes on arrays: in a graph of a device it is a part of that."""
    recorder = _active.get()
    return function(*args) if recorder is None else recorder.launch(function, *args)


def record_note(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that computes on no array: no graph of a device needs to end before it."""
    recorder = _active.get()
    return function(*args) if recorder is None else recorder.note(function, *args)


def recorded_input(function: Callable[..., Array], *args: Any) -> Array:
    """Return a function's array; in a recording, a buffer that each replay fills by a call.

    The array comes from outside of the step, or from a recorded call: no graph of a device needs to
    end before it.
    """
    recorder = _active.get()
    return function(*args) if recorder is None else recorder.input(partial(function, *args))


def recorded_copy(array: Array) -> Array:
    """Return a copy of an array that each replay makes anew at this place."""
    recorder = _active.get()
    is_captured = recorder is not None and recorder.captures
    return array.copy() if is_captured else recorded_input(array.copy)


def to_library(xp: Any, values: Any) -> Array:
    """Return values as an array of a library; a recording on a device copies them in each replay."""
    if type(values) is np.ndarray and xp is not np:
        return recorded_input(xp.asarray, values)
    result: Array = xp.asarray(values)
    return result


def recorded_numbers(function: Callable[[], Any]) -> Any:
    """Return a function's numbers; in a graph of a device, an array that each replay fills."""
    recorder = _active.get()
    return function() if recorder is None else recorder.numbers(function)


def fill(buffer: Array, function: Callable[[], Any]) -> None:
    """Write a function's array to a buffer."""
    buffer[...] = function()


def refuse(
    what: str,
    remedy: str = "return the tensor and read it outside, or do not compile this step",
) -> None:
    """Refuse to return a Python number while recording: it would stay the first step's.

    Raises:
        UsageError: when a step is being recorded.
    """
    if _active.get() is not None:
        raise UsageError(
            f"{what} inside a compiled step would always be the first step's; {remedy}"
        )


def refuse_inside(what: str) -> None:
    """Refuse a function that runs steps of its own inside a recording, which would miss them.

    Raises:
        UsageError: when a step is being recorded.
    """
    if _active.get() is not None:
        raise UsageError(
            f"{what} cannot be part of a compiled step, whose replays would leave it out; call it"
            " outside"
        )


class Recorder:
    """Records calls in their order.

    Args:
        pool: the memory of the results; recordings that are replayed one at a time may share it.

    Attributes:
        calls: the recorded calls.
        leaves: by id, the state of the leaf tensors that the calls read, which `is_valid` compares:
            the leaf, its data, its gradient's buffer, whether it needs a gradient, its hook and
            guard, and its gradient (False if the step clears it first: any gradient is then
            valid).
        loose: leaves without flat storage, and the arrays in which calls compute their gradients.
        made: the results of the step's operations.
        cleared: the ids of leaves whose gradients the step itself clears.
        owners: the objects, by id, whose settings the calls depend on: numbers, texts and flags
            among their attributes, and in dictionaries that are attributes.
        pool: as given.
        captures: whether it records graphs of a device, see `cuda.graph`.
        warms_up: whether the step is only done, and recorded another time.
    """

    captures: ClassVar[bool] = False
    warms_up = False

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self.calls: list[Call] = []
        self.leaves: dict[int, tuple[Any, Array, Array | None, bool, Any, Any, Any]] = {}
        self.loose: list[tuple[Any, Array]] = []
        self.made: WeakSet[Any] = WeakSet()
        self.cleared: set[int] = set()
        self.owners: dict[int, Any] = {}
        self._settings: list[tuple[dict[str, Any], int, Callable[[Any], Any], Any]] = []
        self.pool = pool or MemoryPool()
        self._modules: dict[str, _RecordingModule] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the computations in this block."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
            # These reference this recorder. Without the cycle, its memory is freed with the last
            # reference, not later by the garbage collector.
            self._modules.clear()
            self.made.clear()
            for owner in self.owners.values():
                for held in (vars(owner), *vars(owner).values()):
                    self._note_settings(held)

    def _note_settings(self, held: Any) -> None:
        names = [
            name
            for name, value in (held.items() if isinstance(held, dict) else ())
            if isinstance(value, _SETTINGS) and not str(name).startswith("_") and name != "path"
        ]
        if names:
            read = itemgetter(*names)  # the fastest look at several attributes
            self._settings.append((held, len(held), read, read(held)))

    def module(self, xp: ModuleType) -> Any:
        """Return the stand-in for an array library, whose functions record their calls."""
        if xp.__name__ not in self._modules:
            self._modules[xp.__name__] = _RecordingModule(self, xp)
        return self._modules[xp.__name__]

    def record(self, function: Callable[..., object], *args: Any) -> None:
        """Add a call to the list, without making it now."""
        self.calls.append(alias(partial(function, *args) if args else function))

    def record_leaf(self, leaf: Any) -> None:
        """Store the state of a leaf of the graph at its first use, see `leaves`."""
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

    def is_valid(self) -> bool:
        """True if all leaves and settings are as they were recorded."""
        for held, count, read, values in self._settings:
            if len(held) != count or read(held) != values:
                return False
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

    def restore_grads(self) -> None:
        """Give each leaf the gradient that it had, before a step that was not done is done again."""
        for leaf, *_, grad in self.leaves.values():
            if grad is not False:  # else the step clears it first
                leaf._grad = grad

    def copy_loose_grads(self) -> None:
        """Replace the gradients of `loose` leaves by copies, which the next replay won't change."""
        for leaf, buffer in self.loose:
            if type(leaf.grad) is type(buffer) and namespace(buffer).may_share_memory(
                leaf.grad, buffer
            ):
                leaf.grad = leaf.grad.copy()

    def copy(self, array: Array) -> Array:
        """Return a copy, in the recording's memory if possible, with the same element order."""
        pooled = self.pooled(array)
        return array.copy(order="K") if pooled is array else pooled

    def pooled(self, array: Array, copied: bool = True) -> Array:
        """Return a copy in the pool; the array itself if it is CuPy's or not C-contiguous.

        Args:
            copied: whether to copy the values too; otherwise they are undefined.
        """
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return array
        result = self.pool.allocate(array.shape, array.dtype)
        if copied:
            np.copyto(result, array)
        return result

    def run_eagerly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function without recording."""
        token = _active.set(None)
        try:
            return function(*args)
        finally:
            _active.reset(token)

    def record_call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, record it as one call, and return its result."""
        result = self.run_eagerly(function, *args)
        self.record(function, *args)
        return result

    def note(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do the same for a function that computes on no array, see `record_note`."""
        result = Recorder.run_eagerly(self, function, *args)  # no graph ends
        self.record(function, *args)
        return result

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do the same for a function that only computes on arrays, see `record_launch`."""
        return self.record_call(function, *args)

    def input(self, function: Callable[[], Array]) -> Array:
        """Return a buffer with a function's array, which replays fill anew."""
        buffer: Array = self.run_eagerly(lambda: self.copy(function()))
        self.record(fill, buffer, function)
        return buffer

    def numbers(self, function: Callable[[], Any]) -> Any:
        """Return a function's numbers; only operations that are recorded whole need them."""
        return function()


class _RecordingModule:
    """An array library whose functions record their calls."""

    def __init__(self, recorder: Recorder, xp: ModuleType) -> None:
        self._recorder, self._xp = recorder, xp

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._xp, name)
        if callable(value) and not isinstance(value, type):
            value = _RecordingFunction(self._recorder, self._xp, name, value)
        setattr(self, name, value)  # later look-ups bypass this method
        return value


class _RecordingFunction:
    """A function of an array library that records its calls and its methods' (`add.reduce`)."""

    def __init__(
        self, recorder: Recorder, xp: ModuleType, name: str, function: Callable[..., Any]
    ) -> None:
        self._recorder, self._xp, self._name, self._function = recorder, xp, name, function

    def __getattr__(self, name: str) -> Any:
        return _RecordingFunction(
            self._recorder, self._xp, f"{self._name}.{name}", getattr(self._function, name)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        record = self._recorder.record
        if self._name in _EMPTY:
            return self._recorder.pooled(result, copied=False)
        if self._name in _FILLED:
            result = self._recorder.pooled(result)
            if self._name.startswith("zeros"):
                record(result.fill, 0)  # a device clears memory without a kernel
            else:
                record(
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
            record(self._bound(args, kwargs))
            return result
        return self._record_result(result, args, kwargs)

    def _record_result(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
        """Record the call with the result's array as its `out`, unless the result is a view.

        Return the result, always an array.
        """
        if isinstance(result, tuple | list):
            raise UsageError(
                f"{self._name} returns several arrays, but a compiled step keeps one per call; use"
                " single results"
            )
        out = self._xp.asarray(result)
        # a view needs no call, and an array without elements shares no memory
        if not out.size or any(
            is_array(arg) and self._xp.may_share_memory(arg, out) for arg in args
        ):
            return out
        out = self._recorder.pooled(out)
        if self._writes_out():
            self._recorder.record(self._bound(args, {**kwargs, "out": out}))
        else:
            self._recorder.record(fill, out, partial(self._function, *args, **kwargs))
        return out

    def _writes_out(self) -> bool:
        """True if the function has `out`: universal functions, their reductions, some others."""
        owner, name = getattr(self._function, "__self__", None), self._name
        return (
            _is_universal(self._function)
            or (_is_universal(owner) and name.endswith(".reduce"))
            or (name in _WITH_OUT and (self._xp is np or name not in _WITHOUT_ON_DEVICE))
        )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call with all its arguments, in its fastest form: keywords cost 0.1 us each."""
        function, name = self._function, self._name
        if self._xp is np and name in _METHODS and type(args[0]) is np.ndarray:
            function, args = getattr(args[0], name), args[1:]
        elif (
            isinstance(function, np.ufunc)
            and name not in _NAMED_OUT
            and (len(args), *kwargs) == (function.nin, "out")
        ):
            return partial(function, *args, kwargs["out"])
        return partial(function, *args, **kwargs)


def _is_universal(function: Any) -> bool:
    return isinstance(function, np.ufunc) or type(function).__name__ == "ufunc"


LEAST_BYTES = 1024  # smaller results are allocated outside the pool
# mapped memory begins at a page; small chunks there would compete for the same cache lines
LEAST_MAPPED_BYTES = 128 * 1024


class ChunkPart(NamedTuple):
    """A range of bytes of a chunk of memory."""

    chunk: int
    start: int
    stop: int


class PooledBlock:
    """A block of memory that returns to its pool when the last array over it is freed.

    NumPy makes an array over it by `__array_interface__`; the array and its views hold a reference
    to this object.

    Args:
        pool: the block's pool.
        span: the block's position in it.
        block: its bytes, at least as many as the array needs.
        shape: of the array, C-contiguous.
        dtype: of the array. bfloat16 is declared as 16-bit integers, since the interface has no
            code for it.
    """

    def __init__(
        self, pool: MemoryPool, span: ChunkPart, block: Array, shape: Shape, dtype: Dtype
    ) -> None:
        self.pool, self.span, self.block = pool, span, block
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            # bfloat16's `str` is that of raw bytes
            "typestr": dtype.str if dtype.kind != "V" else f"<u{dtype.itemsize}",
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.pool.returned.append(self.span)


class MemoryPool:
    """A best-fit allocator over chunks of memory.

    A result gets the smallest free range that fits; of ties the one freed last, which may still be
    in the cache. The rest of the range stays free, and adjacent free ranges merge. So a recording
    with fewer rows fits the memory of one with more. If no range fits, a new chunk is allocated.

    Attributes:
        returned: the ranges freed since the last allocation.
        size_bytes: of all chunks together.
    """

    def __init__(self) -> None:
        # A list that `__del__` only appends to: the garbage collector may call it at any time, also
        # during a merge.
        self.returned: list[ChunkPart] = []
        self.size_bytes = 0
        self._chunks: list[Array] = []
        self._free: list[ChunkPart] = []

    def allocate(self, shape: Shape, dtype: Dtype) -> Array:
        """Return an uninitialized C-contiguous array, from the pool unless it is small."""
        bytes_needed = dtype.itemsize * prod(shape)
        if bytes_needed < LEAST_BYTES:
            return np.empty(shape, dtype)
        span = self._take(-(-bytes_needed // LINE_BYTES) * LINE_BYTES)
        block = self._chunks[span.chunk][span.start : span.stop]
        array = np.asarray(PooledBlock(self, span, block, shape, dtype))
        return array if array.dtype == dtype else array.view(dtype)

    def _take(self, count_bytes: int) -> ChunkPart:
        while self.returned:
            self._merge(self.returned.pop(0))
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

    def _merge(self, span: ChunkPart) -> None:
        """Add a range to the free ones, merged with its neighbours."""
        for other in [item for item in self._free if item.chunk == span.chunk]:
            if other.stop == span.start or other.start == span.stop:
                self._free.remove(other)
                span = ChunkPart(
                    span.chunk, min(span.start, other.start), max(span.stop, other.stop)
                )
        self._free.append(span)


def alias(x: Any) -> Any:
    """Return the same array, or a call on the same arrays, without keeping pool blocks in use.

    Supports arrays, their methods, tuples of arrays, and partial calls of these; any other value is
    returned unchanged.
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
        # getattr: as_strided puts an object that is no array between a view and its base
        base = getattr(base, "base", None)
    if base is None:
        return array
    block = base.block
    return np.ndarray(
        array.shape, array.dtype, block.data, array.ctypes.data - block.ctypes.data, array.strides
    )


def _aligned(count_bytes: int) -> Array:
    """Return bytes that begin at a cache line.

    Large chunks are mapped, not taken from malloc: a chunk outlives the other allocations of the
    recording, and would leave holes among them that stay unused.
    """
    if count_bytes >= LEAST_MAPPED_BYTES:
        return np.frombuffer(
            mmap.mmap(-1, count_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
        )
    return empty(np, (count_bytes,), np.uint8)
