"""From a configuration to what a run works with: model, optimizer, schedule, layout and trainer.

`train.run.set_up` calls these in the order in which things depend on one another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.command import flag_of
from nnmpi.compose.arrange import arrange, find_mesh
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.layout import GradientExchange, Layout, Numerics
from nnmpi.compose.losses import ERRORS, sum_cross_entropy
from nnmpi.compose.trainer import Trainer
from nnmpi.compose.worker import Worker
from nnmpi.custom import call_custom, is_custom, load_custom
from nnmpi.data.dataset import Samples
from nnmpi.data.loader import Batch
from nnmpi.errors import UsageError
from nnmpi.mesh import Mesh
from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.lstm import lstm
from nnmpi.models.mlp import mlp
from nnmpi.models.pretrained import load_pretrained, read_dropout, read_size
from nnmpi.models.resnet import resnet
from nnmpi.nn.linear import Embedding
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import RING, ULYSSES
from nnmpi.optim import updates
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import ConstantRate, Cosine, Schedule, StepDecay, Warmup
from nnmpi.tensor.parameter import FlatStorage
from nnmpi.train.checkpoint import Extent
from nnmpi.train.computing import explain_errors
from nnmpi.train.config import (
    SEQUENCE_MODELS,
    Config,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    non_defaults,
    require,
)
from nnmpi.train.inputs import Inputs, load_inputs
from nnmpi.train.signature import ModelSignature

# Adam's where runs are compared, in place of 1e-8: it divides each gradient by its size, so that
# what is 0 but for rounding would become an update as large as any, and two equal runs would
# differ. Divided by this, rounding stays what it is.
VERIFIED_EPS = 1e-3
# Options that a layout has, too, by the same names.
SAME = (
    "virtual_stages split reduction memory_limit sp zero activation_memory offload offload_state"
    " expert_parallel"
)
TOO_LARGE = "the model does not fit into memory ({}); make it smaller"


def build_model(config: ModelConfig, sample_shape: tuple[int, ...], classes: int) -> Module:
    """Return the model, uninitialized.

    Args:
        config: which model, with which layers.
        sample_shape: of one sample, such as (28, 28, 1).
        classes: how many outputs it has: one for each class, or quantity.

    Raises:
        UsageError: when the model does not take such samples, or the user's own cannot be built.
    """
    if is_custom(config.model):
        model = call_custom(
            config.model, "--model", "(sample_shape, classes)", sample_shape, classes
        )
        if not isinstance(model, Module):
            raise UsageError(
                f"--model {config.model} gave a {type(model).__name__}; return a nnmpi.nn.Module"
            )
        if not list(model.parameters()):
            raise UsageError(
                f"--model {config.model} gave a model without parameters; give it a layer that has"
                " some"
            )
        return model
    if config.model == "mlp":
        return mlp(sample_shape, classes, config.hidden, config.activation, dropout_of(config))
    if config.model == "cnn":
        return cnn(sample_shape, classes, config.hidden, dropout_of(config))
    if config.model == "resnet":
        return resnet(sample_shape, classes)
    return _build_sequence_model(config, sample_shape, classes)


def _build_sequence_model(
    config: ModelConfig, sample_shape: tuple[int, ...], tokens: int
) -> Module:
    """Return a language model, uninitialized. See `build_model`; the classes are the tokens of the
    vocabulary.
    """
    if len(sample_shape) != 1:
        raise UsageError(
            f"model {config.model} needs sequences of tokens, not samples of shape {sample_shape};"
            " give a text, or try model cnn or mlp"
        )
    layers, features, heads = config.sizes
    if config.model == "lstm":
        return lstm(tokens, features, layers, dropout_of(config))
    if config.pretrained is None:
        mixture = config.experts or 0, config.experts_top, config.experts_capacity
        return gpt(tokens, sample_shape[0], features, layers, heads, dropout_of(config), *mixture)
    size = read_size(config.pretrained)
    for name in ("layers", "features", "heads"):
        given, has = getattr(config, name), getattr(size, name)
        if given not in (None, has):
            raise UsageError(
                f"--{name} {given} is not what --pretrained {config.pretrained} has, {has}; leave"
                " it out"
            )
    if size.vocabulary < tokens or size.context < sample_shape[0]:
        raise UsageError(
            f"--pretrained {config.pretrained} has {size.vocabulary} tokens and a context of"
            f" {size.context}, but the data {tokens} and {sample_shape[0]}; give its own tokenizer,"
            f" and a --context of at most {size.context}"
        )
    return gpt(**vars(size), dropout=dropout_of(config))


def dropout_of(config: ModelConfig) -> float:
    """Return the model's dropout: as given, else what a pretrained one says, else 0.

    Raises:
        DataError: when that cannot be read.
    """
    if config.dropout is None:
        return 0.0 if config.pretrained is None else read_dropout(config.pretrained)
    return config.dropout


def check_samples(model: str, samples: Samples) -> None:
    """Refuse samples that do not fit the model: numbers for tokens, too large labels.

    Raises:
        UsageError: naming both.
    """
    if is_custom(model):
        return
    if samples.is_tokens == (model in SEQUENCE_MODELS):
        labels = samples.labels(np.arange(1))
        if labels.ndim > 1 and labels.dtype.kind == "i" and not samples.is_tokens:
            raise UsageError(
                f"{samples.name} has labels of shape {labels.shape[1:]} for each sample, and"
                f" --model {model} predicts one class; give one label for each sample, or a model"
                " of your own"
            )
        return
    what, others = (
        ("tokens", SEQUENCE_MODELS) if samples.is_tokens else ("no text or tokens", ("mlp", "cnn"))
    )
    raise UsageError(
        f"--model {model} does not go with {samples.name}, whose samples are {what}; give --model"
        f" {' or '.join(others)}"
    )


def check_vocabulary(model: Module, samples: Samples) -> None:
    """Refuse tokens that the model's largest embedding has no row for.

    Raises:
        UsageError: with both numbers.
    """
    entries = [
        module.num_embeddings
        for _, module in model.named_modules()
        if isinstance(module, Embedding)
    ]
    if entries and samples.vocabulary > max(entries):
        raise UsageError(
            f"{samples.name} has {samples.vocabulary} tokens, but the model's embedding"
            f" {max(entries)} rows: token {samples.vocabulary - 1} is outside its vocabulary; make"
            " the model larger, or take its own tokenizer"
        )


def build_extent(config: OptimizationConfig, inputs: Inputs) -> Extent:
    """Return how long the run is."""
    train_batches = inputs.train_loader.batches_per_epoch
    steps = config.epochs * train_batches
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    stop = min(steps, config.stop_after or steps)
    epochs = min(config.epochs, -(-steps // train_batches))
    return Extent(epochs, steps, train_batches, inputs.test_loader.batches_per_epoch, stop)


def warmup_steps(config: OptimizationConfig, extent: Extent) -> int:
    """Return the steps of linear warm-up: by default an epoch, at most a tenth of the run."""
    if config.warmup_epochs is None:
        return min(extent.train_batches, extent.steps // 10)
    return round(config.warmup_epochs * extent.train_batches)


def build_schedule(config: OptimizationConfig, extent: Extent) -> Schedule:
    """Return the learning rate as a function of the step.

    What follows the warm-up has the rest of the run; a run that is shorter than its warm-up sees
    nothing of it.
    """
    lr = config.lr
    warmup = warmup_steps(config, extent)
    after: Schedule = ConstantRate(lr)
    if config.drops is not None:
        epochs, factor = config.drops
        after = StepDecay(lr, max(1, round(epochs * extent.train_batches)), factor)
    elif config.lr_schedule == "cosine":
        after = Cosine(lr, max(1, extent.steps - warmup))
    elif is_custom(config.lr_schedule):
        expected = "(step, steps, lr)"
        first = call_custom(config.lr_schedule, "--lr-schedule", expected, 0, extent.steps, lr)
        require(
            isinstance(first, int | float),
            f"--lr-schedule {config.lr_schedule} gave {first!r}; return a number",
        )
        rate = load_custom(config.lr_schedule, "--lr-schedule", expected)
        after = lambda step: float(rate(step, extent.steps, lr))  # noqa: E731
    return Warmup(warmup, after) if warmup else after


def build_optimizer(
    config: OptimizationConfig, storage: FlatStorage, eps: float | None = None
) -> Optimizer:
    """Return the optimizer over a model's storage; eps replaces Adam's default."""
    if is_custom(config.optimizer):
        made = call_custom(config.optimizer, "--optimizer", "(storage, lr)", storage, config.lr)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"--optimizer {config.optimizer} gave a {type(made).__name__}; return an"
                " optim.Optimizer"
            )
        return made
    return updates.build(
        config.optimizer,
        storage,
        lr=config.lr,
        momentum=config.momentum or None,
        weight_decay=config.weight_decay,
        eps=None if config.optimizer == "sgd" else eps,
    )


def build_layout(config: ParallelConfig, rule: OptimizationConfig, model: ModelConfig) -> Layout:
    """Return the layout that the options ask for.

    Raises:
        UsageError: for values that do not go together.
    """
    dp, pp, tp = (None if ranks == "auto" else ranks for ranks in (config.dp, config.pp, config.tp))
    schedule = load_custom(config.pipeline, "--pipeline", "(rank, ranks, microbatches)")
    same: dict[str, Any] = {name: getattr(config, name) for name in SAME.split()}
    layout = Layout(dp, pp, tp, schedule=schedule, state_arrays=rule.state_arrays, **same)
    return choose_attention(layout, model)


def choose_attention(layout: Layout, model: ModelConfig) -> Layout:
    """Return the layout, with ring attention if sequences have more ranks than heads."""
    if layout.sp == 1 or model.model != "gpt":
        return layout
    heads = model.sizes[2] if model.pretrained is None else read_size(model.pretrained).heads
    return replace(layout, sp_attention=RING if heads < layout.sp * (layout.tp or 1) else ULYSSES)


def build_full_model(config: Config, train: Samples, backend: Backend, group: Group) -> Module:
    """Return the whole model for these samples, uninitialized. Collective.

    Raises:
        UsageError: on all ranks, when the model does not take them.
        DeviceError: on all ranks, when one has not enough memory for it.
    """
    with agreed(group), explain_errors(backend, TOO_LARGE):
        check_samples(config.model.model, train)
        model = build_model(
            config.model, train.sample_shape, ModelSignature.of(train, None).outputs
        )
        check_vocabulary(model, train)
    return model


def build_trainer(
    config: Config,
    model: Module,
    group: Group,
    inputs: Inputs,
    backend: Backend,
    layout: Layout | None = None,
    verified: bool = False,
) -> Trainer:
    """Return the trainer: an initialized model and optimizer under the options. Collective.

    Args:
        config: every option.
        model: of `build_full_model`; it is initialized here, or what this rank has of it.
        group: all ranks of the run.
        inputs: the data.
        backend: where this rank computes.
        layout: how the model is spread over the ranks; None for all of it on each.
        verified: whether it is to be compared with another run, in step: every step is checked,
            gradients stay, messages leave when they are awaited, and Adam makes no updates of
            rounding.

    Raises:
        UsageError: on all ranks, for what this number of ranks cannot do.
        DeviceError: on all ranks, when one has not enough memory for it.
    """
    options, sync = config.optimization, config.sync
    where = None
    if layout is not None and not sync.rule.asynchronous:
        rows = -(-inputs.batch_size // inputs.train_loader.microbatches)
        sample = inputs.train.rows(np.arange(rows), config.run.dtype)
        with use_precision(config.run.precision), explain_errors(backend, TOO_LARGE):
            # it measures what each layer takes
            where = arrange(model, group, layout, sample, config.run.dtype, backend)
        model = where.model
    with agreed(group), explain_errors(backend, TOO_LARGE):
        storage = FlatStorage if where is None else where.storage
        model.initialize(
            seed=config.run.seed, dtype=config.run.dtype, backend=backend, storage=storage
        )
        if config.model.pretrained is not None:
            load_pretrained(model, config.model.pretrained)
        optimizer = build_optimizer(options, model.storage, VERIFIED_EPS if verified else None)
    common: dict[str, Any] = {
        "numerics": Numerics(config.run.precision, options.clip),
        "seed": config.run.seed,
        "backend": backend,
        "slow": sync.slowness(config.run.seed),
    }
    if is_custom(options.loss) or options.loss in ERRORS:
        common["loss"] = load_custom(options.loss, "--loss", "(logits, labels)")
    else:
        common["loss"] = sum_cross_entropy(where, options.label_smoothing)
        common["evaluation_loss"] = sum_cross_entropy(where)
    if sync.rule.asynchronous:
        return AsynchronousWorker(model, optimizer, group, sync.rule, **common)
    fused = False if verified else None  # the fused update leaves no gradients
    allreduce = load_custom(config.parallel.allreduce, "--allreduce", "(rank, size)")
    exchange = GradientExchange(allreduce, fused_update=fused, check=verified)
    return Worker(
        model,
        optimizer,
        group,
        exchange=exchange,
        arrangement=where,
        synchronous_sends=verified,
        **common,
    )


@contextmanager
def trial_run(
    config: Config,
    samples: tuple[Samples, Samples],
    layout: Layout,
    group: Group,
    backend: Backend,
    verified: bool = False,
) -> Iterator[tuple[Worker, Inputs, Iterator[Batch]]]:
    """Yield a trainer for a layout with inputs and endless batches. Collective.

    What is trained is thrown away.

    Args:
        config, layout, group, backend, verified: see `build_trainer`.
        samples: of training and test.

    Raises:
        NnmpiError: on all ranks, where the layout cannot be.
    """
    mesh = find_mesh(group, layout)
    replica = mesh.coordinates(group.rank).d, mesh.dp
    inputs = load_inputs(config, group, lambda _: None, replica, mesh.pp, samples)
    model = build_full_model(config, inputs.train, backend, group)
    trainer = build_trainer(config, model, group, inputs, backend, layout, verified)
    if not isinstance(trainer, Worker):
        raise UsageError("only ranks in step are measured and compared")
    yield (
        trainer,
        inputs,
        (batch for epoch in count() for batch in inputs.train_loader.epoch(epoch)),
    )
    trainer.release()
    trainer.arrangement.free()


def find_layout(config: Config, group: Group) -> tuple[Layout, Mesh]:
    """Return the layout that was asked for and the mesh that it means here. Collective.

    Raises:
        LayoutError, UsageError: on all ranks, when it does not fit the world, or options do not go
            together.
    """
    with agreed(group):
        layout = build_layout(config.parallel, config.optimization, config.model)
    mesh = find_mesh(group, layout)
    for name in non_defaults(config.parallel).keys() & {"pipeline", "virtual_stages", "split"}:
        # then it may be that of a run that had a pipeline
        fits = mesh.pp > 1 or config.run.resume is not None
        sentence = (
            f"belongs to a pipeline, and {mesh} has none; give --pp 2 or more, or leave it out"
        )
        require(fits, f"{flag_of(name)} {sentence}")
    return layout, mesh
