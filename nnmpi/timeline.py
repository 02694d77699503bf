"""A rank's timeline: cheap events, and Chrome's trace format, which Perfetto opens.

Who computes, sends or waits records into the current timeline; if there is none, nearly nothing
happens:

    with timeline.recording(timeline.Timeline()) as mine:
        with timeline.span("2F0", "forward"):                   # stage 2, forward, microbatch 0
            ...
    write_chrome(path, to_chrome({0: mine.events}))

In the picture that Perfetto draws, each rank is a process and each track a thread. Events of one
track that overlap without one lying within the other are put on tracks of their own; a message is
an arrow from its send to its receive:

    rank 0   compute     |  0F0  |  0F1  |            rank 1   compute            |  1F0  |
             send                | m0 |--------------.          receive     | m0     |
                                                      `---------------------------->'
"""

import gzip
import json
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

import nnmpi.clock as clock
from nnmpi.files import write_atomically

COMPUTE, SEND, RECEIVE, REDUCE, WAITING = "compute", "send", "receive", "reduce", "waiting"
TRACKS = (COMPUTE, SEND, RECEIVE, REDUCE, WAITING)
BUCKETS = "buckets"  # the track of sums that are under way, whatever the rank does meanwhile

Args = Mapping[str, Any]


class TraceEvent(NamedTuple):
    """Something that took time on one rank.

    Attributes:
        name: what the picture shows, such as "2F0".
        category: its kind, by which a picture is coloured or searched: "forward", "backward" ...
        track: the row in which it stands: one of TRACKS, or a new one.
        begin_s, end_s: when, in seconds of the rank's clock.
        args: JSON values that are shown when the event is clicked; None for none.
        sends: the name of the message that leaves in this event; "" for none. Unique in the whole
            trace.
        takes: the name of the message that arrives in it.
        meeting: of a collective: its name, the same on all ranks that take part, and no others'.
        came_s: when this rank joined it, which may be before it began to stand there.
    """

    name: str
    category: str
    track: str
    begin_s: float
    end_s: float
    args: Args | None = None
    sends: str = ""
    takes: str = ""
    meeting: str = ""
    came_s: float = 0.0


class Timeline:
    """One rank's events in order; adding one takes some hundred nanoseconds.

    Args:
        clock: returns seconds; it must not go backwards.

    Attributes:
        events: what was added; only to be read.
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
def recording(timeline: Timeline) -> Iterator[Timeline]:
    """Record the events of the body into this timeline, also inside another recording."""
    token = _timeline.set(timeline)
    try:
        yield timeline
    finally:
        _timeline.reset(token)


def span(
    name: str, category: str, track: str = COMPUTE, args: Args | None = None
) -> AbstractContextManager[None]:
    """Return a context whose time becomes an event of the current timeline, if there is one.

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


# ---- who waits for whom ----

_NOTICED_S = 1e-9  # shorter waits are roundings


def part_waits(
    everyones: Sequence[Sequence[TraceEvent]], ahead_s: Sequence[float]
) -> dict[int, list[TraceEvent]]:
    """Return the ranks' events with bars that do not count a moment twice, by a common clock.

        rank 0   compute | B0 |xxxxxxx sum |              rank 0   compute | B0 |
        rank 1   compute | B0         | sum |        ->            waiting      | ... |
                                                                   reduce             | sum |

    In a collective a rank waits until the last one has come, and for a message until it was sent;
    what is computed stops meanwhile. So of any moment of a rank one of computing, exchanging and
    waiting is true.

    Args:
        everyones: the events of each rank.
        ahead_s: by how much each rank's clock is ahead of the common one.
    """
    processes = [[*_moved(events, ahead)] for events, ahead in zip(everyones, ahead_s, strict=True)]
    since = {event.sends: event.begin_s for events in processes for event in events if event.sends}
    for event in chain.from_iterable(processes):
        if event.meeting:
            since[event.meeting] = max(event.came_s, since.get(event.meeting, event.came_s))
    return {rank: [*_parted(events, since)] for rank, events in enumerate(processes)}


def _moved(events: Iterable[TraceEvent], ahead_s: float) -> Iterator[TraceEvent]:
    """Yield events by a clock that the rank's is ahead of; what meets more than once under a name
    is numbered.
    """
    met = Counter[str]()
    for event in events:
        begin_s, end_s, came_s = (at - ahead_s for at in (event.begin_s, event.end_s, event.came_s))
        met[event.meeting] += 1
        meeting = event.meeting and f"{event.meeting} {met[event.meeting]}"
        yield event._replace(begin_s=begin_s, end_s=end_s, came_s=came_s, meeting=meeting)


