"""The interface of all trainers: train up to a point, evaluate, state, report, release.

    segment = trainer.run(loader, epoch, 0, loader.batches_per_epoch, step=0, lr=lambda step: 0.1)
    print(segment.totals.loss, trainer.evaluate(test_loader.epoch(0)).accuracy)

The batches between two such points are a segment. At its ends all ranks have the same weights, so
evaluations and checkpoints work as in any other run. Within it the ranks may meet after every step,
or each continues at its own speed:

    in step       rank 0   |--0--|.....|--1--|.....|--2--|.....|--3--|.....|  `compose.worker`
                  rank 1   |----0------|----1------|----2------|----3------|
    out of step   worker 0 |--0--|--2--|--4--|--5--|--7--|        |           `AsynchronousWorker`
                  worker 1 |----1-----|----3-----|----6-----|     |

    Trainer             the interface; TrainingSegment: its input
    Progress            its reports on the way; SegmentReport: its report at the end; the sums of
                        both are in `stats`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeAlias

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.onednn import installed
from nnmpi.backend.precision import low_dtype
from nnmpi.backend.precision import precision as mode_of
from nnmpi.base.errors import CheckpointError, UsageError, asks_to_stop, expect
from nnmpi.base.loop import Origin
from nnmpi.base.ownership import claim
from nnmpi.base.settled import Settled
from nnmpi.comm.agreement import as_text
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from nnmpi.compose.arrange import Arrangement, replicate, require_same_options
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.layout import Numerics
from nnmpi.compose.losses import SumLoss, check_loss, named_loss
from nnmpi.compose.state import training_state
from nnmpi.compose.stats import Staleness, StepReport, Totals
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.names import Names, agree
from nnmpi.nn.chain import ModelPart
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState


@dataclass
class Progress:
    """A joint step of all ranks; if ranks are out of step, a used gradient or one worker's step.

    Attributes:
        batch: the number of its batch in the epoch.
        worker: the number of the worker that computed it; 0 for a joint step.
        totals: of this one step, over its samples, with the worker's times. `wall_s` are the
            seconds since the last report.
    """

    batch: int
    worker: int
    totals: StepReport


@dataclass
class SegmentReport:
    """A segment, equal on all ranks, except in-step times, which are this rank's.

    Attributes:
        totals: over the completed batches (fewer than given after a signal), and the samples of the
            used gradients. Out of step, times are means over the workers, and `wall_s` lasts until
            all have ended.
        signal: the number of the signal that ended it early, STOPPED, or 0.

    For ranks out of step:
        messages, bytes: of gradients and weights, each counted once, over all ranks.
        updates: the number of updates; with local SGD and gossip, of one worker.
        staleness: of the used gradients, by worker. None if it is undefined (gossip).
        lead: the largest lead of a worker over the slowest when it began a step, in steps.
        disagreement: the ranks' distance from their mean weights before they met, relative to the
            mean's norm.
    """

    totals: Totals = field(default_factory=Totals)
    signal: int = 0
    messages: int = 0
    bytes: int = 0
    updates: int = 0
    staleness: Staleness | None = None
    lead: int = 0
    disagreement: float = 0.0

    def plus(self, other: SegmentReport) -> SegmentReport:
        """Return both reports combined: sums, and the largest signal, updates, lead and drift."""
        largest = ("signal", "updates", "lead", "disagreement")
        staleness = [item.staleness for item in (self, other) if item.staleness is not None]
        return SegmentReport(
            totals=self.totals.plus(other.totals),
            messages=self.messages + other.messages,
            bytes=self.bytes + other.bytes,
            staleness=Staleness.sum(staleness) if staleness else None,
            **{name: max(getattr(self, name), getattr(other, name)) for name in largest},
        )

    @property
    def batches(self) -> int:
        """The number of completed batches."""
        return self.totals.steps


Rate: TypeAlias = Callable[[int], float]
OnProgress: TypeAlias = Callable[[Progress], object]
PollSignal: TypeAlias = Callable[[], int]
STOPPED = 128  # in the place of a signal's number: `progress` has asked to stop


@dataclass
class TrainingSegment:
    """The input of a trainer's `run_segment`: the arguments of `run`.

    Attributes:
        batches: the numbers of the batches in the epoch.
        step: the number of the first of them in the whole run.
    """

    loader: Loader
    epoch: int
    batches: range
    step: int
    lr: Rate
    progress: OnProgress
    poll_signal: PollSignal

    def number(self, batch: int) -> int:
        """Return the number in the whole run of a batch of the epoch."""
        return self.step + batch - self.batches.start


@dataclass(eq=False, repr=False)
class Training:
    """A checkpoint's contents: a model and its optimizer, distributed over a group."""

    model: Module
    optimizer: Optimizer
    group: Group
    arrangement: Arrangement
    _names: Names = field(init=False, default_factory=dict)  # of the data that it was trained on
    _source: Origin | None = field(init=False, default=None)  # of the last batches, whose are these

    def state(self) -> tuple[ModelState, ModelState]:
        """Return the full model's and optimizer's arrays, over all ranks.

        The optimizer's names are "slot/parameter"; for its numbers, see `scalars`. An average of
        the weights begins anew with weights that are set, unless the optimizer's state is, too.
        """
        return training_state(self.arrangement, self.optimizer)

    def scalars(self) -> dict[str, Any]:
        """Return a checkpoint's JSON besides arrays: the optimizer's class, steps and rate.

        Raises:
            UsageError: while an average of the weights, which `state` would return, is in their
                place.
        """
        optimizer = self.optimizer
        self.model.storage.check_weights("a checkpoint")
        kind = type(optimizer).__name__
        numbers = {"kind": kind, "steps": optimizer.steps, "lr": float(optimizer.lr)}
        return (
            numbers
            | ({"names": self._names} if self._names else {})
            | ({"sum": self._keeper} if self._keeper else {})
        )

    @property
    def _keeper(self) -> str:
        """The class whose state is that of the gradients' sums; empty if they have none."""
        strategy = self.model.storage.strategy
        return "" if strategy is None else strategy.keeper

    def check_scalars(self, values: Mapping[str, Any], source: object) -> None:
        """Refuse the state of another optimizer, or of another way to sum gradients.

        Their arrays may have the same names.

        Args:
            values: of `scalars`.
            source: of the values, for the message.

        Raises:
            CheckpointError: naming both.
            UsageError: while an average of the weights is in their place.
        """
        self.model.storage.check_weights("loading a checkpoint")
        before, now = values.get("kind"), type(self.optimizer).__name__
        if before not in (None, now):
            raise CheckpointError(
                f"{source} has the state of {before}, which {now} would misread; go on with"
                f" {before}"
            )
        before, now = values.get("sum", ""), self._keeper
        if before != now:
            raise CheckpointError(
                f"{source} has {f'the state of {before}' if before else 'no state of sums'}, but"
                f" gradients are summed {f'by {now}' if now else 'without a state'} now; give the"
                " same sum or compress as before"
            )

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `scalars`, of this or another kind of trainer."""
        self.optimizer.steps = index(values["steps"])
        self.optimizer.lr = values.get("lr", self.optimizer.lr)
        self._names, self._source = values.get("names", {}), None


class Trainer(
    Settled,
    Training,
    ABC,
    read_once="model optimizer group seed loss evaluation_loss backend precision clip slow"
    " arrangement in_step options reporters",
):
    """Trains and evaluates a model on the ranks of a group. All ranks make the same calls.

    Attributes:
        model, optimizer, group, seed, slow: as given.
        loss, evaluation_loss: (logits, labels) -> the sum of the samples' losses.
        backend: of the model.
        precision: of products, see `backend.precision`.
        clip: the largest gradient norm, or None.
        arrangement: the model's distribution over the ranks.
        in_step: whether the ranks meet after every step. Then `progress` is called every step on
            every rank; otherwise on rank 0 alone, for each gradient that arrives, and the segment's
            report has the results of all ranks.
        options: the constructor's, how ranks exchange gradients or weights.
        reporters: the calls of `progress` for each batch, one for each worker.
    """

    in_step = False
    reporters = 1
    options: Any = None

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        loss: SumLoss | str | None,
        evaluation_loss: SumLoss | None,
        numerics: Numerics,
        seed: int,
        backend: Backend | None,
        slow: Slow = NOT_SLOW,
        arrangement: Arrangement | None = None,
    ) -> None:
        call = f"nnmpi.{type(self).__name__}(model, optimizer, group, ...)"
        expect(call, (model, Module), (optimizer, Optimizer), (group, Group))
        if optimizer.storage is not model.storage:
            raise UsageError(
                "the optimizer's arrays are not the model's; make it for model.storage, after the"
                " last model.initialize()"
            )
        claim(model, "model")
        claim(optimizer, "optimizer")
        self.model, self.optimizer, self.group, self.seed = model, optimizer, group, seed
        self.loss = named_loss(loss, arrangement)
        self.evaluation_loss = (
            self.loss if evaluation_loss is None else named_loss(evaluation_loss, arrangement)
        )
        self.backend = numpy_backend() if backend is None else backend
        self.precision = mode_of() if numerics.precision is None else numerics.precision
        self.clip = numerics.clip
        model.storage.check_weights(f"a {type(self).__name__}")
        optimizer.decide_average(self, numerics.ema)
        self._ema = optimizer.ema
        self.slow = slow
        self._names, self._source = {}, None
        self._is_own = arrangement is None  # so `release` frees its groups
        self.arrangement = (
            replicate(model, group, self.backend) if arrangement is None else arrangement
        )
        for item in (self.loss, self.evaluation_loss):
            check_loss(item, arrangement)
        slow.check(group.size)
        check_numerics(self)

    def __repr__(self) -> str:
        """Return model, optimizer and ranks as text."""
        model = f"{type(self.model).__name__} of {self.model.storage.size:,} parameters"
        ranks = f"rank {self.group.rank} of {self.arrangement.mesh.sizes}"
        return f"{type(self).__name__}({model}, {self.optimizer!r}, {ranks})"

    def run(
        self,
        loader: Loader,
        epoch: int,
        first: int,
        stop: int,
        step: int,
        lr: Rate,
        progress: OnProgress | None = None,
        poll_signal: PollSignal | None = None,
    ) -> SegmentReport:
        """Train on the batches first..stop-1 of an epoch, and meet. Collective.

        Args:
            loader: of the training data. It must give this rank's part, except with a parameter
                server, which assigns the parts.
            step: the number of earlier batches in the whole run, which keys dropout and the
                learning rate.
            lr: step -> learning rate.
            progress: called for every step, or on rank 0 for every gradient; see `in_step`. If it
                returns "stop" or raises `nnmpi.StopTraining` on a rank, all ranks end with a full
                batch, soon after, and the report's `signal` is STOPPED.
            poll_signal: returns the number of a signal that this rank got, or 0; after a signal all
                ranks end with a full batch.

        Returns:
            The segment's report; after a signal its totals may have fewer steps.

        Raises:
            DivergenceError: on all ranks, when a loss or gradient was not finite; it was not used.
            UsageError: for a loader of another rank's part, if the mode needs this rank's.
        """
        asked = 0

        def note(item: Progress) -> None:
            nonlocal asked
            if progress is not None and asks_to_stop(progress, item):
                asked = STOPPED

        def poll() -> int:
            return asked or (0 if poll_signal is None else poll_signal())

        batches = range(first, stop)
        return self.run_segment(TrainingSegment(loader, epoch, batches, step, lr, note, poll))

    def note_source(self, source: Origin | None) -> None:
        """Keep the names of data to train on; refuse others than before, see `data.names`.

        Args:
            source: of the batches; None for arrays, whose numbers have no names.

        Raises:
            DataError: for other classes, columns or tokens.
        """
        if source is not None and source is not self._source:
            self._names, self._source = agree(self._names, source.names, source.name), source

    def check_source(self, source: Origin | None) -> None:
        """Refuse data to evaluate whose names are others than those of the training's.

        Raises:
            DataError: as `note_source`.
        """
        if source is not None and source is not self._source:
            agree(self._names, source.names, source.name)

    @abstractmethod
    def run_segment(self, segment: TrainingSegment) -> SegmentReport:
        """Train on a segment, and meet; see `run`, which makes one."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch], *, metrics: Any = ()) -> Evaluation:
        """Return loss, score and metrics of batches, over all ranks. Collective.

        Args:
            batches: with this rank's parts.
            metrics: one or several, the same on all ranks: names in `nnmpi.metrics.METRICS`, a
                `Metric`, or a function (outputs, labels) -> a value of each label, whose mean it
                is.

        Raises:
            UsageError: on all ranks, for a metric that is not for these labels.
        """

    def averaged(self) -> AbstractContextManager[object]:
        """Put the weights' average, if one is kept, in their place meanwhile. Collective."""
        return nullcontext()

    def details(self, report: StepReport) -> dict[str, Any]:
        """Return the last step's numbers that are no sums, by name."""
        return {}

    def describe_exchange(self) -> str:
        """Return the all-reduce of gradients as text; "" if there is none."""
        return ""

    @abstractmethod
    def summary(self) -> Sequence[str]:
        """Return lines about the work since the last call. Collective."""

    def memory(self) -> Sequence[str]:
        """Return lines about the memory peak, if it is known. Collective."""
        return ()

    def release(self) -> None:
        """Detach everything from the model: each rank then has its own copy, or shard. Collective.

        A second call does nothing.
        """
        if self._is_own:
            self._is_own = False
            self.arrangement.free()


