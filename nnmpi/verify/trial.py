"""A short training run as values, on any number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.random import stream
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement, arrange, describe_stages
from nnmpi.compose.layout import Layout
from nnmpi.compose.options import GradientExchange, Numerics
from nnmpi.compose.state import gradient_state
from nnmpi.compose.worker import Worker
from nnmpi.data.catalogue import load
from nnmpi.data.dataset import IGNORED, Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.train.build import build_model, build_optimizer, own_or_name
from nnmpi.verify.options import Options

# Adam's, in place of 1e-8: it divides each gradient by its size, so that what is 0 but for rounding would become an
# update as large as any, and two equal runs would differ. Divided by this, rounding stays what it is.
EPS = 1e-3


@dataclass(frozen=True)
class Trial:
    """What a run did. Arrays are the whole model's, on rank 0 alone.

    Attributes:
        losses, norms: of each step.
        gradients: of the first step, by parameter.
        weights: after the last step, by parameter.
        statistics: the model's other arrays after the last step.
        evaluation: loss and accuracy over all samples.
        layout: how the model lay on the ranks, in lines.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Array]
    weights: dict[str, Array]
    statistics: dict[str, Array]
    evaluation: tuple[float, float]
    layout: list[str]


def load_samples(options: Options) -> Dataset:
    """Return the samples.

    Raises:
        UsageError, DataError: when there are none.
    """
    samples, classes = options.trial.samples, options.trial.random_classes
    draws = stream(options.trial.seed, "verify")
    if options.is_language:
        tokens = draws.integers(0, classes, (samples, options.context + 1))
        lengths = draws.integers(1, options.context + 1, (samples, 1))  # what is behind them does not count
        labels = np.where(np.arange(options.context) < lengths, tokens[:, 1:], IGNORED)
        return Dataset("random tokens", tokens[:, :-1], labels, classes)
    if options.trial.shape is None:
        train, _ = load(options.trial.dataset, seed=options.trial.seed)
        return train.take(np.arange(min(options.trial.samples, len(train))))
    x = draws.standard_normal((samples, *options.trial.shape), dtype=np.float32)
    return Dataset("random samples", x, draws.integers(0, classes, samples), classes)


def run(options: Options, dataset: Dataset, group: Group, layout: Layout, backend: Backend) -> Trial:
    """Train the model under a layout of the group's ranks. Collective.

    Args:
        options: the model, its optimizer, and how many steps.
        dataset: the samples.
        group: the ranks that train; rank 0 alone for the serial run.
        layout: how the model lies on them.
        backend: where this rank computes.

    Raises:
        LayoutError, UsageError: on all ranks, when the layout does not fit.
        CommError: on all ranks, when copies of a weight differ after a step.
    """
    worker = _build(options, dataset, group, layout, backend)
    where = worker.arrangement
    assert where is not None
    losses, norms, gradients = [], [], dict[str, Array]()
    for batch in islice(_batches(options, dataset, where), options.trial.steps):
        report = worker.step(batch)
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if len(losses) == 1:
            gradients = gradient_state(worker.model, group, where).to_dict()
    evaluated = worker.evaluate(_loader(options, dataset, where, 1, training=False).epoch(0))
    arrays = worker.state()[0].to_dict()
    weights = {name: arrays[name] for name in where.parameters if name in arrays}
    statistics = {name: array for name, array in arrays.items() if name not in weights}
    worker.release()
    where.mesh.free()
    evaluation = (evaluated.loss, evaluated.accuracy)
    return Trial(losses, norms, gradients, weights, statistics, evaluation, _describe(where))


def _build(options: Options, dataset: Dataset, group: Group, layout: Layout, backend: Backend) -> Worker:
    with agreed(group):
        model = build_model(options.model, dataset.sample_shape, dataset.classes)
    rows = -(-_batch_size(options, dataset) // microbatches(options, dataset))
    dtype = options.trial.dtype
    where = arrange(model, group, layout, dataset.rows(np.arange(rows), dtype), dtype, backend)
    with agreed(group):
        where.model.initialize(seed=options.trial.seed, dtype=dtype, backend=backend, storage=where.storage)
        optimizer = build_optimizer(options.optimization, where.model.storage, EPS)
    return Worker(
        where.model,
        optimizer,
        group,
        exchange=GradientExchange(
            own_or_name(options.parallel.allreduce, "--allreduce", "(rank, size)"),
            fused_update=False,  # it leaves no gradients that could be compared
            check=True,
        ),
        numerics=Numerics(clip=options.optimization.clip),
        seed=options.trial.seed,
        backend=backend,
        arrangement=where,
        synchronous_sends=True,
    )


def _batches(options: Options, dataset: Dataset, where: Arrangement) -> Iterator[Batch]:
    """Yield a rank's parts of the batches, epoch after epoch."""
    loader = _loader(options, dataset, where, microbatches(options, dataset), training=True)
    for epoch in count():
        yield from loader.epoch(epoch)


def _loader(options: Options, dataset: Dataset, where: Arrangement, parts: int, training: bool) -> Loader:
    return Loader(
        dataset,
        _batch_size(options, dataset),
        seed=options.trial.seed,
        rank=where.data_rank,
        world=where.data_ranks,
        microbatches=parts,
        whole=where.layout.fixed and training,
        shuffle=training,
        dtype=options.trial.dtype,
    )


def _batch_size(options: Options, dataset: Dataset) -> int:
    wanted = options.optimization.batch_size
    return len(dataset) if wanted == "full" else min(wanted, len(dataset))


def microbatches(options: Options, dataset: Dataset) -> int:
    """Return the number of parts of each batch: as asked for, but not more than its samples."""
    return min(options.microbatches, _batch_size(options, dataset))


def _describe(where: Arrangement) -> list[str]:
    zero = f", zero {where.layout.zero}" if where.layout.zero else ""
    return [f"layout {where.mesh.mesh}{zero}", *describe_stages(where)]
