"""From a configuration to the parts of a run: model, optimizer, schedule and worker."""

from collections.abc import Sequence

import numpy as np

from nnmpi.backend.precision import use_precision
from nnmpi.backend.record import Backend
from nnmpi.comm.agree import agreed
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.buckets import plan_buckets
from nnmpi.comm.exchange import bucket_limit, overlaps
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.pace import Pace
from nnmpi.compose.relaxed import RelaxedWorker
from nnmpi.compose.runner import sum_cross_entropy
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.models.cnn import cnn
from nnmpi.models.mlp import mlp
from nnmpi.models.resnet import resnet
from nnmpi.nn.module import Module
from nnmpi.optim import names
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import Constant, Cosine, Schedule, StepDecay, Warmup, linear_scaling
from nnmpi.tensor.flat import FlatStorage
from nnmpi.train.config import Config, ModelConfig, OptimizationConfig
from nnmpi.train.device import explained
from nnmpi.train.inputs import Inputs
from nnmpi.train.own import build_own, is_own
from nnmpi.train.parallel import ParallelConfig
from nnmpi.train.report import Extent
from nnmpi.train.switch import decided

BYTES_PER_MIB = 2**20
MS_PER_S = 1000
TOO_LARGE = "the model does not fit into memory ({}); make it smaller"


def build_model(config: ModelConfig, sample_shape: tuple[int, ...], classes: int) -> Module:
    """Return the model for samples of this shape, without values yet.

    Raises:
        UsageError: when the model does not take such samples, or the user's own cannot be built.
    """
    if is_own(config.model):
        return build_own(config.model, sample_shape, classes)
    if config.model == "mlp":
        return mlp(sample_shape, classes, config.hidden, config.activation, config.dropout)
    if config.model == "cnn":
        return cnn(sample_shape, classes, config.hidden, config.dropout)
    return resnet(sample_shape, classes)


def build_extent(config: OptimizationConfig, inputs: Inputs) -> Extent:
    """Return how long the run is."""
    train_batches = inputs.train_loader.batches_per_epoch
    steps = config.epochs * train_batches
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return Extent(config.epochs, steps, train_batches, inputs.test_loader.batches_per_epoch)


def build_schedule(config: OptimizationConfig, extent: Extent, batch_size: int) -> Schedule:
    """Return the learning rate as a function of the step.

    What follows the warm-up has the rest of the run; a run that is shorter than its warm-up sees nothing of it.
    """
    lr = linear_scaling(config.lr, batch_size, config.base_batch) if config.lr_scaling == "linear" else config.lr
    warmup = round(config.warmup_epochs * extent.train_batches)
    after: Schedule = Constant(lr)
    if config.schedule == "step":
        every = max(1, round(config.step_epochs * extent.train_batches))
        after = StepDecay(lr, every, config.step_factor)
    elif config.schedule == "cosine":
        after = Cosine(lr, max(1, extent.steps - warmup))
    return Warmup(warmup, after) if warmup else after


def build_optimizer(config: OptimizationConfig, storage: FlatStorage) -> Optimizer:
    """Return the optimizer over a model's storage."""
    sgd = config.optimizer == "sgd"
    return names.build(
        config.optimizer,
        storage,
        lr=config.lr,
        momentum=config.momentum if sgd else None,
        nesterov=config.nesterov if sgd else None,
        weight_decay=config.weight_decay,
    )


def build_layout(config: ParallelConfig, optimizer: str = "adam", momentum: float = 0.0) -> Layout:
    """Return the layout that the options ask for.

    Args:
        optimizer, momentum: which say how many arrays the optimizer keeps for each parameter.

    Raises:
        UsageError: for values that do not go together.
    """
    dp, pp, tp = (None if ranks == "auto" else ranks for ranks in (config.dp, config.pp, config.tp))
    return Layout(
        dp,
        pp,
        tp,
        schedule=config.pipeline,
        virtual_stages=config.virtual_stages,
        split=config.links,
        recompute=config.recompute,
        reduction=config.reduction,
        memory_limit=config.memory_limit_bytes,
        state_arrays=2 if optimizer != "sgd" else int(momentum > 0),
    )


