"""Worker: a model, an optimizer and the parallel strategies put together, with one call per update.

    worker = Worker(model, optimizer, group)
    for batch in loader.epoch(0):
        report = worker.step(batch)

    worker.run(loader, 0, 0, loader.batches_per_epoch, step=0, lr=lambda step: 0.1)  # as any Trainer does it

Every rank runs the same calls and gets the same reports: global means, not its own share. With an
`arrangement` the model may be cut and sharded (see `compose.arrange`); without one, every rank has
all of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite, nan
from statistics import fmean
from textwrap import wrap
from typing import Any

import numpy as np

import nnmpi.clock as clock
import nnmpi.timeline as timeline
from nnmpi.backend.backend import Backend
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.precision import precision as mode_of
from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.comm.agreement import PeriodicCheck
from nnmpi.comm.gradients import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose import refusals
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.exchange import make_exchange
from nnmpi.compose.layout import DEFAULT_EXCHANGE, DEFAULT_NUMERICS, GradientExchange, Numerics
from nnmpi.compose.losses import SumLoss, to_device
from nnmpi.compose.passes import Passes, evaluate_all
from nnmpi.compose.stats import StepReport, Totals
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment
from nnmpi.data.dataset import count_targets, read_array
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import Cut
from nnmpi.errors import ShapeError, UsageError
from nnmpi.memory.ledger import (
    ACTIVATIONS,
    BATCHES,
    COMMUNICATION,
    GRADIENTS,
    PARAMETERS,
    STATE,
    MemoryLedger,
)
from nnmpi.nn.chain import ModelPart
from nnmpi.nn.module import Module
from nnmpi.ops.collectives import CATEGORY
from nnmpi.optim.clip import LossScale, coefficient
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.replication import check_free
from nnmpi.parallel.zero.storage import ShardedStorage, predict_bytes
from nnmpi.synchrony.slow import NOT_SLOW, Slow
from nnmpi.timeline import COUNTER, Timeline, TraceEvent, current, recording
from nnmpi.units import format_bytes

_AS_IT_IS, _NOTHING = nullcontext(), nullcontext[Sequence[TraceEvent]](())


class Worker(Trainer):
    """Trains and evaluates a model on the ranks of a group. Making one is collective.

    Args:
        model: initialized; `arrangement.model` where there is an arrangement.
        optimizer: made over `model.storage`.
        group: all ranks; each batch is shared out over them, or over the replicas of the
            arrangement.
        loss: "cross-entropy" (the default), "mse", "mae", "huber" or "bce", see `compose.losses`;
            or a function (logits, labels) -> a loss for each label, or their sum if it has an
            argument `reduction="sum"`. The sum is divided by the labels of the global batch that
            count, once: those of whole numbers that are not negative (with labels of another kind,
            by its samples). Where `arrangement.classes` are shared out, it must be
            `compose.losses.sum_cross_entropy(arrangement)`.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        exchange: how gradients are summed over the replicas, and whether the update is fused with
            that.
        numerics: the precision, and the largest length of the gradient.
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.
        arrangement: how the model lies on the ranks; None for all of it on each.
        synchronous_sends: let no message of a pipeline leave before its receive is posted (for
            tests).
        slow: how long steps last at least, and stragglers.

    Attributes:
        scaling: the loss scale of fp16; None otherwise.
        exchange: what becomes of gradients; see `compose.exchange`.
        parallel: the strategy in it.
        notice: what is not as it was asked for, and why; else empty.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, a loss that is a mean, and
            options that do not go together; see also `parallel.DataParallel`.
    """

    in_step = True

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        loss: SumLoss | str | None = None,
        evaluation_loss: SumLoss | None = None,
        exchange: GradientExchange = DEFAULT_EXCHANGE,
        numerics: Numerics = DEFAULT_NUMERICS,
        seed: int = 0,
        backend: Backend | None = None,
        arrangement: Arrangement | None = None,
        synchronous_sends: bool = False,
        slow: Slow = NOT_SLOW,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            group,
            loss,
            evaluation_loss,
            numerics,
            seed,
            backend,
            slow,
            arrangement,
        )
        self.scaling = LossScale() if self.precision == "fp16" else None
        where = self.arrangement
        self._sequence, self._fixed = where.sequence, where.layout.fixed
        self._shares = max(where.mesh.tp.size, where.mesh.sp.size) > 1
        self._checks = exchange.check
        check_pairs(self, arrangement, exchange.fused_update)
        check_free(model)  # before anything is moved
        self.exchange = make_exchange(self, exchange)
        self.parallel, self.notice = self.exchange.parallel, self.exchange.notice
        self.passes = Passes(self, self.exchange, synchronous_sends)
        self.ledger, self._recorded_bytes = MemoryLedger(self._predict_memory()), 0
        self._batch_bytes = -1
        self._at_once = 1  # microbatches whose activations there are
        self._waiting = 0  # bytes of what others wait with
        # of the largest batch of those whose steps were counted
        self._counted_bytes: int | None = None
        self.ledger.note(self._held_memory())
        self._signals = PeriodicCheck(group)
        # what values were drawn in, between which a step's arrays would leave holes
        return_freed_memory()

    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself.
        Collective.

        A second call does nothing.
        """
        self.passes.release()
        super().release()

    def step(self, batch: Batch | Any, y: Any = None, lr: float | None = None) -> StepReport:
        """Do one update with this rank's part of a global batch; collective.

            for batch in loader: worker.step(batch)
            worker.step(x, y)                           rows of this replica's, as many as it likes,
                                                        and their labels

        On a device the host waits once: when the gradients are summed, it reads loss, right answers
        and the gradient's length in one copy. So a gradient that is not finite is found before the
        update, and clipping needs no second wait; the update itself, and the next batch's copy, go
        on while the host prepares the next step.

        A batch of several microbatches (see `data.Loader`) is one update: their gradients are added
        up. (With schedule pipedream each microbatch is one; the gradient's length is then not
        known, and reported as NaN.)

        Args:
            batch: a loader's; or samples (rows, *sample_shape), arrays or what NumPy reads: floats
                become the weights' dtype. Replicas' rows together are the global batch; ranks of
                one replica give the same.
            y: their labels (rows, ...), where samples are given.
            lr: the learning rate; the optimizer's own by default.

        Raises:
            DivergenceError: on all ranks, when the loss or the gradient is not finite; the weights
                are unchanged then (running statistics are not, and with pipedream the weights are
                not either). With fp16, only when the gradient overflows at the smallest loss scale,
                too.
            CommError: with `GradientExchange.check`, on all ranks, when weights differ.
            UsageError: for a batch not shared out over the replicas as needed; after `release`; in
                a compiled step.
        """
        begin = clock.now()
        self.parallel.check_not_released()
        if not hasattr(batch, "cuts"):
            batch = self._batch_of(batch, y)
        elif y is not None:
            raise UsageError("the learning rate goes by its name: worker.step(batch, lr=0.1)")
        if lr is not None:
            self.optimizer.lr = lr
        if self._sequence is not None:
            batch = self._sequence.part(batch)
        if self.backend.is_device:  # before what the pass allocates is counted
            there = to_device(batch, self.model, self.backend)
            batch = replace(batch, x=there.x, y=there.y, host_y=there.labels)
        self.model.storage.zero_grad()
        step, factor = self.optimizer.steps, 1.0 if self.scaling is None else self.scaling.value
        world, met_s = self.group.comm.world, self.group.comm.world.met_s
        world.step = step
        nbytes = batch.x.nbytes + batch.y.nbytes
        drawn = current() is not None
        if drawn or nbytes != self._batch_bytes:
            self._batch_bytes = nbytes
            self._note_memory({BATCHES: nbytes})
        # then each pass is looked at, and none replayed
        counts = self._is_to_count(nbytes) or drawn
        with self._deterministic():
            with (
                self._watching() if self._shares else _NOTHING as exchanged,
                self._counting() if counts else _AS_IT_IS,
            ):
                report = self.passes.train(batch, step, factor, not counts)
                if report.passed is not None:
                    self._at_once = (
                        1 if self.arrangement.layout.recomputes else report.passed.peak_live
                    )
                    self._waiting = report.passed.peak_waiting
            if self.passes.replay.held_bytes != self._recorded_bytes:  # there are new recordings
                self._recorded_bytes = self.passes.replay.held_bytes
                self._note_memory({ACTIVATIONS: self._recorded_bytes})
            numbers = self.passes.sums()  # the update is not waited for
            if exchanged:
                report.count(_exchanged(exchanged))
            if self.slow:
                # here all ranks meet, so that the others wait for a slow one in the same step
                paused_s = self.passes.paused_s
                computed_s = clock.now() - begin - (world.met_s - met_s) - report.wait_s - paused_s
                self.slow.wait(computed_s, self.group.rank, step, waited_s=paused_s)
            (report.loss_sum, report.score_sum, targets), norm, met = self.exchange.meet(numbers)
        report.count(met)
        norm = report.grad_norm = norm / factor
        if targets != batch.global_targets:
            names = (
                "group.rank and group.size"
                if self._is_own
                else "arrangement.data_rank and arrangement.data_ranks"
            )
            raise UsageError(
                f"the ranks' parts of this batch have {targets:.0f} labels that count together, but"
                f" the global batch {batch.global_targets}; give Loader the rank and world of the"
                f" replica ({names}), or a Batch of your own the targets of each microbatch"
            )
        # A value that overflowed anywhere makes the norm inf or NaN, so it is the test of the whole
        # gradient. Loss and norm are of all ranks' sums, so all ranks decide alike here, without a
        # message. PipeDream has no norm.
        if not isfinite(report.loss_sum) or not (self.passes.updates or isfinite(norm)):
            # With fp16 a gradient that overflowed says that the loss scale was too large: leave
            # this update out.
            report.skipped = (
                isfinite(report.loss_sum) and self.scaling is not None and self.scaling.shrink()
            )
            if not report.skipped:  # divergence: the step is computed again, to find where it began
                with self._deterministic():
                    raise self.passes.explain(batch, step, report.loss)
        elif not self.passes.updates:
            # else it is PipeDream's, which has updated after each microbatch
            clipped = 1.0 if self.clip is None else coefficient(norm, self.clip)
            if self.scaling is not None:
                self.scaling.grow()
            with timeline.span("update", "update"):
                self.exchange.update(clipped / factor)
        if self._checks:
            self.exchange.check_equal()
        if isfinite(report.predicted_s):
            report.predicted_steps = 1
        else:
            report.predicted_s = 0.0
        report.loss_scale, report.wall_s = factor, clock.now() - begin
        report.sync_s = world.met_s - met_s
        report.compute_s = report.wall_s - report.sync_s - report.wait_s
        return report

    @contextmanager
    def _watching(self) -> Iterator[Sequence[TraceEvent]]:
        """Note what layers exchange in the block; where a trace is recorded, that serves."""
        found: list[TraceEvent] = []
        trace = current() or Timeline()
        first = len(trace.events)
        with recording(trace):
            yield found
        found += trace.events[first:]

    def _held_memory(self) -> dict[str, int]:
        """Return what this rank holds between steps; of what stands once per node, its part."""
        storage, shares = self.model.storage, self.exchange.holders
        parameters, gradients, rest = storage.held_bytes()
        state = self.optimizer.state_bytes // shares
        return {
            PARAMETERS: parameters // shares,
            GRADIENTS: gradients,
            STATE: state,
            COMMUNICATION: rest,
        }

    def _predict_memory(self) -> dict[str, int]:
        """Return what formulas say of it; nothing where parameters stand once per node by a fused
        update.
        """
        where, storage = self.arrangement, self.model.storage
        if self.exchange.is_fused or len(set(storage.groups)) > 1 or not storage.data:
            return {}
        ranks, layout = where.mesh.replicas, where.layout
        once = isinstance(storage, ShardedStorage) and storage.stands_once
        found = predict_bytes(
            *(self.model, layout.zero, ranks.rank, ranks.size, storage.data[0].dtype.itemsize),
            *(len(self.optimizer.slots()), layout.unit_bytes, once),
            away=layout.offload_state,
        )
        return {PARAMETERS: found.parameters, GRADIENTS: found.gradients, STATE: found.optimizer}

    def _is_to_count(self, nbytes: int) -> bool:
        """Return whether to count what a step allocates, given the bytes of its batch; see
        `memory.ledger`.
        """
        if self._counted_bytes is None:
            self._counted_bytes = -1
        elif nbytes > self._counted_bytes:
            self._counted_bytes = nbytes
            return True
        return False

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with self.ledger.measuring(lambda most: most * self._at_once + self._waiting):
            yield
        self._note_memory(self._held_memory(), self.ledger.report().peaks[ACTIVATIONS])

    def _note_memory(self, held: Mapping[str, int], activations: int = 0) -> None:
        """Note what is held, and draw it where a trace is recorded."""
        self.ledger.note(held)
        timeline = current()
        if timeline is not None:
            now = timeline.clock()
            amounts = {**self.ledger.report().held, ACTIVATIONS: activations}
            timeline.add("memory", COUNTER, COUNTER, now, now, amounts)

    def _run(self, segment: TrainingSegment) -> SegmentReport:
        totals, signal, ended = Totals(), 0, clock.now()
        with segment.loader.epoch(segment.epoch, segment.batches.start, self.backend) as batches:
            for number in segment.batches:
                step, begin = segment.number(number), clock.now()
                with timeline.span("input", "input", timeline.WAITING):
                    batch = next(batches)
                input_s = clock.now() - begin
                with timeline.span(f"step {step}", "step", "steps"):
                    report = self.step(batch, lr=segment.lr(step))
                # a step lasts from the end of the one before to its own
                before, ended = ended, clock.now()
                report.input_s, report.wall_s = input_s, ended - before
                totals.add(report)
                segment.progress(Progress(number, 0, report, report.grad_norm, totals.wall_s))
                answers = self._signals.gather(segment.poll_signal(), report.wall_s)
                signal = max(map(int, answers)) if answers else 0
                if signal:
                    break
        return SegmentReport(totals, signal)

    def details(self, report: Totals) -> dict[str, Any]:
        """See `Trainer.details`."""
        assert isinstance(report, StepReport)
        more: dict[str, Any] = {"staleness": fmean(report.staleness)} if report.staleness else {}
        more |= self.ledger.peaks_by_name()
        if self.scaling is not None:
            more |= {"loss_scale": report.loss_scale, "skipped_steps": self.scaling.skipped}
        return more

    def _batch_of(self, x: Any, y: Any) -> Batch:
        """Return the batch of which each replica has these rows; collective."""
        if y is None:
            what = type(x).__name__
            raise UsageError(
                f"step takes a batch of a data.Loader, or samples and labels, not a {what} alone: "
                "for batch in loader: worker.step(batch), or worker.step(x, y)"
            )
        samples, labels = (np.atleast_1d(read_array(each, "step")) for each in (x, y))
        if len(samples) != len(labels):
            raise ShapeError(
                f"{len(samples)} samples have {len(labels)} labels; give one for each sample"
            )
        replicas, data = self.arrangement.mesh.replicas, self.model.storage.data
        # a stage without parameters reads shapes alone
        dtype = data[0].dtype if data else np.dtype("float32")
        samples = samples.astype(dtype, copy=False) if samples.dtype.kind == "f" else samples
        labels = labels.astype(dtype if labels.dtype.kind == "f" else np.int64, copy=False)
        counts = replicas.gather([len(samples), count_targets(labels)])
        first = sum(rows for rows, _ in counts[: replicas.rank])
        return Batch(
            x=np.ascontiguousarray(samples),
            y=labels,
            indices=np.arange(first, first + len(samples)),
            cuts=(Cut(0, len(samples), first),),
            global_rows=sum(rows for rows, _ in counts),
            epoch=0,
            number=self.optimizer.steps,
            targets=(sum(targets for _, targets in counts),),
        )

    def evaluate(self, batches: Iterable[Batch] | Any, y: Any = None) -> Totals:
        """See `Trainer.evaluate`; or of this replica's samples and their labels."""
        batches = batches if y is None else [self._batch_of(batches, y)]
        with self._deterministic():
            if self._sequence is None:
                return evaluate_all(self.group, batches, self.passes.evaluate)
            parts = map(self._sequence.part, batches)
            return evaluate_all(self.group, parts, self.passes.evaluate, self._sequence.size)

    def scalars(self) -> dict[str, Any]:
        """See `Trainer.scalars`; with fp16 the loss scale is there, too."""
        return super().scalars() | (
            {} if self.scaling is None else {"loss_scale": self.scaling.state()}
        )

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """See `Trainer.load_scalars`."""
        super().load_scalars(values)
        if self.scaling is not None and "loss_scale" in values:  # else it begins anew
            self.scaling.load(values["loss_scale"])

    def explain_replay(self) -> str:
        """Return why the last pass was not replayed, as `nnmpi.compile` would do it; nothing if it
        was.
        """
        return self.passes.replay.explain()

    def describe_exchange(self) -> str:
        """See `Trainer.describe_exchange`."""
        return self.exchange.describe()

    def summary(self) -> list[str]:
        """Return lines about the pipeline's passes, if there are any."""
        return self.passes.summary()

    def memory(self) -> list[str]:
        """See `Trainer.memory`: of each kind on rank 0."""
        found = self.ledger.report()
        peaks = [int(peak) for peak in self.group.gather(found.peak)]
        kinds = ", ".join(
            f"{kind} {format_bytes(nbytes)}" for kind, nbytes in found.peaks.items() if nbytes
        )
        wrong = [kind for kind, nbytes in found.predicted.items() if nbytes != found.peaks[kind]]
        agrees = (
            f"; predicted otherwise: {', '.join(wrong)}"
            if wrong
            else ", as predicted"
            if found.predicted
            else ""
        )
        rank = peaks.index(max(peaks))
        own = f"; {format_bytes(found.peak)} on rank 0" if rank else ""
        most = f"memory at the peak {format_bytes(max(peaks))} on rank {rank}{own}"
        return [f"{most}{agrees}:", *wrap(kinds, 94, initial_indent="  ", subsequent_indent="  ")]

    def _deterministic(self) -> AbstractContextManager[object]:
        """Compute in the worker's precision; with reduction "fixed" also to the same bits on any
        number of replicas.

        The bits of a product or a sum of squares may depend on how many threads BLAS has.
        """
        refuse_inside("a Worker's step or evaluation")
        if self.precision == mode_of() and self.scaling is None and not self._fixed:
            return _AS_IT_IS
        stack = ExitStack()
        stack.enter_context(use_precision(self.precision))
        if self.scaling is not None:  # an overflow needs no warning: the gradient's length shows it
            stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        if self._fixed:
            stack.enter_context(loaded_pools().limit(limits=1, user_api="blas"))
        return stack


