"""Timelines: what is recorded and where, and traces that keep the rules of Chrome's format."""

import gzip
import json
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base import timeline
from nnmpi.base.timeline import Timeline, TraceEvent, split_waits, to_chrome, tracing, write_chrome
from tests.chrome import arrows, breaches, names, spans


def ticking():
    """Return a timeline whose clock goes on by one second at every look."""
    seconds = iter(range(1000))
    return Timeline(lambda: float(next(seconds)))


def event(name, begin_s, end_s, track="compute", **more):
    return TraceEvent(name, "test", track, begin_s, end_s, None, **more)


# ---- recording ----


def test_nothing_is_recorded_without_a_timeline():
    assert timeline.current() is None
    with timeline.span("x", "y"):
        pass
    assert timeline.current() is None


def test_spans_are_recorded_into_the_current_timeline():
    outer, inner = ticking(), ticking()
    with tracing(outer) as given:
        assert given is outer is timeline.current()
        with (
            timeline.span("a", "forward"),
            timeline.span("b", "wait", timeline.WAITING, {"bytes": 3}),
        ):
            pass
        with tracing(inner), timeline.span("c", "forward"):
            pass
        assert timeline.current() is outer
    assert timeline.current() is None
    assert outer.events == [
        TraceEvent("b", "wait", "waiting", 1.0, 2.0, {"bytes": 3}),
        TraceEvent("a", "forward", "compute", 0.0, 3.0),
    ]
    assert [item.name for item in inner.events] == ["c"]


def test_a_span_that_fails_is_recorded_and_the_error_goes_on():
    mine = ticking()
    with pytest.raises(KeyError), tracing(mine), timeline.span("a", "forward"):
        raise KeyError
    assert mine.events == [TraceEvent("a", "forward", "compute", 0.0, 1.0)]
    assert timeline.current() is None


def test_another_thread_begins_without_a_timeline():
    result = []
    with tracing(Timeline()):
        thread = threading.Thread(target=lambda: result.append(timeline.current()))
        thread.start()
        thread.join()
    assert result == [None]


# ---- Chrome's format ----


def test_an_example():
    """Two ranks whose clocks differ by 100 s, with a message."""
    sender = [event("0F0", 5.0, 6.0), event("out", 6.0, 6.5, "send", sends="m")]
    receiver = [event("in", 104.5, 106.75, "receive", receives="m"), event("1F0", 106.75, 108.0)]
    trace = to_chrome(split_waits([sender, receiver], [0.0, 100.0]), {0: "rank 0 (d0 p0 t0)"})
    assert breaches(trace) == []
    assert spans(trace) == [
        (0, "compute", "0F0", 0.5e6, 1.5e6),
        (0, "send", "out", 1.5e6, 2e6),
        (1, "compute", "1F0", 2.25e6, 3.5e6),
        (1, "receive", "in", 1.5e6, 2.25e6),
        (1, "waiting", "in", 0.0, 1.5e6),
    ]
    assert arrows(trace) == [("out", "in")]
    assert names(trace, "process_name") == {(0, 0): "rank 0 (d0 p0 t0)", (1, 0): "rank 1"}
    assert trace["displayTimeUnit"] == "ms"


def test_a_rank_waits_for_the_last_one_and_computes_no_more():
    """Sums in the order in which each rank does them; a sum that was begun before is waited for
    since then.
    """

    def met(arrived_s, begin_s, end_s):
        return TraceEvent(
            "sum", "collective", "reduce", begin_s, end_s, None, "", "", "sum of 0, 1", arrived_s
        )

    early = [event("B0", 0.0, 9.0), met(1.0, 1.0, 4.0), met(5.0, 5.0, 7.0)]
    late = [event("B0", 0.0, 9.0), met(3.0, 3.0, 4.0), met(2.0, 6.5, 7.0)]
    result = {
        rank: [(item.track, item.begin_s, item.end_s) for item in events]
        for rank, events in split_waits([early, late], [0.0, 0.0]).items()
    }
    full = [("compute", 0.0, 1.0), ("compute", 4.0, 5.0), ("compute", 7.0, 9.0)]
    assert result[0] == [("waiting", 1.0, 3.0), ("reduce", 3.0, 4.0), ("reduce", 5.0, 7.0), *full]
    full = [("compute", 0.0, 3.0), ("compute", 4.0, 6.5), ("compute", 7.0, 9.0)]
    assert result[1] == [("reduce", 3.0, 4.0), ("reduce", 6.5, 7.0), *full]


