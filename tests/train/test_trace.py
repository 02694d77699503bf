"""One trace from all ranks: aligned clocks, named processes, arrows between ranks, and errors that
all ranks raise.
"""

import gzip
import json

import pytest

from nnmpi import NnmpiError
from nnmpi.base.errors import CommError
from nnmpi.base.timeline import Timeline
from nnmpi.train.trace import write_trace
from tests.chrome import arrows, breaches, names, spans

pytestmark = pytest.mark.simulated


class Clock:
    """Shows the common time plus an offset; goes on by what it is told, and a microsecond at every
    look.
    """

    def __init__(self, ahead_s):
        self.now_s = 1000.0 + ahead_s

    def __call__(self):
        self.now_s += 1e-6
        return self.now_s


def around_a_ring(group, ahead_s):
    """Return what a rank does that computes for one second, sends to the right, and takes from the
    left.
    """
    timeline = Timeline(Clock(ahead_s))
    begin_s = 900.0 + ahead_s
    left = (group.rank - 1) % group.size
    timeline.add("work", "forward", "compute", begin_s, begin_s + 1, {"rank": group.rank})
    timeline.add("out", "send", "send", begin_s + 1, begin_s + 1.5, sends=f"from {group.rank}")
    timeline.add("in", "receive", "receive", begin_s + 1, begin_s + 2, receives=f"from {left}")
    return timeline


def read(path):
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("name", ["trace.json", "deeper/trace.json.gz"])
def test_all_ranks_are_in_one_file(group, tmp_path, name, monkeypatch):
    """Ranks of nodes whose clocks are apart by hours did the same at the same time, and so it is
    shown.
    """
    monkeypatch.setattr(group, "nodes", lambda: list(range(group.size)))
    timeline = around_a_ring(group, ahead_s=10_000.0 * group.rank)
    write_trace(tmp_path / name, timeline, group, [f"d0 p{rank} t0" for rank in range(group.size)])
    written = [
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    ]
    assert group.gather(written) == [[name], *[[]] * (group.size - 1)]
    wrong = _faults(read(tmp_path / name), group.size) if group.is_root else []
    assert group.share(wrong) == []


def _faults(trace, size):
    wrong = breaches(trace)
    titles = {(rank, 0): f"rank {rank}: d0 p{rank} t0" for rank in range(size)}
    wrong += [] if names(trace, "process_name") == titles else ["names"]
    wrong += [] if arrows(trace) == [("out", "in")] * size else ["arrows"]
    expected = {"work": (0.0, 1e6), "out": (1e6, 1.5e6), "in": (1e6, 2e6)}
    result = spans(trace)
    wrong += [] if len(result) == 3 * size else ["events"]
    for rank, _, event, begin, end in result:
        # in microseconds; a clock that ticks when it is read shifts a little
        if abs(begin - expected[event][0]) > 2000 or abs(end - expected[event][1]) > 2000:
            wrong.append(f"rank {rank} {event} {begin} {end}")
    return wrong


def raised(group, path, timeline):
    """Return what each rank raises."""
    text = "nothing"
    try:
        write_trace(path, timeline, group)
    except NnmpiError as error:
        text = f"{type(error).__name__}: {error}"
    return group.gather(text)


def test_a_file_that_cannot_be_written_is_one_sentence_on_all_ranks(group, tmp_path):
    (tmp_path / "file").write_text("")
    text = raised(group, tmp_path / "file" / "trace.json", around_a_ring(group, 0.0))
    assert len(set(text)) == 1
    assert text[0].startswith("NnmpiError: the trace cannot be written to ")
    assert text[0].endswith(
        "file/trace.json (File exists); give a file in a folder with room that you may write to"
    )
    (tmp_path / "folder").mkdir()
    text = raised(group, tmp_path / "folder", around_a_ring(group, 0.0))
    assert len(set(text)) == 1 and "folder (Is a directory);" in text[0]
    assert all(group.gather(sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]))


def test_events_that_cannot_be_drawn_are_refused_on_all_ranks(group, tmp_path):
    last = group.size - 1
    timeline = around_a_ring(group, 0.0)
    if group.rank == last:
        timeline.add("odd", "x", "compute", 1.0, 2.0, {"array": {1, 2}})
    text = raised(group, tmp_path / "trace.json", timeline)
    assert len(set(text)) == 1 and text[0].startswith(
        f"{CommError.__name__}: rank {last} sent something that is not a JSON"
    )
    assert all(group.gather(not list(tmp_path.iterdir())))


def test_ranks_without_events(group, tmp_path):
    timeline = around_a_ring(group, 0.0) if group.rank == group.size - 1 else Timeline()
    write_trace(tmp_path / "trace.json", timeline, group)
    wrong = []
    if group.is_root:
        trace = read(tmp_path / "trace.json")
        wrong = breaches(trace) + (
            [] if len(names(trace, "process_name")) == group.size else ["processes"]
        )
    assert group.share(wrong) == []
