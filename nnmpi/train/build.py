"""The parts of a run, made from its configuration: model, optimizer, schedule, trainer.

`train.run.set_up` calls these functions in the order of the parts' dependences.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision
from nnmpi.base.command import flag_of, require
from nnmpi.base.custom import call_custom, is_custom, load_custom
from nnmpi.base.errors import UsageError, shortened
from nnmpi.base.wings import offered
from nnmpi.comm.agreement import agreed, require_equal
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement, arrange, find_mesh
from nnmpi.compose.layout import GradientExchange, Layout
from nnmpi.compose.losses import CROSS_ENTROPY, SumCrossEntropy, SumError, vocabulary_of
from nnmpi.compose.trainer import Trainer
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.data.loader import Batch, checksum
from nnmpi.models.adapter import load_adapter
from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.lstm import lstm
from nnmpi.models.mlp import mlp
from nnmpi.models.pretrained import (
    layer_names,
    leave_undrawn,
    load_pretrained,
    model_named,
    read_size,
)
from nnmpi.models.resnet import resnet
from nnmpi.nn.lora import adapt
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.optim import updates
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import ConstantRate, Cosine, RateSchedule, StepDecay, WarmRestarts, Warmup
from nnmpi.tensor.function import kind_of
from nnmpi.tensor.parameter import FlatStorage
from nnmpi.train.checkpoint import Extent
from nnmpi.train.computing import explain_errors
from nnmpi.train.config import (
    SEQUENCE_MODELS,
    Config,
    ExchangeConfig,
    ModelConfig,
    OptimizationConfig,
)
from nnmpi.train.derived import dropout_of, size_of, with_adapter
from nnmpi.train.inputs import NORMALIZED, Inputs, load_inputs
from nnmpi.train.signature import ModelSignature

# Adam's eps in runs that are compared, in place of 1e-8. Adam divides each gradient by its size: a
# gradient that is 0 up to rounding would become a full update, and two equal runs would differ.
# With this eps such an update is as small as the rounding.
VERIFIED_EPS = 1e-3
TOO_LARGE = "the model does not fit into memory ({}); make it smaller"


def build_model(config: ModelConfig, sample_shape: tuple[int, ...], classes: int) -> Module:
    """Return the model, uninitialized.

    Args:
        config: of the model.
        sample_shape: of one sample, such as (28, 28, 1).
        classes: the number of outputs: classes, tokens or quantities.

    Raises:
        UsageError: when the model does not take such samples, or a user's model cannot be built.
    """
    if is_custom(config.model):
        given = isinstance(config.model, Module)  # by a program: `nnmpi.fit`
        model = (
            config.model
            if given
            else call_custom(
                config.model, "--model", "(sample_shape, classes)", sample_shape, classes
            )
        )
        if not isinstance(model, Module):
            raise UsageError(
                f"--model {config.model} returned {kind_of(model)}; return an nnmpi.nn.Module"
            )
        if not list(model.parameters()):
            raise UsageError(
                f"--model {config.model} returned a model without parameters; give it a layer that"
                " has some"
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
    if len(sample_shape) != 1:
        raise UsageError(
            f"model {config.model} needs sequences of tokens, not samples of shape {sample_shape};"
            " give a text, or try model cnn or mlp"
        )
    layers, features, heads = config.sizes
    if config.model == "lstm":
        return lstm(tokens, features, layers, dropout_of(config))
    if config.pretrained is None:
        if config.model == "llama":
            return size_of(config, tokens, sample_shape[0]).build()
        mixture = config.experts or 0, config.experts_top, config.experts_capacity
        return gpt(tokens, sample_shape[0], features, layers, heads, dropout_of(config), *mixture)
    size = read_size(config.pretrained)
    kind = model_named(config.pretrained)
    if kind != config.model:
        raise UsageError(
            f"--pretrained {config.pretrained} is a {kind}, not a {config.model}; leave --model out"
        )
    for name in ("layers", "features", "heads", "kv_heads"):
        option, has = getattr(config, name), getattr(size, name, None)
        if option not in (None, has):
            raise UsageError(
                f"{flag_of(name)} {option} differs from the {has} of --pretrained"
                f" {config.pretrained}; leave it out"
            )
    if size.vocabulary < tokens or size.context < sample_shape[0]:
        raise UsageError(
            f"--pretrained {config.pretrained} has {size.vocabulary} tokens and a context of"
            f" {size.context}, but the data have {tokens} and {sample_shape[0]}; use its own"
            f" tokenizer, and a --context of at most {size.context}"
        )
    model = size.build(dropout_of(config))
    leave_undrawn(model, size)
    config = with_adapter(config)  # a plan has not read its folder
    if config.lora is not None:
        settings = config.lora_alpha, config.lora_targets, config.lora_dropout, config.base_dtype
        adapt(model, config.lora, *settings)
    return model


def check_samples(model: str, samples: Samples) -> None:
    """Refuse samples that do not fit the model: quantities for tokens, or several labels each.

    Raises:
        UsageError: with both names.
    """
    if is_custom(model):
        return
    if samples.is_tokens == (model in SEQUENCE_MODELS):
        labels = samples.labels(np.arange(1))
        if labels.ndim > 1 and labels.dtype.kind == "i" and not samples.is_tokens:
            raise UsageError(
                f"{samples.name} has labels of shape {labels.shape[1:]} for each sample, but"
                f" --model {model} predicts one class; give one label for each sample, or a model"
                " of your own"
            )
        return
    what, others = (
        ("tokens", SEQUENCE_MODELS) if samples.is_tokens else ("not text or tokens", ("mlp", "cnn"))
    )
    raise UsageError(
        f"--model {model} cannot be trained on {samples.name}, whose samples are {what}; give"
        f" --model {' or '.join(others)}"
        + (", or to learn classes from a table's texts, --target" if samples.is_tokens else "")
    )


def check_vocabulary(model: Module, samples: Samples) -> None:
    """Refuse tokens beyond the rows of the model's largest embedding.

    Raises:
        UsageError: with both numbers.
    """
    entries = vocabulary_of(model)
    if entries is not None and samples.vocabulary > entries:
        raise UsageError(
            f"{samples.name} has {samples.vocabulary} tokens, but the model's embedding has"
            f" {entries} rows: token {samples.vocabulary - 1} is outside its vocabulary; make"
            " the model larger, or use its own tokenizer"
        )


def build_extent(config: OptimizationConfig, inputs: Inputs) -> Extent:
    """Return the run's length in epochs, steps and batches."""
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


