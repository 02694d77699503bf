"""AsynchronousWorker: data-parallel training in which ranks need not be in step.

    worker = AsynchronousWorker(model, optimizer, group, Sync("ssp", staleness=4))
    for epoch in range(10):
        segment = worker.run(loader, epoch, 0, loader.batches_per_epoch, step=..., lr=rate)
        print(worker.evaluate(test_loader.epoch(0)).accuracy, segment.staleness.mean())

Every rank makes the same calls. Between two calls all ranks have the same weights, so evaluations
and checkpoints work as in any other run. Within `run` each rank continues as soon as its coupling
lets it: it takes a task, computes its gradient without communication, and hands it to the coupling.

    ServerCoupling       pull weights and a task from rank 0, push the gradient there (asp, ssp)
    AveragingCoupling    update the local weights by part `rank` of each batch, and average them now
                         and then (local, gossip)

    rank 0     | its own parts; between layers it receives gradients and sends weights and tasks ...
    rank 1     | pull |  gradient of batch 0, part 0  | push | pull |  batch 1, part 1 ...
    rank 2     | pull |  gradient of batch 0, part 1         | push | pull | ...

    local      worker 0   step step step step | mean of all | step step step step | mean of all
               worker 1   step step step step |             | step step step step |
    gossip     worker 0   step | with 3 and 1 | step | with 3 and 1 |
               worker 1   step | with 0 and 2 | step | with 0 and 2 |

To add a mode, write its row in MODES of `synchrony.sync`. One that averages weights has a class, as
`slowmo` has, and a row in AVERAGES; any other, a coupling here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from math import isfinite
from typing import Any

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.asynchronous.averaging import Averaging, Gossip, LocalSGD, average
from nnmpi.asynchronous.consistency import Task
from nnmpi.asynchronous.server import ParameterServer, Push, PushPull
from nnmpi.asynchronous.slowmo import SlowMo
from nnmpi.backend.array import Integers
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.base.custom import call_custom, name_of
from nnmpi.base.errors import DivergenceError, UsageError, expect
from nnmpi.comm.agreement import PeriodicCheck, agreed, require_equal
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from nnmpi.comm.synchrony.sync import Sync, without_server
from nnmpi.compose.evaluation import Evaluation, evaluate_all
from nnmpi.compose.layout import DEFAULT_NUMERICS, Numerics
from nnmpi.compose.losses import SumLoss
from nnmpi.compose.passes import Passes
from nnmpi.compose.stats import Staleness, StepReport, Totals
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment, to_evaluate
from nnmpi.data.loader import Batch
from nnmpi.nn.module import Module
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.divergence import locate_nonfinite, nonfinite_message
from nnmpi.parallel.replication import broadcast_state, check_free, check_same_model
from nnmpi.parallel.witness import SAME_DATA, StepWitness

SHOWN_WORKERS = 16
# the fields of a gradient's Push that are reported
REPORTED = (
    *("samples", "targets", "loss_sum", "score_sum", "grad_norm"),
    *("compute_s", "sync_s", "input_s"),
)


class Coupling(ABC):
    """The exchange between ranks out of step. Making one is collective, and so is `open`.

    Args:
        trainer: the model's trainer.
        sync: the settings.

    Attributes:
        waited_s: seconds that this rank waited for others; the reader resets it to 0.
        served_s: seconds spent on other ranks' messages while a gradient was computed; the reader
            resets it to 0.
        reporters: see `Trainer`.
        serve: on a rank that serves others, polls their messages while a gradient is computed; None
            on other ranks.
        sleep_until: on such a rank, serves until a time of `nnmpi.base.clock`.
    """

    def __init__(self, trainer: AsynchronousWorker, sync: Sync) -> None:
        self.trainer, self.group, self.sync = trainer, trainer.group, sync
        self.waited_s = self.served_s = 0.0
        self.reporters = 1
        self.serve: Callable[[], None] | None = None
        self.sleep_until: Callable[[float], None] | None = None

    def open(self, segment: TrainingSegment) -> None:
        """Begin a segment, with the same weights on all ranks."""
        self.segment, self.waited_s = segment, 0.0

    @abstractmethod
    def tasks(self) -> Iterator[tuple[Task, Batch]]:
        """Yield this rank's tasks with their batches; first put the task's weights in place."""

    @abstractmethod
    def use(self, task: Task, batch: Batch, report: StepReport, lr: float) -> None:
        """Push the gradient in the model's storage, or update with it.

        Args:
            task, batch: its task, and the task's batch.
            report: of the part, as one step.
            lr: the learning rate of the batch.
        """

    @abstractmethod
    def close(self, totals: Totals) -> tuple[SegmentReport, int]:
        """Make all weights equal; return this rank's report and, on rank 0, the batch count."""

    @abstractmethod
    def release(self) -> None:
        """Give all ranks the optimizer's state, and free communicators. Collective."""


