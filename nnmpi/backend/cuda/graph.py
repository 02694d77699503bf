"""A step on a device as CUDA graphs: CUDA captures what the step queues while it runs.

    first call     the step runs in the memory of the graphs: kernels are compiled and loaded
    second call    the step runs again, and CUDA captures its work instead of doing it:

                       forward    backward     all-reduce     backward     update
                     [ graph 1            ]      call       [ graph 2 ]     call

                   A call that sends, waits or reads a number needs its predecessors' results: it
                   ends a graph, which is launched at once, and another graph begins after it.
    later calls    the graphs are launched, and the calls made, in the same order

A launch of a graph costs the host a few microseconds, however many kernels are in it. The capture
sees memory as the eager step does: an array that is freed serves another result. So a recorded step
needs no more memory than an eager one. Numbers that differ between steps lie in device memory,
which is written before a launch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from math import inf
from threading import local
from types import ModuleType
from typing import Any
from weakref import finalize

import numpy as np

from nnmpi.backend.array import Array, is_array
from nnmpi.backend.program.call import items_of
from nnmpi.backend.recording import Recorder
from nnmpi.base.errors import UsageError

NUMBERS = 1024  # uint32, in a block of device memory
AHEAD = 4  # launches whose numbers may not have been read yet
# CUDA's errors of work that cannot be captured
_CAPTURE_ERRORS = range(900, 911)


@cache
def _unused() -> list[Any]:
    """Return the pools whose graphs are gone, but perhaps not yet all of their results."""
    return []


def free_unused() -> None:
    """Return the memory of graphs that are gone to CuPy's default pool.

    A pool does not do so by itself when it is deleted. While its graphs exist, free blocks are
    theirs.
    """
    for pool in _unused().copy():
        pool.free_all_blocks()
        if not pool.total_bytes():
            _unused().remove(pool)


class GraphMemory:
    """The memory in which steps are captured.

    The memory is a pool that takes its blocks from CuPy's default pool: there it counts, and the
    limit applies to it. CuPy keeps what was freed for the stream in which it was taken, so what
    earlier eager steps have freed is given back before work in the stream of the captures begins.

    Args:
        xp: cupy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        default = xp.get_default_memory_pool()
        self._blocks: list[tuple[int, int]] = []  # where they begin and end
        self._pool = xp.cuda.MemoryPool(partial(_take, default.malloc, self._blocks))
        free_unused()
        default.free_all_blocks(xp.cuda.get_current_stream())
        finalize(self, _unused().append, self._pool)

    @property
    def size_bytes(self) -> int:
        """The memory that the graphs hold, in bytes."""
        return int(self._pool.total_bytes())

    def borrowed(self, array: Array) -> Array:
        """Return an array in this memory as one that does not hold it, any other array unchanged.

        Later results of the step may lie there, as they did while it was captured.
        """
        memory: Any = array.data
        i = bisect_right(self._blocks, (memory.ptr, inf)) - 1
        if not array.nbytes or i < 0 or memory.ptr >= self._blocks[i][1]:
            return array
        cuda = self.xp.cuda
        room = cuda.UnownedMemory(memory.ptr, self._blocks[i][1] - memory.ptr, self._pool)
        pointer = cuda.MemoryPointer(room, 0)
        return self.xp.ndarray(array.shape, array.dtype, pointer, array.strides)

    def room_for(self, array: Array) -> Array:
        """Return an uninitialized array in this memory, like another, for the current stream."""
        with self.inside():
            return self.xp.empty_like(array)

    @contextmanager
    def inside(self, captures: bool = False) -> Iterator[Any]:
        """Queue the block's work on the thread's stream for captures, with results in this memory.

        If it is not captured, it waits for what the current stream has to do, which waits for it:
        earlier results may have lain in the same memory.
        """
        outer = self.xp.cuda.get_current_stream()
        with self.xp.cuda.using_allocator(self._pool.malloc), stream_of(self.xp) as stream:
            # the two never compute at the same time, see `cublas.Handle`
            stream.shares_with = outer
            if not captures:
                stream.wait_event(outer.record())
            yield stream
        if not captures:
            outer.wait_event(stream.record())


def _take(allocate: Callable[[int], Any], blocks: list[tuple[int, int]], size: int) -> Any:
    """Return a block of memory, and note where it lies."""
    block = allocate(size)
    insort(blocks, (block.ptr, block.ptr + size))
    return block


_streams = local()


def stream_of(xp: ModuleType) -> Any:
    """Return this thread's stream for captures on its current device.

    The default stream cannot be captured. There is one for all steps, since cuBLAS keeps a
    workspace for each stream.
    """
    name = f"stream{xp.cuda.runtime.getDevice()}"
    if not hasattr(_streams, name):
        setattr(_streams, name, xp.cuda.Stream(non_blocking=True))
    return getattr(_streams, name)


class Segment:
    """A graph, and the numbers that it reads.

    Args:
        graph: CuPy's.
        stream: the one of the launches, in whose workspace products compute; kept, as that is.
        numbers: pairs of arrays on the device and on the host.
    """

    def __init__(
        self, xp: ModuleType, graph: Any, stream: Any, numbers: Sequence[tuple[Any, Array]]
    ) -> None:
        self._xp, self._graph, self._stream, self._numbers = xp, graph, stream, numbers
        self._sent: list[Any] = []  # the latest launches: their ends, and what they copy

    def __call__(self) -> None:
        """Write the numbers, and launch the graph on the current stream."""
        stream, copies = self._xp.cuda.get_current_stream(), list[Array]()
        for target, values in self._numbers:
            # Without a stream CuPy would wait. A copy is given, which nobody writes to and which is
            # kept: a card that reads pageable memory itself, such as GH200's, may read it late.
            copies.append(values.copy())
            target.set(copies[-1], stream=stream)
        self._graph.launch(stream)
        if copies:
            self._sent.append((stream.record(), copies))
        if len(self._sent) > AHEAD:
            self._sent[0][0].synchronize()
            del self._sent[0]


