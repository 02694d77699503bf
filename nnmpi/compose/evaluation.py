"""Evaluation over many batches: loss, score and metrics, over all ranks.

evaluate_all      the one loop: of Worker, AsynchronousWorker and `nnmpi evaluate`
MetricStates      what the metrics have measured on this rank
Evaluation        the result
as_many           batches of which every rank has as many
refuse_uneven     the error of ranks that have not
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from math import nan, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import nnmpi.base.clock as clock
import nnmpi.compose.losses as losses
from nnmpi.backend.array import Array
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.sums import slices
from nnmpi.base.errors import NnmpiError, UsageError, is_own, name_ranks
from nnmpi.base.loop import Taken
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.buffers import to_host
from nnmpi.comm.group import Group
from nnmpi.compose.losses import SumError, SumLoss, is_own_loss
from nnmpi.compose.scalars import LOSS, SCORE, WEIGHTS, DeferredScalars
from nnmpi.compose.stats import Totals
from nnmpi.data.loader import Batch
from nnmpi.metrics.metric import (
    CLASSES,
    QUANTITIES,
    TOKENS,
    YES_OR_NO,
    Metric,
    MetricState,
    MetricTask,
    check_suits,
)
from nnmpi.metrics.rows import METRICS
from nnmpi.ops.collectives import gather
from nnmpi.parallel.witness import SAME_DATA, StepWitness
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.placement import features
from nnmpi.tensor.tensor import Tensor

_END = object()
LOGITS_BYTES = 2**26  # at most so many of logits are gathered at once, or in a forward pass

# what is measured and how it is merged: metrics that have both in common share a state
_Kind: TypeAlias = tuple[Any, Any]


@dataclass
class Evaluation(Totals):
    """The result of an evaluation.

    Attributes:
        metrics: the values of the metrics that were asked for, by name; NaN for no samples.
        states: what they have measured, over all ranks.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    states: dict[Any, MetricState | None] = field(default_factory=dict, repr=False)

    def state_of(self, metric: Metric) -> MetricState | None:
        """Return what a metric has measured; None without samples, or if it was not asked for."""
        return self.states.get(_kind_of(metric))


class _Merged:
    """States in the order of the rows, merged two by two: n joined rows are copied log2(n) times.

    Args:
        metric: says how they are merged.
    """

    def __init__(self, metric: Metric) -> None:
        self._merge = metric.merged
        self._parts: list[tuple[int, MetricState]] = []  # with the number of states in each

    def add(self, state: MetricState) -> None:
        """Add the state of some more rows."""
        count = 1
        while self._parts and self._parts[-1][0] == count:
            state, count = self._merge(self._parts.pop()[1], state), 2 * count
        self._parts.append((count, state))

    def result(self) -> MetricState | None:
        """Return the state of all rows; None without any."""
        if not self._parts:
            return None
        counts, states = zip(*self._parts, strict=True)
        state = reduce(self._merge, states)
        self._parts = [(sum(counts), state)]  # a merge of one's own may have changed the parts
        return state