def build_worker(
    config: Config,
    group: Group,
    inputs: Inputs,
    backend: Backend,
    algorithms: Sequence[str] | None = None,
    layout: Layout | None = None,
) -> Worker:
    """Return the worker with an initialized model and its optimizer. Collective.

    Args:
        layout: how the model is spread over the ranks; None for all of it on each.
        algorithms: the all-reduce of each bucket, in the place of "auto", when a run goes on that had chosen them.

    Raises:
        UsageError: on all ranks, when the model does not take the data set's samples.
        DeviceError: on all ranks, when one has not enough memory for it.
    """
    options, parallel = config.optimization, config.parallel
    with agreed(group), explained(backend, TOO_LARGE):
        model = build_model(config.model, inputs.train.sample_shape, inputs.train.classes)
    where = None
    if layout is not None:
        rows = -(-inputs.batch_size // inputs.train_loader.microbatches)
        sample = inputs.train.rows(np.arange(rows), config.run.dtype)
        with use_precision(config.run.precision), explained(backend, TOO_LARGE):  # it measures what each layer takes
            where = arrange(model, group, layout, sample, config.run.dtype, backend)
        model = where.model
    with agreed(group), explained(backend, TOO_LARGE):
        model.initialize(seed=config.run.seed, dtype=config.run.dtype, backend=backend)
        optimizer = build_optimizer(options, model.storage)
    fused = decided(parallel.fused_update) if group.size > 1 else False
    overlap = decided(parallel.overlap)
    bucket_bytes = None if parallel.bucket_mb is None else max(1, int(parallel.bucket_mb * BYTES_PER_MIB))
    allreduce: str | Sequence[str] = parallel.allreduce
    if algorithms and allreduce == AUTO and not fused:
        replicas = group if where is None else where.mesh.dp
        limit = bucket_limit(bucket_bytes, overlaps(replicas) if overlap is None else overlap)
        if len(algorithms) == _count_buckets(model.storage, limit):  # else it begins anew
            allreduce = algorithms
    return Worker(
        model,
        optimizer,
        group,
        loss=sum_cross_entropy(where, options.label_smoothing),
        evaluation_loss=sum_cross_entropy(where),
        allreduce=allreduce,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
        fused_update=fused,
        check=parallel.check_weights,
        clip=options.clip,
        seed=config.run.seed,
        backend=backend,
        arrangement=where,
        precision=config.run.precision,
    )


def build_relaxed(config: Config, group: Group, inputs: Inputs, backend: Backend) -> RelaxedWorker | VirtualWorker:
    """Return the worker of a run whose ranks need not be in step, or of one in virtual time. Collective.

    Raises:
        UsageError, DeviceError: as in `build_worker`; and for what this number of ranks cannot do.
    """
    options, sync = config.optimization, config.sync
    with agreed(group), explained(backend, TOO_LARGE):
        model = build_model(config.model, inputs.train.sample_shape, inputs.train.classes)
        model.initialize(seed=config.run.seed, dtype=config.run.dtype, backend=backend)
        optimizer = build_optimizer(options, model.storage)
    losses = sum_cross_entropy(None, options.label_smoothing), sum_cross_entropy(None)
    pace = build_pace(config)
    if sync.virtual_workers:
        return VirtualWorker(
            model,
            optimizer,
            group,
            sync.rule,
            sync.virtual_workers,
            *losses,
            clip=options.clip,
            seed=config.run.seed,
            backend=backend,
            pace=pace,
            network=sync.links,
            precision=config.run.precision,
        )
    return RelaxedWorker(
        model,
        optimizer,
        group,
        sync.rule,
        *losses,
        clip=options.clip,
        seed=config.run.seed,
        backend=backend,
        pace=pace,
        precision=config.run.precision,
    )


def build_pace(config: Config) -> Pace:
    """Return how slow the ranks are on purpose."""
    return Pace(config.sync.pace_ms / MS_PER_S, config.sync.slowdown(config.run.seed))


def _count_buckets(storage: FlatStorage, bucket_bytes: int) -> int:
    spans = [(span.buffer, span.start, span.stop) for span in storage.spans]
    return len(plan_buckets(spans, [grad.dtype.itemsize for grad in storage.grads], bucket_bytes))
