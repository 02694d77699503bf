"""Captures and graphs: what is called while a stream captures is done when the graph is launched.

A function's result is then memory full of rubbish, of the shape that zeros in the place of the
arguments give. A graph does not keep its arrays' memory, as there: it can be launched as long as
the device's memory below them is not given back (so they come from a pool that the graph's owner
keeps).

CuPy refuses its own products in a capture. Here they are computed: the engine calls them where the
double has no kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from cupy_backends.cuda.api.runtime import CUDARuntimeError
from numpy.lib.array_utils import byte_bounds

from cupy import _array, _streams
from cupy.cuda import memory, runtime

INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, CAPTURED_EVENT = 901, 902, 903, 904, 905, 907
FREED = 700


class Graph:
    """Work to be launched, as often as one likes."""

    _work: list[Callable[[], None]]
    _memory: list[weakref.ref[memory.BaseMemory]]

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            "currently this class cannot be initiated by the user and must be created via stream"
            " capture"
        )

    def launch(self, stream=None):
        """Do the work in a stream, by default the current one."""
        uses = [item() for item in self._memory]
        if None in uses:
            raise CUDARuntimeError(FREED)
        stream = _streams.current() if stream is None else stream
        capture = _streams.capturing(stream)
        if capture is None:
            stream._push(_streams.Launch(self._run, uses))
        else:
            capture.add(self._run, self._memory, stream)

    def upload(self, stream=None):
        """Bring it to the device before the first launch."""

    def _run(self):
        for work in self._work:
            work()


class Capture:
    """What streams have been asked for since one of them began.

    Attributes:
        streams: those that take part: the first one began.
        broken: something was asked for that cannot be in a graph.
    """

    def __init__(self, stream, mode):
        if mode not in (None, runtime.streamCaptureModeRelaxed):
            raise NotImplementedError("the double captures in relaxed mode alone")
        self.streams = [stream]
        self.broken = False
        self._work = []
        self._memory = {}
        # Of each stream's work, how much stands before what comes next in a stream.
        self._before = {stream: {stream: 0}}
        stream._capture = self
        _streams.CAPTURES.append(self)

    def fail(self, status):
        """Raise an error after which there will be no graph."""
        self.broken = True
        raise CUDARuntimeError(status)

    def seen(self, stream):
        """Return how much of each stream's work stands before what comes next in a stream."""
        return dict(self._before[stream])

    def wait(self, stream, event):
        """Let what comes next in a stream stand behind an event; the stream takes part from now
        on.
        """
        if event._stream is None:
            return
        if event._capture is None:
            self.fail(ISOLATION)
        if self not in _streams.CAPTURES:
            raise CUDARuntimeError(CAPTURED_EVENT)
        if stream._capture not in (None, self):
            self.fail(MERGE)
        if stream._capture is None:
            stream._capture = self
            self.streams.append(stream)
            self._before[stream] = {stream: 0}
        mine = self._before[stream]
        for other, count in event._seen.items():
            mine[other] = max(mine.get(other, 0), count)

    def end(self, stream):
        """Return the graph."""
        if stream is not self.streams[0]:
            self.fail(UNMATCHED)
        for item in self.streams:
            item._capture = None
        _streams.CAPTURES.remove(self)
        if self.broken:
            raise CUDARuntimeError(INVALIDATED)
        joined = self._before[stream]
        if any(self._before[item][item] > joined.get(item, 0) for item in self.streams):
            raise CUDARuntimeError(UNJOINED)
        graph = Graph.__new__(Graph)
        graph._work, graph._memory = self._work, list(self._memory.values())
        return graph

    def add(self, work, touches, stream=None):
        """Put some work into the graph.

        Args:
            touches: the memory that it reads and writes.
            stream: whose it is; by default the current one's.
        """
        if self.broken:
            raise CUDARuntimeError(INVALIDATED)
        stream = _streams.current() if stream is None else stream
        self._before[stream][stream] += 1
        self._work.append(work)
        self._memory.update((id(item), item) for item in touches)

    def take(self, function, args, kwargs):
        """Put a function's call into the graph and return its result, which holds rubbish.

        Arrays of zeros that cannot be written to stand for the arguments, or others if that is an
        error. What writes nothing and gives only views computes nothing, and is done now.
        """
        standing = {}  # an array, by what stands for it
        zeros = []

        writes = False

        def to_zeros(array):
            host, owner = _zeros_like(array._host)
            host.flags.writeable = writes
            result = _array.made(host, memory.Aside(owner))
            memory.OWNERS[id(owner)] = result._mem  # so that a view of it is known as one
            standing[id(result)] = array
            zeros.append(result._mem)
            return result

        def trace():
            with _streams.aside(traces=True), np.errstate(all="ignore"):
                return function(*_each(to_zeros, args), **_each(to_zeros, kwargs))

        try:
            traced = trace()
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            writes = True
            standing.clear()
            traced = trace()
        results = _arrays(traced)
        if not writes and all(item._mem in zeros for item in results):
            with _streams.aside():
                return function(*args, **kwargs)
        if any(item._mem in zeros and id(item) not in standing for item in results):
            raise NotImplementedError("the double captures nothing that gives a view and computes")

        targets = []

        def to_blank(array):
            result = standing.get(id(array))
            if result is None:
                result = _array.made(*memory.blank(array._host))
                targets.append(result._host)
            else:
                targets.append(None)
            return result

        touched = []

        def to_loan(array):
            touched.append(array)
            return _array.made(array._host, memory.Aside(array._host))

        result = _each(to_blank, traced)
        lent_args, lent_kwargs = _each(to_loan, args), _each(to_loan, kwargs)
        touched.extend(_arrays(result))

        def work():
            fresh = _arrays(function(*lent_args, **lent_kwargs))
            for target, value in zip(targets, fresh, strict=True):
                if target is not None:
                    np.copyto(target, value._host)

        self.add(work, _references(array._mem for array in touched))
        return result


def submit(work, *addresses):
    """Do some work of another library in the current stream, or put it into a graph.

    Args:
        addresses: of the memory that it reads and writes.
    """
    _streams.submit(work, _references(map(memory.base_of, addresses)))


def _references(given):
    """Return references to the device's memory below some, which do not keep it; what somebody else
    gives and takes back nobody can look after.
    """
    roots = map(memory.root_of, given)
    return [weakref.ref(mem) for mem in roots if isinstance(mem, memory.Memory)]


def _zeros_like(array):
    """Return an array of zeros with the strides of another, and the array that has its memory."""
    if not array.size:
        empty = np.empty_like(array)
        return empty.view(), empty
    low, high = byte_bounds(array)
    owner = np.zeros(high - low, np.uint8)
    start = array.__array_interface__["data"][0] - low
    return np.ndarray(array.shape, array.dtype, owner, start, array.strides), owner


def _each(change, value):
    """Return a value with its arrays changed."""
    if type(value) is _array.ndarray:
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_each(change, item) for item in value)
    if type(value) is dict:
        return {key: _each(change, item) for key, item in value.items()}
    return value


def _arrays(value):
    """Return the arrays in a value."""
    result = []
    _each(lambda array: result.append(array) or array, value)  # type: ignore[func-returns-value]
    return result