class ServerCoupling(Coupling):
    """Gradients go to a server on rank 0, and weights come from it; see `asynchronous.server`.

    Rank 0 polls its messages after the forward pass, after each layer of the backward pass, while
    it waits, and while it is slowed down. Its time for other ranks is a part of its step's time,
    but is not multiplied by a straggler's factor.

    Attributes:
        server: on rank 0; None on the other ranks.
    """

    def __init__(self, trainer: AsynchronousWorker, sync: Sync) -> None:
        super().__init__(trainer, sync)
        storage, group = trainer.model.storage, trainer.group
        self.server = (
            ParameterServer(storage, trainer.optimizer, group.size) if group.is_root else None
        )
        self._talk = PushPull(group, storage, self.server, self._count, trainer.backend)
        self.reporters = group.size
        if self.server is not None:
            self.sleep_until, self.serve = self._talk.serve_until, self._serve
            for span in storage.spans:
                span.parameter.hook = lambda _: self._serve()

    def open(self, segment: TrainingSegment) -> None:
        """See `Coupling.open`."""
        super().open(segment)
        self._last_report_s = clock.now()  # of the last reported gradient
        self._updates = 0 if self.server is None else self.server.version
        self._talk.open(segment.batches.start, segment.batches.stop, self.sync.bound)

    def tasks(self) -> Iterator[tuple[Task, Batch]]:
        """See `Coupling.tasks`."""
        loader, ranks = self.segment.loader, self.group.size
        orders: dict[int, Integers] = {}
        while True:
            begin = clock.now()
            with timeline.span("pull", "pull", timeline.WAITING):
                task = self._talk.pull()
            self.waited_s += clock.now() - begin
            if task is None:
                return
            epoch, number, part = self.segment.epoch, task.batch, task.part
            if loader.partition != "none":  # the rank's own samples, again and again
                epoch, number, part = (
                    *divmod(self.trainer.steps, loader.batches_per_epoch),
                    self.group.rank,
                )
            if epoch not in orders:
                orders = {epoch: loader.order(epoch)}
            yield task, loader.part(orders[epoch], epoch, number, part, ranks)

    def use(self, task: Task, batch: Batch, report: StepReport, lr: float) -> None:
        """See `Coupling.use`."""
        push = Push(
            batch=task.batch,
            part=task.part,
            global_targets=batch.global_targets,
            lr=lr,
            signal=self.segment.poll_signal(),
            broken=not report.is_finite,
            **{name: getattr(report, name) for name in REPORTED},
        )
        with timeline.span("push", "push", timeline.SEND):
            self._talk.push(push)

    def close(self, totals: Totals) -> tuple[SegmentReport, int]:
        """See `Coupling.close`."""
        self._talk.finish()
        report = SegmentReport(
            totals=totals,
            signal=self.segment.poll_signal(),
            messages=self._talk.messages,
            bytes=self._talk.bytes,
        )
        optimizer, server, batches = self.trainer.optimizer, self.server, 0
        if server is not None:
            batches, lead = server.controller.batches_done, server.controller.longest_lead
            updates = server.version - self._updates
            report = replace(report, updates=updates, staleness=server.staleness, lead=lead)
        optimizer.steps = int(self.group.share(optimizer.steps))
        return report, batches

    def release(self) -> None:
        """See `Coupling.release`; until then only rank 0 has the optimizer's state."""
        for arrays in self.trainer.optimizer.slots().values():
            self._talk.broadcast(arrays)
        self._talk.free()
        for span in self.trainer.model.storage.spans:
            span.parameter.hook = None

    def _serve(self) -> None:
        begin = clock.now()
        self._talk.poll()
        self.served_s += clock.now() - begin

    def _count(self, worker: int, push: Push) -> None:
        """Report an arrived gradient on rank 0; after a signal no further batch begins."""
        assert self.server is not None
        if not push.broken:
            before_s, self._last_report_s = self._last_report_s, clock.now()
            fields = {name: getattr(push, name) for name in REPORTED}
            report = StepReport(steps=1, wall_s=self._last_report_s - before_s, **fields)
            self.segment.progress(Progress(push.batch, worker, report))
        if self.segment.poll_signal():
            self.server.controller.close()


