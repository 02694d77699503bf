"""A run's loss and metrics on data: what `nnmpi evaluate` and the result of `nnmpi.fit` call."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, prod

import numpy as np

from nnmpi.base.errors import DataError, DivergenceError
from nnmpi.compose.evaluation import LOGITS_BYTES, Evaluation, MetricStates, evaluate_all
from nnmpi.compose.inference import Inference, check_finite, nonfinite_rows
from nnmpi.compose.losses import (
    ERRORS,
    SumCrossEntropy,
    SumError,
    SumLoss,
    has_class_weights,
    label_weights,
    score_of,
)
from nnmpi.compose.scalars import LOSS, SCORE, WEIGHTS, DeferredScalars
from nnmpi.data.cells import class_key
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.data.lazy import change_rows
from nnmpi.data.loader import Batch, Loader
from nnmpi.metrics.metric import Metric
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.run import Run
from nnmpi.train.signature import BYTES, ModelSignature


def evaluate(
    run: Run,
    samples: Samples,
    batch_size: int,
    metrics: Sequence[Metric] = (),
    own_loss: SumLoss | None = None,
) -> Evaluation:
    """Return a run's loss, score and metrics on samples. Collective.

    The samples are sharded over the replicas.

    Args:
        run: opened on these ranks.
        samples: must fit the model; see `match_samples`.
        batch_size: the maximum number of samples per forward pass of a replica.
        metrics: of the result.
        own_loss: of a program; None for that of the run's options.

    Raises:
        DivergenceError: on all ranks, for outputs or a loss that are not finite.
        UsageError: on all ranks, for an exception in a metric.
    """
    signature, mesh = run.signature, run.arrangement.mesh
    rows = max(
        1,
        min(
            batch_size,
            LOGITS_BYTES // (8 * signature.outputs * prod(samples.labels(np.arange(1)).shape)),
        ),
    )
    loader = Loader(
        signature.to_learn(samples),
        rows * mesh.dp.size,
        mesh.dp,
        shuffle=False,
        transform=signature.normalize,
        dtype=run.config.run.dtype,
    )
    # A user's loss may need data that only training has: mse replaces it.
    name = run.config.optimization.loss
    is_classes = signature.predicts == "classes"
    loss = own_loss or (
        SumCrossEntropy()
        if is_classes
        else SumError(name if name in ERRORS else "mse", signature.target_std)
    )
    inference = Inference(run.arrangement, run.backend, run.config.numerics.precision)
    sums, measured, wrong = DeferredScalars(), MetricStates(metrics, loss), 0
    counts = mesh.model.rank == 0  # all ranks of a replica have its outputs

    def compute(batch: Batch) -> bool:
        nonlocal wrong
        if not len(batch.x):
            return counts
        outputs = Tensor(inference(batch.x))
        if counts:
            wrong += nonfinite_rows(outputs.data)
            total = float(loss(outputs, batch.y).numpy())
            sums.add(LOSS, total * getattr(loss, "factor", 1.0))
            sums.add(SCORE, score_of(loss)(outputs.data, batch.y))
            if has_class_weights(loss):
                sums.add(WEIGHTS, label_weights(loss, batch))
            measured.add(outputs.data, batch.on_host, counts)
        return counts

    with loader.epoch(0) as batches, np.errstate(all="ignore"):  # see the checks below
        result = evaluate_all(run.group, batches, compute, sums, measured)
    inference.release()
    (everywhere,) = run.group.sum_floats([float(wrong)])
    check_finite(result.samples, everywhere)
    if not isfinite(result.loss_sum):
        raise DivergenceError(
            f"the loss on {samples.name} is {result.loss_sum}: its targets are too far from the"
            " predictions for this number type; scale them as in training"
        )
    return result


def match_samples(signature: ModelSignature, samples: Samples) -> Samples:
    """Return the samples with the class numbers and column order of the model's training data.

    Bytes are scaled as in training.

    Raises:
        DataError: for samples of another shape or kind, and for labels outside the model's classes.
    """
    fits = samples.is_tokens == signature.is_tokens
    if not fits or (
        not samples.is_tokens and tuple(samples.sample_shape) != signature.sample_shape
    ):
        kind = "tokens" if samples.is_tokens else f"samples of shape {tuple(samples.sample_shape)}"
        raise DataError(
            f"{samples.name} has {kind}, which do not fit a model that takes"
            f" {signature.sample_shape}"
        )
    if not isinstance(samples, Dataset):
        return samples
    x = samples.x
    if not samples.is_tokens and not (x.dtype == np.uint8 and signature.stored == BYTES):
        of = f"samples of {samples.name}"
        x = change_rows(x, lambda rows, numbers: signature.scaled(rows, name=of, numbers=numbers))
    labels, predicts, shape = samples.y, samples.predicts, samples.target_shape
    if predicts != signature.predicts or (
        predicts != "classes" and shape != signature.target_shape
    ):
        expected = f"{signature.predicts} of shape {signature.target_shape}"
        raise DataError(
            f"{samples.name} has {predicts} of shape {shape}, but the model predicts {expected}"
        )
    names, model_names = samples.class_names, signature.class_names
    keys = [*map(class_key, names)]
    if predicts == "classes" and not model_names and all(map(str.isdecimal, keys)):
        model_names = tuple(map(str, range(signature.classes)))  # a table's 3 is class 3
    if names and model_names:
        known = [*map(class_key, model_names)]
        for key, name in zip(keys, names, strict=True):
            if key not in known:
                raise DataError(
                    f"{samples.name} has the class {name!r}, which is none of the model's; remove"
                    " its samples"
                )
        numbers = np.array([known.index(key) for key in keys], labels.dtype)
        # also for yes or no, whose two names stand for 0 and 1
        labels = change_rows(labels, lambda rows, _: numbers[rows.astype(np.int64)])
    notes = samples.notes
    if model_names and not names and [*model_names] != [*map(str, range(len(model_names)))]:
        notes += (f"labels are numbers of the model's classes, 0 for {model_names[0]!r}",)
    if names and not model_names:
        notes += (f"the model's classes have no names; 0 is taken for {names[0]!r}",)
    classes = max(signature.classes, 2 * (predicts == "yes-or-no"))
    return replace(
        samples,
        notes=notes,
        x=signature.in_order(x, samples.columns, samples.name),
        y=labels,
        classes=classes,
        class_names=signature.class_names,
        scale=signature.scale if x.dtype == np.uint8 else 1.0,
        columns=signature.columns,
    )