def _exchanged(events: Sequence[TraceEvent]) -> Traffic:
    """Return what sharded layers exchanged, of what a timeline noted."""
    events = [event for event in events if event.category == CATEGORY]
    count = sum(int((event.args or {}).get("bytes", 0)) for event in events)
    return Traffic(0.0, count, len(events), nan if events else 0.0)


def check_pairs(worker: Worker, arrangement: Arrangement | None, fused_update: bool | None) -> None:
    """Refuse options that do not go together, and a model that is not the arrangement's.

    Raises:
        UsageError: saying which.
    """
    model, backend, where = worker.model, worker.backend, worker.arrangement
    mesh = where.mesh.mesh
    given = replace(where.layout, dp=mesh.dp, pp=mesh.pp, tp=mesh.tp).features()
    given |= (
        {refusals.STATE_OUT: "state out of memory"} if model.storage.state_store is not None else {}
    )
    given |= {refusals.FUSED: "the fused update"} if fused_update else {}
    given |= (
        {} if worker.optimizer.elementwise else {refusals.MATRICES: type(worker.optimizer).__name__}
    )
    given |= {refusals.DEVICE: str(backend.device)} if backend.is_device else {}
    given |= {refusals.FP16: "fp16"} if worker.scaling is not None else {}
    given |= {refusals.CLIP: "clip"} if worker.clip is not None else {}
    refusals.refuse(given)
    if arrangement is None:
        if isinstance(model, ModelPart) or any(
            parameter.region is not None for parameter in model.parameters()
        ):
            raise UsageError(
                "this rank has a part of the model alone, which the other ranks do not share; give"
                " the Worker the arrangement that made it: arrangement=where"
            )
        return
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if arrangement.layout.zero and not isinstance(model.storage, ShardedStorage):
        raise UsageError(
            f"with zero {arrangement.layout.zero} the model's storage is shared out from the"
            " beginning; initialize it with storage=arrangement.storage"
        )
