"""The table of metrics, and the rows' arithmetic, in float64.

To add a metric, add its row to `METRICS`: options, help, records, curves and pages follow. The
values are those of scikit-learn's functions of the same names:

    precision, recall, f1    of each class; their mean is over the classes that occur among labels
                             or predictions (average="macro"). A class that was never predicted, or
                             has no label, has 0. Of one yes or no: those of yes ("binary"); of
                             several: the mean over them.
    top-5                    of equal logits the first ones count, as in accuracy
    auc                      equal scores count one half; NaN with labels of one class alone. It
                             needs all scores: 16 bytes for each test sample, on each rank
    rmse, mae, r2            over all elements; r2 is multioutput="variance_weighted", without
                             outputs of constant targets; NaN if all are constant
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp, inf, log, nan, sqrt
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.command import suggest
from nnmpi.base.custom import as_custom, load_custom, name_of
from nnmpi.base.errors import UsageError, shortened
from nnmpi.metrics.metric import (
    CLASSES,
    QUANTITIES,
    TOKENS,
    YES_OR_NO,
    Metric,
    MetricState,
    MetricTask,
    check_suits,
    joined,
    mean_of,
)

# ---- how outputs and labels are read ----


def _is_float(labels: Array) -> bool:
    """Return whether labels are those of yes or no, not of classes."""
    return labels.dtype.kind == "f"


def _columns(values: Array) -> Array:
    """Return values as (rows, outputs)."""
    return values.reshape(len(values), -1)


def _best(logits: Array) -> Array:
    """Return the class of each row's largest logit, the first of equal ones."""
    result: Array = logits.argmax(axis=1)
    return result


# ---- shares of right answers ----


def _count_right(outputs: Array, labels: Array) -> MetricState:
    """Return the number of right answers, and of all."""
    right = (outputs > 0) == (labels > 0.5) if _is_float(labels) else _best(outputs) == labels
    return np.array([np.count_nonzero(right), right.size], np.float64)


def _share(state: MetricState) -> float:
    return float(state[0] / state[1]) if state[1] else nan


def top_k(k: int) -> Metric:
    """Return the metric of labels that are among the k largest logits, called "top-k"."""

    def measure(logits: Array, labels: Array) -> MetricState:
        own = logits[np.arange(len(labels)), labels][:, np.newaxis]
        before = np.arange(logits.shape[1]) < labels[:, np.newaxis]
        larger = (logits > own) | ((logits == own) & before)
        right = (larger.sum(axis=1) < k) & ~np.isnan(logits).any(axis=1)
        return np.array([np.count_nonzero(right), len(labels)], np.float64)

    return Metric(
        f"top-{k}",
        measure,
        _share,
        kinds=(CLASSES, TOKENS),
        fewest=k + 1,
        title=f"Label among the {k} largest logits",
        is_share=True,
        help=f"the share of labels among the {k} largest logits; of equal ones the first count",
    )


# ---- counts of each class ----


class ClassCounts(NamedTuple):
    """The rows of a state, each with a number for every class.

    Attributes:
        hits: right predictions.
        predicted: predictions.
        support: labels.
        occurs: not 0 if the class counts in a mean: it has labels or predictions.
    """

    hits: Array
    predicted: Array
    support: Array
    occurs: Array


def count_classes(outputs: Array, labels: Array) -> MetricState:
    """Return the state of `ClassCounts`.

    Of yes or no each output is a class, whose yes is counted, and occurs in every row.
    """
    if _is_float(labels):
        yes, is_yes = (_columns(values) for values in (outputs > 0, labels > 0.5))
        hits, predicted, support = (values.sum(axis=0) for values in (yes & is_yes, yes, is_yes))
        rows = np.full(yes.shape[1], len(yes))
        return np.array(ClassCounts(hits, predicted, support, rows), np.float64)
    classes, best = outputs.shape[1], _best(outputs)
    hits, predicted, support = (
        np.bincount(values, minlength=classes) for values in (labels[best == labels], best, labels)
    )
    return np.array(ClassCounts(hits, predicted, support, predicted + support), np.float64)


