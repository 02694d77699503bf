"""What a rank did when: events that are cheap to record, and Chrome's trace format, which Perfetto opens.

Who computes, sends or waits records into the current timeline; if there is none, nearly nothing happens:

    with timeline.recording(timeline.Timeline()) as mine:
        with timeline.span("2F0", "forward"):                   # stage 2, forward, microbatch 0
            ...
    write_chrome(path, to_chrome({0: mine.events}))

In the picture that Perfetto draws, each rank is a process and each track a thread. Events of one track that overlap
without one lying within the other are put on tracks of their own; a message is an arrow from its send to its receive:

    rank 0   compute     |  0F0  |  0F1  |            rank 1   compute            |  1F0  |
             send                | m0 |--------------.          receive     | m0     |
                                                      `---------------------------->'
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import nnmpi.clock as clock
from nnmpi.files import write_atomically

COMPUTE, SEND, RECEIVE, REDUCE, WAITING = "compute", "send", "receive", "reduce", "waiting"
TRACKS = (COMPUTE, SEND, RECEIVE, REDUCE, WAITING)

Args = Mapping[str, Any]


class TraceEvent(NamedTuple):
    """Something that took time on one rank.

    Attributes:
        name: what the picture shows, such as "2F0".
        category: its kind, by which a picture is coloured or searched: "forward", "backward" ...
        track: the row in which it stands: one of TRACKS, or a new one.
        begin_s, end_s: when, in seconds of the rank's clock.
        args: JSON values that are shown when the event is clicked; None for none.
        sends: the name of the message that leaves in this event; "" for none. Unique in the whole trace.
        takes: the name of the message that arrives in it.
    """

    name: str
    category: str
    track: str
    begin_s: float
    end_s: float
    args: Args | None = None
    sends: str = ""
    takes: str = ""


class Timeline:
    """One rank's events, in the order in which they were added. To add one takes some hundred nanoseconds.

    Args:
        clock: returns seconds; it must not go backwards.

    Attributes:
        events: what was added; only to be read.
    """

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self.clock = clock
        self.events: list[TraceEvent] = []

    def add(
        self,
        name: str,
        category: str,
        track: str,
        begin_s: float,
        end_s: float,
        args: Args | None = None,
        sends: str = "",
        takes: str = "",
    ) -> None:
        """Add an event.

        Args:
            name, category, track, begin_s, end_s, args, sends, takes: see `TraceEvent`.
        """
        self.events.append(TraceEvent(name, category, track, begin_s, end_s, args, sends, takes))


_timeline: ContextVar[Timeline | None] = ContextVar("nnmpi_timeline", default=None)
_NOTHING = nullcontext()


def current() -> Timeline | None:
    """Return the timeline that records now; None where nothing is recorded. Threads begin without one."""
    return _timeline.get()


@contextmanager
def recording(timeline: Timeline) -> Iterator[Timeline]:
    """Record the events of the body into this timeline, also inside another recording."""
    token = _timeline.set(timeline)
    try:
        yield timeline
    finally:
        _timeline.reset(token)


def span(name: str, category: str, track: str = COMPUTE, args: Args | None = None) -> AbstractContextManager[None]:
    """Return a context whose time becomes an event of the current timeline, if there is one.

    Args:
        name, category, track, args: see `TraceEvent`.
    """
    timeline = _timeline.get()
    return _NOTHING if timeline is None else _timed(timeline, name, category, track, args)


@contextmanager
def _timed(timeline: Timeline, name: str, category: str, track: str, args: Args | None) -> Iterator[None]:
    begin_s = timeline.clock()
    try:
        yield
    finally:
        timeline.add(name, category, track, begin_s, timeline.clock(), args)


# ---- Chrome's format ----


_ENDS = attrgetter("sends"), attrgetter("takes")
COUNTER = "counter"  # the category of events that say how much of something there is, in their args


def to_chrome(
    processes: Mapping[int, Sequence[TraceEvent]],
    names: Mapping[int, str] | None = None,
    offsets_s: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Return the events in Chrome's trace format: {"traceEvents": [...], "displayTimeUnit": "ms"}.

    Times are in microseconds from the first event, to the nanosecond. Messages of which one end is missing get no
    arrow.

    Args:
        processes: rank -> its events, in any order.
        names: rank -> name of its process; "rank 3" where it is missing.
        offsets_s: rank -> how far its clock is ahead of the common one, in seconds; 0 where it is missing.
    """
    offsets_s = offsets_s or {}
    begins = [event.begin_s - offsets_s.get(rank, 0.0) for rank, events in processes.items() for event in events]
    first_s = min(begins, default=0.0)
    sent, taken = ({name for each in processes.values() for event in each if (name := end(event))} for end in _ENDS)
    messages = {name: number for number, name in enumerate(sorted(sent & taken), 1)}  # the others get no arrow
    rows: list[dict[str, Any]] = []
    for rank in sorted(processes):
        name = (names or {}).get(rank, f"rank {rank}")
        rows += [_about("process_name", rank, 0, name=name), _about("process_sort_index", rank, 0, sort_index=rank)]
        places = [_place(event, first_s + offsets_s.get(rank, 0.0)) for event in processes[rank]]
        rows += [_amounts(each, rank) for each in places if each.event.category == COUNTER]
        spans = [each for each in places if each.event.category != COUNTER]
        for thread, (track, lane) in enumerate(_lanes(spans)):
            rows += [_about("thread_name", rank, thread, name=track)]
            rows += [_about("thread_sort_index", rank, thread, sort_index=thread)]
            rows += [row for each in lane for row in _rows(each, rank, thread, messages)]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace as JSON, compressed when the name ends in .gz; the file appears whole.

    Raises:
        OSError: when it cannot be written; nothing is left then.
    """
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


class _Placed(NamedTuple):
    """An event with its times in whole nanoseconds of the trace, in which it can be compared exactly."""

    begin_ns: int
    end_ns: int
    event: TraceEvent


def _place(event: TraceEvent, zero_s: float) -> _Placed:
    """Return the event on the trace's clock; `zero_s` is the trace's beginning on the rank's clock."""
    return _Placed(round((event.begin_s - zero_s) * 1e9), round((event.end_s - zero_s) * 1e9), event)


