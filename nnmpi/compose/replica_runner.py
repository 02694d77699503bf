"""Forward, backward and evaluation of a model that this rank has from end to end (or its shards of every layer).

ForwardBackward     microbatch after microbatch, forward and backward, replayed where that is safe. And evaluation
ReplicaRunner       the runner of a Worker: gradients are summed over the replicas while backward goes on
LocalGradient       the gradient of one part of a batch for an asynchronous worker: no message is sent for it
evaluate_all        loss and score over many batches, as means over the ranks
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import NamedTuple, TypeAlias

from nnmpi import clock, timeline
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import perform, refuse_inside
from nnmpi.comm.agreement import agreed
from nnmpi.comm.gradients import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose.options import GradientExchange
from nnmpi.compose.replayed import ReplayedPass
from nnmpi.compose.runner import (
    LOSS,
    SCORE,
    DeferredScalars,
    DeviceBatch,
    Outcome,
    Values,
    check_cuts,
    label_check,
    score_of,
    summed,
    to_device,
)
from nnmpi.compose.stats import EvalReport, Totals
from nnmpi.compose.trainer import Trainer
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import Cut
from nnmpi.errors import UsageError
from nnmpi.memory.layers import ShardedWeights
from nnmpi.memory.plan import Plan
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.store import Store
from nnmpi.nn.mode import evaluation, training
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.divergence import explain, explain_gradients, locate_nonfinite, nonfinite_message
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.parallel.zero.strategy import ShardedDataParallel
from nnmpi.tensor.backward import leaves_of
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor


def evaluate_all(
    group: Group,
    batches: Iterable[Batch],
    evaluate: Callable[[Batch, DeferredScalars], bool],
    backend: Backend,
    parts: int = 1,
) -> EvalReport:
    """Return loss and score over this rank's parts of all batches, put together over the ranks; collective.

    On a device the sums are read once, at the end.

    Args:
        evaluate: adds loss and right answers to what is to be read, and returns whether this rank's count.
        parts: how many ranks' batches have the same samples, each some of their positions.
    """
    begin = clock.now()
    scalars, rows, own_targets = DeferredScalars(), 0, 0
    for batch in batches:
        if evaluate(batch, scalars):
            rows, own_targets = rows + len(batch.y), own_targets + batch.own_targets
    values = scalars.read()
    sums = group.sum_floats([values.get(LOSS, 0.0), values.get(SCORE, 0.0), rows, own_targets])
    report = EvalReport(samples=int(sums[2]) // parts, targets=int(sums[3]), wall_s=clock.now() - begin)
    report.loss_sum, report.score_sum = sums[:2]
    return report


class Microbatch(NamedTuple):
    """The part of a batch that is worked on, and of which step it is."""

    batch: Batch
    step: int
    cut: Cut
    part: DeviceBatch


Backward: TypeAlias = Callable[[Tensor, Tensor, bool], None]


class ForwardBackward:
    """Takes batches forward and backward, microbatch by microbatch, and notes what is to be known of them at the end.

    Args:
        trainer: whose model, losses and seed they are, and which says how the model lies on the ranks.
        backward: takes a microbatch's loss back: called with it, its gradient, and whether it is the batch's last.
        fixed: what sums the microbatches' gradients in a fixed order, if something does.
        alone: whether no other rank computes along: then microbatches without rows are left out.
        weights: the strategy that lets the model's weights come, if they are not there.

    Attributes:
        scalars: SCORE, and LOSS; with a fixed order each microbatch's loss by its number.
        now: what is worked on, or was last.
        passes: what does them; see `compose.replayed`.
        counts: whether this rank's losses count. Of ranks that share layers all compute the same one.
        planned: the model as it runs by a plan, once it has, where there is a budget for activations.
    """

    def __init__(
        self,
        trainer: Trainer,
        backward: Backward,
        fixed: FixedReduction | None = None,
        alone: bool = False,
        weights: ShardedWeights | None = None,
    ) -> None:
        model, loss, evaluation_loss, backend = trainer.model, trainer.loss, trainer.evaluation_loss, trainer.backend
        self.model, self.backend, self.seed, self.fixed, self._weights = model, backend, trainer.seed, fixed, weights
        self._loss, self._evaluation_loss, self._alone, self._backward = loss, evaluation_loss, alone, backward
        where = trainer.arrangement
        classes = 0 if where is None else where.classes
        self._check, self._check_evaluation = label_check(loss, classes), label_check(evaluation_loss, classes)
        # It is called on every rank, since it may communicate where the classes are shared out.
        self._score = score_of(loss, where)
        self._sequence = None if where is None else where.sequence
        self.counts = where is None or where.mesh.place.t == 0
        self.scalars = DeferredScalars()
        self._looks = trainer.group.is_root  # one rank warns for all, in its first pass
        self._budget = None if where is None else where.layout.activation_memory
        self._world = None if where is None else where.mesh.world
        self._store: Store | None = None
        if where is not None and where.layout.offload is not None and self._budget is not None:
            with agreed(where.mesh.world):
                self._store = Store(where.layout.offload, backend)
        self.now: Microbatch
        self._begin_s = 0.0
        self._score_now: Array | float = 0.0
        self._last_seed: tuple[float, Array] | None = None
        self.passes = ReplayedPass(self._forward_and_backward, model, loss)
        self._evaluations = ReplayedPass(self._evaluate, model, evaluation_loss, self.passes.pool)
        self._evaluated: DeferredScalars
        # A device's recordings would keep more memory than its steps take; a plan keeps to a budget of its own.
        can = where is None or (not where.layout.fixed and where.layout.zero < 2 and where.layout.offload is None)
        self._can_replay = can and not backend.is_device and self._budget is None
        self.planned: RecomputedModel | None = None
        self._told: Plan = ()  # the plan that was told of last

    def run(self, batch: Batch, step: int, scale: float = 1.0, replays: bool = False) -> None:
        """Take each microbatch forward and backward.

        Args:
            step: the number of the batch in the run, which keys dropout.
            scale: what the gradients are multiplied by.
            replays: whether passes may be recorded and replayed.
        """
        device_batch, cuts, length = to_device(batch, self.model, self.backend), batch.cuts, batch.length
        self.scalars.clear()
        seed = self._seed(scale / max(batch.global_targets, 1))
        for cut in cuts:
            if self._alone and cut.stop == cut.start:
                continue
            if self.fixed is not None:
                self.fixed.microbatch = cut.number
            part = device_batch if len(cuts) == 1 else device_batch.rows(slice(cut.start, cut.stop))
            self.now = Microbatch(batch, step, cut, part)
            flags = (cut is cuts[0], cut is cuts[-1], length)
            with training(self.seed, step, cut.first_row):
                self.passes.go((part.x, part.y, seed), flags, replays and self._can_replay)

    def _seed(self, value: float) -> Array:
        """Return the gradient of the sum of the losses, () float64, where the model lives."""
        if self._last_seed is None or self._last_seed[0] != value:
            self._last_seed = value, self.backend.xp.full((), value, "float64")
        return self._last_seed[1]

    def _forward_and_backward(
        self, x: Tensor, y: Tensor, seed: Tensor, _first: bool, last: bool, length: int | None
    ) -> None:
        """Take a microbatch forward and backward. A replay makes the calls on arrays again, and what is performed.

        Args:
            _first: whether it is the batch's first, before which there are no gradients; recorded apart from others.
            last: whether it is the last one.
            length: of whole sequences, where x has some of their positions.
        """
        perform(self._begin)
        loss = self._forward(x, y, length)
        if self._looks:
            self._looks = False
            self._warn_of_strangers(loss)
        perform(self._end_forward, loss.data)
        self._backward(loss, seed, last)
        perform(self._show, "B", "backward")

    def _warn_of_strangers(self, loss: Tensor) -> None:
        """Warn of a parameter that gets a gradient, but belongs to no layer of the model: no update will change it."""
        own = {id(parameter) for _, parameter in self.model.named_parameters()}
        for leaf in leaves_of(loss):
            if isinstance(leaf, Parameter) and id(leaf) not in own:
                warnings.warn(
                    f"a parameter of shape {leaf.shape} gets a gradient, but is not found in the model, and so is not "
                    "trained: a layer must be a module's attribute or an item of a list that is one, not a variable "
                    "of a function around it; if nothing is to train it, set its requires_grad = False",
                    stacklevel=2,
                )
                return

    def _begin(self) -> None:
        self._begin_s = clock.now()

    def _end_forward(self, loss: Array) -> None:
        self.scalars.add(LOSS if self.fixed is None else self.now.cut.number, loss)
        self.scalars.add(SCORE, self._score_now)
        self._show("F", "forward")

    def _show(self, letter: str, category: str) -> None:
        """Put what was computed since `_begin_s` into the trace, if there is one, and begin with what is next."""
        trace = timeline.current()
        if trace is not None:
            begin_s, self._begin_s = self._begin_s, clock.now()
            number = self.now.step if self._alone else self.now.cut.number
            trace.add(f"{letter}{number}", category, timeline.COMPUTE, begin_s, self._begin_s)

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """Add LOSS and SCORE of a batch, in evaluation mode; return whether they count."""
        part, self._evaluated = to_device(batch, self.model, self.backend), scalars
        self.now = Microbatch(batch, 0, Cut(0, len(part.y), batch.first_row), part)
        with no_grad(), evaluation():
            may_replay = self._can_replay and timeline.current() is None
            self._evaluations.go((part.x, part.y), (part.length,), may_replay)
        return self.counts

    def _evaluate(self, x: Tensor, y: Tensor, length: int | None) -> None:
        logits = self._leave(self.model(self._enter(x, length)), length)
        self._check_evaluation(self.now.part, 0, logits)
        loss = summed(self._evaluation_loss, logits, y.data)
        perform(self._note_score, logits.data)
        perform(self._end_evaluation, loss.data)

    def _end_evaluation(self, loss: Array) -> None:
        if self.counts:  # else it takes part for the others
            self._evaluated.add(LOSS, loss)
            self._evaluated.add(SCORE, self._score_now)

    def suspect(
        self, batch: Batch, step: int, is_finite: Callable[[float], bool]
    ) -> tuple[Array, Callable[[], Tensor]]:
        """Return the input of the first microbatch whose loss is not finite, else of the last, and what computes it.

        Args:
            is_finite: asked of each microbatch's loss, computed again.
        """
        device_batch = to_device(batch, self.model, self.backend)
        parts = [device_batch.x[cut.start : cut.stop] for cut in batch.cuts]
        tries = list(
            zip(parts, (partial(self._compute, device_batch, cut, step, batch) for cut in batch.cuts), strict=True)
        )
        return next((each for each in tries if not is_finite(each[1]().item())), tries[-1])

    def _compute(self, device_batch: DeviceBatch, cut: Cut, step: int, batch: Batch) -> Tensor:
        """Return the loss of a microbatch, computed once more."""
        part = device_batch.rows(slice(cut.start, cut.stop))
        self.now = Microbatch(batch, step, cut, part)
        with training(self.seed, step, cut.first_row):
            return self._forward(Tensor(part.x), Tensor(part.y), batch.length)

    def _forward(self, x: Tensor, y: Tensor, length: int | None) -> Tensor:
        """Return the loss of a microbatch, and note its score. The logits do not outlive it."""

        def head(logits: Tensor) -> Tensor:
            logits = self._leave(logits, length)
            self._check(
                self.now.part, self.now.cut.start, logits
            )  # before the loss: a device reads out of range silently
            perform(self._note_score, logits.data)
            return summed(self._loss, logits, y.data)

        if self._budget is None:
            return head(self.model(self._enter(x, length)))
        return self._recomputed(self.now.batch)(self._enter(x, length), head, self.now.batch.global_rows)

    def _note_score(self, logits: Array) -> None:
        self._score_now = self._score(Tensor(logits), self.now.part)  # the last one: a plan may compute the head twice

    def _recomputed(self, batch: Batch) -> RecomputedModel:
        """Return the model as it runs within its budget."""
        if self.planned is None:
            adds = batch.microbatches > 1 and self._weights is None  # else each is summed by itself
            self.planned = RecomputedModel(
                self.model, self._budget, self.backend, adds, self._world, self._store, self._weights
            )
        return self.planned

    def release(self) -> None:
        """Let go of what has gone out of memory."""
        if self._store is not None:
            self._store.close()

    def summary(self) -> list[str]:
        """Say what the plan takes that is run since the last call."""
        planned = self.planned
        if planned is None or planned.plan == self._told:
            return []
        self._told = planned.plan
        return [planned.describe()]

    def _enter(self, x: Tensor, length: int | None) -> Tensor:
        return x if self._sequence is None or length is None else self._sequence.enter(x, length)

    def _leave(self, logits: Tensor, length: int | None) -> Tensor:
        return logits if self._sequence is None or length is None else self._sequence.leave(logits, length)


@dataclass(frozen=True)
class Gradient:
    """What computing a gradient gave; the gradient itself is in the model's storage.

    Attributes:
        totals: of the part, a step; its times are for the caller to fill in.
        norm: the length of the gradient of the part's mean loss, before clipping; not finite if the loss is not.
    """

    totals: Totals
    norm: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers, so that it may be used."""
        return isfinite(self.totals.loss_sum) and isfinite(self.norm)


