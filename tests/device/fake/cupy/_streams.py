"""Streams and events: copies on a stream arrive when somebody waits for them, and not before.

Kernels and functions compute at once; what is put off is what a host would see too early:

    to the host     the host's memory holds rubbish until the stream, or an event after the copy, is
                    waited for
    to the device   the array holds what it held until then, or until work in the same stream needs
                    it

So a host that reads without waiting, or a stream that does not wait for another one's copy, gets
wrong numbers here. A graph is such a copy to the device. Where a stream captures, nothing is
computed (see `_capture`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING

from cupy_backends.cuda.api.runtime import CUDARuntimeError

if TYPE_CHECKING:
    pass

# Streams with copies under way, and captures; almost always empty, so that one look suffices for
# most operations.
PENDING = []
CAPTURES = []
_local = threading.local()

ILLEGAL_STATE, UNSUPPORTED, IMPLICIT, CAPTURED_EVENT = 401, 900, 906, 907


class _Copy:
    """A copy that has been asked for; it may read page-locked memory.

    Args:
        read: returns what is to be copied, as it is now.
        write: puts it there.
        to_host: whether the host is the one to see it.
    """

    def __init__(self, read, write, to_host):
        self._read = read
        self._write = write
        self.to_host = to_host
        self._value = None

    def read(self):
        """Take the value now: what comes after this in the same stream may change the source."""
        if self._read is not None:
            self._value, self._read = self._read(), None

    def finish(self):
        """Let the copy arrive."""
        self.read()
        self._write(self._value)


class _Wait:
    """A stream's waiting for an event of another one."""

    to_host = False

    def __init__(self, stream, place):
        self._stream, self._place = stream, place

    def finish(self):
        self._stream._settle(self._place)


class Launch:
    """A graph that has been launched.

    Args:
        work: what it does.
        uses: what must not be freed before.
    """

    to_host = False

    def __init__(self, work, uses):
        self._work = work
        self._uses = uses

    def finish(self):
        """Do it, once: also if it fails."""
        work, self._work = self._work, None
        if work is not None:
            with aside():
                work()
        self._uses = None


class Stream:
    """A queue of copies."""

    null: Stream

    def __init__(self, null=False, non_blocking=False):
        self._is_null = null
        self.ptr = 0 if null else id(self)
        self._blocking = not non_blocking and not null
        self._queue = deque()
        self._arrived = 0
        self._capture = None

    def __enter__(self):
        _stack().append(self)
        return self

    def __exit__(self, *args):
        _stack().pop()

    def _push(self, item):
        self._queue.append(item)
        if self not in PENDING:
            PENDING.append(self)

    @property
    def _issued(self):
        """How much has been put into it: no counter, which threads could miscount for good."""
        return self._arrived + len(self._queue)

    def _finish(self, upto=None):
        """Let copies arrive, all or those before a place."""
        while self._queue and (upto is None or self._arrived < upto):
            item = self._queue.popleft()
            self._arrived += 1
            item.finish()
        if not self._queue and self in PENDING:
            PENDING.remove(self)

    def _settle(self, upto=None):
        """Do for the device what is under way, while the host still sees nothing of it."""
        saved = deque()
        for place, item in enumerate(self._queue):
            if upto is not None and self._arrived + place >= upto:
                saved.append(item)
            elif item.to_host:
                item.read()
                saved.append(item)
            else:
                for before, copy in enumerate(saved):
                    if copy.to_host and isinstance(
                        item, _Copy
                    ):  # this one may read the page-locked memory that it writes
                        copy.finish()
                        saved[before] = _Done()
                item.finish()
                saved.append(_Done())
        self._queue = saved
        if all(isinstance(item, _Done) for item in saved):
            self._arrived += len(saved)
            saved.clear()
            if self in PENDING:
                PENDING.remove(self)

    def synchronize(self):
        """Wait for everything in this stream; for the null stream, in the blocking ones too."""
        _refuse_null(self)
        if self._capture is not None:
            self._capture.fail(UNSUPPORTED)
        for stream in [item for item in PENDING if item._blocking] if self._is_null else []:
            stream._finish()
        self._finish()

    def record(self, event=None):
        """Return an event after all that is in this stream now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Let what comes later in this stream wait for the event; by that, a stream takes part in
        another one's capture.
        """
        capture = event._capture or self._capture
        if capture is not None:
            capture.wait(self, event)
        elif event._stream is None:
            return
        elif self is current() or self._is_null:
            event._stream._settle(event._place)
        else:
            self._push(_Wait(event._stream, event._place))

    def begin_capture(self, mode=None):
        """Take what comes into a graph, instead of doing it."""
        if self._is_null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self._capture is not None:
            self._capture.fail(ILLEGAL_STATE)
        from cupy._capture import Capture

        Capture(self, mode)

    def end_capture(self):
        """Return the graph of what came since `begin_capture`."""
        if self._capture is None:
            raise CUDARuntimeError(ILLEGAL_STATE)
        return self._capture.end(self)

    def is_capturing(self):
        """Return whether what comes is taken into a graph."""
        _refuse_null(self)
        if self._capture is not None and self._capture.broken:
            raise RuntimeError(
                "the stream was capturing, but an error has invalidated the capture sequence"
            )
        return self._capture is not None