class MetricStates:
    """What an evaluation's metrics have measured on this rank.

    Args:
        chosen: the metrics.
        loss: of the model; it tells yes or no from quantities.
        classes: the number of all classes, if the ranks of `group` have a part of each row's
            logits; else 0.
        group: those ranks.
    """

    def __init__(
        self,
        chosen: Sequence[Metric],
        loss: SumLoss,
        classes: int = 0,
        group: Group | None = None,
    ) -> None:
        self._chosen, self._classes, self._group = chosen, classes, group
        self._is_yes_or_no = isinstance(loss, SumError) and loss.name == losses.YES_OR_NO
        is_plain = is_own_loss(loss) and not getattr(loss, "label_smoothing", 0.0)
        self._known = [metric for metric in chosen if metric.known is not None and is_plain]
        measured = [metric for metric in chosen if metric not in self._known]
        self._metric_of: dict[_Kind, Metric] = {_kind_of(metric): metric for metric in measured}
        self._sums = {kind: _Merged(metric) for kind, metric in self._metric_of.items()}
        self.failed: NnmpiError | None = None  # to be raised where all ranks meet

    def add(self, outputs: Array, labels: NDArray[Any], counts: bool) -> None:
        """Measure some rows. Collective over the ranks that have parts of the same logits.

        Args:
            outputs: (rows, ..., classes) logits, of which this rank may have a part; or outputs of
                as many elements as the labels.
            labels: (rows, ...), on the host.
            counts: whether this rank's rows count; other ranks have the same rows.
        """
        try:
            task = self._task_of(outputs, labels)
            check_suits(self._chosen, task, METRICS.values())
        except UsageError as error:  # of the shapes, so that all of the ranks have it
            self.failed = self.failed or error
            return
        if task.classes:
            outputs, labels = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)
        size = LOGITS_BYTES // (8 * task.classes) if self._group is not None else len(labels)
        for rows in slices(len(labels), max(size, 1)):
            part = outputs[rows]
            if self._group is not None:
                part = gather(Tensor(part), self._group, features(task.classes))._data
            if counts and self.failed is None:
                try:
                    self._measure(to_host(to_float32(part)), labels[rows], task)
                except NnmpiError as error:
                    self.failed = error

    def _measure(self, outputs: NDArray[Any], labels: NDArray[Any], task: MetricTask) -> None:
        if task.classes:
            known = labels >= 0
            if not known.all():
                outputs, labels = outputs[known], labels[known]
        else:
            dtype = np.float64 if task.kind == QUANTITIES else outputs.dtype
            outputs, labels = outputs.reshape(labels.shape).astype(dtype), labels.astype(dtype)
        outputs, labels = outputs.view(), labels.view()
        for values in (outputs, labels):
            values.flags.writeable = False  # they are another metric's, too
        if len(labels):
            for kind, metric in self._metric_of.items():
                self._sums[kind].add(metric.state(outputs, labels))

    def _task_of(self, outputs: Array, labels: NDArray[Any]) -> MetricTask:
        """Return what a model with these outputs for these labels predicts."""
        if labels.dtype.kind == "f" and outputs.size == labels.size:
            return MetricTask(YES_OR_NO if self._is_yes_or_no else QUANTITIES)
        if labels.dtype.kind in "iu" and outputs.shape[:-1] == labels.shape:
            classes = self._classes or outputs.shape[-1]
            return MetricTask(TOKENS if labels.ndim > 1 else CLASSES, classes)
        raise UsageError(
            "metrics need an output of each class for each label, or one for each number; the"
            f" outputs have shape {outputs.shape} and the labels {labels.shape}, of {labels.dtype}"
        )

    def shapes(self) -> list[list[int] | None]:
        """Return the shape of each state as JSON; None without rows. What raises is kept."""
        try:
            states = [merged.result() for merged in self._sums.values()]
        except NnmpiError as error:
            self.failed = self.failed or error
            return []
        return [None if state is None else [*state.shape] for state in states]

    def over(
        self, group: Group, by_rank: Sequence[Sequence[list[int] | None]]
    ) -> dict[_Kind, MetricState | None]:
        """Return the states over all ranks. Collective.

        Args:
            group: all ranks.
            by_rank: the `shapes` of each.

        Raises:
            UsageError: on all ranks, for states to be added that have different shapes.
        """
        return {
            kind: _over_ranks(group, self._metric_of[kind], merged.result(), shapes)
            for (kind, merged), shapes in zip(
                self._sums.items(), zip(*by_rank, strict=True), strict=True
            )
        }

    @property
    def is_same_everywhere(self) -> bool:
        """Whether the ranks find the same values from the same states.

        A function of one's own may depend on the rank, or draw numbers, and ranks that have
        different values would not stop at the same evaluation.
        """
        return all(is_own(metric.finish) for metric in self._chosen)

    def values(self, evaluation: Evaluation) -> dict[str, float]:
        """Return the metrics' values by name; NaN without any rows.

        Args:
            evaluation: with the states over all ranks.

        Raises:
            UsageError: for an exception in a function of one's own.
        """
        if not evaluation.targets:
            return {metric.name: nan for metric in self._chosen}
        return {
            metric.name: (
                metric.known(evaluation)
                if metric.known is not None and metric in self._known
                else metric.value(evaluation.state_of(metric))
            )
            for metric in self._chosen
        }

    def text(self) -> str:
        """Return the metrics' names as text, for a comparison of the ranks."""
        return ", ".join(metric.name for metric in self._chosen)


def _kind_of(metric: Metric) -> _Kind:
    return metric.measure, metric.merge


def _over_ranks(
    group: Group, metric: Metric, state: MetricState | None, shapes: Sequence[Sequence[int] | None]
) -> MetricState | None:
    """Return the merged state of all ranks; `shapes` are those of their states. Collective."""
    known = [shape for shape in shapes if shape is not None]
    if not known or group.size == 1:
        return state
    counts = [0 if shape is None else prod(shape) for shape in shapes]
    own = np.zeros(0) if state is None else state.reshape(-1)
    if metric.merge is not np.add:
        parts = group.all_gather_v(own, counts, check=False)
        states = [
            part.reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
            if shape is not None
        ]
        return reduce(metric.merged, states)
    if any(shape != known[0] for shape in known):
        raise UsageError(
            f"metric {metric.name}: its states have the shapes {known} on the ranks, which cannot"
            " be added; measure the same shape of any rows, or give the Metric another merge"
        )
    total = np.zeros(prod(known[0])) if state is None else own.copy()
    group.all_reduce(total, check=False)
    return total.reshape(known[0])