def _of_all(report: StepReport, batch: Batch) -> StepReport:
    """Return a rank's report with its means, and the counts of all ranks, for rates per second."""
    share = batch.global_targets / max(report.targets, 1)
    return replace(
        report,
        samples=batch.global_rows,
        targets=batch.global_targets if report.targets else 0,
        loss_sum=report.loss_sum * share,
        score_sum=report.score_sum * share,
    )


AVERAGES: dict[Any, type[Averaging]] = {"local": LocalSGD, "slowmo": SlowMo, "gossip": Gossip}
"""By mode of synchrony: the class that averages weights; one for each such row of MODES."""


class AveragingCoupling(Coupling):
    """Each rank trains on part `rank` of every batch, and weights are averaged."""

    def __init__(self, trainer: AsynchronousWorker, sync: Sync) -> None:
        super().__init__(trainer, sync)
        expected = "(group, storage, optimizer, every, outer_lr, outer_momentum)"
        given = (self.group, trainer.model.storage, trainer.optimizer)
        outer = (sync.period, sync.outer_lr, sync.outer_momentum)
        kind = AVERAGES.get(sync.sync, sync.sync)
        self._averaging: Averaging = call_custom(kind, "--sync", expected, *given, *outer)
        expect(f"Sync({name_of(sync.sync)})", (self._averaging, Averaging))
        self._check = PeriodicCheck(self.group)

    def open(self, segment: TrainingSegment) -> None:
        """See `Coupling.open`."""
        loader, group = segment.loader, self.group
        if (loader.rank, loader.world) != (group.rank, group.size):
            raise UsageError(
                f"the loader gives part {loader.rank} of {loader.world}, but this is rank"
                f" {group.rank} of {group.size}; call data.Loader(dataset,"
                " batch_size, group)"
            )
        super().open(segment)
        self._averaging.begin()
        self._staleness, self._signal, self._broken = Staleness(group.size), 0, False
        self._stops = False

    def tasks(self) -> Iterator[tuple[Task, Batch]]:
        """See `Coupling.tasks`."""
        segment = self.segment
        with segment.loader.epoch(
            segment.epoch, segment.batches.start, self.trainer.backend
        ) as batches:
            for number in segment.batches:
                self._step_s = clock.now()
                yield Task(number, self.group.rank), next(batches)
                if self._stops:
                    return

    def use(self, task: Task, batch: Batch, report: StepReport, lr: float) -> None:
        """See `Coupling.use`."""
        trainer, segment = self.trainer, self.segment
        optimizer, number = trainer.optimizer, segment.number(task.batch)
        if not report.is_finite:
            self._broken = True
        elif report.targets:
            scale(trainer.model.storage.grads, batch.global_targets / report.targets)
            optimizer.lr = lr
            with timeline.span("update", "update"):
                optimizer.step()
        else:
            optimizer.steps += 1  # equal on all ranks
        if self.group.is_root and not self._broken:
            segment.progress(Progress(task.batch, 0, _of_all(report, batch)))
        self._staleness.add(self.group.rank, self._averaging.steps_since_average(number))
        begin = clock.now()
        with self.group.collective("average"):
            self._averaging.after_step(number, batch.own_targets)
        # After the last batch all ranks meet anyway, and exchange signals and errors with their
        # reports.
        if task.batch + 1 < segment.batches.stop:
            with self.group.collective("signals"):
                notes = (
                    self._check.gather(
                        [segment.poll_signal(), self._broken], clock.now() - self._step_s
                    )
                    or []
                )
            self._signal = max([self._signal, *(int(signal) for signal, _ in notes)])
            self._stops = self._signal > 0 or any(broken for _, broken in notes)
        self.waited_s += clock.now() - begin

    def close(self, totals: Totals) -> tuple[SegmentReport, int]:
        """See `Coupling.close`."""
        report = SegmentReport(
            totals=totals,
            disagreement=self._averaging.synchronize(),
            signal=max(self._signal, self.segment.poll_signal()),
            messages=self._averaging.messages,
            bytes=self._averaging.bytes,
            updates=totals.steps,
            staleness=self._staleness if isinstance(self._averaging, LocalSGD) else None,
        )
        return report, totals.steps

    def release(self) -> None:
        """See `Coupling.release`."""
        self._averaging.release()


