"""How long a step's sharded layers took to communicate: read off the events that their exchanges record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan

from nnmpi.comm.exchange import Traffic
from nnmpi.parallel.sharded.exchange import CATEGORY
from nnmpi.timeline import Timeline, current, recording


class Meter:
    """Adds up the exchanges of sharded layers, step by step.

    Args:
        needed: whether there are such layers; otherwise it does nothing.

    Attributes:
        needed: as given.
        traffic: of the last body that ran.
    """

    def __init__(self, needed: bool) -> None:
        self.traffic = Traffic()
        self.needed = needed

    def running(self) -> AbstractContextManager[None]:
        """Count what the body exchanges; where a trace is recorded, its events serve."""
        return self._counting() if self.needed else nullcontext()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        timeline = current() or Timeline()
        first = len(timeline.events)
        with recording(timeline):
            yield
        events = [event for event in timeline.events[first:] if event.category == CATEGORY]
        seconds = sum(event.end_s - event.begin_s for event in events)
        count = sum(int((event.args or {}).get("bytes", 0)) for event in events)
        self.traffic = Traffic(seconds, 0.0, count, len(events), nan if events else 0.0)
