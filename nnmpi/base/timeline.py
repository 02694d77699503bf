"""A rank's timeline: cheap events, and Chrome's trace format, which Perfetto opens.

Code that computes, sends or waits records into the current timeline. Without one, a record costs
one look at a context variable:

    with timeline.tracing(timeline.Timeline()) as mine:
        with timeline.span("2F0", "forward"):                   # stage 2, forward, microbatch 0
            ...
    write_chrome(path, to_chrome({0: mine.events}))

Perfetto draws each rank as a process and each track as a thread. Events of one track may only nest;
partly overlapping ones get tracks of their own. A message is an arrow from its send to its receive:

    rank 0   compute     |  0F0  |  0F1  |            rank 1   compute            |  1F0  |
             send                | m0 |--------------.          receive     | m0     |
                                                      `---------------------------->'
"""

import gzip
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import nnmpi.base.clock as clock
from nnmpi.base.files import json_text, write_atomically

COMPUTE, SEND, RECEIVE, REDUCE, WAITING = "compute", "send", "receive", "reduce", "waiting"
TRACKS = (COMPUTE, SEND, RECEIVE, REDUCE, WAITING)
BUCKETS = "buckets"  # the track of sums in flight, which overlap with the rank's other tracks

Args = Mapping[str, Any]


class TraceEvent(NamedTuple):
    """An interval of one rank.

    Attributes:
        name: the text in the picture, such as "2F0".
        category: its kind, for colours and searches: "forward", "backward" ...
        track: its row: one of TRACKS, or a new one.
        begin_s, end_s: in seconds of the rank's clock.
        args: JSON values, shown when the event is clicked; None for none.
        sends: the name of the message sent in this event, unique in the trace; "" for none.
        receives: the name of the message received in it; "" for none.
        collective: the name of a collective, the same on all its ranks and different from others'.
        arrived_s: this rank's start of the collective, which may precede its wait (`begin_s`).
    """

    name: str
    category: str
    track: str
    begin_s: float
    end_s: float
    args: Args | None = None
    sends: str = ""
    receives: str = ""
    collective: str = ""
    arrived_s: float = 0.0


class Timeline:
    """One rank's events in order; adding one takes some hundred nanoseconds.

    Args:
        clock: returns seconds; it must not go backwards.

    Attributes:
        events: the recorded events; read-only.
    """

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self.clock = clock
        self.events: list[TraceEvent] = []

    def add(self, *values: Any, **named: Any) -> None:
        """Add an event of these values; see `TraceEvent`."""
        self.events.append(TraceEvent(*values, **named))


_timeline: ContextVar[Timeline | None] = ContextVar("nnmpi_timeline", default=None)
_NOTHING = nullcontext()


def current() -> Timeline | None:
    """Return the recording timeline, or None; new threads have none."""
    return _timeline.get()


@contextmanager
def tracing(timeline: Timeline) -> Iterator[Timeline]:
    """Record the events of the body into this timeline, also inside another recording."""
    token = _timeline.set(timeline)
    try:
        yield timeline
    finally:
        _timeline.reset(token)


def span(
    name: str, category: str, track: str = COMPUTE, args: Args | None = None
) -> AbstractContextManager[None]:
    """Return a context whose duration becomes an event of the current timeline, if there is one.

    Args:
        name, category, track, args: see `TraceEvent`.
    """
    timeline = _timeline.get()
    return _NOTHING if timeline is None else _timed(timeline, name, category, track, args)


@contextmanager
def _timed(
    timeline: Timeline, name: str, category: str, track: str, args: Args | None
) -> Iterator[None]:
    begin_s = timeline.clock()
    try:
        yield
    finally:
        timeline.add(name, category, track, begin_s, timeline.clock(), args)


# ---- waits for other ranks ----

_NOTICED_S = 1e-9  # shorter waits are rounding errors


