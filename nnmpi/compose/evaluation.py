"""Evaluating: each rank its parts of all batches, and the means over all ranks' samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.given import give, label_check
from nnmpi.compose.readings import Readings
from nnmpi.compose.report import EvalReport
from nnmpi.compose.runner import CORRECT, LOSS, Correct, SumLoss
from nnmpi.data.loader import Batch
from nnmpi.nn.mode import evaluation
from nnmpi.nn.module import Module
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


def evaluate_batch(
    model: Module,
    loss: SumLoss,
    correct: Correct,
    backend: Backend,
    batch: Batch,
    readings: Readings | None,
    classes: int = 0,
) -> int:
    """Add loss and right answers of a part of a batch, for a model that this rank has end to end; return its rows.

    Args:
        readings: where they are added; None on a rank that computes them only because others do.
        classes: where they are shared out over ranks, how many there are; else 0.
    """
    given = give(batch, model, backend)
    with no_grad(), evaluation():
        logits = model(Tensor(given.x))
        label_check(loss, classes)(given, 0, logits)
        loss_sum, hits = loss(logits, given.y).data, correct(logits, given)
    if readings is not None:
        readings.add(LOSS, loss_sum)
        readings.add(CORRECT, hits)
    return len(batch.y)


def evaluate_all(
    group: Group, batches: Iterable[Batch], evaluate: Callable[[Batch, Readings], int], backend: Backend
) -> EvalReport:
    """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective.

    On a device the sums are read once, at the end.

    Args:
        evaluate: adds loss and right answers to what is to be read, and returns the samples that this rank counts.
    """
    begin = time.perf_counter()
    readings, rows = Readings(backend), 0
    for batch in batches:
        rows += evaluate(batch, readings)
    values = readings.read()
    loss_sum, correct, samples = group.sum_floats([values.get(LOSS, 0.0), values.get(CORRECT, 0.0), rows])
    count = max(samples, 1)
    return EvalReport(loss_sum / count, correct / count, int(samples), time.perf_counter() - begin)
