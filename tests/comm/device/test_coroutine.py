"""What a collective that plays itself waits for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from nnmpi.comm.device.coroutine import EventWait
from tests.device.library import load


class Lost(RuntimeError):
    """What waiting for an event raises on a device that is lost."""


class Mark:
    """An event of which one can only say how the device answers."""

    ptr = 7
    done = False

    def synchronize(self) -> None:
        raise Lost


@pytest.mark.parametrize(("status", "come"), [(0, True), (600, False)])
def test_an_event_is_asked_for(monkeypatch: pytest.MonkeyPatch, status: int, come: bool) -> None:
    monkeypatch.setattr(load().cuda.runtime, "eventQuery", lambda ptr: status)
    assert EventWait(Mark()).poll() is come


def test_a_lost_device_is_not_polled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's `done` is False then too."""
    monkeypatch.setattr(load().cuda.runtime, "eventQuery", lambda ptr: 700)
    with pytest.raises(Lost):
        EventWait(Mark()).poll()


def test_the_doubles_events_come_when_their_copies_have() -> None:
    cupy: Any = load()
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    assert EventWait(event).poll()
    source, out = cupy.arange(3), importlib.import_module("cupyx").empty_pinned(3, "int64")
    source.get(stream=stream, out=out, blocking=False)
    event.record(stream)
    assert not EventWait(event).poll()
    EventWait(event).wait()
    assert EventWait(event).poll() and out.tolist() == [0, 1, 2]
