"""A metric: what is measured of some rows, how two measurements are merged, and the value.

    rank 0, batch 0    outputs, labels  --measure-->  state \\
    rank 0, batch 1    outputs, labels  --measure-->  state  } --merge-->  state  --finish-->  value
    rank 1, batch 0    outputs, labels  --measure-->  state /

A state is a small float64 array: counts and sums, which are added; or scores, which are joined.
So the value does not depend on batches, ranks and shards, but for the rounding of float64's sums.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.custom import called, fault
from nnmpi.base.errors import NnmpiError, UsageError

MetricState: TypeAlias = NDArray[np.float64]
Measure: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], Any]

# what a model predicts
CLASSES, TOKENS, YES_OR_NO, QUANTITIES = "classes", "tokens", "yes or no", "quantities"


class MetricTask(NamedTuple):
    """What a model predicts.

    Attributes:
        kind: CLASSES, one for each sample; TOKENS, one for each position of a sequence; YES_OR_NO,
            one or several for each sample; QUANTITIES.
        classes: the number of classes or tokens; 0 for other kinds.
    """

    kind: str
    classes: int = 0

    def __str__(self) -> str:
        return f"{self.classes} {self.kind}" if self.classes else self.kind


@dataclass(frozen=True)
class Metric:
    """A metric of a model's outputs.

    Attributes:
        name: in options, records and curves.
        measure: (outputs, labels) -> the state of these rows. Of CLASSES and TOKENS it gets logits
            (n, classes) and integer labels (n,), without the positions that are padding; of
            YES_OR_NO logits (n, ...) and float labels of the same shape, 0 or 1; of QUANTITIES
            outputs and labels (n, ...) in float64, in the units of the data.
        finish: state -> the value.
        merge: (state, state) -> the state of both: `np.add`, which ranks do as an all-reduce;
            `joined`, for scores; or any other associative one.
        kinds: of the tasks that it is for.
        fewest, most: bounds of a task's number of classes.
        higher_is_better: which of two values is the best.
        known: evaluation -> the value, if an evaluation by nnmpi's own loss has it already, in its
            loss and score; then `measure` is not called.
        per_class: state -> the value of each class, if there is one.
        default_for: kinds of tasks that are evaluated by it without being asked.
        label: before its value in a line; the name by default.
        title: of its curve on a page; one of the user's own has its name there.
        is_share: whether it is printed in per cent.
        help: what it is, in a few words, for pages.

    Example:
        >>> def within_one(outputs, labels):
        ...     near = abs(outputs.argmax(axis=1) - labels) <= 1
        ...     return [near.sum(), len(labels)]
        >>> metric = metrics.Metric("within-one", within_one, lambda state: state[0] / state[1])
        >>> metric(np.eye(4), np.array([0, 2, 3, 0]))
        0.75
    """

    name: str
    measure: Measure
    finish: Callable[[MetricState], float]
    merge: Callable[[MetricState, MetricState], MetricState] = np.add
    kinds: Collection[str] = (CLASSES, TOKENS, YES_OR_NO, QUANTITIES)
    fewest: int = 0
    most: float = inf
    higher_is_better: bool = True
    known: Callable[[Any], float] | None = None
    per_class: Callable[[MetricState], NDArray[Any]] | None = None
    default_for: Collection[str] = ()
    label: str = ""
    title: str = ""
    is_share: bool = False
    help: str = ""

    def __call__(self, outputs: Any, labels: Any) -> float:
        """Return the value of some rows, all at once; the shapes are those of `measure`.

        Raises:
            UsageError: for an exception in a function of one's own.
        """
        return self.value(self.state(np.asarray(outputs), np.asarray(labels)))

    def state(self, outputs: NDArray[Any], labels: NDArray[Any]) -> MetricState:
        """Return the state of some rows.

        Raises:
            UsageError: for an exception in a function of one's own, with its line, and for a result
                that is not made of numbers.
        """
        try:
            measured = self.measure(outputs, labels)
            if measured is None:  # which NumPy would take for no number
                raise TypeError("it returns None; return the state")
            return np.ascontiguousarray(measured, dtype=np.float64)
        except (NnmpiError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"metric {self.name}: {fault(self.measure, ('outputs', 'labels'), error)}"
            ) from error

    def merged(self, first: MetricState, second: MetricState) -> MetricState:
        """Return the state of both, which `merge` may change.

        Raises:
            UsageError: as `state`, and for states to be added that have different shapes.
        """
        if self.merge is np.add and first.shape != second.shape:
            raise UsageError(
                f"metric {self.name}: its states have the shapes {first.shape} and {second.shape},"
                " which cannot be added; measure the same shape of any rows, or give the Metric"
                " another merge"
            )
        try:
            return np.ascontiguousarray(self.merge(first, second), dtype=np.float64)
        except (NnmpiError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"metric {self.name}: {fault(self.merge, ('state', 'state'), error)}"
            ) from error

    def value(self, state: MetricState | None) -> float:
        """Return the value of a state; NaN for None, of no rows.

        Raises:
            UsageError: as `state`, and for a value that is no number.
        """
        if state is None:
            return nan
        try:
            return float(self.finish(state))
        except (NnmpiError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"metric {self.name}: {fault(self.finish, ('state',), error)}"
            ) from error

    def suits(self, task: MetricTask) -> bool:
        """Return whether it is for this task."""
        return task.kind in self.kinds and (
            not task.classes or self.fewest <= task.classes <= self.most
        )

    def of_class(self, number: int, name: str) -> "Metric":
        """Return the metric of one class, such as "recall:3".

        Args:
            number: of the class.
            name: behind the colon.
        """
        each, chosen = self.per_class, f"{self.name}:{name}"
        assert each is not None

        def finish(state: MetricState) -> float:
            values = each(state)
            if number >= len(values):
                raise UsageError(
                    f"metric {chosen}: the classes are 0 to {len(values) - 1}; give one of them"
                )
            return float(values[number])

        title = f"{self.name.capitalize()} of class {name}"
        return replace(self, name=chosen, finish=finish, label=chosen, title=title)

    def text(self, value: float) -> str:
        """Return label and value as text: "accuracy 98.06 %", "AUC 0.9931"."""
        shown = f"{100 * value:.2f} %" if self.is_share else f"{value:.4g}"
        return f"{self.label or self.name} {shown}"


@dataclass(frozen=True)
class InUnits:
    """A metric's `measure` of outputs and labels that are not in the data's units.

    Two that have the same parts are equal, so that metrics share what they measure.

    Attributes:
        measure: of a metric.
        units: gives numbers in the data's units.
    """

    measure: Measure
    units: Callable[[Any], Any]

    def __call__(self, outputs: NDArray[Any], labels: NDArray[Any]) -> Any:
        return self.measure(self.units(outputs), self.units(labels))


def joined(first: MetricState, second: MetricState) -> MetricState:
    """Return the rows of both states."""
    return np.concatenate([first, second])


def mean_of(function: Callable[[Any, Any], Any], name: str) -> Metric:
    """Return the metric of a function (outputs, labels) -> a value of each row: their mean.

    Args:
        function: a value of each label, or of each sample. With an attribute
            `higher_is_better = False` the lowest mean is the best one.
        name: of the metric.

    Example:
        >>> right = lambda outputs, labels: outputs.argmax(axis=1) == labels
        >>> metrics.find_metric(right)(np.eye(3), np.array([0, 1, 1]))
        0.6666666666666666
    """

    def measure(outputs: NDArray[Any], labels: NDArray[Any]) -> MetricState:
        try:
            values = np.asarray(function(outputs, labels), dtype=np.float64)
        except NnmpiError:
            raise
        except Exception as error:
            raise UsageError(
                f"metric {name}: {fault(function, ('outputs', 'labels'), error)}"
            ) from error
        if values.shape not in (labels.shape, labels.shape[:1]):
            raise UsageError(
                f"metric {name}: {called(function, ('outputs', 'labels'))} returned"
                f" {'one number' if not values.ndim else f'values of shape {values.shape}'} for"
                f" labels of shape {labels.shape}; return a value of each label, whose mean is"
                " the metric, or make it an nnmpi.metrics.Metric, which says how numbers of"
                " several batches are merged"
            )
        return np.array([values.sum(), values.size])

    is_higher = bool(getattr(function, "higher_is_better", True))
    return Metric(name, measure, lambda state: state[0] / state[1], higher_is_better=is_higher)


def check_suits(chosen: Iterable[Metric], task: MetricTask, rows: Iterable[Metric]) -> None:
    """Refuse metrics that are not for a task.

    Args:
        chosen: the metrics.
        task: what the model predicts.
        rows: that may be named instead.

    Raises:
        UsageError: with those that are for it.
    """
    for metric in chosen:
        if not metric.suits(task):
            fitting = ", ".join(row.name for row in rows if row.suits(task))
            raise UsageError(
                f"metric {metric.name} is not for a model that predicts {task}; give {fitting}, or"
                " one of your own"
            )