class AsynchronousWorker(Trainer, read_once="coupling sync"):
    """Trains and evaluates a model on ranks that meet only now and then. Making one is collective.

    Args:
        model: initialized; all ranks begin with rank 0's parameters and buffers.
        optimizer: made over `model.storage`.
        group: all ranks.
        sync: the mode; see `synchrony.sync`.
        loss: see `Worker`.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        numerics: the precision, and the largest gradient norm of one worker's part.
        seed: of the run; keys dropout masks.
        backend: of the model; NumPy by default.
        slow: minimum step times, and stragglers.

    Attributes:
        coupling: the exchange between the ranks.
        steps: the number of this rank's steps; a resumed run continues the count.

    Batch normalization takes the statistics of a worker's own part; running statistics are averaged
    when the ranks meet.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, a model with a strategy, a
            loss that is a mean, and a mode that excludes this number of ranks.

    Example:
        >>> def program(group):
        ...     train, _ = data.load("iris")
        ...     model = models.mlp(train.sample_shape, 3, hidden=[8]).initialize(seed=0)
        ...     worker = nnmpi.AsynchronousWorker(
        ...         model, optim.SGD(model.storage, lr=0.1), group, nnmpi.Sync("ssp", staleness=2)
        ...     )
        ...     loader = data.Loader(train, 30, group)
        ...     batches = loader.batches_per_epoch
        ...     segment = worker.run(loader, 0, 0, batches, step=0, lr=lambda step: 0.1)
        ...     return segment.totals.steps
        >>> nnmpi.simulate(program, ranks=3)[0]
        4
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        sync: Sync,
        loss: SumLoss | str | None = None,
        evaluation_loss: SumLoss | None = None,
        numerics: Numerics = DEFAULT_NUMERICS,
        seed: int = 0,
        backend: Backend | None = None,
        slow: Slow = NOT_SLOW,
    ) -> None:
        self.options = self.sync = sync
        super().__init__(
            model, optimizer, group, loss, evaluation_loss, numerics, seed, backend, slow
        )
        expect("nnmpi.AsynchronousWorker(model, optimizer, group, sync)", (sync, Sync))
        if not sync.asynchronous:
            raise UsageError("a synchronous run is done by nnmpi.Worker; give Sync another mode")
        if optimizer.ema:
            raise UsageError(
                f"an average of the weights (ema) needs ranks in step, not {name_of(sync.sync)};"
                " leave it out"
            )
        if self.precision == "fp16":
            raise UsageError(
                "with fp16 all ranks skip an update that overflows on one of them, but with"
                f" {name_of(sync.sync)} they do not synchronize in every step; use bf16, which"
                " needs no loss scaling, or a synchronous run without servers"
            )
        if sync.has_server and not optimizer.elementwise:
            raise UsageError(
                f"with {sync.sync} a server updates flat arrays, but {type(optimizer).__name__}"
                f" takes whole matrices; give sync {without_server()}, or adamw"
            )
        sync.check(group.size)
        with agreed(group):  # only rank 0 has hooks in a model
            check_free(model, group)
        check_same_model(group, model)
        broadcast_state(model, group)
        self._check = StepWitness(
            model, world=group, copies=group, alike=group, replicas=group, is_equal=True
        )
        self.coupling = (ServerCoupling if sync.has_server else AveragingCoupling)(self, sync)
        self.reporters = self.coupling.reporters
        self._passes = Passes(self)
        self._passes.poll = self.coupling.serve
        self.steps = -1
        self._unreported = SegmentReport()  # of the segments since the last summary

    def run_segment(self, segment: TrainingSegment) -> SegmentReport:
        """See `Trainer.run_segment`."""
        group, coupling = self.group, self.coupling
        self.note_source(segment.loader.source)
        with group.collective("begin"):
            # again, as parameters may be frozen by now; also no earlier work counts as waiting
            check_same_model(group, self.model)
            where = f"step {segment.step}", f"epoch {segment.epoch}", f"{segment.batches}"
            source = segment.loader.source
            require_equal(
                group,
                [*source.texts(), f"{source.transformed()}", *where],
                "the ranks train on different data, or from other places",
                SAME_DATA,
                UsageError,
            )
        begin = ended = clock.now()
        totals, broken, trained = Totals(), "", 0  # trained: steps with rows
        self.steps = segment.step if self.steps < 0 else self.steps
        coupling.open(segment)
        for task, batch in coupling.tasks():
            started, number = clock.now(), segment.number(task.batch)
            lr = segment.lr(number)
            waited_s, coupling.waited_s, coupling.served_s = coupling.waited_s, 0.0, 0.0
            group.comm.world.step = number
            report = self.compute(batch, number)
            self.slow.wait(
                clock.now() - started - coupling.served_s,
                group.rank,
                self.steps,
                coupling.sleep_until,
            )
            self.steps += 1
            if not report.is_finite and not broken:
                broken = self._explain(batch, report, number)
            before, ended = ended, clock.now()
            report.compute_s, report.sync_s = ended - started, waited_s
            report.input_s, report.wall_s = started - before - waited_s, ended - before
            totals.add(report)
            trained += report.targets > 0
            coupling.use(task, batch, report, lr)
        totals.sync_s += coupling.waited_s
        with group.collective("end"):
            closing = clock.now()
            local, batches = coupling.close(totals)
            totals.sync_s += clock.now() - closing
            segment_report = combine_reports(group, local, broken, batches, clock.now() - begin)
        average_buffers(self.model, group, trained)
        self._unreported = self._unreported.plus(segment_report)
        return segment_report

    def compute(self, batch: Batch, step: int) -> StepReport:
        """Compute a part's gradient into `storage.grads`, divided by the full batch's targets.

        The gradients of all parts of a batch add up to that of its mean loss.

        Args:
            step: the number of the batch in the run, which keys dropout: the masks are those of a
                synchronous run.

        Returns:
            The sums of the part, and the norm of the gradient of its mean loss, before clipping.
        """
        refuse_inside("a worker's step")
        storage = self.model.storage
        with use_precision(self.precision):
            storage.zero_grad()
            now = self._passes.begin(batch, step)
            now.train()
            storage.finish_gradients()
            (loss_sum, score_sum, targets), norm = now.send_sums()(), 0.0
            if targets:
                norm = global_norm(storage.grads) * (batch.global_targets / targets)
                if self.clip is not None:
                    scale(storage.grads, coefficient(norm, self.clip))
        return StepReport(
            steps=1,
            samples=len(batch.y),
            targets=targets,
            loss_sum=loss_sum,
            score_sum=score_sum,
            grad_norm=norm,
        )

    def _explain(self, batch: Batch, report: StepReport, step: int) -> str:
        """Return the sentence about a non-finite gradient, after computing it again."""
        with use_precision(self.precision):
            origin = locate_nonfinite(self.model, *self._passes.suspect(batch, step, isfinite))
            return nonfinite_message(step + 1, report.loss, origin, f"rank {self.group.rank}")

    def evaluate(self, batches: Iterable[Batch], *, metrics: Any = ()) -> Evaluation:
        """See `Trainer.evaluate`."""
        self.model.storage.check_tree()
        passes, given = self._passes, map(self._checked, to_evaluate(batches))
        with use_precision(self.precision):
            return evaluate_all(
                self.group,
                given,
                lambda batch: passes.evaluate(batch).counts,
                passes.evaluated,
                passes.measure(metrics),
                self._check,
            )

    def _checked(self, batch: Batch) -> Batch:
        self.check_source(batch.source)
        return batch

    def summary(self) -> list[str]:
        """Return lines about staleness and sent bytes since the last call."""
        text, self._unreported = self._unreported, SegmentReport()
        return describe_segments(text)

    def release(self) -> None:
        """See `Trainer.release`."""
        self.coupling.release()
        super().release()


def combine_reports(
    group: Group, local: SegmentReport, broken: str, batches: int, seconds: float
) -> SegmentReport:
    """Return all ranks' report of a segment. Collective.

    Args:
        local: this rank's report; each of its gradients is a step.
        broken: the sentence about a non-finite loss or gradient; otherwise empty.
        batches, seconds: of the segment; rank 0's are used.

    Raises:
        DivergenceError: on all ranks, when one of them got a non-finite value.
    """
    values = {
        **vars(local),
        "totals": vars(local.totals),
        "staleness": local.staleness and local.staleness.to_json(),
    }
    gathered = group.gather([values, broken, batches, seconds])
    for _, sentence, *_ in gathered:
        if sentence:
            raise DivergenceError(sentence)
    for values, *_ in gathered:
        values["totals"] = Totals(**values["totals"])
        values["staleness"] = values["staleness"] and Staleness.from_json(values["staleness"])
    report = reduce(SegmentReport.plus, [SegmentReport(**values) for values, *_ in gathered])
    _, _, batches, seconds = gathered[0]
    totals = report.totals.mean_over(group.size, batches)
    return replace(report, totals=replace(totals, steps=batches, wall_s=seconds))


def average_buffers(model: Module, group: Group, steps: int) -> None:
    """Average running statistics over the ranks, weighted by their steps. Collective.

    A rank's own statistics are of its own samples alone. Without any step nothing changes.
    """
    total = group.sum_floats([steps])[0]
    if group.size == 1 or not total:
        return
    average((buffer.data for _, buffer in model.named_buffers()), group, steps / total)


def describe_segments(total: SegmentReport) -> list[str]:
    """Describe segments: staleness, drift of weights and workers, bytes sent."""
    steps = total.batches
    if not steps:
        return []
    far, stale, lead = total.disagreement, total.staleness, total.lead
    words = []
    if stale is not None:
        counts = [histogram.total() for histogram in stale.histograms]
        shown = ", ".join(map(str, counts[:SHOWN_WORKERS])) + (
            ", ..." if len(counts) > SHOWN_WORKERS else ""
        )
        words = [f"staleness {stale.mean():.2f} on average, at most {stale.largest()}"]
        words += [f"at most {lead} {'step' if lead == 1 else 'steps'} ahead"] if lead else []
        words += [f"steps by worker: {shown}"]
    words += (
        [f"weights differed by {100 * far:.2g} % before they were averaged at the end"]
        if far
        else []
    )
    sent = (
        f"{total.messages / steps:.3g} messages with {total.bytes / steps / 2**20:.3g} MiB per"
        " step, over all ranks"
    )
    return [*(["; ".join(words)] if words else []), sent]
