"""Worker: model, optimizer and parallel strategies behind one call per update.

    worker = Worker(model, optimizer, group)
    for batch in loader.epoch(0):
        report = worker.step(batch)

    batches = loader.batches_per_epoch
    worker.run(loader, 0, 0, batches, step=0, lr=lambda step: 0.1)  # the interface of every Trainer

All ranks make the same calls and get the same reports: global means, not a rank's share. With an
`arrangement` the model may be sharded (see `compose.arrange`). Without one, every rank holds the
full model.

A step hands its gradients to its `exchange` (buckets, fused update, ZeRO or fixed order, see
`compose.exchange`). `step` names no strategy; `check_pairs` and the forecast of memory do.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import isfinite, prod
from statistics import fmean
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.backend import Backend
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.precision import precision as mode_of
from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.base.command import as_given, spelled
from nnmpi.base.errors import LayoutError, NnmpiError, ShapeError, UsageError, expect
from nnmpi.base.launcher import describe_idle
from nnmpi.base.loop import Reached, last_read
from nnmpi.base.timeline import COUNTER, current
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import PeriodicCheck, agreed
from nnmpi.comm.group import Group, simulated_ranks
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from nnmpi.comm.world import Traffic
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.evaluation import as_many, evaluate_all, refuse_uneven
from nnmpi.compose.exchange import make_exchange
from nnmpi.compose.layout import (
    DEFAULT_EXCHANGE,
    DEFAULT_NUMERICS,
    GradientExchange,
    Numerics,
    check_layout,
)
from nnmpi.compose.losses import SumLoss
from nnmpi.compose.passes import BatchPass, Passes
from nnmpi.compose.stats import StepReport, Totals
from nnmpi.compose.trainer import (
    Progress,
    SegmentReport,
    Trainer,
    TrainingSegment,
    to_evaluate,
)
from nnmpi.data.dataset import count_targets, read_array
from nnmpi.data.loader import Batch
from nnmpi.data.names import agree, of_table
from nnmpi.data.sampler import Cut
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
from nnmpi.optim.clip import LossScale, coefficient, device_coefficient
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.replication import check_free
from nnmpi.parallel.witness import StepWitness
from nnmpi.parallel.zero.storage import ShardedStorage, predict_bytes

_UNCHANGED = nullcontext()


class _Started(NamedTuple):
    """A step whose gradients are being computed.

    Attributes:
        batch, place, now: of this rank; its place in a loader's data; its pass.
        lr, step, factor: the learning rate, the number of the update, the scale of the loss.
        report: to be completed.
        read: waits for the step's numbers.
        traffic, begin, collective_s: its account, and the times when it began.
        is_steady: whether its memory was not noted: it is like that of the step before.
    """

    batch: Batch
    place: Reached
    now: BatchPass
    lr: float
    step: int
    factor: float
    report: StepReport
    read: Callable[[], tuple[float, float, int]]
    traffic: Traffic
    begin: float
    collective_s: float
    is_steady: bool


class Worker(Trainer, fixed="scaling exchange parallel notice passes ledger"):
    """Trains and evaluates a model on the ranks of a group. The constructor is collective.

    Args:
        model: initialized; `arrangement.model` if there is an arrangement.
        optimizer: made over `model.storage`.
        group: all ranks. Each batch is split over them, or over the replicas of the arrangement.
        loss: "cross-entropy" (the default), "mse", "mae", "huber" or "bce", see `compose.losses`;
            or a function (logits, labels) -> one loss per label, or their sum if it takes
            `reduction="sum"`. The sum is divided once, by the valid labels of the global batch:
            integer labels are valid unless negative; for other labels, samples are counted. With
            class weights it is divided by those of the valid labels. With sharded classes
            (`arrangement.classes`) it must be `compose.losses.SumCrossEntropy(arrangement)`.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        exchange: how gradients are summed over the replicas, and whether the update is fused with
            the sum.
        numerics: the precision, and the largest gradient norm.
        seed: of the run; keys dropout masks.
        backend: device of the model; NumPy by default.
        arrangement: how the model is sharded; None for a full replica on every rank.
        synchronous_sends: send a pipeline's message only after its receive is posted (for tests).
        slow: minimum duration of steps, and stragglers.

    Attributes:
        scaling: the loss scale of fp16; None otherwise.
        exchange: sums gradients and updates weights; see `compose.exchange`.
        parallel: the strategy that the exchange uses.
        notice: the options that could not be honored, and why; and of one rank alone, which cores
            stand idle, and the command that uses them. Empty if there are none.

    Raises:
        UsageError: for an optimizer over arrays of another model, a loss that is a mean, and
            incompatible options; see also `parallel.DataParallel`.

    Example:
        >>> def program(group):
        ...     model = models.mlp((4,), 3, hidden=[16]).initialize(seed=0)
        ...     worker = nnmpi.Worker(model, optim.SGD(model.storage, lr=0.1), group)
        ...     report = worker.step(np.ones((8, 4)), np.zeros(8, int))
        ...     return report.samples, round(report.loss, 4)
        >>> nnmpi.simulate(program, ranks=2)
        [(16, 0.905), (16, 0.905)]
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
        expect("Worker(..., exchange=GradientExchange(...))", (exchange, GradientExchange))
        expect("Worker(..., numerics=Numerics(...))", (numerics, Numerics))
        self.options = exchange
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
        self._fixed = self.arrangement.layout.fixed
        check_pairs(self, arrangement)
        # before the exchange moves parameters into its own storage
        check_free(model, group, bool(self.arrangement.layout.zero))
        self.exchange = make_exchange(self, exchange)
        self.parallel = self.exchange.strategy
        try:
            self.passes = Passes(self, self.exchange, synchronous_sends)
        except NnmpiError:  # on all ranks
            self.exchange.release()
            raise
        mesh = self.arrangement.mesh
        self._check = StepWitness(
            model,
            world=mesh.world,
            # the stages of a pipeline have different parameters
            copies=mesh.replicas if self.arrangement.is_pipeline else mesh.world,
            alike=mesh.replicas,
            replicas=mesh.dp,
            is_equal=self.parallel.keeps_equal,
            shards=mesh.tp if mesh.tp.size > 1 else None,
            sharers=self.arrangement.same_rows,
            optimizer=optimizer,
        )
        self.ledger, self._recorded_bytes = MemoryLedger(self._predict_memory()), 0
        self._batch_bytes = -1
        self._counted_bytes: int | None = None  # of the largest batch that was counted
        self.ledger.note(self._held_memory())
        self._signals = PeriodicCheck(group)
        self._repeated = 0  # steps that were done again, to find out why they diverge
        # Drawing initial values left free blocks in the heap. A step's arrays would fragment them.
        return_freed_memory()

    @property
    def notice(self) -> str:
        """See the class; this is found out each time that it is read."""
        alone = self.group.size == 1 and not (self.backend.is_device or simulated_ranks.get())
        idle = describe_idle("mpirun -n {} python ...") if alone else ""
        return "; ".join(filter(None, [self.exchange.notice, idle]))

    def release(self) -> None:
        """Detach from the model: every rank has a plain copy again. Collective.

        After ZeRO the storage stays sharded, for another Worker of the same arrangement; for a
        plain copy call `worker.parallel.gather_model()`, too. A second call does nothing.

        Raises:
            UsageError: within `averaged`.
        """
        self.model.storage.check_weights("release()")
        self.passes.replay.compare_at_end()
        self.passes.release()
        super().release()

    def step(self, batch: Batch | Any, y: Any = None, lr: float | None = None) -> StepReport:
        """Do one update with this rank's shard of a global batch. Collective.

            for batch in loader: worker.step(batch)
            worker.step(x, y)                   # rows of this replica, any number, and their labels

        On a device the host waits once per step: it reads loss, score and gradient norm
        in one copy after the gradients are summed. So a gradient that is not finite is found
        before the update, and clipping needs no second wait. The update and the next batch's copy
        overlap with the host's preparation of the next step. `run` reads a step late, see
        `run_segment`.

        A batch of several microbatches (see `data.Loader`) is one update: their gradients are
        accumulated. With schedule pipedream each microbatch is an update; the gradient norm is
        then unknown and reported as NaN.

        Args:
            batch: a loader's batch; or samples (rows, *sample_shape), anything that NumPy can
                convert. Floats are cast to the weights' dtype. The rows of all replicas form the
                global batch; ranks of one replica give the same rows.
            y: labels (rows, ...), if `batch` holds samples.
            lr: the learning rate; the optimizer's by default.

        Raises:
            DivergenceError: on all ranks, if the loss or the gradient is not finite. Weights are
                unchanged (except with pipedream); running statistics are not. With fp16, only if
                the gradient overflows at the smallest loss scale.
            CommError: with `GradientExchange.check`, on all ranks, if weights differ.
            UsageError: for a batch that is not split over the replicas; after `release`; in a
                compiled step.
        """
        return self._finish(self._start(batch, y, lr))

    def _start(self, batch: Batch | Any, y: Any, lr: float | None) -> _Started:
        """Begin a step: compute its gradients. A device is not waited for."""
        begin = clock.now()
        self.parallel.check_not_released()
        if self.model.storage.shown is not None:  # a call in each step would cost more
            self.model.storage.check_weights("a step")
        if hasattr(batch, "columns"):
            self._names = agree(self._names, of_table(batch), "the table")
        batch = self._batch_of(batch, y)
        if batch.source is not self._source:
            self.note_source(batch.source)
        place = last_read() if batch.loop is None else [(batch.loop, batch.number)]
        self.optimizer.check_place(place)
        if lr is not None:
            self.optimizer.lr = lr
        batch, rows = self.arrangement.local(batch)
        self.model.storage.zero_grad()
        step, factor = self.optimizer.steps, 1.0 if self.scaling is None else self.scaling.value
        world = self.group.comm.world
        world.step, world.traffic, collective_s = step, Traffic(), world.collective_s
        self.passes.tells_loss = self._check.begin_step(step, batch.taken(), rows)
        counts, is_new = self._note_batch(batch)
        observed = counts or current() is not None
        with self._deterministic():
            now = self.passes.begin(batch, step, factor)
            with now.measuring() if counts else _UNCHANGED:
                # Counting and tracing observe every operation, so such a pass runs eagerly.
                report = now.train(not observed)
            if counts:
                self.ledger.note_activations(now.peak_bytes())
            if observed:
                self._note_memory(self._held_memory(), self.ledger.report().peaks[ACTIVATIONS])
            self._note_recordings()
            read = now.send_sums()
        account = world.traffic, begin, collective_s
        is_steady = not (observed or is_new)
        lr = self.optimizer.lr
        return _Started(batch, place, now, lr, step, factor, report, read, *account, is_steady)

    def _finish(self, started: _Started, updated: bool = False) -> StepReport:
        """End a step: read its numbers, meet the other ranks, judge, update, report.

        Args:
            updated: whether a guarded update has been launched already.
        """
        world = self.group.comm.world
        world.step, world.traffic = started.step, started.traffic
        with self._deterministic():
            # on a device this is the step's only wait; the update is not waited for
            numbers = started.read()
            self._pace(started)
            norm = self._meet(started, numbers)
        # Loss and norm are sums over all ranks, so all ranks take the same branch without a
        # message. One overflowed value makes the norm inf or NaN: it tests the whole gradient.
        # An update that was launched ahead has looked at `squares`; the gradient is now the next
        # step's.
        if isfinite(started.report.loss_sum) and (
            isfinite(self.exchange.squares if updated else norm) or self.exchange.updates_in_passes
        ):
            if not updated:
                self._update(norm, started.factor)
        elif updated:  # its guard let it change nothing: do the step again, and wait
            self.optimizer.steps, self._repeated = started.step, self._repeated + 1
            return self._finish(self._start(started.batch, None, started.lr))
        else:
            self._skip(started)
        self.optimizer.note_place(started.place, is_known=started.batch.loop is not None)
        return self._report(started)

    def _pace(self, started: _Started) -> None:
        """Wait, if steps have a minimum time: the ranks meet next, so a straggler delays all."""
        if self.slow:
            paused_s, met_s = started.now.paused_s, self.group.comm.world.collective_s
            waited_s = met_s - started.collective_s + started.report.wait_s + paused_s
            computed_s = clock.now() - started.begin - waited_s
            self.slow.wait(computed_s, self.group.rank, started.step, waited_s=paused_s)

    def _meet(self, started: _Started, numbers: tuple[float, float, int]) -> float:
        """Sum the step's numbers over all ranks, and return the gradient norm. Collective.

        Raises:
            UsageError: on all ranks, when they do different steps, or a batch is not split over
                them.
        """
        batch, report = started.batch, started.report
        failed = started.now.failed
        (*sums, targets, failures), norm = self.exchange.meet((*numbers, failed is not None))
        report.loss_sum, report.score_sum = sums
        if failures:
            with agreed(self.group):
                if failed is not None:
                    raise failed
        self._check.end_step(started.step, started.now.words)
        if targets != batch.global_targets:
            given = "group" if self._is_own else "arrangement"
            raise UsageError(
                f"the ranks' parts of this batch have {targets:.0f} counted labels together, but"
                f" the global batch has {batch.global_targets}; give Loader the"
                f" {given}, or your own Batch the targets of each microbatch"
            )
        report.grad_norm = norm / started.factor
        return report.grad_norm

    def _update(self, norm: float, factor: float) -> None:
        """Clip, and update the weights, unless the pass has done so."""
        if self.exchange.updates_in_passes:
            return
        clipped = 1.0 if self.clip is None else coefficient(norm, self.clip)
        if self.scaling is not None:
            self.scaling.grow()
        with timeline.span("update", "update"):
            self.exchange.update(clipped / factor)

    def _skip(self, started: _Started) -> None:
        """Skip the update of a step whose loss or gradient is not finite.

        With fp16 an overflowed gradient means that the loss scale is too large: try a smaller one.

        Raises:
            DivergenceError: otherwise, after the step was computed again to locate its origin.
        """
        report = started.report
        report.skipped = (
            isfinite(report.loss_sum) and self.scaling is not None and self.scaling.shrink()
        )
        if not report.skipped:
            with self._deterministic():
                raise self.passes.explain(started.batch, started.step, report.loss)

    def _report(self, started: _Started) -> StepReport:
        """Complete the report of a step, and compare the ranks' weights if that was asked for."""
        if self.options.check:
            self.exchange.check_equal()
        report, world = started.report, self.group.comm.world
        report.count(world.traffic)
        if isfinite(report.predicted_s):
            report.predicted_steps = 1
        else:
            report.predicted_s = 0.0
        report.loss_scale, report.wall_s = started.factor, clock.now() - started.begin
        report.sync_s = world.collective_s - started.collective_s
        report.compute_s = report.wall_s - report.sync_s - report.wait_s
        return report

    def _note_batch(self, batch: Batch) -> tuple[bool, bool]:
        """Note a batch's bytes; return whether its pass is counted, and whether they are new."""
        nbytes, is_traced = batch.x.nbytes + batch.y.nbytes, current() is not None
        is_new = nbytes != self._batch_bytes
        if is_traced or is_new:
            self._batch_bytes = nbytes
            self._note_memory({BATCHES: nbytes})
        return self._should_count(nbytes), is_new

    def _note_recordings(self) -> None:
        if self.passes.replay.held_bytes != self._recorded_bytes:  # something was recorded
            self._recorded_bytes = self.passes.replay.held_bytes
            self._note_memory({ACTIVATIONS: self._recorded_bytes})

    def _held_memory(self) -> dict[str, int]:
        """Return the bytes held between steps; of memory that a node shares, this rank's share."""
        storage, shares = self.model.storage, self.parallel.holders
        parameters, gradients, buffers = storage.held_bytes()
        return {
            PARAMETERS: parameters // shares,
            GRADIENTS: gradients,
            STATE: self.optimizer.state_bytes // shares,
            COMMUNICATION: buffers,
        }

    def _predict_memory(self) -> dict[str, int]:
        """Predict `_held_memory` by formula, for the ledger; empty if no formula applies."""
        arrangement, storage = self.arrangement, self.model.storage
        if self.parallel.is_fused or len(set(storage.groups)) > 1 or not storage.data:
            return {}
        ranks, layout = arrangement.mesh.replicas, arrangement.layout
        once = isinstance(storage, ShardedStorage) and storage.is_node_shared
        predicted = predict_bytes(
            self.model,
            layout.zero,
            ranks.rank,
            ranks.size,
            storage.dtype.itemsize,
            len(self.optimizer.held_slots()),
            layout.unit_bytes,
            once,
            offloaded=layout.offload_state,
            units=arrangement.units,
        )
        return {
            PARAMETERS: predicted.parameters,
            GRADIENTS: predicted.gradients,
            STATE: predicted.optimizer,
        }

    def _should_count(self, nbytes: int) -> bool:
        # The first step is counted in a trace alone: it also allocates memory that stays, such as
        # optimizer state. Later a batch is counted if it is larger than all counted before: the
        # second step may be an epoch's short last batch.
        if self._counted_bytes is None:
            self._counted_bytes = -1
            return current() is not None
        if nbytes > self._counted_bytes:
            self._counted_bytes = nbytes
            return True
        return False

    def _note_memory(self, held_bytes: Mapping[str, int], activations: int = 0) -> None:
        self.ledger.note(held_bytes)
        trace = current()
        if trace is not None:
            now = trace.clock()
            amounts = {**self.ledger.report().held, ACTIVATIONS: activations}
            trace.add("memory", COUNTER, COUNTER, now, now, amounts)

    def run_segment(self, segment: TrainingSegment) -> SegmentReport:
        """Do the steps of a segment; where nothing depends on their numbers, one ahead of them.

            host      start 1  update 1  start 2  read 1, report  update 2  start 3  read 2 ...
            device          gradients 1         update 1    gradients 2         update 2 ...

        A device always has work: the host reads a step's numbers while the next one is computed.
        An update is launched before they are read; its guard lets it change nothing if they are not
        finite. Then the step is done again, so errors and weights are those of `step`.
        """
        totals, signal, ended = Totals(), 0, clock.now()
        can_go_ahead = self._can_go_ahead()
        ahead: tuple[int, float, _Started] | None = None  # a step whose numbers are not read yet

        def end(number: int, input_s: float, report: StepReport) -> None:
            nonlocal ended, signal
            # Measured from the end of the previous step: input and progress are included.
            before, ended = ended, clock.now()
            report.input_s, report.wall_s = input_s, ended - before
            totals.add(report)
            segment.progress(Progress(number, 0, report))
            last = number + 1 == segment.batches.stop  # what was asked for is not lost with it
            answers = self._signals.gather(segment.poll_signal(), report.wall_s, last)
            signal = max(signal, *map(int, answers)) if answers else signal

        def catch_up() -> None:
            nonlocal ahead
            if ahead is not None:
                (number, input_s, before), ahead = ahead, None
                report = self._finish(before, True)
                report.compute_s = clock.now() - ended - input_s - report.sync_s
                end(number, input_s, report)

        with segment.loader.epoch(segment.epoch, segment.batches.start, self.backend) as batches:
            for number in segment.batches:
                step, begin = segment.number(number), clock.now()
                with timeline.span("input", "input", timeline.WAITING):
                    batch = next(batches)
                input_s, lr = clock.now() - begin, segment.lr(step)
                if not can_go_ahead:
                    with timeline.span(f"step {step}", "step", "steps"):
                        report = self.step(batch, lr=lr)
                    end(number, input_s, report)
                else:
                    if batch.x.nbytes + batch.y.nbytes != self._batch_bytes:
                        catch_up()  # its memory is noted next
                    try:
                        started = self._start(batch, None, lr)
                    except Exception:
                        catch_up()
                        raise
                    repeated = self._repeated
                    catch_up()
                    if self._repeated != repeated:
                        started = self._start(batch, None, lr)
                    if started.is_steady and number + 1 < segment.batches.stop and not signal:
                        self._update_ahead()
                        ahead = number, input_s, started
                    else:
                        end(number, input_s, self._finish(started))
                if signal:
                    break
        return SegmentReport(totals, signal)

    def _can_go_ahead(self) -> bool:
        """Whether updates may be launched before the steps' numbers are read."""
        return (
            self.passes.is_alone
            and self.arrangement.is_plain
            and self.optimizer.can_guard
            and self.scaling is None
            and not (self.slow or self.options.check or current())
        )

    def _update_ahead(self) -> None:
        """Launch an update that changes nothing if the step's numbers are not finite."""
        guard = self.passes.guard()  # finite, it is the square of the gradient's norm
        with self.optimizer.guarded(guard):
            self.exchange.update(1.0 if self.clip is None else device_coefficient(guard, self.clip))

    def details(self, report: StepReport) -> dict[str, Any]:
        """See `Trainer.details`."""
        more = {"staleness": fmean(report.staleness)} if report.staleness else {}
        more |= self.ledger.peaks_by_name()
        if self.scaling is not None:
            more |= {"loss_scale": report.loss_scale, "skipped_steps": self.scaling.skipped}
        return more

    def _batch_of(self, x: Any, y: Any) -> Batch:
        """Return a batch as it is; of samples and labels, this replica's shard. Collective."""
        if hasattr(x, "cuts"):
            if y is not None:
                raise UsageError("give the learning rate by keyword: worker.step(batch, lr=0.1)")
            return x
        if y is None:
            raise UsageError(
                "step takes a batch of a data.Loader, or samples and labels, not only a"
                f" {type(x).__name__}: for batch in loader: worker.step(batch), or"
                " worker.step(x, y)"
            )
        samples, labels = (np.atleast_1d(read_array(values, "step")) for values in (x, y))
        if len(samples) != len(labels):
            raise ShapeError(
                f"{len(samples)} samples have {len(labels)} labels; give one for each sample"
            )
        dtype, number = self.model.storage.dtype, self.arrangement.data_rank
        samples = samples.astype(dtype, copy=False) if samples.dtype.kind == "f" else samples
        labels = labels.astype(dtype if labels.dtype.kind == "f" else np.int64, copy=False)
        self._check.require_same_rows([samples.shape, labels.shape])
        row_elements = prod(samples.shape[1:])
        given = self.group.gather([number, len(samples), count_targets(labels), row_elements])
        refuse_uneven(given)
        counts = {number: (rows, targets) for number, rows, targets, _ in given}
        first = sum(counts[before][0] for before in range(number))
        return Batch(
            x=np.ascontiguousarray(samples),
            y=labels,
            indices=np.arange(first, first + len(samples)),
            cuts=(Cut(0, len(samples), first),),
            global_rows=sum(rows for rows, _ in counts.values()),
            epoch=0,
            number=self.optimizer.steps,
            targets=(sum(targets for _, targets in counts.values()),),
            row_elements=max(elements for *_, elements in given),
        )

    def evaluate(self, batches: Iterable[Batch] | Any, y: Any = None) -> Totals:
        """Evaluate batches, one, or this replica's samples and labels; see `Trainer.evaluate`."""
        self.model.storage.check_tree()
        if y is not None or isinstance(batches, Batch):
            batches = [batches if y is None else (batches, y)]
        rows, failed = list[int](), list[NnmpiError]()

        def evaluate(batch: Batch) -> bool:
            now = self.passes.evaluate(batch)
            failed.extend([] if now.failed is None else [now.failed])
            return now.counts

        with self.averaged(), self._deterministic():
            parts = self.arrangement.mesh.sp.size
            given = to_evaluate(batches)
            if not self.arrangement.is_plain:
                given = as_many(self.group, given)
            shares, sums = (self._share_of(rows, item) for item in given), self.passes.evaluated
            totals = evaluate_all(self.group, shares, evaluate, sums, self._check, parts, rows)
        with agreed(self.group):
            if failed:
                raise failed[0]
        return totals

    def averaged(self) -> AbstractContextManager[None]:
        """See `Trainer.averaged`: weights as `evaluate` uses them, for an export or predictions.

        Raises:
            UsageError: when another Worker of this optimizer has ended the average since.
        """
        optimizer = self.optimizer
        if optimizer.is_decided_by_another(self) and optimizer.ema != self._ema:
            raise UsageError(
                f"this Worker was made with {as_ema(self._ema)}, and a later one of its optimizer"
                f" with {as_ema(optimizer.ema)}; go on with that one, or make a new one"
            )
        if optimizer.ema and self.arrangement.layout.asynchronous:
            raise average_refusal(self.arrangement)
        return self.parallel.averaged(optimizer) if optimizer.ema else _UNCHANGED

    def _share_of(self, rows: list[int], item: Any) -> Batch:
        """Return what this rank evaluates of a batch; note the checksum of its rows."""
        # a pair of an iterable, or of another library's loader
        if isinstance(item, tuple | list) and hasattr(item[0], "columns"):
            agree(self._names, of_table(item[0]), "the table")
        batch, checksum = self.arrangement.local(
            self._batch_of(*item) if isinstance(item, tuple | list) else item
        )
        rows += checksum
        self.check_source(batch.source)
        return batch

    def scalars(self) -> dict[str, Any]:
        """See `Trainer.scalars`; with fp16's loss scale."""
        scale = {} if self.scaling is None else {"loss_scale": self.scaling.state()}
        return super().scalars() | scale

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """See `Trainer.load_scalars`."""
        super().load_scalars(values)
        if self.scaling is not None and "loss_scale" in values:  # else it starts at its default
            self.scaling.load(values["loss_scale"])

    def explain_replay(self) -> str:
        """Return why the last pass ran eagerly; empty if it was replayed as by `nnmpi.compile`."""
        return self.passes.replay.explain()

    def describe_exchange(self) -> str:
        """See `Trainer.describe_exchange`."""
        return self.exchange.describe()

    def summary(self) -> list[str]:
        """Return lines about the passes of a pipeline or memory plan, if there is one."""
        return self.passes.summary()

    def memory(self) -> list[str]:
        """See `Trainer.memory`; the kinds are those of rank 0."""
        ledger = self.ledger.report()
        peaks = [int(peak) for peak in self.group.gather(ledger.peak)]
        kinds = ", ".join(
            f"{kind} {format_bytes(nbytes)}" for kind, nbytes in ledger.peaks.items() if nbytes
        )
        wrong = [kind for kind, nbytes in ledger.predicted.items() if nbytes != ledger.peaks[kind]]
        agrees = (
            f"; predicted otherwise: {', '.join(wrong)}"
            if wrong
            else ", as predicted"
            if ledger.predicted
            else ""
        )
        rank = peaks.index(max(peaks))
        on_root = f"; {format_bytes(ledger.peak)} on rank 0" if rank else ""
        most = f"memory at the peak {format_bytes(max(peaks))} on rank {rank}{on_root}"
        return [f"{most}{agrees}:", *wrap(kinds, 94, initial_indent="  ", subsequent_indent="  ")]

    def _deterministic(self) -> AbstractContextManager[object]:
        """Compute in the worker's precision; with reduction "fixed", with one BLAS thread.

        The bits of a product or a sum of squares may depend on the number of BLAS threads, and
        "fixed" promises the same bits on any number of replicas.
        """
        refuse_inside("a Worker's step or evaluation")
        if self.precision == mode_of() and self.scaling is None and not self._fixed:
            return _UNCHANGED
        stack = ExitStack()
        stack.enter_context(use_precision(self.precision))
        if self.scaling is not None:  # no warnings: the gradient norm shows an overflow
            stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        if self._fixed:
            stack.enter_context(loaded_pools().limit(limits=1, user_api="blas"))
        return stack


