"""Batches through the executor: losses, scores and gradients.

    Passes              of a Worker: begins a BatchPass for each batch
    BatchPass           its losses; gradients are summed over the replicas during the backward pass
    evaluate_all        loss and score over many batches, as means over the ranks

    the last backward of stage s    --> reduce(s)    start its sum over the replicas
    all are done                    --> finish       wait for the sums; sum tied parameters over
                                                     stages

PipeDream (Narayanan et al., 2019) updates after every microbatch instead, without a flush. Each
backward then uses the weights of its forward: an update writes a new copy of the stage's weights,
and the graphs of microbatches in flight keep the old copies until their backward (weight stashing).
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, starmap
from math import isfinite, nan
from statistics import median
from typing import Any

import numpy as np

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.array import Array, Shape
from nnmpi.backend.cuda.kernels import device_kernels
from nnmpi.backend.precision import low_dtype
from nnmpi.backend.program.record import record_launch
from nnmpi.backend.recording import (
    active,
    record_call,
    record_note,
    recorded_input,
)
from nnmpi.base.custom import name_of
from nnmpi.base.errors import NnmpiError, UsageError, is_own, name_ranks
from nnmpi.base.loop import Taken
from nnmpi.base.shard import split
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import PP, BoundMesh
from nnmpi.comm.synchrony.slow import NOT_SLOW
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.exchange import Exchange
from nnmpi.compose.executor import Executor
from nnmpi.compose.losses import (
    LOSS,
    SCORE,
    SQUARES,
    WEIGHTS,
    DeferredScalars,
    SumCrossEntropy,
    SumError,
    SumLoss,
    balanced,
    check_classes,
    check_labels,
    count_correct,
    has_class_weights,
    is_own_loss,
    label_weights,
    sum_of,
    to_device,
)
from nnmpi.compose.replayed import OBSERVED, Replay
from nnmpi.compose.stats import PassReport, StepReport, Totals
from nnmpi.compose.trainer import Trainer
from nnmpi.compose.walk import Pass
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import Cut
from nnmpi.memory.fitting import StageCost, choose_savings
from nnmpi.memory.plan import Plan
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.store import BYTE_S, Store, measure_bandwidth
from nnmpi.nn.chain import parameters_of
from nnmpi.nn.mode import Mode, current, evaluation, within
from nnmpi.nn.module import Buffer, Module
from nnmpi.parallel.divergence import explain, explain_gradients
from nnmpi.parallel.pipeline.stage import Visit
from nnmpi.parallel.witness import SAME_DATA, StepWitness
from nnmpi.schedule.schedule import COMPUTE, Kind, Schedule
from nnmpi.schedule.simulate import measured_costs, simulate_schedule
from nnmpi.tensor.backward import leaves_of
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

# enough for a mean; older passes may be of another load of the machine
PASSES_KEPT = 20


def evaluate_all(
    group: Group,
    batches: Iterable[Batch],
    evaluate: Callable[[Batch], BatchPass],
    scalars: DeferredScalars,
    witness: StepWitness,
    parts: int = 1,
    rows_seen: Sequence[int] = (),
) -> Totals:
    """Return loss and score over this rank's parts of all batches, summed over ranks. Collective.

    On a device the sums are read once, at the end.

    Args:
        evaluate: adds loss and score of a batch to the scalars.
        scalars: of evaluations; their sums begin anew.
        parts: the number of ranks that share the positions of each sample; every one of them
            counts its rows.
        witness: compares what the ranks were given.
        rows_seen: a checksum of each batch, where several ranks compute the same rows.

    Raises:
        UsageError: on all ranks, if they have different numbers of batches, other ones, or not all
            rows of each once.
    """
    begin = clock.now()
    rows, own_targets, taken = 0, 0, list[Taken]()
    scalars.clear()
    with no_grad():
        for batch in batches:
            taken.append(batch.taken())
            if evaluate(batch).counts:
                rows, own_targets = rows + len(batch.y), own_targets + batch.own_targets
    values = scalars.read()
    own = values.get(LOSS, 0.0), values.get(SCORE, 0.0), values.get(WEIGHTS, own_targets)
    # as JSON, since another rank may have a further batch, whose rows the ranks tell in this way
    witness.begin({"number of batches": len(taken)}, taken, rows_seen)
    by_rank = group.gather({"sums": [*own, rows, own_targets, witness.number()]})
    refuse_uneven(by_rank)
    loss, score, weights, samples, targets, differ = map(
        sum, zip(*(item["sums"] for item in by_rank), strict=True)
    )
    if differ % witness.modulus:
        witness.refuse("evaluation")
    return Totals(
        samples=int(samples) // parts,
        targets=int(targets),
        loss_sum=loss * (targets / weights if weights else 1.0),
        score_sum=score,
        wall_s=clock.now() - begin,
    )


def refuse_uneven(by_rank: Sequence[object]) -> None:
    """Refuse ranks of which some have evaluated all their batches, and others have one more."""
    done = [rank for rank, item in enumerate(by_rank) if isinstance(item, dict)]
    if 0 < len(done) < len(by_rank):
        raise UsageError(
            f"the ranks give evaluate different numbers of batches, {name_ranks(done)} fewer than"
            f" the others; {SAME_DATA}"
        )


class BatchPass(Pass):
    """A batch's pass: losses and scores of its microbatches; in training their gradients.

    Args:
        owner: of the trainer's passes.
        batch: of this rank.
        step: the number of the update, which keys dropout.
        scalars: get losses and scores.
        cuts: the rows of each microbatch.
        trains: whether a backward pass follows.
        factor: of the gradients (see `optim.clip`).

    Attributes:
        batch: on the model's backend.
        counts: whether this rank's losses count.
        failed: an error of the last stage's loss, or of a replay, raised when all ranks meet.
        paused_s: the seconds that it was slowed down on purpose.
    """

    def __init__(
        self,
        owner: Passes,
        batch: Batch,
        step: int,
        scalars: DeferredScalars,
        cuts: Sequence[Cut],
        trains: bool = True,
        factor: float = 1.0,
    ) -> None:
        self._owner, self._step, self._trains, self._cuts = owner, step, trains, cuts
        self.counts, self.slow, self.poll = owner.counts, owner.slow, owner.poll
        self.failed: NnmpiError | None = None
        self.paused_s, self._final = 0.0, 0
        self._scalars, loss = scalars, owner.losses[not trains]
        # an evaluation has several batches
        self._loss = balanced(loss, batch, owner.world, self.counts) if trains else loss
        self.batch = to_device(self._with_known_labels(batch), owner.model, owner.backend)
        self._parts = [self.batch.rows(cut) for cut in cuts]
        self._each = trains and owner.updates_per_microbatch
        self.adds = batch.microbatches > 1
        total = batch.global_targets
        # the factor of each microbatch's sum of losses in a backward pass
        self._weights = [
            factor / max(batch.targets[cut.number] if self._each else total, 1) for cut in cuts
        ]
        self._versions: dict[int, int] = {}  # of the weights in a microbatch's forward pass
        self._staleness: list[int] = []
        # by parameter: this rank's stages that still have to add to its gradient
        self._left = Counter(chain.from_iterable(owner.numbers.values())) if trains else Counter()
        inputs, seeds = [part.x for part in self._parts], self._make_seeds() if trains else ()
        size = batch.global_elements if trains else 0
        super().__init__(owner.executor, inputs, seeds, batch.length or 0, size)

    def _make_seeds(self) -> list[Array]:
        """Return the seed of each microbatch's backward pass: loss scale / labels of the update.

        A float64 array of shape (); `backward` casts it to the loss's dtype.
        The loss is a sum over labels, so this gives the gradients of the mean loss.
        `DataParallel.backward` does the same division. With pipedream each microbatch is an update.
        """
        return [self._owner.backend.asarray(weight) for weight in self._weights]

    def key(self) -> tuple[Any, ...]:
        """Return the key of the pass's recording."""
        full, shapes = self.batch, [(part.x.shape, part.y.shape) for part in self._parts]
        recomputed = self.executor.recomputed if self._trains else frozenset()
        return self._trains, full.length, full.x.dtype, full.y.dtype, *shapes, recomputed

    def train(self, may_replay: bool = True) -> StepReport:
        """Compute the gradients of the mean loss, summed over replicas. Collective.

        Does not wait for a device, so the report has neither loss nor score; `send_sums` does.

        Args:
            may_replay: whether the pass may be recorded and replayed.
        """
        owner, batch = self._owner, self.batch
        exchange = owner.exchange
        report = StepReport(steps=1, samples=batch.global_rows, targets=batch.global_targets)
        if owner.hooks is not None and self.slow:
            owner.hooks.before_sum = self._pace_layer
        if self._cuts:
            with owner.settling(self) if owner.settles else nullcontext():
                passed = self.run(self.key(), owner.refusal_of(self, may_replay))
            self.note_audit()
            if owner.is_pipeline:
                report.passed, report.wait_s = passed, passed.wait_s
                report.staleness = tuple(self._staleness)
                owner.passed.append(report)
        if owner.hooks is not None:
            owner.hooks.before_sum = int
        if exchange is not None and not owner.updates_per_microbatch:
            exchange.finish()
            exchange.note_squares(self._scalars)
        return report

    def note_audit(self) -> None:
        """Note what the audit of a replay has found; raise it where no ranks meet."""
        replay = self._owner.replay
        found, replay.failed = replay.failed, None
        if found is not None and self._owner.exchange is None:
            raise found
        self.failed = self.failed or found

    def send_sums(self) -> Callable[[], tuple[float, float, int]]:
        """Begin to copy this rank's contribution: losses, score, counted labels.

        Returns a function that waits for a device's numbers, and returns them. If several ranks
        have equal results, all but one return zeros. It may communicate, so call it on all ranks.
        """
        arrive, exchange, world = self._scalars.send(), self._owner.exchange, self._owner.world

        def read() -> tuple[float, float, int]:
            values = arrive()
            if exchange is not None:
                exchange.squares = values.get(SQUARES, nan)
            numbers = range(len(self._cuts) if self.counts else 0)
            losses = {self._cuts[m].number: values[LOSS, m] for m in numbers}
            return (
                sum(losses.values())
                if exchange is None
                else exchange.strategy.sum_losses(losses, world),
                sum(values[SCORE, m] for m in numbers),
                self.batch.own_targets if self.counts else 0,
            )

        return read

    # ---- how a microbatch is computed ----

    def mode(self, microbatch: int, again: bool) -> AbstractContextManager[None]:
        """See `Pass`."""
        if not self._trains:
            return evaluation()
        return within(self.late(BatchPass._training, microbatch, again))

    def _training(self, microbatch: int, again: bool, mode: Mode) -> Mode:
        """Begin a microbatch's forward; return its mode."""
        owner, cut = self._owner, self._cuts[microbatch]
        if owner.exchange is not None and owner.exchange.strategy.microbatch != cut.number:
            owner.exchange.strategy.microbatch = cut.number
        if self._each and not again:
            self._versions[microbatch] = owner.optimizer.steps
        return mode._replace(
            training=True,
            seed=owner.seed,
            step=self._step + (microbatch if self._each else 0),
            first_row=cut.first_row,
            again=again,
            weight=self._weights[microbatch],
            dropped=None if again else set(),
        )

    def head(self, logits: Tensor, microbatch: int) -> Tensor:
        """Return the loss of a microbatch; add loss and score to the step's scalars."""
        owner, again = self._owner, current().again
        if not again and owner.backend.is_device:
            # before the loss: a device would read out of range silently
            self.do(record_note, BatchPass._check_labels, microbatch, logits.shape)
        labels = self.do(recorded_input, BatchPass._labels, microbatch)
        try:
            loss = sum_of(self._loss, logits, labels)
        except NnmpiError as error:
            if not owner.defers or active() is not None:
                raise
            self.failed, loss = error, (logits * 0).sum()
        owner.classes = logits.shape[-1] if logits.shape else 0
        if not again:
            # with sharded classes ranks exchange their best ones, which no graph contains
            record = record_call if owner.has_classes else record_launch
            self.do(record, BatchPass._note_numbers, microbatch, labels, logits._data, loss._data)
        return loss

    def _labels(self, microbatch: int) -> Array:
        return self._parts[microbatch].y

    def _with_known_labels(self, batch: Batch) -> Batch:
        """Return a batch whose labels the loss takes; note the error of others.

        The other stages of a pipeline wait for this rank's gradients: it gives them some.
        """
        owner = self._owner
        if not owner.defers or not owner.classes or not self.counts:
            return batch
        try:
            check_classes(self._loss, batch.labels, owner.classes)
        except NnmpiError as error:
            self.failed = error
            return replace(batch, y=batch.on_host * 0, host_y=None)
        return batch

    def _check_labels(self, microbatch: int, shape: Shape) -> None:
        check_labels(self._loss, self._parts[microbatch], self._cuts[microbatch].start, shape)

    def _note_numbers(self, microbatch: int, labels: Array, logits: Array, loss: Array) -> None:
        owner = self._owner
        if owner.has_classes:
            labels = self._parts[microbatch].on_host
        score = owner.score(logits, labels)
        if self._trains and owner.is_alone:
            self._scalars.add(SQUARES, loss * 0)  # NaN, if the loss is not finite
        if self._trains or self.counts:
            factor = getattr(self._loss, "factor", 1.0)  # to the data's units
            loss = loss if factor == 1 else loss * factor
            for name, number in ((LOSS, loss), (SCORE, score)):
                self._scalars.add((name, microbatch) if self._trains else name, number)

    # ---- its gradients ----

    def begin_backward(self, microbatch: int) -> None:
        """See `Pass`."""
        owner = self._owner
        if owner.looks:
            owner.looks = False
            for output in self.outputs(microbatch):
                _warn_of_untracked(owner.model, output)
        self._final = 0
        if owner.hooks is not None:
            owner.hooks.begin_pass(microbatch == len(self._cuts) - 1)

    def end_backward(self, microbatch: int) -> None:
        """See `Pass`."""
        if self._owner.hooks is not None:
            self._owner.hooks.finish_pass()
            self._owner.hooks.end_pass()

    def abort(self) -> None:
        """See `Pass`."""
        if self._owner.exchange is not None:
            self._owner.exchange.strategy.end_pass()

    def reduce(self, stage: int, microbatch: int | None) -> None:
        """See `Pass`. A gradient to which several stages add is final after the last of them."""
        if microbatch is not None:
            return
        owner = self._owner
        assert owner.exchange is not None
        self._left.subtract(owner.numbers[stage])
        owner.exchange.strategy.final(
            [number for number in reversed(owner.numbers[stage]) if not self._left[number]]
        )

    def progress(self) -> None:
        """See `Pass`."""
        if self._owner.exchange is not None:
            self._owner.exchange.strategy.progress()

    def step(self, stage: int, microbatch: int) -> None:
        """See `Pass`: sum over the replicas, and update a new copy of the weights."""
        owner = self._owner
        assert owner.exchange is not None
        owner.exchange.finish()
        storage = owner.model.storage
        storage.move(data=[data.copy() for data in storage.data])
        for span in storage.spans:
            # `move` clears the gradients, but their buffers still have the values
            span.parameter.grad = span.parameter.buffer
        self._staleness.append(owner.optimizer.steps - self._versions.pop(microbatch))
        owner.optimizer.apply()
        storage.zero_grad()

    def pace(self, computed_s: float, share: float, waited_s: float) -> float:
        """See `Pass`."""
        paused_s = self.slow.wait(
            computed_s, self._owner.world.rank, self._step, share=share, waited_s=waited_s
        )
        self.paused_s += paused_s
        return paused_s

    def _pace_layer(self, number: int) -> None:
        """Slow a backward pass down before its next sum, by the share of gradients that are final.

        A straggler sends each gradient late, not only the last one.
        """
        storage = self._owner.model.storage
        self._final += storage.spans[number].parameter.size
        self.pace_instruction(self._final / storage.size)


