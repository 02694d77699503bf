"""Runs on ranks, with a minimum step time that is slept: weights are copied during the run, and
evaluated after it.

    settings    "recipe"; "pace_s"; "observed"; "cases": [{"mode", "slow", "steps"}, ...]; "repeats"
    result      a row for each case and repeat, in interleaved order: {"mode", "slow", "repeat",
                "curve", ...}

    mode           snapshot
    synchronous    rank 0's weights
    with a server  the server's weights when a gradient arrives
    other          each rank's weights after the same steps; the mean over the ranks is evaluated,
                   at the time of the last rank

`simulated` runs the same code on simulated ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from benchmarks.synchrony.curve import Evaluation, write
from benchmarks.synchrony.modes import MODES, slow_text
from benchmarks.synchrony.recipe import Data, Recipe
from nnmpi.asynchronous.server import ParameterServer
from nnmpi.asynchronous.worker import AsynchronousWorker
from nnmpi.backend.array import Array
from nnmpi.base import clock
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.comm.synchrony.sync import Sync
from nnmpi.compose.layout import GradientExchange
from nnmpi.compose.stats import Staleness
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer
from nnmpi.compose.worker import Worker
from nnmpi.nn.mode import evaluation
from nnmpi.ops.loss import cross_entropy
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor

Row = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """Weights during a run, with the batches of gradients until then, and the time."""

    batches: float
    seconds: float
    weights: list[Array]


def measure(group: Group, settings: Mapping[str, Any]) -> list[Row]:
    """Return the rows of all cases. Collective."""
    data = Recipe(**settings["recipe"]).load()
    rows = []
    for repeat in range(settings["repeats"]):
        for case in settings["cases"]:
            recipe = Recipe(**{**settings["recipe"], "steps": case["steps"]})
            slow = replace(
                Slow.parse(slow_text(case["slow"], group.size)), minimum_s=settings["pace_s"]
            )
            run = MeasuredRun(group, recipe, MODES[case["mode"]], slow, data)
            rows.append({**case, "repeat": repeat, **run.go(settings["observed"])})
    return rows


class MeasuredRun:
    """One run of one case.

    Args:
        group: the ranks, one worker each.
        recipe: of the training.
        sync: the mode of synchronization.
        slow: the minimum time of a step, and the stragglers.
        data: of the recipe.
    """

    def __init__(self, group: Group, recipe: Recipe, sync: Sync, slow: Slow, data: Data) -> None:
        self.group, self.recipe, self.sync, self.slow = group, recipe, sync, slow
        self.loader, self._test = recipe.loaders(data, group.rank, group.size)
        self.model, self.optimizer = recipe.build(data[0])
        self._snapshots: list[Snapshot] = []
        self._batches, self._due = 0.0, float(recipe.every)
        self._begin_s = 0.0

    def go(self, observed: bool) -> Row:
        """Train, then evaluate the snapshots, or the last weights alone. Collective."""
        self._due = 0.0 if observed else inf
        report = self._train()
        curve = self._evaluate()
        end = curve[-1]
        return {
            **report,
            "batches": end.batches,
            "loss": end.loss,
            "accuracy": end.accuracy,
            "curve": write(curve),
        }

    def _build(self) -> tuple[Trainer, ParameterServer | None]:
        """Return the trainer, synchronous by a ring all-reduce, and this rank's server."""
        common = {"slow": self.slow, "seed": self.recipe.seed}
        if not self.sync.asynchronous:
            ring = GradientExchange(allreduce="ring")
            return Worker(self.model, self.optimizer, self.group, exchange=ring, **common), None
        worker = AsynchronousWorker(self.model, self.optimizer, self.group, self.sync, **common)
        return worker, getattr(worker.coupling, "server", None)

    def _train(self) -> Row:
        trainer, server = self._build()
        schedule, per_epoch = self.recipe.schedule(), self.loader.batches_per_epoch

        def done(progress: Progress) -> None:
            if server is not None:
                self._copy(server.master)  # before this gradient's update
            if server is not None or trainer.in_step:
                self._batches += 1 / trainer.reporters
            if trainer.in_step and self.group.is_root:
                self._copy(self.model.storage.data)

        def rate(step: int) -> float:
            if not trainer.in_step and not self.sync.has_server:
                # the trainer calls `rate` before each update, on every rank
                self._batches = step
                self._copy(self.model.storage.data)
            return schedule(step)

        self.group.barrier()
        self._begin_s = clock.now()
        self._copy(self.model.storage.data)
        result = SegmentReport()
        for first in range(0, self.recipe.steps, per_epoch):
            count = min(per_epoch, self.recipe.steps - first)
            report = trainer.run(
                self.loader, first // per_epoch, 0, count, first, rate, progress=done
            )
            result = result.plus(report)
        self.group.barrier()  # a straggler may still train
        seconds = self.group.share(clock.now() - self._begin_s)
        self._batches, self._due = float(self.recipe.steps), 0.0
        self._copy(self.model.storage.data)
        trainer.release()
        stale = result.staleness or Staleness(1)
        return {"seconds": seconds, "staleness": {"mean": stale.mean(), "max": stale.largest()}}

    def _copy(self, weights: list[Array]) -> None:
        """Copy weights, if a snapshot is due."""
        batches = round(self._batches, 6)  # a sum of fractions
        if batches < self._due:
            return
        while self._due <= batches:
            self._due += self.recipe.every
        now_s = clock.now() - self._begin_s
        self._snapshots.append(Snapshot(batches, now_s, [weight.copy() for weight in weights]))

    def _evaluate(self) -> list[Evaluation]:
        """Return the evaluations of the snapshots. Collective."""
        batch = next(iter(self._test.epoch(0)))  # this rank's part of the test data
        result = []
        for number in range(int(self.group.share(len(self._snapshots)))):
            batches, seconds, weights = self._agree(number)
            for target, values in zip(self.model.storage.data, weights, strict=True):
                target[...] = values
            with no_grad(), evaluation():
                logits = self.model(Tensor(batch.x))
                loss = cross_entropy(logits, batch.y, reduction="sum").item()
            hits = float((np.argmax(logits.data, axis=-1) == batch.y).sum())
            sums = self.group.sum_floats([loss, hits])
            result.append(
                Evaluation(batches, seconds, *(item / batch.global_rows for item in sums))
            )
        return result

    def _agree(self, number: int) -> tuple[float, float, list[Array]]:
        """Return a snapshot on all ranks: rank 0's, or the ranks' mean at the latest time."""
        if not self.sync.asynchronous or self.sync.has_server:
            # all ranks have the same weights, or rank 0 alone has them
            mine = self._snapshots[number] if self.group.is_root else None
            batches, seconds = self.group.share(mine and (mine.batches, mine.seconds))
            weights = [
                np.ascontiguousarray(item)
                for item in (mine.weights if mine else self.model.storage.data)
            ]
            for entry in weights:
                self.group.broadcast(entry)
            return batches, seconds, weights
        local = self._snapshots[number]
        weights = [np.ascontiguousarray(weight) for weight in local.weights]
        for entry in weights:
            self.group.all_reduce(entry)
            entry /= self.group.size
        return local.batches, self.group.max_floats([local.seconds])[0], weights