def _parted(events: Sequence[TraceEvent], since: Mapping[str, float]) -> Iterator[TraceEvent]:
    """Yield a rank's events: waits first, and what is computed in pieces."""
    stands: list[tuple[float, float]] = []
    for event in events:
        since_s = since.get(event.meeting or event.takes, event.begin_s)
        since_s = min(max(since_s, event.begin_s), event.end_s)
        if event.track in TRACKS[1:] and event.begin_s < event.end_s:
            stands.append((event.begin_s, event.end_s))
        if since_s - event.begin_s > _NOTICED_S:
            yield TraceEvent(event.name, "waiting", WAITING, event.begin_s, since_s)
        if event.track != COMPUTE and (
            since_s < event.end_s or since_s == event.begin_s or event.takes
        ):
            yield event._replace(begin_s=since_s)
    stands.sort()
    for event in events:
        if event.track == COMPUTE:
            begin_s = event.begin_s
            for stop_s, on_s in stands[
                bisect_left(stands, (begin_s,)) : bisect_left(stands, (event.end_s,))
            ]:
                if begin_s < stop_s:
                    yield event._replace(begin_s=begin_s, end_s=stop_s)
                begin_s = max(begin_s, on_s)
            if begin_s < event.end_s or begin_s == event.begin_s:
                yield event._replace(begin_s=begin_s)


# ---- Chrome's format ----


_ENDS = attrgetter("sends"), attrgetter("takes")
COUNTER = "counter"  # the category of events that say how much of something there is, in their args


def to_chrome(
    processes: Mapping[int, Sequence[TraceEvent]],
    names: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the events in Chrome's trace format: {"traceEvents": [...], "displayTimeUnit": "ms"}.

    Times are in microseconds from the first event, to the nanosecond. Messages of which one end is
    missing get no arrow.

    Args:
        processes: rank -> its events, in any order.
        names: rank -> name of its process; "rank 3" where it is missing.
    """
    first_s = min((event.begin_s for events in processes.values() for event in events), default=0.0)
    sent, taken = (
        {name for process in processes.values() for event in process if (name := end(event))}
        for end in _ENDS
    )
    # the others get no arrow
    messages = {name: number for number, name in enumerate(sorted(sent & taken), 1)}
    rows: list[dict[str, Any]] = []
    for rank in sorted(processes):
        name = (names or {}).get(rank, f"rank {rank}")
        rows += [
            _about("process_name", rank, 0, name=name),
            _about("process_sort_index", rank, 0, sort_index=rank),
        ]
        places = [_place(event, first_s) for event in processes[rank]]
        rows += [_amounts(place, rank) for place in places if place.event.category == COUNTER]
        spans = [place for place in places if place.event.category != COUNTER]
        for thread, (track, lane) in enumerate(_lanes(spans)):
            rows += [_about("thread_name", rank, thread, name=track)]
            rows += [_about("thread_sort_index", rank, thread, sort_index=thread)]
            rows += [row for item in lane for row in _rows(item, rank, thread, messages)]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace as JSON, compressed when the name ends in .gz; the file appears whole.

    Raises:
        OSError: when it cannot be written; nothing is left then.
    """
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


class _Placed(NamedTuple):
    """An event with its times in whole nanoseconds of the trace, in which it can be compared
    exactly.
    """

    begin_ns: int
    end_ns: int
    event: TraceEvent


def _place(event: TraceEvent, zero_s: float) -> _Placed:
    """Return the event on the trace's clock; `zero_s` is the trace's beginning."""
    return _Placed(
        round((event.begin_s - zero_s) * 1e9), round((event.end_s - zero_s) * 1e9), event
    )


def _lanes(spans: Sequence[_Placed]) -> Iterator[tuple[str, list[_Placed]]]:
    """Yield the rows of a rank with their names; in each, any two events are apart or one lies
    within the other.
    """
    tracks = dict.fromkeys(TRACKS) | dict.fromkeys(item.event.track for item in spans)
    for track in tracks:
        # the ends of the events in which the next one would lie
        lanes: list[tuple[list[int], list[_Placed]]] = []
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
    placed: _Placed, rank: int, thread: int, messages: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield the event, and the ends of arrows in it."""
    begin_ns, end_ns, event = placed
    where = {"pid": rank, "tid": thread}
    row = {"ph": "X", "name": event.name, "cat": event.category, **where}
    row |= {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    yield row | (
        {"args": {key: _finite(value) for key, value in event.args.items()}} if event.args else {}
    )
    sent, taken = (messages.get(end(event)) for end in _ENDS)
    if sent is not None:
        yield {
            "ph": "s",
            "id": sent,
            "name": "message",
            "cat": "message",
            "ts": begin_ns / 1000,
            **where,
        }
    if taken is not None:
        # An arrow ends in the event around its time, and one that ended at that very moment is
        # around no more.
        inside_ns = max(begin_ns, end_ns - 1)
        yield {
            "ph": "f",
            "bp": "e",
            "id": taken,
            "name": "message",
            "cat": "message",
            "ts": inside_ns / 1000,
            **where,
        }


def _amounts(placed: _Placed, rank: int) -> dict[str, Any]:
    """Return how much of something there is from a moment on: a viewer draws these as a curve."""
    at = {"pid": rank, "ts": placed.begin_ns / 1000}
    return {"ph": "C", "name": placed.event.name, "args": dict(placed.event.args or {}), **at}


def _about(what: str, rank: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _finite(value: Any) -> Any:
    """Return the value; as text where JSON has no number for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
