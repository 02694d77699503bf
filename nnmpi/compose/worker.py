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
from numpy.typing import NDArray

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
from nnmpi.compose.evaluation import Evaluation, as_many, evaluate_all, refuse_uneven
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


class _Account(NamedTuple):
    """What a step's report is computed from at its end.

    Attributes:
        begin: the clock when the step began.
        collective_s: this rank's seconds in collectives until then.
        traffic: of the step's messages so far.
    """

    begin: float
    collective_s: float
    traffic: Traffic


class _Started(NamedTuple):
    """A step whose gradients are being computed.

    Attributes:
        batch: of this rank.
        place: the batch's, in the data of a loop.
        lr: the learning rate.
        step: the number of the update.
        factor: the scale of the loss.
        batch_pass: the pass over the batch.
        report: of the pass; `Worker._report` completes it.
        read_numbers: waits for the pass's losses, scores and counted labels.
        account: see there.
        is_steady: whether its memory was not noted: it is like that of the step before.
    """

    batch: Batch
    place: Reached
    lr: float
    step: int
    factor: float
    batch_pass: BatchPass
    report: StepReport
    read_numbers: Callable[[], tuple[float, float, int]]
    account: _Account
    is_steady: bool


class _Share(NamedTuple):
    """A replica's part of a global batch that was given as samples and labels."""

    rows: int
    targets: int
    row_elements: int