def split_waits(
    by_rank: Sequence[Sequence[TraceEvent]], ahead_s: Sequence[float]
) -> dict[int, list[TraceEvent]]:
    """Split waits from exchanges and computation, on a common clock: no time counts twice.

        rank 0   compute | B0 |xxxxxxx sum |              rank 0   compute | B0 |
        rank 1   compute | B0         | sum |        ->            waiting      | ... |
                                                                   reduce             | sum |

    A rank in a collective waits until the last rank arrives; a receiver waits until its message is
    sent. Computation pauses meanwhile. So at any time a rank either computes, exchanges or waits.

    Args:
        by_rank: the events of each rank.
        ahead_s: the seconds by which each rank's clock is ahead of the common one.
    """
    processes = [[*_moved(events, ahead)] for events, ahead in zip(by_rank, ahead_s, strict=True)]
    since = {event.sends: event.begin_s for events in processes for event in events if event.sends}
    for event in chain.from_iterable(processes):
        if event.collective:
            since[event.collective] = max(
                event.arrived_s, since.get(event.collective, event.arrived_s)
            )
    return {rank: [*_split(events, since)] for rank, events in enumerate(processes)}


def _moved(events: Iterable[TraceEvent], ahead_s: float) -> Iterator[TraceEvent]:
    """Yield a rank's events on the common clock; number collectives that have the same name."""
    counts = Counter[str]()
    for event in events:
        begin_s, end_s, arrived_s = (
            at - ahead_s for at in (event.begin_s, event.end_s, event.arrived_s)
        )
        name = event.collective
        counts[name] += 1
        yield event._replace(
            begin_s=begin_s,
            end_s=end_s,
            arrived_s=arrived_s,
            collective=name and f"{name} {counts[name]}",
        )


def _split(events: Sequence[TraceEvent], since: Mapping[str, float]) -> Iterator[TraceEvent]:
    """Yield a rank's events: each wait apart from its exchange, computation cut by both.

    Args:
        events: of the rank.
        since: the end of the wait for each collective (its last arrival) and message (its send).
    """
    pauses: list[tuple[float, float]] = []
    for event in events:
        since_s = since.get(event.collective or event.receives, event.begin_s)
        since_s = min(max(since_s, event.begin_s), event.end_s)
        if event.track in TRACKS[1:] and event.begin_s < event.end_s:
            pauses.append((event.begin_s, event.end_s))
        if since_s - event.begin_s > _NOTICED_S:
            yield TraceEvent(event.name, "waiting", WAITING, event.begin_s, since_s)
        # An exchange that was all wait has no bar of its own; a receive keeps one for its arrow.
        if event.track != COMPUTE and (
            since_s < event.end_s or since_s == event.begin_s or event.receives
        ):
            yield event._replace(begin_s=since_s)
    pauses.sort()
    for event in events:
        if event.track == COMPUTE:
            begin_s = event.begin_s
            for pause_s, resume_s in pauses[
                bisect_left(pauses, (begin_s,)) : bisect_left(pauses, (event.end_s,))
            ]:
                if begin_s < pause_s:
                    yield event._replace(begin_s=begin_s, end_s=pause_s)
                begin_s = max(begin_s, resume_s)
            if begin_s < event.end_s or begin_s == event.begin_s:
                yield event._replace(begin_s=begin_s)


# ---- Chrome's format ----


_ENDS = attrgetter("sends"), attrgetter("receives")
COUNTER = "counter"  # the category of events with amounts in their args