def evaluate_all(
    group: Group,
    batches: Iterable[Batch],
    evaluate: Callable[[Batch], bool],
    scalars: DeferredScalars,
    measured: MetricStates | None = None,
    witness: StepWitness | None = None,
    parts: int = 1,
    rows_seen: Sequence[int] = (),
) -> Evaluation:
    """Return loss, score and metrics of this rank's parts of all batches, over all ranks.
    Collective.

    On a device the sums are read once, at the end; a metric that is measured waits for each batch.

    Args:
        evaluate: adds loss and score of a batch to the scalars, and measures the metrics; returns
            whether they count.
        scalars: of evaluations; their sums begin anew.
        measured: of the metrics, without any rows; None for none.
        parts: the number of ranks that share the positions of each sample; every one of them
            counts its rows.
        witness: compares what the ranks were given.
        rows_seen: a checksum of each batch, where several ranks compute the same rows.

    Raises:
        UsageError: on all ranks, if they have different numbers of batches, other ones, or not all
            rows of each once; for different metrics, and for a metric that is not for these labels
            or that raises an exception.
    """
    begin = clock.now()
    rows, own_targets, taken = 0, 0, list[Taken]()
    scalars.clear()
    with no_grad():
        for batch in batches:
            taken.append(batch.taken())
            if evaluate(batch):
                rows, own_targets = rows + len(batch.y), own_targets + batch.own_targets
    values = scalars.read()
    own = values.get(LOSS, 0.0), values.get(SCORE, 0.0), values.get(WEIGHTS, own_targets)
    # as JSON, since another rank may have a further batch, whose rows the ranks tell in this way
    told: dict[str, Any] = {"sums": [*own, rows, own_targets]}
    if measured is not None:
        shapes = measured.shapes()
        failed = measured.failed is not None
        told |= {"metrics": measured.text(), "failed": failed, "shapes": shapes}
    by_rank = group.gather(told)
    refuse_uneven(by_rank)
    _check_metrics(group, measured, by_rank)
    loss, score, weights, samples, targets = map(
        sum, zip(*(item["sums"] for item in by_rank), strict=True)
    )
    if witness is not None:
        witness.compare_evaluation(taken, rows_seen)
    result = Evaluation(
        samples=int(samples) // parts,
        targets=int(targets),
        loss_sum=loss * (targets / weights if weights else 1.0),
        score_sum=score,
        wall_s=clock.now() - begin,
    )
    if measured is not None:
        result.states = measured.over(group, [item["shapes"] for item in by_rank])
        if measured.is_same_everywhere:
            with agreed(group):
                result.metrics = measured.values(result)
        else:
            result.metrics = on_root(group, lambda: measured.values(result))
        result.wall_s = clock.now() - begin
    return result


def _check_metrics(
    group: Group, measured: MetricStates | None, by_rank: Sequence[dict[str, Any]]
) -> None:
    """Refuse different metrics on the ranks, and what one of them has raised. Collective.

    Raises:
        UsageError: on all ranks.
    """
    named = [item.get("metrics", "") for item in by_rank]
    if named.count(named[0]) < len(named):
        other = next(rank for rank, name in enumerate(named) if name != named[0])
        raise UsageError(
            f"rank 0 evaluates the metrics {named[0] or '(none)'}, and rank {other}"
            f" {named[other] or '(none)'}; give all ranks the same"
        )
    if measured is not None and any(item["failed"] for item in by_rank):
        with agreed(group):
            if measured.failed is not None:
                raise measured.failed


def as_many(group: Group, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, as long as every rank has one more. Collective at each.

    For layers that meet in each batch: they would wait for ranks that have none.
    """
    for item in chain(items, [_END]):
        have = group.gather_floats([item is not _END])[:, 0].tolist()
        refuse_uneven([() if more else {} for more in have])
        if item is _END:
            return
        yield item


def refuse_uneven(by_rank: Sequence[object]) -> None:
    """Refuse ranks of which some have evaluated all their batches, and others have one more."""
    done = [rank for rank, item in enumerate(by_rank) if isinstance(item, dict)]
    if 0 < len(done) < len(by_rank):
        raise UsageError(
            f"the ranks give evaluate different numbers of batches, {name_ranks(done)} fewer than"
            f" the others; {SAME_DATA}"
        )