class LocalGradient:
    """Computes gradients of parts of batches.

    Args:
        trainer: whose model it is, without another strategy; its `clip` is for the gradient of a part's mean loss.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.model, self.backend, self.clip = trainer.model, trainer.backend, trainer.clip
        self._passes = ForwardBackward(trainer, self._backward, alone=True)
        self._precision = trainer.precision
        self._poll: Callable[[], None] | None = None

    def look_after(self, poll: Callable[[], None]) -> None:
        """Call this, too, from now on: many times while a gradient is computed.

        Raises:
            UsageError: when a strategy has the model's hooks already.
        """
        parameters = [span.parameter for span in self.model.storage.spans]
        if any(each.hook is not None or each.guard is not None for each in parameters):
            raise UsageError("the model has a DataParallel (or other hooks) already; call its release() first")
        self._poll = poll
        for parameter in parameters:
            parameter.hook = lambda _: poll()

    def run(self, batch: Batch, step: int) -> Gradient:
        """Compute the gradient of the part's losses, divided by the targets of the whole batch, into `storage.grads`.

        The gradients of all parts of a batch add up to that of its mean loss.

        Args:
            step: the number of the batch in the run, which keys dropout: the masks are those of a synchronous run.
        """
        refuse_inside("a worker's step")
        with use_precision(self._precision):
            return self._run(batch, step)

    def _run(self, batch: Batch, step: int) -> Gradient:
        scalars = self._passes.scalars
        self.model.storage.zero_grad()
        self._passes.run(batch, step)  # as `DataParallel` divides, but the parts' gradients are added up elsewhere
        self.model.storage.finish_gradients()
        targets, norm = batch.own_targets, 0.0
        values = scalars.read()
        if targets:
            norm = self._clip(batch.global_targets / targets)
        totals = Totals(1, len(batch.y), targets)
        totals.loss_sum, totals.score_sum = values.get(LOSS, 0.0), values.get(SCORE, 0.0)
        return Gradient(totals, norm)

    def _backward(self, loss: Tensor, seed: Tensor, _last: bool) -> None:
        if self._poll is not None:
            self._poll()
        loss.backward(seed)

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """See `ForwardBackward.evaluate`."""
        with use_precision(self._precision):
            return self._passes.evaluate(batch, scalars)

    def explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        """Return the sentence about a gradient that is not finite, after computing it again.

        Args:
            who: whose it is: "rank 2", "worker 2".
        """
        with use_precision(self._precision):
            place = locate_nonfinite(self.model, *self._passes.suspect(batch, step, isfinite))
            return nonfinite_message(step + 1, gradient.totals.loss, place, who)

    def release(self) -> None:
        """Take everything off the model again."""
        if self._poll is not None:
            for span in self.model.storage.spans:
                span.parameter.hook = None

    def _clip(self, ratio: float) -> float:
        """Return the length of the gradient of this part's mean loss, and clip the gradient by it.

        The stored gradient is divided by the whole batch's targets, so its length is multiplied by the batch's
        targets / the part's.
        """
        grads = self.model.storage.grads
        norm = global_norm(grads) * ratio
        if self.clip is not None:
            scale(grads, coefficient(norm, self.clip))
        return norm


def data_parallel(
    trainer: Trainer, exchange: GradientExchange, is_summed: bool, runs_backward: bool = True
) -> DataParallel:
    """Return what sums a trainer's gradients over its replicas; with ZeRO it shares the model out, too. Collective.

    Args:
        exchange: how they are summed.
        is_summed: whether they are summed there, if not in a fixed order.
        runs_backward: whether it runs the backward passes.
    """
    where, model, backend = trainer.arrangement, trainer.model, trainer.backend
    replicas, zero = (trainer.group, 0) if where is None else (where.mesh.replicas, where.layout.zero)
    if zero:
        return ShardedDataParallel(
            model, replicas, zero, exchange.algorithm, backend=backend, runs_backward=runs_backward
        )
    free = where is None or not where.layout.fixed
    how = (exchange.allreduce, exchange.bucket_bytes, exchange.overlap)
    return DataParallel(model, replicas, *how, backend, is_summed and free, runs_backward, free)


class ReplicaRunner:
    """Runs a whole model, or this rank's shards of its layers.

    Args:
        trainer: whose model it is, without a pipeline.
        exchange: how gradients are summed over the replicas.
        is_summed: whether this runner sums them; a fused update does it otherwise.
    """

    updates = False

    def __init__(self, trainer: Trainer, exchange: GradientExchange, is_summed: bool) -> None:
        self.model, self.world = model, world = trainer.model, trainer.group
        arrangement, backend = trainer.arrangement, trainer.backend
        replicas = world if arrangement is None else arrangement.mesh.replicas
        fixed = arrangement is not None and arrangement.layout.fixed
        self.parallel = data_parallel(trainer, exchange, is_summed)
        self._plans = arrangement is not None and arrangement.layout.activation_memory is not None
        self.fixed = FixedReduction(model, replicas, backend) if fixed else None
        strategy = self.parallel
        weights = strategy if isinstance(strategy, ShardedDataParallel) and strategy.stage > 1 else None
        self._passes = ForwardBackward(trainer, self._backward, self.fixed, weights=weights)
        self.scalars, self.evaluate = self._passes.scalars, self._passes.evaluate

    def run(self, batch: Batch, step: int, scale: float, replays: bool = False) -> Outcome:
        """See `Runner.run`."""
        fixed = self.fixed
        check_cuts(batch, fixed is not None)
        if fixed is not None:
            plans, self._plans = self._plans, False  # all ranks together, in the first batch
            if plans and 0 in self.world.gather(len(batch.cuts)):
                raise UsageError(
                    "ranks without samples cannot take part in a plan for the activations of reduction fixed; give a "
                    "larger batch, fewer ranks, or no activation_memory"
                )
            fixed.begin(batch.microbatches)
        self._passes.run(batch, step, scale, replays)
        if fixed is None:
            return Outcome(self._sums, batch.own_targets if self._passes.counts else 0, self.parallel.traffic)
        begin = clock.now()
        fixed.finish()
        traffic = Traffic(clock.now() - begin, 0.0, fixed.sent_bytes, len(fixed.storage.grads), nan)
        return Outcome(partial(self._sums_fixed, fixed, batch.cuts), batch.own_targets, traffic)

    @property
    def replays(self) -> int:
        """How many passes were replayed so far."""
        return self._passes.passes.replays

    @property
    def held_bytes(self) -> int:
        """What recorded passes keep of memory between two steps."""
        return self._passes.passes.held_bytes

    def _backward(self, loss: Tensor, seed: Tensor, last: bool) -> None:
        now, fixed = self._passes.now, self.fixed
        self.parallel.backward(loss, now.batch.global_targets, last and fixed is None, seed=seed)
        if fixed is not None:
            fixed.add(now.cut.number)

    def _sums(self, values: Values) -> tuple[float, float]:
        return (values.get(LOSS, 0.0), values.get(SCORE, 0.0)) if self._passes.counts else (0.0, 0.0)

    def _sums_fixed(self, fixed: FixedReduction, cuts: Sequence[Cut], values: Values) -> tuple[float, float]:
        total = fixed.sum_numbers({cut.number: values[cut.number] for cut in cuts}, self.world)
        return total if self.world.is_root else 0.0, values.get(SCORE, 0.0)

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        if self.fixed is not None or isinstance(self.parallel, ShardedDataParallel):
            return explain_gradients(self.world, self.model, step + 1, value, "its microbatches and replicas")
        x, again = self._passes.suspect(batch, step, lambda loss: all(map(isfinite, self.world.sum_floats([loss]))))
        return explain(self.world, self.model, x, again, step + 1, value)

    def summary(self) -> list[str]:
        """Say what is computed again, once for each plan; see `Runner.summary`."""
        return self._passes.summary()

    def release(self) -> None:
        """See `Runner.release`."""
        self._passes.release()
        self.parallel.release()
        if self.fixed is not None:
            self.fixed.release()