def to_chrome(
    processes: Mapping[int, Sequence[TraceEvent]],
    names: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the events in Chrome's trace format: {"traceEvents": [...], "displayTimeUnit": "ms"}.

    Times are in microseconds from the first event, to the nanosecond. A message without one of its
    ends gets no arrow.

    Args:
        processes: rank -> its events, in any order.
        names: rank -> name of its process; "rank 3" by default.
    """
    first_s = min((event.begin_s for events in processes.values() for event in events), default=0.0)
    sent, taken = (
        {name for process in processes.values() for event in process if (name := end(event))}
        for end in _ENDS
    )
    messages = {name: number for number, name in enumerate(sorted(sent & taken), 1)}
    rows: list[dict[str, Any]] = []
    for rank in sorted(processes):
        name = (names or {}).get(rank, f"rank {rank}")
        rows += [
            _about("process_name", rank, 0, name=name),
            _about("process_sort_index", rank, 0, sort_index=rank),
        ]
        intervals = [
            _Interval(
                round((event.begin_s - first_s) * 1e9), round((event.end_s - first_s) * 1e9), event
            )
            for event in processes[rank]
        ]
        rows += [_amounts(item, rank) for item in intervals if item.event.category == COUNTER]
        spans = [item for item in intervals if item.event.category != COUNTER]
        for thread, (track, lane) in enumerate(_lanes(spans)):
            rows += [_about("thread_name", rank, thread, name=track)]
            rows += [_about("thread_sort_index", rank, thread, sort_index=thread)]
            rows += [row for item in lane for row in _rows(item, rank, thread, messages)]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace as JSON atomically, compressed when the name ends in .gz.

    Raises:
        OSError: when it cannot be written; then there is no file.
    """
    text = json_text(trace, separators=(",", ":")).encode()
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


class _Interval(NamedTuple):
    """An event with its times in integer nanoseconds of the trace, for exact comparisons."""

    begin_ns: int
    end_ns: int
    event: TraceEvent


def _lanes(spans: Sequence[_Interval]) -> Iterator[tuple[str, list[_Interval]]]:
    """Yield the named rows of a rank; in each, any two events are disjoint or nested."""
    tracks = dict.fromkeys(TRACKS) | dict.fromkeys(item.event.track for item in spans)
    for track in tracks:
        # per lane: the ends of the events that enclose the next one, and all its events
        lanes: list[tuple[list[int], list[_Interval]]] = []
        local = (item for item in spans if item.event.track == track)
        for entry in sorted(local, key=lambda entry: (entry.begin_ns, -entry.end_ns)):
            for lane in lanes:
                ends = lane[0]
                while ends and ends[-1] <= entry.begin_ns:
                    ends.pop()
                if not ends or entry.end_ns <= ends[-1]:
                    break
            else:
                lane = [], []
                lanes.append(lane)
            lane[0].append(entry.end_ns)
            lane[1].append(entry)
        for number, (_, lane_events) in enumerate(lanes, start=1):
            yield track if number == 1 else f"{track} {number}", lane_events


def _rows(
    interval: _Interval, rank: int, thread: int, messages: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield the event, and the ends of arrows in it."""
    begin_ns, end_ns, event = interval
    where = {"pid": rank, "tid": thread}
    row = {"ph": "X", "name": event.name, "cat": event.category, **where}
    row |= {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    yield row | (
        {"args": {key: _finite(value) for key, value in event.args.items()}} if event.args else {}
    )
    sent, taken = (messages.get(end(event)) for end in _ENDS)
    # Perfetto attaches an arrow to the event that encloses its time, excluding the event's end.
    inside_ns = max(begin_ns, end_ns - 1)
    for kind, message, at_ns in (
        ({"ph": "s"}, sent, begin_ns),
        ({"ph": "f", "bp": "e"}, taken, inside_ns),
    ):
        if message is not None:
            about = {"name": "message", "cat": "message", "ts": at_ns / 1000}
            yield {**kind, "id": message, **about, **where}


def _amounts(interval: _Interval, rank: int) -> dict[str, Any]:
    """Return a counter's row: the amounts from this time on, which viewers draw as a curve."""
    at = {"pid": rank, "ts": interval.begin_ns / 1000}
    return {"ph": "C", "name": interval.event.name, "args": dict(interval.event.args or {}), **at}


def _about(what: str, rank: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _finite(value: Any) -> Any:
    """Return the value, but NaN and infinities as text: JSON has no numbers for them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