class Passes:
    """Begins the passes of a trainer's model, and knows what they share. Collective throughout.

    Args:
        trainer: the owner of model, losses, seed and arrangement. Its optimizer is used here only
            if every microbatch is an update.
        exchange: sums the gradients. None if no other rank computes the same batch; microbatches
            without rows are skipped then.
        synchronous_sends: see `comm.point_to_point.Messages`.

    Attributes:
        replay: records and replays.
        hooks: the strategy whose hooks report final gradients; None if the program does.
        updates_per_microbatch: whether the pass itself updates the weights, after every
            microbatch; otherwise the Worker does, once per step.
        evaluated: the sums of an evaluation.
        counts: whether this rank's losses count: it is the first tensor-parallel rank of the last
            stage.
        defers: whether an error in the last stage's loss is raised when all ranks meet.
        classes: of this rank's logits, once they are known.
        numbers: the storage numbers of each stage's parameters, for this rank's stages.
        settles: whether `settling` has anything to do.
        looks: whether this rank looks for parameters outside the model, in its first pass.
        passed: reports of pipelines' passes since the last summary.
        planned: the model under its plan, if there is a budget for its activations.
        slow, poll: see `Pass`.
    """

    poll: Callable[[], None] | None = None

    def __init__(
        self,
        trainer: Trainer,
        exchange: Exchange | None = None,
        synchronous_sends: bool = False,
    ) -> None:
        arrangement, backend, model = trainer.arrangement, trainer.backend, trainer.model
        self.model, self.backend, self.world = model, backend, trainer.group
        self._arrangement, self.exchange = arrangement, exchange
        self.losses = trainer.loss, trainer.evaluation_loss
        self.seed, self.optimizer = trainer.seed, trainer.optimizer
        # Called on every rank, since it communicates if the classes are sharded.
        loss = trainer.loss
        self.score = loss.score if isinstance(loss, SumCrossEntropy | SumError) else count_correct
        is_loose = exchange is None or arrangement.layout.asynchronous
        if is_loose and any(map(has_class_weights, self.losses)):
            raise UsageError(
                "the loss has class weights, whose mean needs all labels of a global batch; updates"
                " of single workers or microbatches have none: train with a synchronous Worker, or"
                " without weights"
            )
        self.looks = trainer.group.is_root  # one rank warns for all
        self._reported: Plan = ()  # the last reported plan
        self._store: Store | None = None
        layout, self._in_segments = arrangement.layout, bool(arrangement.stages)
        limited = layout.limits_activations or (
            layout.activation_memory is not None and not self._in_segments
        )
        if limited and layout.offload is not None:
            with agreed(arrangement.mesh.world):
                self._store = Store(layout.offload, backend)
        # of a pipeline's stages, and the largest batch for which they were measured
        self._limit = layout.activation_memory if self._in_segments else None
        self._fitted_size = 0
        self._fitted = ""  # how they fit, until it is reported
        self.updates_per_microbatch = layout.asynchronous
        self.slow = NOT_SLOW if exchange is None else trainer.slow
        self.replay = Replay(
            model, _refusal(arrangement, self.losses, backend.is_device), backend.xp
        )
        # of training and of evaluation, always the same, since recorded passes add to them
        self._scalars, self.evaluated = DeferredScalars(), DeferredScalars()
        self.planned: RecomputedModel | None = None
        compute = self._compute
        if layout.activation_memory is not None and not self._in_segments:
            self.planned = RecomputedModel(
                model, layout.activation_memory, backend, self.world, self._store
            )
            compute = self._compute_planned
        self.executor = Executor(arrangement, backend, compute, self.replay, synchronous_sends)
        self.hooks = None if exchange is None or self._in_segments else exchange.strategy
        self.counts = (
            self.executor.count - 1 in self.executor.stages and arrangement.mesh.coordinates.t == 0
        )
        self.is_pipeline, self.has_classes = arrangement.is_pipeline, bool(arrangement.classes)
        self.defers = self.is_pipeline and not self.updates_per_microbatch
        self.classes = 0
        self.is_alone = backend.is_device and trainer.group.size == 1 and not self._in_segments
        self.numbers = _numbers(arrangement)
        self._watched = _foreign_buffers(model, arrangement)
        self.settles = bool(self._watched) or isinstance(self._limit, int)
        self.passed: deque[StepReport] = deque(maxlen=PASSES_KEPT)
        if backend.is_device:
            _compile_ahead(model, backend.xp, trainer.precision)

    def _compute(self, x: Tensor, visit: Visit) -> Tensor:
        return visit.end(self.model(x))

    def _compute_planned(self, x: Tensor, visit: Visit) -> Tensor:
        """Return the loss of a microbatch, within the budget for activations."""
        mode = current()
        # `suspect` observes the layers, which no plan runs as they are
        if not mode.training or mode.again:
            return self._compute(x, visit)
        assert self.planned is not None
        return self.planned(x, visit.end, visit.size, visit.adds)

    # ---- for the trainer ----

    def begin(self, batch: Batch, step: int, factor: float = 1.0) -> BatchPass:
        """Begin a batch's training pass; call its `train`.

        Args:
            step, factor: see `BatchPass`.
        """
        cuts = batch.cuts
        if self.exchange is None:
            cuts = tuple(cut for cut in cuts if cut.stop > cut.start)
        else:
            self.exchange.begin(batch)
        self._scalars.clear()
        return BatchPass(self, batch, step, self._scalars, cuts, factor=factor)

    def refusal_of(self, now: BatchPass, may_replay: bool) -> str:
        """Return why a pass may not be recorded and replayed; empty if it may."""
        if not may_replay:
            return OBSERVED
        return "activations are measured" if now.meter is not None else ""

    @contextmanager
    def settling(self, now: BatchPass) -> Iterator[None]:
        """Fit activations into their limit by the pass in the block, if it is the largest so far.

        Raises:
            UsageError: when the pass has changed a buffer that it must not change.
        """
        before = [buffer.data.copy() for _, buffer in self._watched]
        fits = isinstance(self._limit, int) and now.size > self._fitted_size
        if fits:
            self.executor.save_memory(self.executor.stages)
        with now.measuring() if fits else nullcontext():
            yield
        if fits:
            self._fit_stages(now)
        for (name, buffer), values in zip(self._watched, before, strict=True):
            if not bool((buffer.data == values).all()):
                raise UsageError(_BUFFER_MOVES.format(name))

    def _fit_stages(self, now: BatchPass) -> None:
        """Choose the stages to recompute from now on, the same on ranks with the same stages."""
        assert isinstance(self._limit, int)
        executor, mesh = self.executor, self._arrangement.mesh
        costs = [[*map(float, cost)] for cost in now.costs.values()]
        for group in (mesh.replicas, mesh.tp):
            costs = np.max(group.gather(costs), axis=0).tolist() if group.size > 1 else costs
        cost_of = dict(zip(executor.stages, starmap(StageCost, costs), strict=True))
        peak = partial(now.peak_of, cost_of)
        again_s = {number: clock.reproducible(cost.seconds) for number, cost in cost_of.items()}
        if not any(again_s.values()):  # times may not decide
            again_s = {number: BYTE_S * (1 + cost.inner) for number, cost in cost_of.items()}
        moving_s = {}
        if self._store is not None:
            most = int(max(cost.inner for cost in cost_of.values()))
            with agreed(mesh.world):
                byte_s = 1 / measure_bandwidth(self._store, self.backend, most)
            byte_s = max(map(float, mesh.world.gather(byte_s)))
            moving_s = {number: 2 * byte_s * cost.inner for number, cost in cost_of.items()}
        with agreed(mesh.world):
            # a backward takes twice as long as a forward
            hidden_s = 3 * sum(again_s.values())
            chosen = choose_savings(again_s, moving_s, hidden_s, peak, self._limit)
            if self._store is not None:
                most = sum(int(cost_of[number].inner) for number in chosen.moved)
                self._store.reserve(most * len(now.inputs))
        executor.save_memory(*chosen, self._store)
        self._fitted_size = now.size
        moved = f", {len(chosen.moved)} go out and come back" * (self._store is not None)
        self._fitted = (
            f"activations take {format_bytes(int(peak(*chosen)))} at most on this rank,"
            f" {format_bytes(int(peak(())))} if all were kept; {len(chosen.again)} of {len(costs)}"
            f" segments are recomputed{moved}"
        )

    def guard(self) -> Array:
        """Return a number on a device that is finite if the batch's loss and gradient are."""
        return self._scalars.place(SQUARES, self.backend.xp)

    def evaluate(self, batch: Batch) -> BatchPass:
        """Add a batch's LOSS and SCORE to `evaluated`, if this rank counts.

        Call it within `no_grad`.
        """
        count = max(len(self._arrangement.cuts), 1)
        if not self._arrangement.meets_in_forward:
            count = max(1, min(len(batch.y), count))
        parts = enumerate(split(len(batch.y), count))
        cuts = [Cut(cut.start, cut.stop, batch.first_row + cut.start, m) for m, cut in parts]
        now = BatchPass(self, batch, 0, self.evaluated, cuts, trains=False)
        now.run(now.key(), OBSERVED if timeline.current() else "")
        now.note_audit()
        loss = self.losses[True]
        if self.counts and has_class_weights(loss):
            self.evaluated.add(WEIGHTS, label_weights(loss, batch))
        return now

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """Return the error with the origin of a non-finite loss or gradient."""
        if (
            self._in_segments
            or self._arrangement.layout.expert_parallel
            or (self.exchange is not None and not self.exchange.strategy.keeps_own)
        ):
            return explain_gradients(self.world, self.model, step + 1, value)
        x, compute = self.suspect(
            batch, step, lambda loss: all(map(isfinite, self.world.sum_floats([loss])))
        )
        return explain(self.world, self.model, x, compute, step + 1, value)

    def suspect(
        self, batch: Batch, step: int, is_finite: Callable[[float], bool]
    ) -> tuple[Array, Callable[[], Tensor]]:
        """Return the input and loss of the first microbatch with a non-finite loss, or the last.

        Args:
            is_finite: tests a microbatch's loss, which is computed again.
        """
        now = BatchPass(self, batch, step, DeferredScalars(), batch.cuts)
        stage = self.executor.stages[0]

        def compute(microbatch: int) -> Tensor:
            visit = now.visit(microbatch)
            with visit.mode(True):
                (loss,), _ = stage.run([Tensor(now.inputs[microbatch])], True, visit)
                return loss

        tries = [(x, partial(compute, microbatch)) for microbatch, x in enumerate(now.inputs)]
        return next((item for item in tries if not is_finite(item[1]().item())), tries[-1])

    def summary(self) -> list[str]:
        """Return lines about the batches since the last call: the plan's cost, pipeline passes."""
        planned = self.planned
        if planned is not None and planned.plan != self._reported:
            self._reported = planned.plan
            return [planned.describe()]
        lines, self._fitted = [self._fitted] * bool(self._fitted), ""
        if not self.passed:
            return lines
        # without an epoch's short last batch
        full = max(report.samples for report in self.passed)
        passes = [
            report.passed
            for report in self.passed
            if report.passed is not None and report.samples == full
        ]
        plan = self.executor.schedule_for(passes[0].microbatches)
        lines.append(_forecast(self._arrangement.mesh, plan, passes))
        old = max((item for report in self.passed for item in report.staleness), default=0)
        self.passed.clear()
        if self.updates_per_microbatch:
            # only schedules that update within a pass, such as pipedream, use old weights
            stale = self._arrangement.mesh.pp.gather(old)
            lines.append(f"staleness by rank: at most {', '.join(map(str, stale))} updates")
        return lines

    def release(self) -> None:
        """Detach from the model; a second call does nothing."""
        if self._store is not None:
            self._store.close()
        if self.exchange is not None and not self.exchange.strategy.released:
            self.exchange.release()
            self.executor.free()