class GraphRecorder(Recorder):
    """Records a step as graphs and calls.

    Args:
        memory: of the results; recordings that are replayed one at a time may share it.
        warms_up: whether to do the work only, in this memory, so that a capture finds room there.
    """

    captures = True

    def __init__(self, memory: GraphMemory, warms_up: bool) -> None:
        super().__init__()
        self.warms_up, self._launched = warms_up, 0
        self._memory, self._kinds = memory, memory.xp.ndarray
        self._capture: tuple[ExitStack, Any] | None = None  # while work is being captured
        self._outer: Any = None  # the stream of the launches
        self._blocks: list[tuple[Array, Array]] = []  # of numbers, on the device and on the host
        self._first = self._used = NUMBERS  # in the last block: of this graph's numbers, of all
        self._numbers: list[tuple[Array, Array]] = []  # of this graph, in earlier blocks

    @contextmanager
    def running(self) -> Iterator[None]:
        """Capture the computations in this block, and do them.

        Raises:
            UsageError: for work that cannot be captured, after a part of the step was done.
        """
        with super().running():
            try:
                self._begin()
                yield
                self._end()
            except BaseException as error:
                self._abort()
                if self._launched and cannot_capture(error):
                    raise UsageError(
                        "a compiled step on a device reads or copies values in the middle"
                        f" ({error}); move that out of the step, or do not compile it"
                    ) from error
                raise

    def can_begin_again(self, error: Exception) -> bool:
        """Whether the step failed because it cannot be captured, before any of it was done."""
        return not (self.warms_up or self._launched) and cannot_capture(error)

    def run_eagerly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function between two graphs."""
        self._end()
        result = super().run_eagerly(function, *args)
        self._begin()
        return result

    def place_of(self, x: Array) -> Array:
        """Return an array for a call, which does not hold memory of the graphs."""
        return self._memory.borrowed(x)

    def _copied(self, array: Array) -> Array:
        """Return a copy of a result in the memory of the graphs, made between two of them."""
        result = self._memory.room_for(array)
        result[...] = array
        return result

    def call(self, function: Any, reads: Any, writes: Any, when: str) -> Any:
        """See `recording.call`: work on declared arrays becomes a part of the graph."""
        args = (*reads, *(writes or ()))
        if when == "before" and not self.warms_up:
            return self._input(partial(function, *args))
        if when != "each" or writes is None:
            return super().call(function, reads, writes, when)
        result = Recorder.run_eagerly(self, function, *args)
        if not items_of(args, self._kinds):
            self.record(function, *args)  # the host's
        return result

    def _input(self, function: Callable[[], Any]) -> Any:
        """Return a buffer of a function's array or numbers, which replays fill before the graph."""
        with self._outside():
            given = Recorder.run_eagerly(self, function)
            if is_array(given):
                buffer = given.copy(order="K")
                self.record(_write, buffer, function)
                return buffer
            values = np.array(given, np.uint32)
            if self._used + values.size > NUMBERS:
                self._take_numbers()
                block = self._memory.xp.empty(NUMBERS, np.uint32)
                self._blocks.append((block, np.empty(NUMBERS, np.uint32)))
                self._first = self._used = 0
        target, host = (block[self._used : self._used + values.size] for block in self._blocks[-1])
        self._used += values.size
        host[...] = values
        self.record(_write, host, function)
        return target

    def _take_numbers(self) -> list[tuple[Array, Array]]:
        """Return this graph's numbers so far, as pairs of arrays on the device and on the host."""
        if self._used > self._first:
            target, host = (block[self._first : self._used] for block in self._blocks[-1])
            self._numbers.append((target, host))
            self._first = self._used
        return self._numbers

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Compute in the stream of the launches, before the next one.

        Results do not lie in the memory of the graph, where its earlier results may.
        """
        xp = self._memory.xp
        allocator = xp.get_default_memory_pool().malloc
        with xp.cuda.using_allocator(allocator), self._outer:
            yield

    def _begin(self) -> None:
        cuda = self._memory.xp.cuda
        self._outer = cuda.get_current_stream()
        with ExitStack() as stack:
            stream = stack.enter_context(self._memory.inside(captures=not self.warms_up))
            if not self.warms_up:
                stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
            self._capture = stack.pop_all(), stream

    def _end(self) -> None:
        """End the graph, and launch it."""
        assert self._capture is not None
        xp, (stack, stream), self._capture = self._memory.xp, self._capture, None
        with stack:
            graph = None if self.warms_up else stream.end_capture()
        if self.warms_up:
            return
        segment = Segment(xp, graph, self._outer, self._take_numbers())
        self._numbers = []
        segment()
        self._launched += 1
        self.append(segment)

    def _abort(self) -> None:
        """End a capture whose work will not be done."""
        if self._capture is None:
            return
        (stack, stream), self._capture = self._capture, None
        with stack, suppress(Exception):  # CUDA has ended it, for the error that is on its way
            if not self.warms_up:
                stream.end_capture()


def cannot_capture(error: BaseException) -> bool:
    """True for an error of CUDA or CuPy that says that work cannot be captured."""
    return getattr(error, "status", None) in _CAPTURE_ERRORS or (
        isinstance(error, RuntimeError | NotImplementedError)
        and any(word in str(error) for word in ("captur", "H2D transfers", "D2H transfers"))
    )


def _write(buffer: Array, function: Callable[[], Any]) -> None:
    buffer[...] = function()