def build_schedule(config: OptimizationConfig, extent: Extent) -> RateSchedule:
    """Return the learning rate as a function of the step.

    The schedule proper spans the steps after the warm-up. A run shorter than its warm-up never
    reaches it.
    """
    lr = config.lr
    warmup = warmup_steps(config, extent)
    after: RateSchedule = ConstantRate(lr)
    name, (epochs, factor) = config.rate_words
    every = max(1, round(epochs * extent.train_batches))
    if name == "step":
        after = StepDecay(lr, every, factor)
    elif name == "restarts":
        after = WarmRestarts(lr, every, factor)
    elif name == "cosine":
        after = Cosine(lr, max(1, extent.steps - warmup))
    elif is_custom(config.lr_schedule):
        expected = "(step, steps, lr)"
        first = call_custom(config.lr_schedule, "--lr-schedule", expected, 0, extent.steps, lr)
        require(
            isinstance(first, int | float),
            f"--lr-schedule {config.lr_schedule} returned {first!r}; return a number",
        )
        rate = load_custom(config.lr_schedule, "--lr-schedule", expected)
        after = lambda step: float(rate(step, extent.steps, lr))  # noqa: E731
    return Warmup(warmup, after) if warmup else after


def build_optimizer(
    config: OptimizationConfig, storage: FlatStorage, eps: float | None = None
) -> Optimizer:
    """Return the optimizer over a model's storage; eps replaces Adam's default."""
    if is_custom(config.optimizer):
        result = call_custom(config.optimizer, "--optimizer", "(storage, lr)", storage, config.lr)
        if not isinstance(result, Optimizer):
            raise UsageError(
                f"--optimizer {config.optimizer} returned {kind_of(result)}; return an"
                " optim.Optimizer"
            )
        return result
    return updates.build(
        config.optimizer,
        storage,
        lr=config.lr,
        momentum=config.momentum if config.optimizer in updates.taking("momentum") else None,
        weight_decay=config.weight_decay,
        eps=eps if config.optimizer in updates.taking("eps") else None,
    )