def as_ema(decay: float) -> str:
    """Return an average of the weights as it was asked for, in words."""
    return f"an average of the weights by {decay:g}" if decay else "no average of the weights"


def average_refusal(arrangement: Arrangement) -> LayoutError:
    """Return the error for an average of weights that are not all of the same update."""
    return LayoutError(
        f"an average of the weights (ema) cannot be combined with"
        f" {as_given(arrangement.layout, 'pipeline')}, whose stages update at times of their own;"
        " leave one of them out"
    )


def check_pairs(worker: Worker, arrangement: Arrangement | None) -> None:
    """Refuse incompatible options, and a model other than the arrangement's.

    Raises:
        UsageError: naming them.
    """
    model, mesh = worker.model, worker.arrangement.mesh.sizes
    layout = worker.arrangement.layout
    if layout.asynchronous and worker.optimizer.ema:
        raise average_refusal(worker.arrangement)
    is_out = model.storage.state_store is not None
    check_layout(layout, mesh, worker.options, worker.precision, worker.clip, is_out)
    if layout.asynchronous and not worker.arrangement.is_pipeline:
        raise UsageError(  # no stage would ever update
            f"{as_given(layout, 'pipeline')} needs two stages or more; give"
            f" {spelled(layout, 'pp')} 2 or more, or leave it out"
        )
    if arrangement is None:
        if isinstance(model, ModelPart) or any(
            parameter.region is not None for parameter in model.parameters()
        ):
            raise UsageError(
                "this rank has only part of the model; give the Worker the arrangement that made"
                " it: arrangement=where"
            )
        return
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if arrangement.layout.zero and not isinstance(model.storage, ShardedStorage):
        raise UsageError(
            f"with zero {arrangement.layout.zero} the model's storage is sharded from the start;"
            " initialize it with storage=arrangement.storage"
        )