def _precision(state: MetricState) -> Array:
    counts = ClassCounts(*state)
    return _ratio(counts.hits, counts.predicted)


def _recall(state: MetricState) -> Array:
    counts = ClassCounts(*state)
    return _ratio(counts.hits, counts.support)


def _f1(state: MetricState) -> Array:
    counts = ClassCounts(*state)
    return _ratio(2 * counts.hits, counts.predicted + counts.support)


def _ratio(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _of_classes(name: str, per_class: Callable[[MetricState], Array], words: str) -> Metric:
    """Return the metric that is the mean over classes of a value of each, which the words name."""

    def finish(state: MetricState) -> float:
        occurs = ClassCounts(*state).occurs > 0
        return float(per_class(state)[occurs].mean()) if occurs.any() else nan

    return Metric(
        name,
        count_classes,
        finish,
        kinds=(CLASSES, TOKENS, YES_OR_NO),
        per_class=per_class,
        label=name.upper() if name == "f1" else name,
        title=f"{name.capitalize()}, mean over the classes",
        help=f"{words}, mean over the classes",
    )


def pair_classes(outputs: Array, labels: Array) -> MetricState:
    """Return each row's class and predicted class as one number; `confusion_of` counts them."""
    return labels * float(outputs.shape[1]) + _best(outputs)


def confusion_of(pairs: MetricState, classes: int) -> Array:
    """Return (classes, classes), how often each class (row) was predicted as each (column)."""
    counts = np.bincount(pairs.astype(np.int64), minlength=classes**2)
    return counts.reshape(classes, classes)


# ---- AUC ----


def _scores(outputs: Array, labels: Array) -> MetricState:
    """Return each row's scores of its second class, or of each yes; then the labels."""
    if _is_float(labels):
        scores, is_yes = _columns(outputs), _columns(labels > 0.5)
    else:
        # not the probability, which is 1 for all large logits
        wide = outputs.astype(np.float64)
        scores, is_yes = wide[:, 1:] - wide[:, :1], labels[:, np.newaxis] == 1
    return np.concatenate([scores, is_yes], axis=1, dtype=np.float64)


def _auc(state: MetricState) -> float:
    scores, is_yes = np.split(state, 2, axis=1)
    return float(np.mean([_area(*column) for column in zip(scores.T, is_yes.T, strict=True)]))


def _area(scores: Array, is_yes: Array) -> float:
    """Return the share of pairs of a yes and a no of which the yes has the larger score."""
    if np.isnan(scores).any():
        return nan
    _, place = np.unique(scores, return_inverse=True)
    yes, every = np.bincount(place, weights=is_yes), np.bincount(place)
    no = every - yes
    pairs = yes.sum() * no.sum()
    below = np.cumsum(no) - no
    return float((yes * (below + no / 2)).sum() / pairs) if pairs else nan


# ---- errors of quantities ----


class _Errors(NamedTuple):
    """The rows of a state, each with a number for every output.

    Attributes:
        rows: their number.
        origin, offset: add up to the targets' mean. A mean far from 0 would be rounded.
        deviations: the sum of the squares of the targets' distances from their mean.
        squares, sizes: the sums of the errors' squares and absolute values.
    """

    rows: Array
    origin: Array
    offset: Array
    deviations: Array
    squares: Array
    sizes: Array


def _errors(outputs: Array, targets: Array) -> MetricState:
    """Return the state of `_Errors`."""
    y = _columns(targets).astype(np.float64)
    error = _columns(outputs).astype(np.float64) - y
    shifted = y - y[0]
    offset = shifted.mean(axis=0)
    deviations = np.square(shifted - offset).sum(axis=0)
    rows = np.full(y.shape[1], len(y), np.float64)
    sums = np.square(error).sum(axis=0), abs(error).sum(axis=0)
    return np.array(_Errors(rows, y[0], offset, deviations, *sums))


def _merge_errors(first: MetricState, second: MetricState) -> MetricState:
    """Return the errors of both (Chan et al., 1979)."""
    a, b = _Errors(*first), _Errors(*second)
    rows = a.rows + b.rows
    distance = (b.origin - a.origin) + (b.offset - a.offset)  # of the means
    between = distance**2 * (a.rows * b.rows / rows)
    return np.array(
        _Errors(
            rows=rows,
            origin=a.origin,
            offset=a.offset + distance * (b.rows / rows),
            deviations=a.deviations + b.deviations + between,
            squares=a.squares + b.squares,
            sizes=a.sizes + b.sizes,
        )
    )


def _rmse(state: MetricState) -> float:
    errors = _Errors(*state)
    return sqrt(errors.squares.sum() / errors.rows.sum())


def _mae(state: MetricState) -> float:
    errors = _Errors(*state)
    return float(errors.sizes.sum() / errors.rows.sum())


def _r2(state: MetricState) -> float:
    errors = _Errors(*state)
    varies = errors.deviations > 0
    if not varies.any():
        return nan
    # an output whose targets are constant has no variance that could be explained
    return float(1 - errors.squares[varies].sum() / errors.deviations[varies].sum())


def _of_errors(
    name: str, finish: Callable[[MetricState], float], title: str, words: str = "", **more: Any
) -> Metric:
    return Metric(
        name,
        _errors,
        finish,
        _merge_errors,
        kinds=(QUANTITIES,),
        label=name.upper(),
        title=title,
        help=words or f"{title[:1].lower()}{title[1:]}, in the data's units",
        **more,
    )


# ---- perplexity ----


def _log_losses(logits: Array, labels: Array) -> MetricState:
    """Return the sum of the labels' cross-entropies, and their number."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(labels)), labels]
    return np.array([losses.sum(), len(labels)])


def _perplexity(state: MetricState) -> float:
    mean = _share(state)
    return exp(mean) if mean < log(float_info.max) else inf if mean == mean else nan


# ---- the table ----

_ROWS = (
    Metric(
        "accuracy",
        _count_right,
        _share,
        kinds=(CLASSES, TOKENS, YES_OR_NO),
        known=lambda evaluation: evaluation.accuracy,
        default_for=(CLASSES, TOKENS, YES_OR_NO),
        title="Accuracy",
        is_share=True,
        help="the share of right answers",
    ),
    top_k(5),
    _of_classes("precision", _precision, "the share of right ones among a class's predictions"),
    _of_classes("recall", _recall, "the share of a class's labels that are predicted"),
    _of_classes("f1", _f1, "the harmonic mean of a class's precision and recall"),
    Metric(
        "auc",
        _scores,
        _auc,
        joined,
        kinds=(CLASSES, YES_OR_NO),
        fewest=2,
        most=2,
        label="AUC",
        title="Area under the ROC curve",
        help="the area under the ROC curve; it needs all scores at once: 16 bytes for each test"
        " sample, on each rank",
    ),
    _of_errors(
        "rmse",
        _rmse,
        "Root of the mean squared error",
        higher_is_better=False,
        default_for=(QUANTITIES,),
    ),
    _of_errors("mae", _mae, "Mean absolute error", higher_is_better=False),
    _of_errors(
        "r2",
        _r2,
        "Share of the variance that is explained (R2)",
        "the share of the variance that is explained",
        default_for=(QUANTITIES,),
    ),
    Metric(
        "perplexity",
        _log_losses,
        _perplexity,
        kinds=(CLASSES, TOKENS),
        higher_is_better=False,
        known=lambda evaluation: evaluation.perplexity,
        default_for=(TOKENS,),
        title="Perplexity",
        help="e to the mean cross-entropy",
    ),
)
METRICS = {row.name: row for row in _ROWS}
"""Every metric by name."""


def each_class(confusion: Any) -> dict[str, Array]:
    """Return the metrics of each class by name, and "support", its number of labels.

    Args:
        confusion: (classes, classes), see `confusion_of`.

    Example:
        >>> from nnmpi.metrics.rows import each_class
        >>> table = each_class([[3, 1], [0, 4]])
        >>> table["recall"].tolist(), table["support"].tolist()
        ([0.75, 1.0], [4.0, 4.0])
    """
    counts = np.asarray(confusion, np.float64)
    predicted, support = counts.sum(axis=0), counts.sum(axis=1)
    hits = counts.diagonal()
    state = np.array(ClassCounts(hits, predicted, support, predicted + support))
    values = {
        name: row.per_class(state) for name, row in METRICS.items() if row.per_class is not None
    }
    return values | {"support": support}


# ---- metrics by name ----


def find_metric(
    given: Any, option: str = "metrics=", class_names: Sequence[str] = (), classes: int = 0
) -> Metric:
    """Return a metric: of a name in `METRICS`, a `Metric`, or a function of one's own.

    Args:
        given: also FILE.py:NAME, for either of the last two; and of the metrics that have a value
            of each class, that of one: "recall:3".
        option: for messages.
        class_names: of a model's classes, which stand for their numbers.
        classes: their number, or that of yes or no; 0 if it is not known yet.

    Raises:
        UsageError: for an unknown name or class, with the nearest; see also
            `base.custom.load_custom`.
    """
    if isinstance(given, Metric):
        return given
    if callable(given):
        return mean_of(given, name_of(given))
    name, _, of_class = str(given).partition(":")
    row = METRICS.get(name)
    if row is not None and not of_class:
        return row
    if row is not None and row.per_class is not None:
        return row.of_class(_number_of(of_class, row, option, class_names, classes), of_class)
    if as_custom(given) is None:
        raise UsageError(
            f"{option} {given} is unknown; give one of {', '.join(METRICS)}, FILE.py:NAME"
            f"{suggest(name, METRICS)}"
        )
    return find_metric(load_custom(given, option, "(outputs, labels)"))


def _number_of(
    name: str, row: Metric, option: str, class_names: Sequence[str], classes: int
) -> int:
    if name in class_names:
        return class_names.index(name)
    if name.isascii() and name.isdecimal() and (int(name) < classes or not classes):
        return int(name)
    known = f" of 0 to {classes - 1}" if classes else f", such as {row.name}:0"
    names = f"; the classes are {shortened(', '.join(class_names))}" if class_names else ""
    raise UsageError(f"{option} {row.name}:{name} is of no class; give its number{known}{names}")


def find_metrics(
    given: Any,
    task: MetricTask | None = None,
    option: str = "metrics=",
    class_names: Sequence[str] = (),
) -> tuple[Metric, ...]:
    """Return several metrics, each once.

    Args:
        given: what `find_metric` takes, or several of it.
        option, class_names: see there.
        task: what the model predicts; None if that is not known yet.

    Raises:
        UsageError: see `find_metric`; for one that is not for the task, with those that are, and
            for two of one name.
    """
    chosen: dict[str, Metric] = {}
    named: dict[str, Any] = {}
    is_one = isinstance(given, str) or callable(given) or not isinstance(given, Iterable)
    for item in [given] if is_one else given:
        metric = find_metric(item, option, class_names)
        before = chosen.setdefault(metric.name, metric)
        if before is not metric and item not in (before, named[metric.name]):
            raise UsageError(
                f"{option} has two metrics that are called {metric.name}; give one of them"
                " another name"
            )
        named.setdefault(metric.name, item)
    if task is not None:
        check_suits(chosen.values(), task, METRICS.values())
    return tuple(chosen.values())