def _lanes(spans: Sequence[_Placed]) -> Iterator[tuple[str, list[_Placed]]]:
    """Yield the rows of a rank with their names; in each, any two events are apart or one lies within the other."""
    tracks = dict.fromkeys(TRACKS) | dict.fromkeys(each.event.track for each in spans)
    for track in tracks:
        lanes: list[list[_Placed]] = []
        open_ends: list[list[int]] = []  # of each lane: the ends of the events in which the next one would lie
        own = (each for each in spans if each.event.track == track)
        for each in sorted(own, key=lambda each: (each.begin_ns, -each.end_ns)):
            for lane in range(len(lanes) + 1):
                if lane == len(lanes):
                    lanes.append([])
                    open_ends.append([])
                ends = open_ends[lane]
                while ends and ends[-1] <= each.begin_ns:
                    ends.pop()
                if not ends or each.end_ns <= ends[-1]:
                    ends.append(each.end_ns)
                    lanes[lane].append(each)
                    break
        for number, lane_events in enumerate(lanes, start=1):
            yield track if number == 1 else f"{track} {number}", lane_events


def _rows(placed: _Placed, rank: int, thread: int, messages: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the event, and the ends of arrows in it."""
    begin_ns, end_ns, event = placed
    where = {"pid": rank, "tid": thread}
    row = {"ph": "X", "name": event.name, "cat": event.category, **where}
    row |= {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    yield row | ({"args": {key: _finite(value) for key, value in event.args.items()}} if event.args else {})
    sent, taken = (messages.get(end(event)) for end in _ENDS)
    if sent is not None:
        yield {"ph": "s", "id": sent, "name": "message", "cat": "message", "ts": begin_ns / 1000, **where}
    if taken is not None:
        # An arrow ends in the event around its time, and one that ended at that very moment is around no more.
        inside_ns = max(begin_ns, end_ns - 1)
        yield {"ph": "f", "bp": "e", "id": taken, "name": "message", "cat": "message", "ts": inside_ns / 1000, **where}


def _amounts(placed: _Placed, rank: int) -> dict[str, Any]:
    """Return how much of something there is from a moment on: a viewer draws these as a curve."""
    at = {"pid": rank, "ts": placed.begin_ns / 1000}
    return {"ph": "C", "name": placed.event.name, "args": dict(placed.event.args or {}), **at}


def _about(what: str, rank: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _finite(value: Any) -> Any:
    """Return the value; as text where JSON has no number for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
