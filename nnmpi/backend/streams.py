"""Streams and events: what a device does in order, and marks in that order.

    stream A   kernel  kernel  [event]                       a stream does its work in order;
    stream B                      wait(event) copy to host   two streams know of one another only by events

The host's processor has done its work when a call returns, so that there a stream is never behind, and an event is the
time at which it was recorded.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark behind all that was given to the stream so far; by default to the current one."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""


class Stream(Protocol):
    """Work that a device does in order. In a `with` block the stream is this thread's current one.

    Memory is handed out again, to the same stream, as soon as no array is over it: keep the arrays that another
    stream reads until that stream has been synchronized.

    Attributes:
        ptr: the stream's handle, for libraries that want one (NCCL, cuDNN); 0 on the host.
    """

    @property
    def ptr(self) -> int:
        """The stream's handle."""

    def synchronize(self) -> None:
        """Wait until all work given to the stream is done."""

    def wait(self, event: Event) -> None:
        """Let the stream's later work begin after the mark; the host does not wait."""

    def __enter__(self) -> Stream:
        """Make this the current stream."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the former stream the current one again."""


class HostEvent:
    """A time on the host.

    Attributes:
        time_s: when it was recorded, by `time.perf_counter`; None before.
    """

    def __init__(self) -> None:
        self.time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self.time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: the host has done what was asked of it."""


class HostStream:
    """The host's processor, which is never behind."""

    ptr = 0

    def synchronize(self) -> None:
        """Do nothing: the host has done what was asked of it."""

    def wait(self, event: Event) -> None:
        """Do nothing: what comes later begins later."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass
