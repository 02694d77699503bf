"""Runs in virtual time, several at once in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from benchmarks.synchrony.curve import Point, write
from benchmarks.synchrony.subject import Subject
from nnmpi.comm.start import start
from nnmpi.compose.pace import Pace
from nnmpi.compose.segment import Progress
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.data.dataset import Dataset
from nnmpi.errors import DivergenceError
from nnmpi.synchrony.network import LinkSpeed, parse_network
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        labels: what the row of results is to tell of it besides.
        slow: see `synchrony.slowdown`.
        network: see `synchrony.network`; empty for messages that take no time.
        observed: whether it is evaluated on the way, or only at its end.
    """

    sync: Sync
    workers: int
    slow: str
    subject: Subject
    pace_s: float
    network: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    observed: bool = True


def play_all(cases: Sequence[Case]) -> list[Row]:
    """Return a row for each run, in their order; as many run at a time as there are cores."""
    cases[0].subject.fetch()
    count = min(len(cases), len(os.sched_getaffinity(0)))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: BLAS reads it once
    try:
        context = multiprocessing.get_context("spawn")  # as MPI's state is not for a fork
        with ProcessPoolExecutor(count, mp_context=context) as pool:
            return list(pool.map(play, cases))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def play(case: Case) -> Row:
    """Run one case; return its labels and what it came to. A run that diverges has a curve up to there."""
    subject = case.subject
    train, test = _data(subject.dataset, subject.data_dir)
    loader, test_loader = subject.loaders(train, test)
    model, optimizer = subject.build(train)
    worker = VirtualWorker(
        model,
        optimizer,
        start(),
        case.sync,
        case.workers,
        seed=subject.seed,
        pace=Pace(case.pace_s, Slowdown.parse(case.slow, subject.seed)),
        network=parse_network(case.network) if case.network else LinkSpeed(),
    )
    batches, seen = list(test_loader.epoch(0)), _Seen(subject.every, worker.told)
    if case.observed:
        first_one = worker.evaluate(batches)
        seen.points.append(Point(0, 0, first_one.loss, first_one.accuracy))

    def observe(now_s: float, observed: VirtualWorker) -> None:
        if seen.is_due():
            report = observed.evaluate(batches)
            seen.points.append(Point(seen.batches, now_s, report.loss, report.accuracy))

    if case.observed:
        worker.observe = observe
    staleness, totals, diverged = Staleness(case.workers), Row(messages=0, bytes=0, updates=0, lead=0), False
    schedule, per_epoch = subject.schedule(), loader.batches_per_epoch
    try:
        for first in range(0, subject.steps, per_epoch):
            count = min(per_epoch, subject.steps - first)
            report = worker.run(loader, first // per_epoch, 0, count, first, schedule, progress=seen.count)
            if report.staleness is not None:
                staleness.merge(report.staleness)
            for name in ("messages", "bytes", "updates"):
                totals[name] += getattr(report, name)
            totals["lead"] = max(totals["lead"], report.lead)
    except DivergenceError:
        diverged = True
    final = worker.evaluate(batches)
    if case.observed:
        seen.points.append(Point(seen.batches, worker.now_s, final.loss, final.accuracy))
    return {
        **case.labels,
        "workers": case.workers,
        "slow_text": case.slow,
        "seconds": worker.now_s,
        "batches": seen.batches,
        "loss": final.loss,
        "accuracy": final.accuracy,
        "diverged": diverged,
        "staleness": {"mean": staleness.mean(), "max": staleness.largest()},
        "distant": staleness.count() - staleness.count(0),
        **totals,
        "curve": write(seen.points),
    }


def settings(case: Case) -> dict[str, Any]:
    """Return what all runs of a table have in common, for its file."""
    common = asdict(case.subject)
    del common["data_dir"]  # of this machine alone
    return {"subject": common, "pace_s": case.pace_s, "network": case.network}


class _Seen:
    """Counts gradients, as batches' worth of them, and knows when an evaluation is due."""

    def __init__(self, every: int, told: int) -> None:
        self.points = list[Point]()
        self._every, self._told, self._gradients, self._next = every, told, 0, every

    @property
    def batches(self) -> float:
        return self._gradients / self._told

    def count(self, progress: Progress) -> None:
        self._gradients += 1

    def is_due(self) -> bool:
        due = self.batches >= self._next
        while self._next <= self.batches:
            self._next += self._every
        return due


@cache
def _data(dataset: str, data_dir: str | None) -> tuple[Dataset, Dataset]:
    return Subject(dataset=dataset, data_dir=data_dir).load()
