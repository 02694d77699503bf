"""Streams and events: copies on a stream arrive when somebody waits for them, and not before.

Kernels and functions compute at once; what is put off is what a host would see too early:

    to the host     the host's memory holds rubbish until the stream, or an event after the copy, is
                    waited for
    to the device   the array holds what it held until then, or until work in the same stream needs
                    it

So a host that reads without waiting, or a stream that does not wait for another one's copy, gets
wrong numbers here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# Streams with copies under way; almost always empty, so that one look suffices for most operations.
PENDING: list[Stream] = []
_local = threading.local()


class _Copy:
    """A copy that has been asked for.

    Args:
        read: returns what is to be copied, as it is now.
        write: puts it there.
        to_host: whether the host is the one to see it.
    """

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], None], to_host: bool
    ) -> None:
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

    def finish(self) -> None:
        self._event._settle()


class Stream:
    """A queue of copies."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._is_null = null
        self._blocking = not non_blocking and not null
        self._queue: deque[_Copy | _Wait] = deque()
        self._issued = 0
        self._arrived = 0

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
        saved: deque[_Copy | _Wait] = deque()
        for place, item in enumerate(self._queue):
            if upto is not None and self._arrived + place >= upto:
                saved.append(item)
            elif item.to_host:
                item.read()
                saved.append(item)
            else:
                for before, copy in enumerate(saved):
                    if copy.to_host:  # this one may read the page-locked memory that it writes
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

    def synchronize(self) -> None:
        """Wait for everything in this stream; for the null stream, in the blocking ones too."""
        for stream in [item for item in PENDING if item._blocking] if self._is_null else []:
            stream._finish()
        self._finish()

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def record(self) -> Event:
        """Return an event after all that is in this stream now."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """Let what comes later in this stream wait for the event."""
        if self is current() or self._is_null:
            event._settle()
        else:
            self._push(_Wait(event))


Stream.null = Stream(null=True)


class _Done:
    """What was a copy to the device and has been done."""

    to_host = False

    def finish(self) -> None:
        """Nothing is left."""


class Event:
    """A place in a stream: after all that is in it now."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._place = stream, stream._issued
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for what stands before it."""
        self._stream._finish(self._place)

    def _settle(self) -> None:
        self._stream._settle(self._place)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two events."""
    return 1e3 * (end_event._time - start_event._time)


def _stack() -> list[Stream]:
    stack: list[Stream] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = [Stream.null]
    return stack


def current() -> Stream:
    """Return this thread's current stream."""
    return _stack()[-1]


def get_current_stream(device_id: int = -1) -> Stream:
    """Return this thread's current stream."""
    return current()


def settle() -> None:
    """Before work in the current stream: do for the device what stands before it there."""
    here = current()
    for stream in list(PENDING):
        if stream is here or (here._is_null and stream._blocking):
            stream._settle()


def finish_all() -> None:
    """Let everything arrive."""
    for stream in list(PENDING):
        stream._finish()


def copy_to_host(
    read: Callable[[], Any], write: Callable[[Any], None], stream: Stream | None, pinned: bool
) -> None:
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


def copy_to_device(
    read: Callable[[], Any], write: Callable[[Any], None], stream: Stream | None, pinned: bool
) -> None:
    """Copy to the device: at once in the current stream, which computes at once too, later in
    another one.
    """
    stream = current() if stream is None else stream
    if stream is current():
        settle()
        write(read())
        return
    copy = _Copy(read, write, to_host=False)
    if not pinned:  # CUDA has taken the bytes when the call returns
        copy.read()
    stream._push(copy)
