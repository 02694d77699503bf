"""Evaluating: each rank its parts of all batches, and the means over all ranks' samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.report import EvalReport
from nnmpi.compose.runner import Correct, SumLoss
from nnmpi.data.loader import Batch
from nnmpi.nn.mode import evaluation
from nnmpi.nn.module import Module
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


def evaluate_batch(
    model: Module, loss: SumLoss, correct: Correct, backend: Backend, batch: Batch
) -> tuple[float, float, int]:
    """Return loss sum, right answers and samples of a part of a batch, for a model that this rank has end to end."""
    x, y = backend.asarray(batch.x), backend.asarray(batch.y)
    with no_grad(), evaluation():
        logits = model(Tensor(x))
        loss_sum = loss(logits, y).item()
    return loss_sum, correct(logits, y), len(batch.y)


def evaluate_all(
    group: Group, batches: Iterable[Batch], evaluate: Callable[[Batch], tuple[float, float, int]]
) -> EvalReport:
    """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective.

    Args:
        evaluate: returns loss sum, right answers and samples that this rank counts.
    """
    begin = time.perf_counter()
    totals = np.zeros(3)
    for batch in batches:
        totals += evaluate(batch)
    loss_sum, correct, samples = group.sum_floats(list(totals))
    count = max(samples, 1)
    return EvalReport(loss_sum / count, correct / count, int(samples), time.perf_counter() - begin)