class Worker(Trainer, read_once="scaling exchange strategy notice passes ledger"):
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
        strategy: the strategy that the exchange uses.
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
        self._fixed_order = self.arrangement.layout.fixed_order
        check_pairs(self, arrangement)
        # before the exchange moves parameters into its own storage
        check_free(model, group, bool(self.arrangement.layout.zero))
        self.exchange = make_exchange(self, exchange)
        self.strategy = self.exchange.strategy
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
            is_equal=self.strategy.keeps_equal,
            shards=mesh.tp if mesh.tp.size > 1 else None,
            sharers=self.arrangement.same_rows,
            optimizer=optimizer,
        )
        self.ledger = MemoryLedger(self._predict_memory())
        self.ledger.note(self._held_memory())
        self._recorded_bytes = 0  # held by recorded passes
        self._batch_bytes = -1  # of the last batch
        self._counted_bytes: int | None = None  # of the largest batch that was counted
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
        plain copy call `worker.strategy.gather_model()`, too. A second call does nothing.

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
        self._check_ready(batch)
        batch = self._batch_of(batch, y)
        if batch.source is not self._source:
            self.note_source(batch.source)
        place = last_read() if batch.loop is None else [(batch.loop, batch.number)]
        self.optimizer.check_place(place)
        if lr is not None:
            self.optimizer.lr = lr
        batch, rows = self.arrangement.local(batch)
        self.model.storage.zero_grad()

        step = self.optimizer.steps
        factor = 1.0 if self.scaling is None else self.scaling.value
        world = self.group.comm.world
        world.step, world.traffic = step, Traffic()
        collective_s = world.collective_s
        self.passes.tells_loss = self._check.begin_step(step, batch.taken(), rows)

        is_counted, is_new_size = self._note_batch(batch)
        is_observed = is_counted or current() is not None
        with self._deterministic():
            batch_pass = self.passes.begin(batch, step, factor)
            if is_counted:
                with batch_pass.measuring():
                    report = batch_pass.train(may_replay=False)
                self.ledger.note_activations(batch_pass.peak_bytes())
            else:
                # a trace observes every operation, as counting does: such a pass runs eagerly
                report = batch_pass.train(may_replay=not is_observed)
            if is_observed:
                self._note_memory(self._held_memory(), self.ledger.report().peaks[ACTIVATIONS])
            self._note_recordings()
            read_numbers = batch_pass.send_sums()
        return _Started(
            batch=batch,
            place=place,
            lr=self.optimizer.lr,
            step=step,
            factor=factor,
            batch_pass=batch_pass,
            report=report,
            read_numbers=read_numbers,
            account=_Account(begin, collective_s, world.traffic),
            is_steady=not (is_observed or is_new_size),
        )

    def _check_ready(self, batch: Batch | Any) -> None:
        """Refuse a step after `release` or within `averaged`, and a table of other columns."""
        self.strategy.check_not_released()
        if self.model.storage.shown is not None:  # a call in each step would cost more
            self.model.storage.check_weights("a step")
        if hasattr(batch, "columns"):
            self._names = agree(self._names, of_table(batch), "the table")

    def _finish(self, started: _Started, updated: bool = False) -> StepReport:
        """End a step: read its numbers, meet the other ranks, judge, update, report.

        Args:
            updated: whether a guarded update has been launched already.
        """
        world = self.group.comm.world
        world.step, world.traffic = started.step, started.account.traffic
        with self._deterministic():
            # on a device this is the step's only wait; the update is not waited for
            numbers = started.read_numbers()
            self._pace(started)
            norm = self._meet(started, numbers)
        # An update that was launched ahead has looked at `squares`; the gradient is now the next
        # step's.
        tested = self.exchange.squares if updated else norm
        # Loss and norm are sums over all ranks, so all ranks take the same branch without a
        # message. One overflowed value makes the norm inf or NaN: it tests the whole gradient.
        is_finite = isfinite(started.report.loss_sum) and (
            isfinite(tested) or self.exchange.updates_in_passes
        )
        if updated and not is_finite:
            return self._repeat(started)
        if not is_finite:
            self._skip(started)
        elif not updated:
            self._update(norm, started.factor)
        self.optimizer.note_place(started.place, is_known=started.batch.loop is not None)
        return self._report(started)

    def _repeat(self, started: _Started) -> StepReport:
        """Do a step again, and wait for it: its guarded update has changed nothing."""
        self.optimizer.steps = started.step
        self._repeated += 1
        return self._finish(self._start(started.batch, None, started.lr))

    def _pace(self, started: _Started) -> None:
        """Wait, if steps have a minimum time: the ranks meet next, so a straggler delays all."""
        if self.slow:
            paused_s, account = started.batch_pass.paused_s, started.account
            met_s = self.group.comm.world.collective_s - account.collective_s
            waited_s = met_s + started.report.wait_s + paused_s
            computed_s = clock.now() - account.begin - waited_s
            self.slow.wait(computed_s, self.group.rank, started.step, waited_s=paused_s)

    def _meet(self, started: _Started, numbers: tuple[float, float, int]) -> float:
        """Sum the step's numbers over all ranks, and return the gradient norm. Collective.

        Raises:
            UsageError: on all ranks, when they do different steps, or a batch is not split over
                them.
        """
        batch, report = started.batch, started.report
        failed = started.batch_pass.failed
        sums, norm = self.exchange.meet((*numbers, failed is not None))
        report.loss_sum, report.score_sum, targets, failures = sums
        if failures:
            with agreed(self.group):
                if failed is not None:
                    raise failed
        self._check.end_step(started.step, started.batch_pass.words)
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
        report, account, world = started.report, started.account, self.group.comm.world
        report.count(world.traffic)
        if isfinite(report.predicted_s):
            report.predicted_steps = 1
        else:
            report.predicted_s = 0.0
        report.loss_scale = started.factor
        report.wall_s = clock.now() - account.begin
        report.sync_s = world.collective_s - account.collective_s
        report.compute_s = report.wall_s - report.sync_s - report.wait_s
        return report

    def _note_batch(self, batch: Batch) -> tuple[bool, bool]:
        """Note a batch's bytes; return whether its pass is counted, and whether they are new."""
        nbytes = batch.x.nbytes + batch.y.nbytes
        is_new_size = nbytes != self._batch_bytes
        if is_new_size or current() is not None:
            self._batch_bytes = nbytes
            self._note_memory({BATCHES: nbytes})
        return self._should_count(nbytes), is_new_size

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

    def _note_recordings(self) -> None:
        if self.passes.replay.held_bytes != self._recorded_bytes:  # something was recorded
            self._recorded_bytes = self.passes.replay.held_bytes
            self._note_memory({ACTIVATIONS: self._recorded_bytes})

    def _note_memory(self, held_bytes: Mapping[str, int], activations: int = 0) -> None:
        self.ledger.note(held_bytes)
        trace = current()
        if trace is not None:
            moment = trace.clock()
            amounts = {**self.ledger.report().held, ACTIVATIONS: activations}
            trace.add("memory", COUNTER, COUNTER, moment, moment, amounts)

    def _held_memory(self) -> dict[str, int]:
        """Return the bytes held between steps; of memory that a node shares, this rank's share."""
        storage, shares = self.model.storage, self.strategy.holders
        parameters, gradients, buffers = storage.held_bytes()
        own = (item for _, item in self.model.named_base() if item.home is None)
        base = sum(item.stored.nbytes for item in own)
        return {
            PARAMETERS: parameters // shares + base,
            GRADIENTS: gradients,
            STATE: self.optimizer.state_bytes // shares,
            COMMUNICATION: buffers + self.strategy.state_bytes,
        }

    def _predict_memory(self) -> dict[str, int]:
        """Predict `_held_memory` by formula, for the ledger; empty if no formula applies."""
        arrangement, storage = self.arrangement, self.model.storage
        if self.strategy.is_fused or len(set(storage.groups)) > 1 or not storage.data:
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

    def run_segment(self, segment: TrainingSegment) -> SegmentReport:
        """Do the steps of a segment; see `_SegmentSteps`."""
        return _SegmentSteps(self, segment).run()

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
        details: dict[str, Any] = {}
        if report.staleness:
            details["staleness"] = fmean(report.staleness)
        details.update(self.ledger.peaks_by_name())
        if self.scaling is not None:
            details["loss_scale"] = report.loss_scale
            details["skipped_steps"] = self.scaling.skipped
        return details

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
        dtype = self.model.storage.dtype
        if samples.dtype.kind == "f":
            samples = samples.astype(dtype, copy=False)
        labels = labels.astype(dtype if labels.dtype.kind == "f" else np.int64, copy=False)
        self._check.require_same_rows([samples.shape, labels.shape])
        return self._shard_of(samples, labels)

    def _shard_of(self, samples: NDArray[Any], labels: NDArray[Any]) -> Batch:
        """Return this replica's rows as a shard of the global batch. Collective."""
        replica, row_elements = self.arrangement.data_rank, prod(samples.shape[1:])
        given = self.group.gather([replica, len(samples), count_targets(labels), row_elements])
        refuse_uneven(given)
        # the ranks of a replica give the same rows, which count once
        shares = {number: _Share(*counts) for number, *counts in given}
        first = sum(shares[before].rows for before in range(replica))
        return Batch(
            x=np.ascontiguousarray(samples),
            y=labels,
            indices=np.arange(first, first + len(samples)),
            cuts=(Cut(0, len(samples), first),),
            global_rows=sum(share.rows for share in shares.values()),
            epoch=0,
            number=self.optimizer.steps,
            targets=(sum(share.targets for share in shares.values()),),
            row_elements=max(share.row_elements for share in shares.values()),
        )

    def evaluate(
        self, batches: Iterable[Batch] | Any, y: Any = None, *, metrics: Any = ()
    ) -> Evaluation:
        """Evaluate batches, one, or this replica's samples and labels; see `Trainer.evaluate`."""
        self.model.storage.check_tree()
        if y is not None or isinstance(batches, Batch):
            batches = [batches if y is None else (batches, y)]
        rows, failed = list[int](), list[NnmpiError]()

        def evaluate(batch: Batch) -> bool:
            batch_pass = self.passes.evaluate(batch)
            if batch_pass.failed is not None:
                failed.append(batch_pass.failed)
            return batch_pass.counts

        with self.averaged(), self._deterministic():
            given = to_evaluate(batches)
            if not self.arrangement.is_plain:
                given = as_many(self.group, given)
            result = evaluate_all(
                self.group,
                (self._share_of(rows, item) for item in given),
                evaluate,
                self.passes.evaluated,
                self.passes.measure(metrics),
                self._check,
                self.arrangement.mesh.sp.size,
                rows,
            )
        with agreed(self.group):
            if failed:
                raise failed[0]
        return result

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
        return self.strategy.averaged(optimizer) if optimizer.ema else _UNCHANGED

    def _share_of(self, rows: list[int], item: Any) -> Batch:
        """Return what this rank evaluates of a batch; note the checksum of its rows."""
        # a pair of an iterable, or of another library's loader
        if isinstance(item, tuple | list) and hasattr(item[0], "columns"):
            agree(self._names, of_table(item[0]), "the table")
        given = self._batch_of(*item) if isinstance(item, tuple | list) else item
        batch, checksum = self.arrangement.local(given)
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
        rank = peaks.index(max(peaks))
        line = f"memory at the peak {format_bytes(max(peaks))} on rank {rank}"
        if rank:
            line += f"; {format_bytes(ledger.peak)} on rank 0"
        wrong = [kind for kind, nbytes in ledger.predicted.items() if nbytes != ledger.peaks[kind]]
        if wrong:
            line += f"; predicted otherwise: {', '.join(wrong)}"
        elif ledger.predicted:
            line += ", as predicted"
        kinds = ", ".join(
            f"{kind} {format_bytes(nbytes)}" for kind, nbytes in ledger.peaks.items() if nbytes
        )
        return [f"{line}:", *wrap(kinds, 76, initial_indent="  ", subsequent_indent="  ")]

    def _deterministic(self) -> AbstractContextManager[object]:
        """Compute in the worker's precision; with reduction "fixed", with one BLAS thread.

        The bits of a product or a sum of squares may depend on the number of BLAS threads, and
        "fixed" promises the same bits on any number of replicas.
        """
        refuse_inside("a Worker's step or evaluation")
        if self.precision == mode_of() and self.scaling is None and not self._fixed_order:
            return _UNCHANGED
        stack = ExitStack()
        stack.enter_context(use_precision(self.precision))
        if self.scaling is not None:  # no warnings: the gradient norm shows an overflow
            stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        if self._fixed_order:
            stack.enter_context(loaded_pools().limit(limits=1, user_api="blas"))
        return stack