def to_evaluate(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches to evaluate; of a Loader those of epoch 0: its place is the training's.

    Raises:
        UsageError: when a sequence ends early, because an item raised StopIteration.
    """
    count = 0
    for batch in batches.epoch(0) if isinstance(batches, Loader) else batches:
        count += 1
        yield batch
    if isinstance(batches, Sized) and hasattr(batches, "__getitem__") and count != len(batches):
        raise UsageError(
            f"item {count} of {len(batches)} batches is missing; the sequence ended there, maybe by"
            " a StopIteration"
        )


def check_numerics(trainer: Trainer) -> None:
    """Refuse ranks with different numerics, and impossible precisions. Collective.

    Replicas with different optimizers would drift apart silently, or wait for one another forever;
    gradients of different losses would be summed.

    Raises:
        UsageError: on all ranks, when they have different precisions, losses, seeds, clipping or
            optimizers, or multiply bf16 by other means; for an unknown precision, bf16 on a device
            without ml_dtypes, tf32 without a device, and any precision but float32 for a float64
            model.
    """
    mode, model, backend = trainer.precision, trainer.model, trainer.backend
    layer = getattr(trainer.loss, "func", trainer.loss)
    require_same_options(
        trainer.group,
        [
            f"precision {mode}",
            # another node's sums would have other bits
            f"products by {installed() or 'NumPy'}"
            if mode == "bf16" and not backend.is_device
            else "",
            *map(as_text, (trainer.loss, trainer.evaluation_loss, trainer.options)),
            *(layer.settings() if isinstance(layer, Module) else ()),
            f"seed {trainer.seed}",
            # replicas of a full model begin with the first one's weights
            f"initial seed {trainer.arrangement.is_plain or model.storage.seed}",
            *trainer.optimizer.rule(not isinstance(model, ModelPart)),
            f"clip {trainer.clip}",
            f"ema {trainer.optimizer.average}",
        ],
    )
    if backend.is_device:
        low_dtype(mode)
    if mode == "tf32" and not backend.is_device:
        raise UsageError(
            f"precision tf32 needs a CUDA device, and backend {backend.name} has none; use float32,"
            " bf16 or fp16, or backend cupy"
        )
    if mode != "float32" and model.storage.dtype == "float64":
        raise UsageError(
            f"precision {mode} is for float32 models, but this one is float64; use precision"
            " float32, or a float32 model"
        )
