"""VirtualWorker: many workers in one process, in virtual time, with real gradients.

    worker = VirtualWorker(model, optimizer, group, Sync("asp"), workers=16, throttle=Throttle(1.0, slowdown))
    worker.observe = lambda now_s, worker: points.append((now_s, worker.evaluate(test.epoch(0)).accuracy))
    report = worker.run(loader, 0, 0, loader.batches_per_epoch, step=0, lr=lambda step: 0.1)
    print(report.seconds, report.staleness.mean())

    virtual time   0         1         2         3         4         5         6
    worker 0       |=========|=========|=========|=========|=========|=========|
    worker 1       |=============================|=============================|      factor 3
                   ^ its gradient is computed here, with the weights of this moment, and used at the other end

The curves depend on the arguments alone: not on the machine's speed, and not on what else it does (another machine's
matrix products may round otherwise, which changes losses a little and times not at all). A step takes the minimum step
time, times the factor of a straggler; messages take what `synchrony.network` says; computing an update takes no time.
Servers, consistency controllers, clocks and gradients are those of a run on ranks. The three ways of training are in
`compose.simulated_cluster`:

    bsp without servers    the slowest worker, then an all-reduce on a ring         SimulatedAllReduce
    bsp, ssp, asp          messages from and to servers, which wait for one another SimulatedServers
    local, gossip          weights of their own, averaged now and then              SimulatedAveraging
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, TypeAlias

from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.comm.units import format_duration
from nnmpi.compose.options import DEFAULT_NUMERICS, Numerics, check_precision, refuse_scaling
from nnmpi.compose.replicas import LocalGradient, evaluate_all
from nnmpi.compose.runner import EvalReport, SumLoss, check_loss, check_optimizer
from nnmpi.compose.segment import StalenessSummary
from nnmpi.compose.simulated_cluster import (
    SimulatedAllReduce,
    SimulatedAveraging,
    SimulatedCluster,
    SimulatedSegment,
    SimulatedServers,
    WorkerStatistics,
)
from nnmpi.compose.trainer import OnProgress, Progress, SegmentReport, Throttle, Trainer, TrainingSegment
from nnmpi.data.loader import Batch
from nnmpi.errors import CheckpointError, UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.replication import check_free
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.sync import Sync

Observe: TypeAlias = Callable[[float, "VirtualWorker"], None]


class VirtualWorker(Trainer):
    """Trains and evaluates a model as many workers would; see `AsynchronousWorker`.

    Args:
        model: initialized.
        optimizer: made over `model.storage`.
        group: of this process alone.
        sync: how the workers go on; a synchronous run without servers, too.
        workers: how many compute. Dedicated servers are further ones, and then have the first ranks.
        loss, evaluation_loss, numerics, seed, backend: see `AsynchronousWorker`.
        throttle: the virtual seconds of a step, above 0, and stragglers by rank; 1 s and nobody by default.
        network: the speed of links; by default messages take no time.

    Attributes:
        now_s: the virtual time.
        observe: called as observe(now_s, worker) after every update, with the weights of that moment in the model: the
            servers', or the mean over the workers. It may evaluate; it must not change the model. None for nobody.

    Raises:
        UsageError: for a group of several ranks, a minimum step time that is not above 0, and what
            `AsynchronousWorker` refuses.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        sync: Sync,
        workers: int,
        loss: SumLoss | None = None,
        evaluation_loss: SumLoss | None = None,
        numerics: Numerics = DEFAULT_NUMERICS,
        seed: int = 0,
        backend: Backend | None = None,
        throttle: Throttle | None = None,
        network: LinkSpeed | None = None,
    ) -> None:
        throttle = Throttle(1.0) if throttle is None else throttle
        check_optimizer(model, optimizer)
        if workers < 1:
            raise UsageError(f"{workers} virtual workers cannot compute anything; give 1 or more")
        if group.size > 1:
            raise UsageError(
                f"virtual time plays {workers} workers in one process, but there are {group.size} ranks; start one"
            )
        if not (isfinite(throttle.minimum_s) and throttle.minimum_s > 0):
            raise UsageError(f"a virtual step of {throttle.minimum_s:g} s is not possible; give a number above 0")
        ranks = sync.ranks_of(workers)
        sync.check(ranks)
        throttle.slowdown.check(sync.worker_ranks(ranks))
        check_free(model)
        super().__init__(model, optimizer, group, loss, evaluation_loss, numerics, seed, backend, throttle)
        self.sync, self.workers = sync, workers
        for each in (self.loss, self.evaluation_loss):
            check_loss(each, None)
        check_precision(self.precision, model, self.backend, group)
        refuse_scaling(self.precision, "in virtual time")
        self.now_s = 0.0
        self.observe: Observe | None = None
        self._gradient = gradient = LocalGradient(
            model, self.loss, self.backend, seed, numerics.clip, self.precision, self.evaluation_loss
        )
        statistics = WorkerStatistics(model, workers)
        self._cluster = SimulatedCluster(
            model,
            optimizer,
            sync,
            workers,
            gradient,
            throttle,
            network or LinkSpeed(),
            statistics,
            seed,
            steps=[0] * workers,
            taken=[0] * workers,
        )
        self._simulation = (
            SimulatedServers(self._cluster)
            if sync.uses_servers
            else SimulatedAveraging(self._cluster)
            if sync.asynchronous
            else SimulatedAllReduce(self._cluster)
        )
        if sync.asynchronous:
            self.reports_per_batch = workers - sync.backup
        self._summary, self._summed_s = StalenessSummary(), 0.0
        self._begin_s = self._last_s = 0.0  # of the segment, and of what was told last

    def _run(self, segment: TrainingSegment) -> SegmentReport:
        """Train until all have met; `now_s` goes on. All seconds are virtual."""
        observe = None if self.observe is None else partial(self._show, self.observe)
        self._begin_s = self._last_s = self.now_s
        report, self.now_s = self._simulation.run(
            SimulatedSegment(
                segment.loader.parts(segment.epoch),
                segment.batches,
                segment.step,
                segment.lr,
                segment.bsp,
                partial(self._tell, segment.progress),
                segment.poll_signal,
                observe,
                self.now_s,
            )
        )
        self._summary.add(report)
        return replace(report, virtual=self.clock_state())

    def _tell(self, progress: OnProgress, one: Progress) -> None:
        """Tell of a gradient whose `at_s` is the virtual time."""
        totals, self._last_s = replace(one.totals, wall_s=one.at_s - self._last_s), one.at_s
        progress(replace(one, totals=totals, at_s=one.at_s - self._begin_s, more={"virtual_s": one.at_s}))

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over all batches; its seconds are real ones."""
        return replace(evaluate_all(self.group, batches, self._gradient.evaluate, self.backend), virtual_s=self.now_s)

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """Put back what `scalars` gave; time goes on where it stood, also with another number of workers."""
        super().load_scalars(values)
        if values["virtual"] is not None:
            self._summed_s = self.now_s = float(values["virtual"]["now_s"])
            with suppress(CheckpointError):
                self.load_clock_state(values["virtual"])

    def summary(self) -> list[str]:
        """Return lines about how stale gradients were, what was sent and how long it took, since the last call."""
        seconds, self._summed_s = self.now_s - self._summed_s, self.now_s
        *stale, sent = self._summary.lines() or [""]
        return [*stale, f"{format_duration(seconds)} of virtual time; {sent}"] if sent else []

    def clock_state(self) -> dict[str, Any]:
        """Return virtual time and the workers' steps, as JSON values: what a checkpoint needs besides `state`."""
        clocks = [list(server.controller.clocks.steps) for server in self._servers()]
        return {
            "now_s": self.now_s,
            "steps": list(self._cluster.steps),
            "taken": list(self._cluster.taken),
            "clocks": clocks,
        }

    def load_clock_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `clock_state` gave: then a resumed run is, bit for bit, one without a break.

        Raises:
            CheckpointError: when it is that of another number of workers or servers; nothing is changed then.
        """
        servers = self._servers()
        lengths = [len(steps) for steps in [state["steps"], *state["clocks"]]]
        if lengths != [self.workers] * (1 + len(servers)):
            raise CheckpointError(
                f"the virtual time of {lengths[0]} workers and {len(lengths) - 1} servers does not fit {self.workers} "
                f"workers and {len(servers)} servers"
            )
        self.now_s = float(state["now_s"])
        self._cluster.steps[:] = [int(count) for count in state["steps"]]
        self._cluster.taken[:] = [int(count) for count in state["taken"]]
        for server, steps in zip(servers, state["clocks"], strict=True):
            server.controller.clocks.steps[:] = [int(count) for count in steps]

    def release(self) -> None:
        """Take everything off the model again."""
        self._cluster.gradient.release()

    def _servers(self) -> list[Any]:
        return self._simulation.servers if isinstance(self._simulation, SimulatedServers) else []

    def _show(self, observe: Observe, now_s: float) -> None:
        self.now_s = now_s
        observe(now_s, self)