def build_exchange(given: GradientExchange) -> ExchangeConfig:
    """Return how gradients are summed: all fields of the options, with what is the user's loaded.

    Raises:
        UsageError: when there is no such function or class.
    """
    signatures = {"allreduce": "(rank, size)", "sum": "(group, gradients)"}
    values = {item.name: getattr(given, item.name) for item in fields(GradientExchange)}
    for name, value in values.items():
        if is_custom(value):
            values[name] = load_custom(value, flag_of(name), signatures[name])
    return ExchangeConfig(**values)


def build_full_model(config: Config, train: Samples, backend: Backend, group: Group) -> Module:
    """Return the full model for these samples, uninitialized. Collective.

    Raises:
        UsageError: on all ranks, when the model does not take the samples.
        DeviceError: on all ranks, when one rank runs out of memory.
    """
    with agreed(group), explain_errors(backend, TOO_LARGE):
        check_samples(config.model.model, train)
        model = build_model(
            config.model, train.sample_shape, ModelSignature.of(train, None).outputs
        )
        check_vocabulary(model, train)
        freeze(model, config.optimization.frozen)
    return model


def freeze(model: Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of a full model with these names, or patterns with * and ?.

    Raises:
        UsageError: for a pattern that no name fits, and if nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        chosen = fnmatch.filter(parameters, pattern)
        if not chosen:
            raise UsageError(
                f"--freeze {pattern} fits no parameter; they are called"
                f" {shortened(', '.join(parameters), 300)}"
            )
        for name in chosen:
            parameters[name].requires_grad = False
    if not any(item.requires_grad for item in parameters.values()):
        raise UsageError("--freeze leaves nothing to train; give fewer names")


def build_trainer(
    config: Config,
    model: Module,
    group: Group,
    inputs: Inputs,
    backend: Backend,
    layout: Layout | None = None,
    verified: bool = False,
) -> Trainer:
    """Return the trainer: layout, initialized model, optimizer and loss. Collective.

    Args:
        config: of the run.
        model: of `build_full_model`. This rank's shard of it is initialized here.
        group: all ranks of the run.
        inputs: the data.
        backend: of this rank.
        layout: of the ranks; None to replicate the model, as asynchronous training does.
        verified: whether the run will be compared with another one. Then every step is checked,
            gradients stay after the update (which is not fused), sends are synchronous, and Adam
            has VERIFIED_EPS.

    Raises:
        UsageError: on all ranks, when the layout does not fit the number of ranks.
        DeviceError: on all ranks, when one rank runs out of memory.
    """
    options, sync = config.optimization, config.sync
    given = model.state() if "storage" in vars(model) else {}  # as a program's model may have
    where = None
    if layout is not None and not sync.asynchronous:
        where = _arranged(config, model, group, inputs, backend, layout)
        model = where.model
    keeps_values = bool(given) and (where is None or where.is_plain)
    with agreed(group), explain_errors(backend, TOO_LARGE):
        if not keeps_values:
            model.initialize(
                seed=config.run.seed,
                dtype=config.run.dtype,
                backend=backend,
                storage=FlatStorage if where is None else where.storage,
            )
        _load_trained(config.model, model)
        optimizer = build_optimizer(options, model.storage, VERIFIED_EPS if verified else None)
    common: dict[str, Any] = {
        "numerics": config.numerics,
        "seed": config.run.seed,
        "backend": backend,
        "slow": sync.slowness(config.run.seed),
        **_losses(options, group, inputs, where),
    }
    if sync.asynchronous:
        return offered("AsynchronousWorker")(model, optimizer, group, sync, **common)
    with agreed(group):
        exchange = build_exchange(config.parallel)
    if verified:  # the fused update leaves no gradients
        exchange = replace(exchange, fused_update=False, check=True)
    worker = Worker(
        model,
        optimizer,
        group,
        exchange=exchange,
        arrangement=where,
        synchronous_sends=verified,
        **common,
    )
    if given and not keeps_values:
        differ = "the ranks' models have different values"
        require_equal(group, [checksum(*given.values())], differ, "give all ranks the same model")
        worker.state()[0].scatter(given.__getitem__)
    return worker


def _arranged(
    config: Config, model: Module, group: Group, inputs: Inputs, backend: Backend, layout: Layout
) -> Arrangement:
    """Return the layout of the model on the ranks; for the arguments see `build_trainer`."""
    mesh = find_mesh(group, layout)
    is_cut = mesh.pp > 1 or mesh.tp > 1 or layout.expert_parallel
    if "storage" in vars(model) and is_cut:
        raise UsageError(
            f"the model has its values already, and {mesh} gives each rank a part of a model"
            " without: leave initialize() out, and for another training build the model again"
        )
    rows = -(-inputs.batch_size // inputs.train_loader.microbatches)
    # by this sample each layer's time and memory are measured
    sample = inputs.train.rows(np.arange(rows), config.run.dtype)
    with use_precision(config.numerics.precision), explain_errors(backend, TOO_LARGE):
        return arrange(model, group, layout, sample, config.run.dtype, backend)


def _load_trained(options: ModelConfig, model: Module) -> None:
    """Load the weights of --pretrained, and those of --adapter."""
    if options.pretrained is None:
        return
    load_pretrained(model, options.pretrained)
    if options.adapter is not None:
        load_adapter(model, options.adapter, layer_names(read_size(options.pretrained)))


def _losses(
    options: OptimizationConfig, group: Group, inputs: Inputs, where: Arrangement | None
) -> dict[str, Any]:
    """Return a trainer's loss, and that of its evaluations if it is another one. Collective."""
    smoothing = options.label_smoothing
    if options.class_weights:
        with agreed(group):
            weights = weigh(options.class_weights, inputs.train)
        weighted = partial(
            cross_entropy, weight=weights, reduction="none", label_smoothing=smoothing
        )
        return {"loss": weighted, "evaluation_loss": SumCrossEntropy(where)}
    if options.loss == CROSS_ENTROPY:
        return {
            "loss": SumCrossEntropy(where, smoothing),
            "evaluation_loss": SumCrossEntropy(where),
        }
    named = load_custom(options.loss, "--loss", "(logits, labels)")
    std = inputs.signature.target_std
    return {"loss": SumError(named, std) if named in NORMALIZED else named}


def weigh(weights: Sequence[float] | str, train: Samples) -> Array:
    """Return the weight of each class.

    Raises:
        UsageError: for samples without classes, and for another number of weights.
    """
    if not isinstance(train, Dataset) or train.predicts != "classes":
        raise UsageError("--class-weights is for classes, which the data have not; leave it out")
    if weights == "balanced":
        counts = sum(np.bincount(y[y >= 0], minlength=train.classes) for y in train.label_blocks())
        return len(train) / (train.classes * np.maximum(counts, 1))
    if len(weights) != train.classes or not any(weights):
        given = " ".join(f"{item:g}" for item in weights)
        raise UsageError(
            f"--class-weights {given}: the data have {train.classes} classes;"
            " give one number for each, and not only zeros"
        )
    return np.array(weights, "float64")


@contextmanager
def trial_run(
    config: Config,
    samples: tuple[Samples, Samples],
    layout: Layout,
    group: Group,
    backend: Backend,
    verified: bool = False,
) -> Iterator[tuple[Worker, Inputs, Iterator[Batch]]]:
    """Yield a trainer for a layout, its inputs, and endless batches. Collective.

    The trained model is released at the end.

    Args:
        config, layout, group, backend, verified: see `build_trainer`.
        samples: of training and test.

    Raises:
        NnmpiError: on all ranks, when the layout is impossible.
    """
    inputs = load_inputs(config, group, lambda _: None, find_mesh(group, layout), samples)
    model = build_full_model(config, inputs.train, backend, group)
    trainer = build_trainer(config, model, group, inputs, backend, layout, verified)
    assert isinstance(trainer, Worker)  # callers have no --sync
    yield (
        trainer,
        inputs,
        (batch for epoch in count() for batch in inputs.train_loader.epoch(epoch)),
    )
    trainer.release()
    trainer.arrangement.free()
