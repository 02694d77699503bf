"""Ranks of different speeds: how far ahead they get, who waits, how much they do; the lines that
tell of it.
"""

import pytest

from nnmpi import Sync
from nnmpi.asynchronous.worker import SHOWN_WORKERS, describe_segments
from nnmpi.compose.stats import Staleness, Totals
from nnmpi.compose.trainer import SegmentReport
from tests.asynchronous.runs import make, name_of, skip_unless_fitting, train
from tests.compose.small_runs import ROWS

SMALL = 2  # rows of a batch: 31 batches in an epoch
SMALL_BATCHES = ROWS // SMALL


def staleness(report):
    assert report.staleness is not None
    return report.staleness


@pytest.mark.both_worlds(min_size=2, max_size=8)
@pytest.mark.parametrize("bound", [1, 3])
def test_nobody_is_further_ahead_than_the_bound(group, bound):
    """Also over segments, as the workers' clocks go on, and with a rank that is always slow."""
    slow = f"ms=1;probability=0.2,factor=6;rank={bound % group.size},factor=4"
    worker = make(group, Sync("ssp", staleness=bound), slow=slow)
    steps = [0] * group.size
    for first, stop in ((0, 9), (9, 10), (10, SMALL_BATCHES)):
        report = train(worker, ((0, first, stop),), SMALL)[0]
        result = staleness(report)
        assert report.lead <= bound
        assert result.largest() <= (2 * bound + 1) * (group.size - 1)
        steps = [before + result.histograms[number].total() for number, before in enumerate(steps)]
        # A worker that begins a step S steps ahead is S + 1 ahead when it has done it.
        assert max(steps) - min(steps) <= bound + 1
        assert sum(steps) == group.size * stop
    worker.release()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("slow", ["first", "last"])
def test_without_a_bound_nobody_waits_for_a_slow_rank(group, slow):
    """And the server's rank goes on serving while it is slowed down itself."""
    number = 0 if slow == "first" else group.size - 1
    # Steps long beside what a busy machine adds to them: otherwise all ranks are slow.
    worker = make(group, Sync("asp"), slow=f"ms=10;rank={number},factor=20")
    report = train(worker, ((0, 0, SMALL_BATCHES),), SMALL)[0]
    counts = [histogram.total() for histogram in staleness(report).histograms]
    others = [count for item, count in enumerate(counts) if item != number]
    assert sum(counts) == group.size * SMALL_BATCHES
    assert counts[number] * 3 < max(others)
    assert report.lead > 4
    assert report.totals.samples == ROWS
    worker.release()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "sync", [Sync("asp"), Sync("local", local_steps=2), Sync("gossip")], ids=name_of
)
def test_a_slowed_rank_takes_as_long_as_it_should(group, sync):
    skip_unless_fitting(group, sync)
    text = []
    worker = make(group, sync, slow="ms=3;rank=0,factor=5")
    report = train(worker, ((0, 0, 4),), progress=text.append)[0]
    assert all(item.totals.compute_s >= 0.003 * (5 if item.worker == 0 else 1) for item in text)
    assert not group.is_root or any(item.worker == 0 for item in text)
    assert report.totals.per_step(report.totals.compute_s) >= 0.003
    assert report.totals.wall_s >= 0.015
    worker.release()


def stale(*workers):
    result = Staleness(len(workers))
    for worker, values in enumerate(workers):
        for value in values:
            result.add(worker, value)
    return result


def test_segments_are_put_together_and_told():
    two, four = Totals(steps=2), Totals(steps=4)
    assert describe_segments(SegmentReport()) == []
    first = SegmentReport(two, messages=6, bytes=2 * 2**20, staleness=stale([0, 1], [2]), lead=1)
    second = SegmentReport(
        four, messages=12, bytes=10 * 2**20, staleness=stale([3], [0, 0]), disagreement=0.025
    )
    text, sent = describe_segments(first.plus(second))
    for words in (
        "1.00 on average, at most 3",
        "1 step ahead",
        "steps by worker: 3, 3",
        "differed by 2.5 %",
    ):
        assert words in text
    assert sent.startswith("3 messages with 2 MiB per step")
    many = describe_segments(SegmentReport(two, staleness=stale(*[[0]] * (SHOWN_WORKERS + 1))))
    assert many[0].endswith("steps by worker: " + ", ".join(["1"] * SHOWN_WORKERS) + ", ...")
