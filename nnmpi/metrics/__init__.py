"""Metrics: how good a model's outputs are, as rows of one table.

    metric.py    Metric, a row; MetricTask, what a model predicts; which rows a task has
    rows.py      the rows, METRICS, and their arithmetic

`nnmpi train --metric`, `nnmpi evaluate --metric` and `Worker.evaluate(metrics=...)` take a row's
name, a `Metric` or a function of one's own. Read metric.py first.

    >>> logits = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5], [0.2, 0.1]])
    >>> metrics.METRICS["accuracy"](logits, np.array([0, 1, 1, 0]))
    0.75
    >>> metrics.METRICS["auc"](logits, np.array([0, 1, 1, 0]))
    0.75
"""

from nnmpi.metrics.metric import (
    CLASSES,
    QUANTITIES,
    TOKENS,
    YES_OR_NO,
    Metric,
    MetricTask,
)
from nnmpi.metrics.rows import METRICS, find_metric, find_metrics, top_k

__all__ = [
    "CLASSES",
    "METRICS",
    "QUANTITIES",
    "TOKENS",
    "YES_OR_NO",
    "Metric",
    "MetricTask",
    "find_metric",
    "find_metrics",
    "top_k",
]