@lru_cache(maxsize=16)
def _refusal(arrangement: Arrangement, losses: Sequence[SumLoss], is_device: bool) -> str:
    """Return why passes of a layout cannot be replayed; empty if they can."""
    layout = arrangement.layout
    strangers = [name_of(loss) for loss in losses if not is_own_loss(loss)]
    reasons = {
        "an update within a pass replaces the weights' arrays": layout.asynchronous,
        "gradients in a fixed order leave the device after each microbatch": (
            layout.fixed and is_device
        ),
        "offloaded arrays are loaded and released between layers": layout.offload is not None,
        "an activation plan has its own memory budget": (
            layout.limits_activations
            or (layout.activation_memory is not None and not arrangement.stages)
        ),
        f"the loss {', '.join(strangers[:1])} is not nnmpi's own, and may decide by values": bool(
            strangers
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


_BUFFER_MOVES = (
    "the forward of your module changed its Buffer {!r}, by this rank's rows or more than once, so"
    " it differs from the serial run's. Give the class an attribute all_reduce = None; a strategy"
    " sets it to a function that sums a float64 array over the ranks that share a batch. Sum with"
    " it where it is set, and change nothing where nnmpi.nn.current().again"
)


def _foreign_buffers(model: Module, arrangement: Arrangement) -> list[tuple[str, Buffer]]:
    """Return buffers, with names, that forwards of users' modules must not change in this layout.

    They must not if replicas have different rows, or if forward passes are recomputed: a buffer
    would then depend on this rank's rows, or be updated twice. A class with `all_reduce` handles
    both cases, except in a fixed order of sums.
    """
    layout = arrangement.layout
    if arrangement.mesh.replicas.size == 1 and layout.activation_memory is None:
        return []
    return [
        (f"{path}.{item}".strip("."), buffer)
        for path, module in model.named_modules()
        if not is_own(type(module)) and (layout.fixed or not hasattr(module, "all_reduce"))
        for item, buffer in vars(module).items()
        if isinstance(buffer, Buffer)
    ]


def _warn_of_untracked(model: Module, loss: Tensor) -> None:
    """Warn of a parameter outside the model that gets a gradient: no optimizer updates it."""
    known = {*model.parameters()}
    for leaf in leaves_of(loss):
        if isinstance(leaf, Parameter) and leaf not in known:
            warnings.warn(
                f"a parameter of shape {leaf.shape} gets a gradient, but is not in the model, so"
                " it is not trained: a layer must be a module's attribute or an item of a list"
                " that is one, not a variable outside; to freeze it, set its requires_grad = False",
                stacklevel=2,
            )
            return


# Families of a device's kernels, and the modules that need them; nearly every model needs _ALWAYS.
_ALWAYS = "dense", "activation", "softmax", "copy"
_FAMILIES = {
    "norm": "BatchNorm GroupNorm",
    "layer_norm": "RMSNorm LayerNorm",
    "embedding": "Embedding",
    "dropout": "Dropout",
    "recurrent": "GRULayer LSTMDirection",
    "pooling": "MaxPool2d AvgPool2d AdaptiveAvgPool2d GlobalAvgPool2d Upsample",
}


def _compile_ahead(model: Module, xp: Any, mode: str) -> None:
    """Begin to compile the kernels that a model on a device needs, all at the same time.

    The first step compiled them one by one, in 0.5 to 1.3 s each; later runs find them on disk.
    """
    kernels = device_kernels(xp)
    if kernels is None or not model.storage.data:
        return
    names = {type(module).__name__ for _, module in model.named_modules()}
    families = {family for family, users in _FAMILIES.items() if names & {*users.split()}}
    families |= {*_ALWAYS}
    wide, low = model.storage.dtype.name, low_dtype(mode)
    narrow = wide if low is None else low.name
    inside = families & {"recurrent"}  # computes in float32 inside of half precision
    kernels.compile_ahead(families - inside, narrow, wide)
    kernels.compile_ahead(["updates", "sums", *inside], wide, wide)
    # copies within a dtype and between them; the seed of a backward pass is float64
    for target, source in {(narrow, narrow), (wide, narrow), (wide, "float64")}:
        kernels.compile_ahead(["copy"], target, source)


def _numbers(arrangement: Arrangement) -> dict[int, list[int]]:
    """Return the storage numbers of each stage's parameters, for this rank's stages."""
    number_of = {span.parameter: i for i, span in enumerate(arrangement.model.storage.spans)}
    return {
        stage: sorted(number_of[parameter] for parameter in parameters_of(layers))
        for stage, layers in arrangement.own_segments.items()
    }


def _forecast(mesh: BoundMesh, schedule: Schedule, reports: Sequence[PassReport]) -> str:
    """Return measured and simulated times of a schedule's passes, as text.

    The time of a pass is the largest of the ranks' medians. The bubble is the share of the ranks'
    time without computation. Collective over the pipeline's ranks.
    """
    group, machine = mesh.pp, mesh.world.machine
    times = [
        [item.kind, item.stage, seconds] for report in reports for item, seconds in report.samples
    ]
    sent = [[op.kind, op.stage, lengths] for op, lengths in reports[-1].sent]
    totals = [
        median(report.total_s for report in reports),
        median(report.compute_s for report in reports),
    ]
    by_rank = group.gather([times, totals, max(report.peak_live for report in reports), sent])
    samples = [
        (Kind(kind).at(stage), seconds) for costs, *_ in by_rank for kind, stage, seconds in costs
    ]
    lengths = {(kind, stage): tuple(sizes) for *_, sent in by_rank for kind, stage, sizes in sent}
    simulation = simulate_schedule(
        schedule,
        measured_costs(schedule.stages, samples),
        machine and machine.parts(mesh.sizes.groups(PP), mesh.world.size)[0],
        lambda send: lengths[send.kind, send.stage],
    )
    measured_s = max(total_s for _, (total_s, _), *_ in by_rank)
    busy_s = sum(compute_s for _, (_, compute_s), *_ in by_rank)
    stage_s = [0.0] * schedule.stages
    for op, seconds in samples:
        if op.kind in COMPUTE:
            stage_s[op.stage] += seconds / len(reports) / schedule.microbatches
    bubble = 1 - busy_s / (measured_s * group.size) if measured_s else 0.0
    return (
        f"pipeline pass {1e3 * measured_s:.2f} ms, simulated {1e3 * simulation.makespan_s:.2f}"
        f" ms{'' if machine else ' without messages, for which there is no fit'}; bubble"
        f" {bubble:.0%}, simulated {simulation.bubble:.0%}; ms per microbatch and stage:"
        f" {', '.join(f'{1e3 * seconds:.2f}' for seconds in stage_s)}; activations kept:"
        f" {', '.join(str(peak) for _, _, peak, _ in by_rank)}"
    )