class _Ahead(NamedTuple):
    """A step whose update is launched, and whose numbers are not read yet."""

    number: int  # of its batch
    input_s: float
    started: _Started


class _SegmentSteps:
    """The steps of a segment; where nothing depends on their numbers, one ahead of them.

        host      start 1  update 1  start 2  read 1, report  update 2  start 3  read 2 ...
        device          gradients 1         update 1    gradients 2         update 2 ...

    A device always has work: the host reads a step's numbers while the next one is computed. An
    update is launched before they are read; its guard lets it change nothing if they are not
    finite. Then the step is done again, so errors and weights are those of `Worker.step`.
    """

    def __init__(self, worker: Worker, segment: TrainingSegment) -> None:
        self._worker, self._segment = worker, segment
        self._totals = Totals()
        self._signal = 0
        self._ended = clock.now()  # the step before
        self._ahead: _Ahead | None = None

    def run(self) -> SegmentReport:
        """Do them, until a signal arrives."""
        segment, do_step = self._segment, self._in_turn
        if self._worker._can_go_ahead():
            do_step = self._overlapped
        with segment.loader.epoch(
            segment.epoch, segment.batches.start, self._worker.backend
        ) as batches:
            for number in segment.batches:
                begin = clock.now()
                with timeline.span("input", "input", timeline.WAITING):
                    batch = next(batches)
                do_step(number, batch, clock.now() - begin)
                if self._signal:
                    break
        return SegmentReport(self._totals, self._signal)

    def _in_turn(self, number: int, batch: Batch, input_s: float) -> None:
        step = self._segment.number(number)
        lr = self._segment.lr(step)
        with timeline.span(f"step {step}", "step", "steps"):
            report = self._worker.step(batch, lr=lr)
        self._end(number, input_s, report)

    def _overlapped(self, number: int, batch: Batch, input_s: float) -> None:
        """Start a step, read the one before, and launch this one's update if that is safe."""
        worker, lr = self._worker, self._segment.lr(self._segment.number(number))
        if batch.x.nbytes + batch.y.nbytes != worker._batch_bytes:
            self._catch_up()  # its memory is noted next
        try:
            started = worker._start(batch, None, lr)
        except Exception:
            self._catch_up()
            raise
        repeated = worker._repeated
        self._catch_up()
        if worker._repeated != repeated:  # so this one began with other weights
            started = worker._start(batch, None, lr)
        is_last = self._signal or number + 1 == self._segment.batches.stop
        if started.is_steady and not is_last:
            worker._update_ahead()
            self._ahead = _Ahead(number, input_s, started)
        else:
            self._end(number, input_s, worker._finish(started))

    def _catch_up(self) -> None:
        """End the step whose numbers are not read yet, if there is one."""
        if self._ahead is None:
            return
        ahead, self._ahead = self._ahead, None
        report = self._worker._finish(ahead.started, updated=True)
        report.compute_s = clock.now() - self._ended - ahead.input_s - report.sync_s
        self._end(ahead.number, ahead.input_s, report)

    def _end(self, number: int, input_s: float, report: StepReport) -> None:
        """Report a step, and ask for signals of all ranks."""
        segment, before = self._segment, self._ended
        # Measured from the end of the previous step: input and progress are included.
        self._ended = clock.now()
        report.input_s, report.wall_s = input_s, self._ended - before
        self._totals.add(report)
        segment.progress(Progress(number, 0, report))
        is_last = number + 1 == segment.batches.stop  # what was asked for is not lost with it
        by_rank = self._worker._signals.gather(segment.poll_signal(), report.wall_s, is_last)
        if by_rank is not None:
            self._signal = max(self._signal, *map(int, by_rank))


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
            parameter.region is not None for _, parameter in model.named_weights()
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
