"""Streams and events: copies on a stream arrive when somebody waits for them, and not before.

Kernels and functions compute at once; what is put off is what a host would see too early:

    to the host     the host's memory holds rubbish until the stream, or an event after the copy, is waited for
    to the device   the array holds what it held until then, or until work in the same stream needs it

So a host that reads without waiting, or a stream that does not wait for another one's copy, gets wrong numbers here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from cupy_backends.cuda.api.runtime import CUDARuntimeError

# Streams with copies under way; almost always empty, so that one look suffices for most operations.
PENDING: list[_Stream] = []
STREAMS: weakref.WeakValueDictionary[int, _Stream] = weakref.WeakValueDictionary()  # by address
EVENTS: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()  # by address
_local = threading.local()


class _Copy:
    """A copy that has been asked for.

    Args:
        read: returns what is to be copied, as it is now.
        write: puts it there.
        to_host: whether the host is the one to see it.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], to_host: bool) -> None:
        self._read: Callable[[], Any] | None = read
        self._write = write
        self.to_host = to_host
        self._value: Any = None

    def read(self) -> None:
        """Take the value now: what comes after this in the same stream may change the source."""
        if self._read is not None:
            self._value, self._read = self._read(), None

    def finish(self) -> None:
        """Let the copy arrive."""
        self.read()
        self._write(self._value)


class _Wait:
    """A stream's waiting for an event of another one."""

    to_host = False

    def __init__(self, event: Event) -> None:
        self._event = event

    def read(self) -> None:
        self._event._settle()

    def finish(self) -> None:
        self._event._settle()


class _Stream:
    """A queue of copies."""

    def __init__(self, ptr: int, blocking: bool) -> None:
        self.ptr = ptr
        STREAMS[ptr] = self
        self._blocking = blocking
        self._queue: deque[_Copy | _Wait] = deque()
        self._issued = 0
        self._arrived = 0
        self._asked = 0

    def _push(self, item: _Copy | _Wait) -> None:
        self._queue.append(item)
        self._issued += 1
        if self not in PENDING:
            PENDING.append(self)

    def _finish(self, upto: int | None = None) -> None:
        """Let copies arrive, all or those before a place."""
        while self._queue and (upto is None or self._arrived < upto):
            item = self._queue.popleft()
            self._arrived += 1
            item.finish()
        if not self._queue and self in PENDING:
            PENDING.remove(self)

    def _settle(self, upto: int | None = None) -> None:
        """Do for the device what is under way, while the host still sees nothing of it."""
        kept: deque[_Copy | _Wait] = deque()
        for place, item in enumerate(self._queue):
            if upto is not None and self._arrived + place >= upto:
                kept.append(item)
            elif item.to_host:
                item.read()
                kept.append(item)
            else:
                for before, copy in enumerate(kept):
                    if copy.to_host:  # this one may read the page-locked memory that it writes
                        copy.finish()
                        kept[before] = _Done()
                item.finish()
                kept.append(_Done())
        self._queue = kept
        if all(isinstance(item, _Done) for item in kept):
            self._arrived += len(kept)
            kept.clear()
            if self in PENDING:
                PENDING.remove(self)

    def synchronize(self) -> None:
        """Wait for everything in this stream; for the null stream, in the blocking ones too."""
        for stream in [each for each in PENDING if each._blocking] if self.ptr == 0 else []:
            stream._finish()
        self._finish()

    @property
    def done(self) -> bool:
        """Whether everything has arrived; asked twice, it has."""
        self._asked = self._asked + 1 if self._queue else 0
        if self._asked > 1:
            self._finish()
        return not self._queue

    def record(self, event: Event | None = None) -> Event:
        """Return an event after all that is in this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what comes later in this stream wait for the event."""
        if self is current() or self.ptr == 0:
            event._settle()
        else:
            self._push(_Wait(event))

    def use(self) -> _Stream:
        """Make it the current stream."""
        _stack()[-1] = self
        return self

    def __enter__(self) -> _Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)


class _Done:
    """What was a copy to the device and has been done."""

    to_host = False

    def read(self) -> None:
        """Nothing is left."""

    finish = read


class _Numbers:
    """The addresses of streams, each once."""

    def __init__(self) -> None:
        self.last = 0x5000

    def take(self) -> int:
        """Return the next."""
        self.last += 16
        return self.last


_NUMBERS = _Numbers()


class Stream(_Stream):
    """A stream of one's own, or the null stream."""

    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        super().__init__(0 if null else 2 if ptds else _NUMBERS.take(), not non_blocking and not null)
        self.is_non_blocking = non_blocking
        self.priority = 0 if priority is None else priority


Stream.null = Stream(null=True)


class ExternalStream(_Stream):
    """A stream that somebody else has made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr, blocking=True)


class Event:
    """A place in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = id(self)
        EVENTS[self.ptr] = self
        self._timed = not disable_timing
        self._stream: _Stream | None = None
        self._place = 0
        self._time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        """Stand after all that is in the stream now."""
        self._stream = current() if stream is None else stream
        self._place = self._stream._issued
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for what stands before it."""
        if self._stream is not None:
            self._stream._finish(self._place)

    @property
    def done(self) -> bool:
        """Whether all before it has arrived."""
        return self._stream is None or self._stream._arrived >= self._place or self._stream.done

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream._settle(self._place)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two events."""
    if not (start_event._timed and end_event._timed) or start_event._stream is None or end_event._stream is None:
        raise CUDARuntimeError(400)
    return 1e3 * (end_event._time - start_event._time)


def _stack() -> list[_Stream]:
    stack: list[_Stream] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = [Stream.null]
    return stack


def current() -> _Stream:
    """Return this thread's current stream."""
    return _stack()[-1]


def get_current_stream(device_id: int = -1) -> _Stream:
    """Return this thread's current stream."""
    return current()


def settle() -> None:
    """Before work in the current stream: do for the device what stands before it there."""
    here = current()
    for stream in list(PENDING):
        if stream is here or (here.ptr == 0 and stream._blocking):
            stream._settle()


def finish_all() -> None:
    """Let everything arrive."""
    for stream in list(PENDING):
        stream._finish()


def copy_to_host(read: Callable[[], Any], write: Callable[[Any], None], stream: _Stream | None, pinned: bool) -> None:
    """Copy to the host; to memory that is not page-locked CUDA does so at once."""
    stream = current() if stream is None else stream
    if not pinned:
        stream.synchronize()
        write(read())
        return
    copy = _Copy(read, write, to_host=True)
    if stream is current():
        settle()
        copy.read()
    stream._push(copy)


def copy_to_device(read: Callable[[], Any], write: Callable[[Any], None], stream: _Stream | None, pinned: bool) -> None:
    """Copy to the device: at once in the current stream, which computes at once too, later in another one."""
    stream = current() if stream is None else stream
    if stream is current():
        settle()
        write(read())
        return
    copy = _Copy(read, write, to_host=False)
    if not pinned:  # CUDA has taken the bytes when the call returns
        copy.read()
    stream._push(copy)
