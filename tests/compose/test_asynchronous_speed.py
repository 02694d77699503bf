"""Ranks of different speeds: how far ahead they get, who waits, how much they do, and what is dropped."""

import pytest

from nnmpi.comm.group import Group
from nnmpi.compose.trainer import Progress, SegmentReport
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync
from tests.compose.asynchronous_runs import equal_on_all, make, name_of, skip_unless_fitting, train
from tests.compose.small_runs import BATCHES, ROWS, weights

pytestmark = pytest.mark.mpi

PACE_S = 0.001
SMALL = 2  # rows of a batch: 31 batches in an epoch
SMALL_BATCHES = ROWS // SMALL


def staleness(report: SegmentReport) -> Staleness:
    assert report.staleness is not None
    return report.staleness


@pytest.mark.parametrize(
    ("sync", "seed"),
    [
        (Sync("ssp", staleness=1), 1),
        (Sync("ssp", staleness=1), 2),
        (Sync("ssp", staleness=3), 1),
        (Sync("ssp", staleness=2, servers=2), 2),
        (Sync("ssp", staleness=2, servers=2, dedicated=True), 1),
    ],
    ids=lambda one: name_of(one) if isinstance(one, Sync) else str(one),
)
def test_nobody_is_further_ahead_than_the_bound(group: Group, sync: Sync, seed: int) -> None:
    """Also over segments, as the workers' clocks go on, and with a rank that is always slow."""
    skip_unless_fitting(group, sync)
    workers = sync.worker_ranks(group.size)
    slow = f"random,probability=0.2,factor=6;rank={workers[seed % len(workers)]},factor=4"
    worker = make(group, sync, pace_s=PACE_S, straggler=slow)
    steps = [0] * len(workers)
    for first, stop in ((0, 9), (9, 10), (10, SMALL_BATCHES)):
        report = train(worker, ((0, first, stop),), SMALL)[0]
        found, bound = staleness(report), sync.bound
        assert bound is not None
        assert report.lead <= bound
        assert found.largest() <= (2 * bound + 1) * (len(workers) - 1)
        assert report.totals.samples == SMALL * (stop - first)
        steps = [before + found.count(number) for number, before in enumerate(steps)]
        # A worker that begins a step S steps ahead is S + 1 ahead when it has done it.
        assert max(steps) - min(steps) <= bound + 1
        assert sum(steps) == len(workers) * stop
    assert equal_on_all(group, weights(worker.model))
    worker.release()


@pytest.mark.parametrize("slow", ["first", "last"])
@pytest.mark.parametrize("sync", [Sync("asp"), Sync("ssp", staleness=10**6)], ids=name_of)
def test_without_a_bound_nobody_waits_for_a_slow_rank(group: Group, sync: Sync, slow: str) -> None:
    """And the server's rank goes on serving while it is slowed down itself."""
    if group.size == 1:
        return
    number = 0 if slow == "first" else group.size - 1
    # Steps long beside what a busy machine adds to them: otherwise all ranks are slow.
    worker = make(group, sync, pace_s=10 * PACE_S, straggler=f"rank={number},factor=20")
    report = train(worker, ((0, 0, SMALL_BATCHES),), SMALL)[0]
    counts = [staleness(report).count(each) for each in range(group.size)]
    others = [count for each, count in enumerate(counts) if each != number]
    assert sum(counts) == group.size * SMALL_BATCHES
    assert counts[number] * 3 < max(others)
    assert report.lead > 4
    assert report.totals.samples == ROWS
    worker.release()


def test_a_bound_makes_the_others_wait_for_a_slow_rank(group: Group) -> None:
    if group.size == 1:
        return
    worker = make(group, Sync("bsp", servers=1), pace_s=PACE_S, straggler=f"rank={group.size - 1},factor=10")
    report = train(worker)[0]
    assert staleness(report).histogram() == {0: group.size * report.batches}
    assert report.totals.per_step(report.totals.sync_s) > 3 * PACE_S
    worker.release()


@pytest.mark.parametrize("sync", [Sync("asp"), Sync("local", local_steps=2), Sync("gossip")], ids=name_of)
def test_a_slowed_rank_takes_as_long_as_it_should(group: Group, sync: Sync) -> None:
    skip_unless_fitting(group, sync)
    pace_s, told = 0.003, list[Progress]()
    worker = make(group, sync, pace_s=pace_s, straggler="rank=0,factor=5")
    report = train(worker, ((0, 0, 4),), progress=told.append)[0]
    assert all(one.totals.compute_s >= pace_s * (5 if one.worker == 0 else 1) for one in told)
    assert not group.is_root or any(one.worker == 0 for one in told)
    assert report.totals.per_step(report.totals.compute_s) >= pace_s
    assert report.totals.wall_s >= pace_s * 5
    worker.release()


def test_gradients_that_are_not_waited_for_are_counted(group: Group) -> None:
    if group.size == 1:
        return
    worker = make(group, Sync("bsp", backup=1), pace_s=PACE_S, straggler=f"rank={group.size - 1},factor=8")
    told: list[int] = []
    reports = train(worker, ((0, 0, BATCHES), (1, 0, BATCHES)), progress=lambda one: told.append(one.totals.samples))
    for report in reports:
        used = staleness(report).count()
        assert used == (group.size - 1) * BATCHES
        assert used + report.dropped + report.unassigned == group.size * BATCHES
        assert report.dropped + report.unassigned == BATCHES
        assert report.dropped > 0
        assert report.totals.samples < ROWS
        assert staleness(report).largest() == 0
        assert (report.updates, report.lead) == (BATCHES, 0)
    assert not group.is_root or sum(told) == sum(report.totals.samples for report in reports)
    assert equal_on_all(group, weights(worker.model))
    worker.release()


def test_stale_gradients_that_count_less_change_the_weights(group: Group) -> None:
    """With a rank that is so slow that its gradients are staler than usual."""
    if group.size == 1:
        return
    worker = make(group, Sync("asp", adapt=True), pace_s=PACE_S, straggler=f"rank={group.size - 1},factor=30")
    report = train(worker, ((0, 0, SMALL_BATCHES),), SMALL)[0]
    assert staleness(report).largest() > group.size - 1
    assert report.totals.samples == ROWS
    assert equal_on_all(group, weights(worker.model))
    worker.release()
