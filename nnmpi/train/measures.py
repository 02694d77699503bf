"""Which metrics a run's evaluations have, and which of them decides on the best one.

Without --metric these are the rows of `nnmpi.metrics` that are the default for the run's task;
--metric and --best-by add others. `nnmpi evaluate` has those of training, in the same units.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from nnmpi.base.errors import UsageError
from nnmpi.data.dataset import Samples
from nnmpi.metrics.metric import CLASSES, QUANTITIES, TOKENS, YES_OR_NO, InUnits, Metric, MetricTask
from nnmpi.metrics.rows import METRICS, find_metric, find_metrics
from nnmpi.train.config import RunConfig
from nnmpi.train.metrics import EVALUATION_FIELDS
from nnmpi.train.signature import ModelSignature

LOSS = "loss"
# what records, finished.json and evaluation.json have beside metrics
TAKEN = EVALUATION_FIELDS | {
    *("step", "of_steps", "ranks", "stopped", "weights_sha256"),
    *("run", "weights", "data", "part", "samples", "targets", "classes", "confusion"),
}


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run's evaluations.

    Attributes:
        chosen: all of them, in the order in which they are reported.
        asked: those of them that --metric and --best-by have added.
        best_by: decides which evaluation is the best; None for the loss.
    """

    chosen: tuple[Metric, ...] = ()
    asked: tuple[Metric, ...] = ()
    best_by: Metric | None = None


def task_of(signature: ModelSignature, samples: Samples) -> MetricTask:
    """Return what a run's model predicts for these samples."""
    if signature.predicts == "quantities":
        return MetricTask(QUANTITIES)
    if signature.predicts == "yes-or-no":
        return MetricTask(YES_OR_NO)
    is_sequence = samples.labels(np.arange(1)).ndim > 1
    return MetricTask(TOKENS if is_sequence else CLASSES, signature.classes)


def run_metrics(
    options: RunConfig, signature: ModelSignature, samples: Samples, more: Iterable[str] = ()
) -> RunMetrics:
    """Return the metrics of a run's evaluations.

    Args:
        options: of the run.
        signature: of its model.
        samples: to evaluate.
        more: names of further metrics.

    Raises:
        UsageError: for an unknown metric, for one that is not for what the model predicts, and for
            a name that records have for something else.
    """
    task = task_of(signature, samples)
    found: dict[str, Metric] = {}  # each once, since a file gives another function at each reading

    def find(name: str, option: str) -> Metric:
        if name not in found:
            found[name] = find_metric(name, option, signature.class_names, signature.outputs)
        return found[name]

    kind = task.kind
    usual = [row for row in METRICS.values() if kind in row.default_for]
    best_by = None
    if options.best_by not in (None, LOSS):
        best_by = find(options.best_by, "--best-by")
        find_metrics([best_by], task, "--best-by")
    elif options.best_by is None and kind not in (TOKENS, QUANTITIES):
        best_by = usual[0]
    given = [find(name, "--metric") for name in (*options.metric, *more)]
    decides = [] if best_by is None else [best_by]
    chosen = find_metrics(_once([*usual, *given, *decides]), task, "--metric")
    for metric in chosen:
        if metric.name in TAKEN:
            raise UsageError(
                f"--metric: a metric is called {metric.name}, which a run's files have for"
                " something else; give it another name"
            )
    if signature.target_mean:
        chosen = tuple(
            replace(metric, measure=InUnits(metric.measure, signature.in_units))
            for metric in chosen
        )
    return RunMetrics(chosen, chosen[len(usual) :], best_by)


def _once(metrics: Iterable[Metric]) -> list[Metric]:
    """Return metrics without those that are named again, such as a --best-by that is a --metric."""
    return [*{id(metric): metric for metric in metrics}.values()]
