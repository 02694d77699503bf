"""Runs in virtual time, several at once in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from benchmarks.synchrony.curve import Evaluation, write
from benchmarks.synchrony.recipe import Recipe
from nnmpi.comm.start import start
from nnmpi.compose.trainer import Progress, Throttle
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.data.dataset import Dataset
from nnmpi.errors import DivergenceError
from nnmpi.synchrony.network import LinkSpeed, parse_network
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync

Row = dict[str, Any]


@dataclass(frozen=True)
class SimulatedRun:
    """One run.

    Attributes:
        labels: further fields of its row of results.
        slow: see `synchrony.slowdown`.
        network: see `synchrony.network`; empty for messages that take no time.
        observed: whether it is evaluated on the way, or only at its end.
    """

    sync: Sync
    workers: int
    slow: str
    recipe: Recipe
    pace_s: float
    network: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    observed: bool = True


def simulate_all(cases: Sequence[SimulatedRun]) -> list[Row]:
    """Return a row for each run, in their order; as many run at a time as there are cores."""
    cases[0].recipe.fetch()
    count = min(len(cases), len(os.sched_getaffinity(0)))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: BLAS reads it once
    try:
        context = multiprocessing.get_context("spawn")  # as MPI's state is not for a fork
        with ProcessPoolExecutor(count, mp_context=context) as pool:
            return list(pool.map(simulate, cases))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def simulate(case: SimulatedRun) -> Row:
    """MeasuredRun one case; return its labels and what it came to. A run that diverges has a curve up to there."""
    recipe = case.recipe
    train, test = _data(recipe.dataset, recipe.data_dir)
    loader, test_loader = recipe.loaders(train, test)
    model, optimizer = recipe.build(train)
    worker = VirtualWorker(
        model,
        optimizer,
        start(),
        case.sync,
        case.workers,
        seed=recipe.seed,
        throttle=Throttle(case.pace_s, Slowdown.parse(case.slow, recipe.seed)),
        network=parse_network(case.network) if case.network else LinkSpeed(),
    )
    batches, seen = list(test_loader.epoch(0)), _Seen(recipe.every, worker.reports_per_batch)
    if case.observed:
        first_one = worker.evaluate(batches)
        seen.points.append(Evaluation(0, 0, first_one.loss, first_one.accuracy))

    def observe(now_s: float, observed: VirtualWorker) -> None:
        if seen.is_due():
            report = observed.evaluate(batches)
            seen.points.append(Evaluation(seen.batches, now_s, report.loss, report.accuracy))

    if case.observed:
        worker.observe = observe
    staleness, totals, diverged = Staleness(case.workers), Row(messages=0, bytes=0, updates=0, lead=0), False
    schedule, per_epoch = recipe.schedule(), loader.batches_per_epoch
    try:
        for first in range(0, recipe.steps, per_epoch):
            count = min(per_epoch, recipe.steps - first)
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
        seen.points.append(Evaluation(seen.batches, worker.now_s, final.loss, final.accuracy))
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


def settings(case: SimulatedRun) -> dict[str, Any]:
    """Return what all runs of a table have in common, for its file."""
    common = asdict(case.recipe)
    del common["data_dir"]  # of this machine alone
    return {"recipe": common, "pace_s": case.pace_s, "network": case.network}


class _Seen:
    """Counts gradients, as batches' worth of them, and knows when an evaluation is due."""

    def __init__(self, every: int, reports_per_batch: int) -> None:
        self.points = list[Evaluation]()
        self._every, self._reports, self._gradients, self._next = every, reports_per_batch, 0, every

    @property
    def batches(self) -> float:
        """Batches' worth of gradients so far."""
        return self._gradients / self._reports

    def count(self, progress: Progress) -> None:
        """Count a gradient."""
        self._gradients += 1

    def is_due(self) -> bool:
        """Return whether an evaluation is due; true once for each."""
        due = self.batches >= self._next
        while self._next <= self.batches:
            self._next += self._every
        return due


@cache
def _data(dataset: str, data_dir: str | None) -> tuple[Dataset, Dataset]:
    return Recipe(dataset=dataset, data_dir=data_dir).load()
