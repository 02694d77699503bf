"""Batches through the executor: losses, scores and gradients.

    Passes              of a Worker: begins a BatchPass for each batch
    BatchPass           its losses; gradients are summed over the replicas during the backward pass

    the last backward of stage s    --> reduce(s)    start its sum over the replicas
    all are done                    --> finish       wait for the sums; sum tied parameters over
                                                     stages

PipeDream (Narayanan et al., 2019) updates after every microbatch instead, without a flush. Each
backward then uses the weights of its forward: an update writes a new copy of the stage's weights,
and the graphs of microbatches in flight keep the old copies until their backward (weight stashing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite, nan
from typing import Any

from nnmpi.backend.array import Array, Shape
from nnmpi.backend.cuda.kernels import compile_for
from nnmpi.backend.recording import active
from nnmpi.base.custom import name_of
from nnmpi.base.errors import NnmpiError
from nnmpi.base.shard import split
from nnmpi.comm.synchrony.slow import NOT_SLOW
from nnmpi.compose.activations import ActivationLimit
from nnmpi.compose.evaluation import MetricStates
from nnmpi.compose.exchange import Exchange
from nnmpi.compose.executor import Executor
from nnmpi.compose.forecast import PipelineForecast
from nnmpi.compose.losses import (
    balanced,
    check_classes,
    check_labels,
    has_class_weights,
    is_own_loss,
    label_weights,
    refuse_weights,
    score_of,
    sum_of,
    to_device,
)
from nnmpi.compose.replayed import OBSERVED, Replay, refusal_of
from nnmpi.compose.scalars import LOSS, SCORE, SQUARES, WEIGHTS, DeferredScalars
from nnmpi.compose.stats import StepReport
from nnmpi.compose.trainer import Trainer
from nnmpi.compose.walk import Pass
from nnmpi.compose.watch import ModelWatch
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import Cut
from nnmpi.metrics.rows import find_metrics
from nnmpi.nn.mode import Mode, current, evaluation, within
from nnmpi.parallel.divergence import explain, explain_gradients
from nnmpi.parallel.witness import Words, loss_as_words
from nnmpi.tensor.tensor import Tensor


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
        words: what is told of the loss, if the ranks compare it, and Python computes it here.
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
        self.words: Words = {}
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
        self._left = Counter[int]()
        for numbers in owner.numbers.values() if trains else ():
            self._left.update(numbers)
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
        # whether the numbers of an evaluation are measured, and losses are weighted
        measures = not self._trains and self._owner.measured is not None
        has_weights = self._trains and full.weights is not None
        kind = self._trains, measures, has_weights
        return *kind, full.length, full.x.dtype, full.y.dtype, *shapes, recomputed

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
            with owner.observing(self) if owner.observes else nullcontext():
                may_replay = may_replay and self.meter is None
                passed = self.run(self.key(), "" if may_replay else OBSERVED)
            self.note_audit()
            if owner.is_pipeline:
                report.passed, report.wait_s = passed, passed.wait_s
                report.staleness = tuple(self._staleness)
                owner.forecast.passed.append(report)
        if owner.hooks is not None:
            owner.hooks.before_sum = int
        if exchange is not None and not owner.updates_per_microbatch:
            exchange.finish()
            exchange.note_squares(self._scalars)
        return report

    def evaluate(self) -> None:
        """Add losses and scores to the scalars."""
        self.run(self.key(), OBSERVED if self._timeline is not None else "")
        self.note_audit()

    def note_audit(self) -> None:
        """Note what the audit of a replay has found; raise it where no ranks meet."""
        replay = self._owner.replay
        # raised here it would be this rank's alone, and the others would wait for its sums
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

    def mode(self, microbatch: int, recomputing: bool) -> AbstractContextManager[None]:
        """See `Pass`."""
        if not self._trains:
            return evaluation()
        return within(self.late(BatchPass._training, microbatch, recomputing))

    def _training(self, microbatch: int, recomputing: bool, mode: Mode) -> Mode:
        """Begin a microbatch's forward; return its mode."""
        owner, cut = self._owner, self._cuts[microbatch]
        if owner.exchange is not None and owner.exchange.strategy.microbatch != cut.number:
            owner.exchange.strategy.microbatch = cut.number
        if self._each and not recomputing:
            self._versions[microbatch] = owner.optimizer.steps
        return mode._replace(
            training=True,
            seed=owner.seed,
            step=self._step + (microbatch if self._each else 0),
            first_row=cut.first_row,
            recomputing=recomputing,
            weight=self._weights[microbatch],
            dropped=None if recomputing else set(),
        )

    def head(self, microbatch: int, logits: Tensor) -> Tensor:
        """Return the loss of a microbatch; add loss and score to the step's scalars."""
        logits = self.executor.whole(logits, self.length)
        owner, recomputing = self._owner, current().recomputing
        labels, weights = self.do(BatchPass._labels, microbatch, when="before"), None
        if self._trains and self.batch.weights is not None:
            weights = self.do(BatchPass._sample_weights, microbatch, when="before")
        try:
            if not recomputing and owner.backend.is_device:
                # before the loss: a device would read out of range silently
                self.do(BatchPass._check_labels, microbatch, logits.shape, writes=())
            loss = sum_of(self._loss, logits, labels, weights)
        except NnmpiError as error:
            # in a pipeline the other stages already compute, and would wait for this gradient
            if not owner.defers or active() is not None:
                raise
            self.failed, loss = error, (logits * 0).sum()
        if owner.tells_loss and not recomputing and active() is None:
            self.words = loss_as_words(loss)
        owner.classes = logits.shape[-1] if logits.shape else 0
        if not recomputing:
            # with sharded classes ranks exchange their best ones, which no graph contains
            given = microbatch, labels, logits._data, loss._data
            reads_host = owner.has_classes or (not self._trains and owner.measured is not None)
            self.do(BatchPass._note_numbers, *given, writes=None if reads_host else ())
        return loss

    def _labels(self, microbatch: int) -> Array:
        return self._parts[microbatch].y

    def _sample_weights(self, microbatch: int) -> Any:
        return self._parts[microbatch].weights

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
        if not self._trains and owner.measured is not None:
            owner.measured.add(logits, self._parts[microbatch].on_host, self.counts)

    # ---- its gradients ----

    def begin_backward(self, microbatch: int) -> None:
        """See `Pass`."""
        owner = self._owner
        if owner.watch.looks:
            owner.watch.look(self.outputs(microbatch))
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
        # graphs of microbatches in flight keep the old arrays
        storage.move(data=[data.copy() for data in storage.data])
        for span in storage.spans:
            # `move` clears the gradients, but their buffers still have the values
            span.parameter.grad = span.parameter.buffer
        self._staleness.append(owner.optimizer.steps - self._versions.pop(microbatch))
        owner.optimizer.apply()
        storage.clear_gradients()

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
        measured: what the metrics of the last evaluation have measured; None for none.
        counts: whether this rank's losses count: it is the first tensor-parallel rank of the last
            stage.
        defers: whether an error in the last stage's loss is raised when all ranks meet.
        classes: of this rank's logits, once they are known.
        numbers: the storage numbers of each stage's parameters, for this rank's stages.
        watch: the model's buffers, and parameters outside of it.
        observes: whether `observing` has anything to do.
        forecast: compares a pipeline's passes with its simulation.
        slow, poll: see `Pass`.
        tells_loss: whether the ranks compare their losses in this step.
    """

    tells_loss = False
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
        self.score = score_of(trainer.loss)
        is_loose = exchange is None or arrangement.layout.asynchronous
        if is_loose and any(map(has_class_weights, self.losses)):
            refuse_weights("the loss has class")
        self._is_loose = is_loose
        self.watch = ModelWatch(model, arrangement, trainer.group.is_root)  # one warns for all
        self._limit = ActivationLimit(arrangement, model, backend)
        self._in_segments = bool(arrangement.stages)
        self.updates_per_microbatch = arrangement.layout.asynchronous
        self.slow = NOT_SLOW if exchange is None else trainer.slow
        strangers = [name_of(loss) for loss in self.losses if not is_own_loss(loss)]
        why = refusal_of(arrangement.layout, self._in_segments, strangers, backend.is_device)
        self.replay = Replay(model, why, backend.xp)
        # of training and of evaluation, always the same, since recorded passes add to them
        self._scalars, self.evaluated = DeferredScalars(), DeferredScalars()
        self.measured: MetricStates | None = None
        self.executor = Executor(
            arrangement, backend, self._limit.run, self.replay, synchronous_sends
        )
        self.forecast = PipelineForecast(arrangement, self.executor)
        self.hooks = None if exchange is None or self._in_segments else exchange.strategy
        self.counts = (
            self.executor.count - 1 in self.executor.stages and arrangement.mesh.coordinates.t == 0
        )
        self.is_pipeline, self.has_classes = arrangement.is_pipeline, bool(arrangement.classes)
        self.defers = self.is_pipeline and not self.updates_per_microbatch
        self.classes = 0
        self.is_alone = backend.is_device and trainer.group.size == 1 and not self._in_segments
        self.numbers = arrangement.numbers
        model.storage.check.tell(self)
        if backend.is_device and model.storage.data:
            layers = {type(module).__name__ for _, module in model.named_modules()}
            compile_for(backend.xp, layers, model.storage.dtype, trainer.precision)

    def follow(self) -> None:
        """Watch the buffers that the model has now; see `nn.module.TreeCheck`."""
        self.watch.list_buffers()
        self.observes = self._limit.fits or bool(self.watch.buffers)

    # ---- for the trainer ----

    def begin(self, batch: Batch, step: int, factor: float = 1.0) -> BatchPass:
        """Begin a batch's training pass; call its `train`.

        Args:
            step, factor: see `BatchPass`.
        """
        if self._is_loose and batch.weights is not None:
            refuse_weights("the samples have")
        cuts = batch.cuts
        if self.exchange is None:
            # nobody waits for this rank: an empty microbatch would only compute on no rows
            cuts = tuple(cut for cut in cuts if cut.stop > cut.start)
        else:
            self.exchange.begin(batch)
        self._scalars.clear()
        return BatchPass(self, batch, step, self._scalars, cuts, factor=factor)

    @contextmanager
    def observing(self, now: BatchPass) -> Iterator[None]:
        """Fit activations by the pass in the block, and watch the model's buffers."""
        fitting = now.fitting(self._limit) if self._limit.fits else nullcontext()
        with self.watch.unmoved(), fitting:
            yield

    def guard(self) -> Array:
        """Return a number on a device that is finite if the batch's loss and gradient are."""
        return self._scalars.place(SQUARES, self.backend.xp)

    def measure(self, metrics: Any) -> MetricStates | None:
        """Let the evaluations that follow measure metrics; return their states, or None for none.

        Args:
            metrics: see `Trainer.evaluate`.
        """
        self.measured = None
        if metrics:
            arrangement, loss = self._arrangement, self.losses[True]
            shards = (arrangement.classes, arrangement.mesh.tp) if arrangement.classes else ()
            self.measured = MetricStates(find_metrics(metrics), loss, *shards)
        return self.measured

    def evaluate(self, batch: Batch) -> BatchPass:
        """Add a batch's LOSS and SCORE to `evaluated`, and measure it, if this rank counts.

        Call it within `no_grad`.
        """
        count = max(len(self._arrangement.cuts), 1)
        if not self._arrangement.meets_in_forward:
            count = max(1, min(len(batch.y), count))
        parts = enumerate(split(len(batch.y), count))
        cuts = [Cut(cut.start, cut.stop, batch.first_row + cut.start, m) for m, cut in parts]
        now = BatchPass(self, batch, 0, self.evaluated, cuts, trains=False)
        now.evaluate()
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
        return [*self._limit.summary(), *self.forecast.summary()]

    def release(self) -> None:
        """Detach from the model; a second call does nothing."""
        self._limit.release()
        if self.exchange is not None and not self.exchange.strategy.released:
            self.exchange.release()
            self.executor.free()
