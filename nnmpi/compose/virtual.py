"""VirtualWorker: many workers in one process, in virtual time, with real gradients.

    worker = VirtualWorker(model, optimizer, group, Sync("asp"), workers=16, pace=Pace(1.0, slowdown))
    worker.observe = lambda now_s, worker: points.append((now_s, worker.evaluate(test.epoch(0)).accuracy))
    report = worker.run(loader, 0, 0, loader.batches_per_epoch, step=0, lr=lambda step: 0.1)
    print(report.seconds, report.staleness.mean())

    virtual time   0         1         2         3         4         5         6
    worker 0       |=========|=========|=========|=========|=========|=========|
    worker 1       |=============================|=============================|      factor 3
                   ^ its gradient is computed here, with the weights of this moment, and used at the other end

The curves depend on the arguments alone: not on the machine's speed, and not on what else it does (another machine's
matrix products may round otherwise, which changes losses a little and times not at all). A step takes its
worker's pace, times the factor of a straggler; messages take what `synchrony.network` says; computing an update takes
no time. Servers, desks, clocks and gradients are those of a run on ranks.

    bsp without servers    the slowest worker, then an all-reduce on a ring         compose.playing.joint
    bsp, ssp, asp          messages from and to servers, which wait for one another compose.playing.served
    local, gossip          weights of their own, averaged now and then              compose.playing.unserved
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import isfinite
from typing import Any, TypeAlias

from nnmpi.backend.precision import precision as mode_of
from nnmpi.backend.precision import use_precision
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.compose.evaluation import evaluate_all, evaluate_batch
from nnmpi.compose.gradient import LocalGradient
from nnmpi.compose.pace import Pace
from nnmpi.compose.pairs import check_precision, refuse_scaling
from nnmpi.compose.playing.joint import Joint
from nnmpi.compose.playing.scene import Scene, Segment
from nnmpi.compose.playing.served import Served
from nnmpi.compose.playing.statistics import Statistics
from nnmpi.compose.playing.unserved import Unserved
from nnmpi.compose.report import EvalReport
from nnmpi.compose.runner import SumLoss, check_loss, check_optimizer, count_correct, sum_cross_entropy
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.state import model_state, optimizer_state
from nnmpi.data.loader import Batch, Loader
from nnmpi.errors import CheckpointError, UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import check_free
from nnmpi.parallel.state import LayoutState
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.sync import Sync

Observe: TypeAlias = Callable[[float, "VirtualWorker"], None]


class VirtualWorker:
    """Trains and evaluates a model as many workers would; see `RelaxedWorker`, whose calls it has.

    Args:
        model: initialized.
        optimizer: made over `model.storage`.
        group: of this process alone.
        sync: how the workers go on; a synchronous run without servers, too.
        workers: how many compute. Dedicated servers are further ones, and then have the first ranks.
        loss, evaluation_loss, clip, seed, backend, precision: see `RelaxedWorker`.
        pace: the virtual seconds of a step, above 0, and stragglers by rank; 1 s and nobody by default.
        network: the speed of links; by default messages take no time.

    Attributes:
        now_s: the virtual time.
        observe: called as observe(now_s, worker) after every update, with the weights of that moment in the model: the
            servers', or the mean over the workers. It may evaluate; it must not change the model. None for nobody.

    Raises:
        UsageError: for a group of several ranks, a pace that is not above 0, and what `RelaxedWorker` refuses.
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
        clip: float | None = None,
        seed: int = 0,
        backend: Backend | None = None,
        pace: Pace | None = None,
        network: LinkSpeed | None = None,
        precision: str | None = None,
    ) -> None:
        pace = Pace(1.0) if pace is None else pace
        check_optimizer(model, optimizer)
        if workers < 1:
            raise UsageError(f"{workers} virtual workers cannot compute anything; give 1 or more")
        if group.size > 1:
            raise UsageError(
                f"virtual time plays {workers} workers in one process, but there are {group.size} ranks; start one"
            )
        if not (isfinite(pace.seconds) and pace.seconds > 0):
            raise UsageError(f"a virtual step of {pace.seconds:g} s is not possible; give a number above 0")
        ranks = sync.ranks_of(workers)
        sync.check(ranks)
        pace.slowdown.check(sync.worker_ranks(ranks))
        check_free(model)
        self.model, self.optimizer, self.group, self.sync, self.workers = model, optimizer, group, sync, workers
        self.loss: SumLoss = sum_cross_entropy(None) if loss is None else loss
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        for each in (self.loss, self.evaluation_loss):
            check_loss(each, None)
        self.seed = seed
        self.backend = numpy_backend() if backend is None else backend
        self.precision = mode_of() if precision is None else precision
        check_precision(self.precision, model, self.backend, group)
        refuse_scaling(self.precision, "in virtual time")
        self.now_s = 0.0
        self.observe: Observe | None = None
        gradient = LocalGradient(model, self.loss, self.backend, seed, clip, precision=self.precision)
        statistics = Statistics(model, workers)
        self._scene = Scene(
            model,
            optimizer,
            sync,
            workers,
            gradient,
            pace,
            network or LinkSpeed(),
            statistics,
            seed,
            steps=[0] * workers,
            taken=[0] * workers,
        )
        self._player = (
            Served(self._scene) if sync.served else Unserved(self._scene) if sync.relaxed else Joint(self._scene)
        )

    def run(
        self,
        loader: Loader,
        epoch: int,
        first: int,
        stop: int,
        step: int,
        lr: Callable[[int], float],
        bsp: bool = False,
        progress: Callable[[Progress], None] | None = None,
        asked: Callable[[], int] | None = None,
    ) -> SegmentReport:
        """Train on the batches first..stop-1 of an epoch, until all have met; `now_s` goes on.

        Args:
            loader: of the training data; any rank's.
            step: the number of batches before them in the whole run, which keys dropout and the learning rate.
            lr: the learning rate of a step.
            bsp: whether the workers stay in step this time: a warm-up.
            progress: called for every gradient that is used, with `at_s` in virtual time since the start of the run.
            asked: whether a signal came, and which; then the segment ends after whole batches.

        Returns:
            What was done; all seconds are virtual.

        Raises:
            DivergenceError: when a loss or gradient was not finite; it was not used, and the weights in the model are
                those that it was computed with.
        """
        observe = None if self.observe is None else partial(self._show, self.observe)
        parts, batches = loader.parts(epoch), range(first, stop)
        tell, ask = progress or (lambda _: None), asked or (lambda: 0)
        report, self.now_s = self._player.run(
            Segment(parts, batches, step, lr, bsp, tell, ask, observe, begin_s=self.now_s)
        )
        return report

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over all batches; its seconds are real ones."""
        one = partial(evaluate_batch, self.model, self.evaluation_loss, count_correct, self.backend)
        with use_precision(self.precision):
            return evaluate_all(self.group, batches, one, self.backend)

    def state(self) -> tuple[LayoutState, LayoutState]:
        """Return the model's and the optimizer's arrays; see `Worker.state`."""
        return (
            model_state(self.model, self.group, None),
            optimizer_state(self.model, self.optimizer, self.group, None),
        )

    def clock_state(self) -> dict[str, Any]:
        """Return virtual time and the workers' steps, as JSON values: what a checkpoint needs besides `state`."""
        clocks = [list(server.desk.clocks.steps) for server in self._servers()]
        return {
            "now_s": self.now_s,
            "steps": list(self._scene.steps),
            "taken": list(self._scene.taken),
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
        self._scene.steps[:] = [int(count) for count in state["steps"]]
        self._scene.taken[:] = [int(count) for count in state["taken"]]
        for server, steps in zip(servers, state["clocks"], strict=True):
            server.desk.clocks.steps[:] = [int(count) for count in steps]

    @property
    def told(self) -> int:
        """How many calls of `progress` there are for each batch."""
        return 1 if isinstance(self._player, Joint) else self.workers - self.sync.backup

    def release(self) -> None:
        """Take everything off the model again."""
        self._scene.gradient.release()

    def _servers(self) -> list[Any]:
        return self._player.servers if isinstance(self._player, Served) else []

    def _show(self, observe: Observe, now_s: float) -> None:
        self.now_s = now_s
        observe(now_s, self)
