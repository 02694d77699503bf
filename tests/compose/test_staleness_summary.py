"""The lines about segments: how stale, how far ahead, what was sent, what was lost; each segment once."""

from nnmpi.compose.segment import SHOWN_WORKERS, StalenessSummary
from nnmpi.compose.trainer import SegmentReport, Totals
from nnmpi.synchrony.staleness import Staleness


def stale(*workers: list[int]) -> Staleness:
    found = Staleness(len(workers))
    for worker, values in enumerate(workers):
        for value in values:
            found.add(worker, value)
    return found


def report(batches: int = 2, **more: object) -> SegmentReport:
    return SegmentReport(Totals(steps=batches), **more)  # type: ignore[arg-type]


def test_nothing_is_said_of_nothing() -> None:
    summary = StalenessSummary()
    assert summary.lines() == []
    summary.add(report(batches=0, messages=9))
    assert summary.lines() == []


def test_segments_are_put_together_and_forgotten() -> None:
    summary = StalenessSummary()
    summary.add(report(2, messages=6, bytes=2 * 2**20, staleness=stale([0, 1], [2]), lead=1))
    summary.add(report(4, messages=12, bytes=10 * 2**20, staleness=stale([3], [0, 0]), lead=0))
    assert summary.lines() == [
        "staleness 1.00 on average, at most 3; at most 1 step ahead; steps by worker: 3, 3",
        "3 messages with 2 MB per step, over all ranks",
    ]
    assert summary.lines() == []


def test_the_largest_lead_and_distance_count() -> None:
    summary = StalenessSummary()
    summary.add(report(staleness=stale([0], [1]), lead=4, disagreement=0.001))
    summary.add(report(staleness=stale([0], [1]), lead=2, disagreement=0.025))
    assert summary.lines()[0] == (
        "staleness 0.50 on average, at most 1; at most 4 steps ahead; steps by worker: 2, 2; "
        "weights differed by 2.5 % before they were averaged at the end"
    )


def test_without_staleness_there_are_weights_that_differ_or_nothing() -> None:
    summary = StalenessSummary()
    summary.add(report(messages=4, bytes=2**19, disagreement=0.5))
    assert summary.lines() == [
        "weights differed by 50 % before they were averaged at the end",
        "2 messages with 0.25 MB per step, over all ranks",
    ]
    summary.add(report(messages=4, bytes=2**19))
    assert summary.lines() == ["2 messages with 0.25 MB per step, over all ranks"]


def test_losses_are_told() -> None:
    summary = StalenessSummary()
    summary.add(report(messages=1, dropped=3))
    summary.add(report(messages=1, unassigned=2))
    assert summary.lines() == [
        "0.5 messages with 0 MB per step, over all ranks; 3 gradients came too late and were dropped, 2 parts of "
        "batches were not begun"
    ]


def test_of_many_workers_the_first_ones_are_named() -> None:
    summary = StalenessSummary()
    summary.add(report(staleness=stale(*[[0]] * (SHOWN_WORKERS + 1))))
    assert summary.lines()[0].endswith("steps by worker: " + ", ".join(["1"] * SHOWN_WORKERS) + ", ...")