def test_overlapping_events_get_tracks_of_their_own():
    result = to_chrome(
        {
            0: [
                event("a", 0, 4, "receive"),
                event("within a", 1, 2, "receive"),
                event("over a", 3, 6, "receive"),
                event("over both", 3.5, 7, "receive"),
                event("after a", 4, 5, "receive"),
                event("else", 0, 1, "own"),
                event("x", 0, 1),
            ]
        }
    )
    assert breaches(result) == []
    assert [(track, name) for _, track, name, _, _ in spans(result)] == [
        ("compute", "x"),
        ("receive", "a"),
        ("receive", "within a"),
        ("receive", "after a"),
        ("receive 2", "over a"),
        ("receive 3", "over both"),
        ("own", "else"),
    ]


def test_the_ends_of_arrows_lie_within_their_events():
    """Also where the next event begins at once, and where one lies in another."""
    a = [event("a", 0, 1, sends="1"), event("b", 1, 3), event("c", 1, 2, sends="2")]
    b = [
        event("d", 0, 1, receives="1"),
        event("e", 1, 2),
        event("f", 2, 4),
        event("g", 3, 4, receives="2"),
    ]
    trace = to_chrome({0: a, 1: b})
    assert breaches(trace) == []
    assert arrows(trace) == [("a", "d"), ("c", "g")]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["compute", "receive"]),
            st.integers(0, 30),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_any_events_keep_the_rules(drawn):
    """And every event is there, with its times, on a track of its kind."""
    processes: dict[int, list[TraceEvent]] = {0: [], 1: [], 2: []}
    for number, (rank, track, begin, length) in enumerate(drawn):
        ends = {"sends": f"m{number // 2}"} if number % 2 == 0 else {"receives": f"m{number // 2}"}
        processes[rank].append(event(str(number), begin / 7, (begin + length) / 7, track, **ends))
    trace = to_chrome(processes)
    assert breaches(trace) == []
    assert len(arrows(trace)) == len(drawn) // 2
    first = min((begin / 7 for _, _, begin, _ in drawn), default=0.0)
    result = {
        int(name): (rank, track.split()[0], begin, end)
        for rank, track, name, begin, end in spans(trace)
    }
    assert len(result) == len(drawn)
    for number, (rank, track, begin, length) in enumerate(drawn):
        assert result[number][:2] == (rank, track)
        assert result[number][2] == pytest.approx((begin / 7 - first) * 1e6, abs=2e-3)
        assert result[number][3] == pytest.approx(((begin + length) / 7 - first) * 1e6, abs=2e-3)


# ---- files ----


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("many", [0, 3])
def test_a_file_holds_what_was_written(name, many, tmp_path):
    events = [
        TraceEvent(f"é{i}", "test", "compute", i, i + 1, {"loss": math.nan, "rows": i})
        for i in range(many)
    ]
    trace = to_chrome({0: events})
    write_chrome(tmp_path / name, trace)
    content = (tmp_path / name).read_bytes()
    text = gzip.decompress(content) if name.endswith(".gz") else content
    assert json.loads(text) == trace
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if many:
        assert trace["traceEvents"][-1]["args"] == {"loss": "nan", "rows": 2}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        write_chrome(tmp_path / "nowhere" / "trace.json", to_chrome({}))
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match="trace.json"):
        write_chrome(tmp_path / "trace.json", to_chrome({}))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