Stream.null = Stream(null=True)


class _Done:
    """What was a copy to the device and has been done."""

    to_host = False

    def finish(self):
        """Nothing is left."""


class Event:
    """A place in a stream: after all that was in it at `record`."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._stream = None
        self._place, self._time = 0, 0.0
        self._capture = None  # with
        self._seen = {}  # how much of each stream's work stands before

    def record(self, stream=None):
        """Put it after all that is in a stream now."""
        stream = current() if stream is None else stream
        self._stream, self._place, self._time = stream, stream._issued, time.perf_counter()
        self._capture = stream._capture
        self._seen = {} if self._capture is None else self._capture.seen(stream)

    def synchronize(self):
        """Wait for what stands before it."""
        if self._capture is not None:
            self._capture.fail(CAPTURED_EVENT)
        if self._stream is not None:
            self._stream._finish(self._place)


def get_elapsed_time(start_event, end_event):
    """Return the milliseconds between two events."""
    return 1e3 * (end_event._time - start_event._time)


def _stack():
    stack = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = [Stream.null]
    return stack


def current():
    """Return this thread's current stream."""
    return _stack()[-1]


def get_current_stream(device_id=-1):
    """Return this thread's current stream."""
    return current()


@contextmanager
def aside(traces=False):
    """Let what this thread computes inside `with` be no work of its current stream.

    Args:
        traces: it is computed for the shapes of the results, with zeros.
    """
    before = is_aside(), is_tracing()
    _local.aside, _local.traces = True, traces
    try:
        yield
    finally:
        _local.aside, _local.traces = before


def is_aside():
    """Return whether what this thread computes is no work of a stream."""
    return getattr(_local, "aside", False)


def is_tracing():
    """Return whether it is computed for the shapes alone."""
    return getattr(_local, "traces", False)


def capturing(stream=None):
    """Return the capture that takes a stream's work; by default the current one's."""
    stream = current() if stream is None else stream
    _refuse_null(stream)
    return stream._capture


def _refuse_null(stream):
    """Raise an error for the null stream, if a stream captures that waits for it."""
    for capture in CAPTURES if stream._is_null else ():
        if any(item._blocking for item in capture.streams):
            capture.fail(IMPLICIT)


def queued(function):
    """Return a function that is work of the current stream: it follows what stands before it
    there, or goes into a graph.
    """

    @wraps(function)
    def call(*args, **kwargs):
        if (CAPTURES or PENDING) and not is_aside():
            capture = capturing()
            if capture is not None:
                return capture.take(function, args, kwargs)
            settle()
        return function(*args, **kwargs)

    return call


def submit(work, touches=()):
    """Do some work of the current stream, or put it into a graph.

    Args:
        touches: references to the memory that it reads and writes.
    """
    if not is_aside():
        capture = capturing()
        if capture is not None:
            capture.add(work, touches)
            return
        settle()
    work()


def reads_host(stream=None):
    """Before the host reads something: do what stands before; CuPy refuses it in a capture."""
    if is_tracing() or CAPTURES and capturing(stream) is not None:
        raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
    if not is_aside():
        settle()


def writes_device(stream=None):
    """Before the host writes to the device, which CuPy refuses in a capture."""
    if is_tracing() or CAPTURES and capturing(stream) is not None:
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")


def settle():
    """Before work in the current stream: do for the device what stands before it there."""
    here = current()
    for stream in list(PENDING):
        if stream is here or (here._is_null and stream._blocking):
            stream._settle()


def finish_all():
    """Let everything arrive."""
    for stream in list(PENDING):
        stream._finish()


def copy_to_host(read, write, stream, pinned):
    """Copy to the host; to memory that is not page-locked CUDA does so at once."""
    stream = current() if stream is None else stream
    if CAPTURES:
        reads_host(stream)
    if not pinned:
        stream.synchronize()
        write(read())
        return
    copy = _Copy(read, write, to_host=True)
    if stream is current():
        settle()
        copy.read()
    stream._push(copy)


def copy_to_device(read, write, stream, pinned):
    """Copy to the device: at once in the current stream, which computes at once too, later in
    another one.
    """
    stream = current() if stream is None else stream
    writes_device(stream)
    if stream is current():
        settle()
        write(read())
        return
    copy = _Copy(read, write, to_host=False)
    if not pinned:  # CUDA has taken the bytes when the call returns
        copy.read()
    stream._push(copy)
