"""The lines printed before training: ranks, layout, machine, data, model, and choices."""

import platform

import threadpoolctl

from nnmpi.backend.blas import blas_pool
from nnmpi.backend.cuda import cudnn
from nnmpi.backend.gemm import name_products
from nnmpi.backend.precision import describe_products
from nnmpi.base.custom import name_of
from nnmpi.base.errors import counted
from nnmpi.base.launcher import describe_idle, start_words
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.fit import describe_network
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.compose.arrange import Arrangement, describe_stages
from nnmpi.compose.trainer import Trainer
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.data.text import Text
from nnmpi.nn.norm import has_batch_norm
from nnmpi.train.build import warmup_steps
from nnmpi.train.checkpoint import Extent, fixed_kernels
from nnmpi.train.computing import describe_device, installed_numba
from nnmpi.train.config import OptimizationConfig
from nnmpi.train.inputs import Inputs, with_options
from nnmpi.train.run import TrainingRun
from nnmpi.train.signature import ModelSignature

LARGE_TARGET = 20.0  # of quantities; weights begin at about 1


def header(run: TrainingRun) -> list[tuple[str, str]]:
    """Return the header's lines as (name, text); starts.jsonl holds them, too. Collective."""
    config, group, backend, trainer = run.config, run.group, run.backend, run.trainer
    inputs, extent, sync, where = run.inputs, run.extent, config.sync, trainer.arrangement
    nodes = sorted(set(group.gather(platform.node())))
    train, test = inputs.train, inputs.test
    mode, precision = config.numerics.precision, ""
    if mode != "float32":
        how = "" if backend.is_device else f" ({describe_products()})"
        precision = f", precision {mode}{how}"
    order = "" if config.data.partition == "none" else f", partition {config.data.partition}"
    if config.data.shuffle_block is not None:
        order = f", shuffled in blocks of {config.data.shuffle_block}"
    if config.data.stratify:
        order += ", split class by class"
    kernels = f", kernels compiled by numba {installed_numba()}" if config.run.jit == "on" else ""
    slow, exchange = sync.slowness(config.run.seed), trainer.describe_exchange()
    named = [
        (
            f"layout: {_layout(where)}{_products(where, group)}, {counted(group.size, 'rank')} on"
            f" {counted(len(nodes), 'node')}"
            f" ({', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''})"
        ),
        *(_pipeline(inputs, where) if where.is_pipeline else []),
        f"simulated: {_world(run, slow)}" if sync.simulate else "",
        f"sync: {sync.describe()}" if sync.asynchronous else "",
        f"slow: {slow.describe()}" if slow else "",
        f"MPI: {group.comm.world.library}",
        (
            f"backend: {backend.name} on {backend.device}, {config.run.dtype}{precision}{kernels}; "
            f"{f'kernels of its own, {cudnn.describe()}' if backend.is_device else blas()}"
        ),
        f"cores: {_idle(run, len(nodes))}",
        run.kernels,
        *describe_device(backend, group, config.run.verbose),
        (
            f"data: {train.name}, {len(train)} training and {len(test)} test"
            f" {_samples(train, inputs.signature)}{order}"
        ),
        *(
            [f"{_noted(train)}: {with_options('; '.join(train.notes))}"]
            if isinstance(train, Dataset) and train.notes
            else []
        ),
        (
            f"batches: {extent.train_batches} of {inputs.batch_size} in each of "
            f"{counted(extent.epochs, 'epoch')}, {counted(extent.steps, 'step')} in all"
        ),
        (
            f"model: {config.model.model}, {_parameters(trainer)};"
            f" {_optimizer(config.optimization, extent)}"
            f"{f', average of the weights by {ema:g}' if (ema := config.numerics.ema) else ''}"
        ),
        f"training: {_habits(run)}",
        _statistics(group, inputs, trainer),
        *([f"all-reduce: {exchange}", f"cost model: {_fit(group)}"] if exchange else []),
        f"run folder: {config.run.out}",
    ]
    return [
        (name, text) for name, _, text in (line.partition(": ") for line in named if line) if text
    ]


def _habits(run: TrainingRun) -> str:
    """Return what else is done to samples, losses and gradients; "" for nothing."""
    config = run.config
    weights = config.optimization.class_weights
    clip, smoothing = config.numerics.clip, config.optimization.label_smoothing
    given = weights if isinstance(weights, str) else " ".join(f"{weight:g}" for weight in weights)
    return ", ".join(
        [
            *([f"augmentation {config.data.augment}"] if config.data.augment != "none" else []),
            *([f"class weights {given}"] if weights else []),
            *(["losses weighted by samples"] if run.inputs.train.weights is not None else []),
            *([f"label smoothing {smoothing:g}"] if smoothing else []),
            *([f"gradients clipped to a norm of {clip:g}"] if clip is not None else []),
        ]
    )


def _idle(run: TrainingRun, nodes: int) -> str:
    """Return which cores stand idle, and how to use them. Collective: all ranks sleep meanwhile."""
    config, mesh = run.config, run.arrangement.mesh.sizes
    if config.sync.simulate or run.backend.is_device or nodes > 1:
        return ""
    layout = "" if config.parallel.dp == AUTO else " --dp auto"
    command = f"nnmpi train --ranks {{}}{layout} ... (nnmpi speedup measures what it gains)"
    return describe_idle(command, mesh.size, mesh.size // mesh.dp, run.inputs.batch_size)


def _noted(train: Dataset) -> str:
    """Return what a data set's notes are about: a table's columns, or files beside images."""
    return "columns" if train.encoding else "left out"


def _samples(samples: Samples, signature: ModelSignature) -> str:
    if isinstance(samples, Text):
        kind = "sentences of at most" if samples.sentences else "blocks of"
        return (
            f"{kind} {samples.context} tokens, of a vocabulary of {samples.classes}"
            f" ({samples.tokenizer.name})"
        )
    targets, scale = f"{samples.classes} classes", ""
    if isinstance(samples, Dataset):
        targets = samples.describe_targets()
        largest = 0.0
        if samples.predicts == "quantities" and not signature.target_mean:
            largest = max((float(abs(y).max()) for y in samples.label_blocks()), default=0.0)
        if signature.target_mean:
            scale = (
                f" of standard deviation {signature.target_std:.4g}, normalized for the training"
            )
        elif largest > LARGE_TARGET:
            scale = (
                f" up to {largest:.4g}, which are not normalized: divide such large ones by their"
                f" standard deviation, {samples.target_scale[1]:.4g}, or they are hardly learned"
            )
    return f"samples of {' x '.join(map(str, samples.sample_shape))}, {targets}{scale}"


def blas() -> str:
    """Return NumPy's BLAS: name, version, processor and threads."""
    threads = blas_pool(threadpoolctl.threadpool_info()).get("num_threads", 1)
    return f"{name_products()}, {counted(threads, 'thread')} per rank"


def _layout(where: Arrangement) -> str:
    mesh = where.mesh.sizes
    shape = f"dp {mesh.dp}" if mesh.size == mesh.dp else str(mesh)
    attention = f" ({where.layout.sp_attention})" if where.sequence is not None else ""
    zero = f", ZeRO {where.layout.zero}" if where.layout.zero else ""
    experts = ", experts sharded" if where.layout.expert_parallel else ""
    return (
        f"{shape}{attention}{zero}{experts}"
        f"{', sums in a fixed order' if where.layout.fixed_order else ''}"
    )


def _products(where: Arrangement, group: Group) -> str:
    """Return the BLAS kernels if they differ: sums in a fixed order have other bits elsewhere."""
    kernels = fixed_kernels(where, group)
    return f" of products by {' and '.join(kernels)}" if len(kernels) > 1 else ""


def _world(run: TrainingRun, slow: Slow) -> str:
    """Return the sources of time on simulated ranks."""
    network = run.config.sync.network
    return (
        f"{counted(run.group.size, 'rank')} in this process, seed {run.config.run.seed}; computing"
        f" takes {'just the time of --slow' if slow.minimum_s else 'its processor time'},"
        f" {f'links of {describe_network(network)}' if network else 'messages no time'}"
    )


def _statistics(group: Group, inputs: Inputs, trainer: Trainer) -> str:
    """Return a line if batch normalization averages over microbatches, else "". Collective."""
    parts = inputs.train_loader.microbatches
    if parts == 1 or not any(group.gather(has_batch_norm(trainer.model))):
        return ""
    samples = counted(-(-inputs.batch_size // parts), "sample")
    return (
        f"statistics: batch normalization takes each of {parts} microbatches ({samples}) by itself;"
        " a run of whole batches has different numbers"
    )


def _pipeline(inputs: Inputs, where: Arrangement) -> list[str]:
    microbatches = inputs.train_loader.microbatches
    recompute = (
        ", computing activations again" if where.layout.activation_memory is not None else ""
    )
    samples = -(-inputs.batch_size // microbatches)
    return [
        (
            f"pipeline: {name_of(where.layout.pipeline)}, {counted(len(where.cuts), 'stage')}, "
            f"{counted(microbatches, 'microbatch', 'microbatches')} of {samples} samples{recompute}"
        ),
        *describe_stages(where),
    ]


def _parameters(trainer: Trainer) -> str:
    local, where = trainer.model.storage.size, trainer.arrangement
    weights = [item for _, item in trainer.model.named_base()]
    if weights:
        of = " of bfloat16" if any(item.base_dtype for item in weights) else ""
        base = sum(item.size for item in weights)
        return f"{local:,} parameters in adapters to {base:,}{of} on rank 0"
    if where.elements == local:
        return f"{local:,} parameters"
    return f"{where.elements:,} parameters, {local:,} of them on rank 0"


def _optimizer(options: OptimizationConfig, extent: Extent) -> str:
    words = [f"{options.optimizer}, learning rate {options.lr:g}"]
    if options.lr_schedule != "constant":
        words.append(options.lr_schedule)
    if warmup := warmup_steps(options, extent):
        words.append(f"warm-up of {counted(warmup, 'step')}")
    return ", ".join(words)


def _fit(group: Group) -> str:
    """Return the source of the cost model."""
    if group.size == 1:
        return "none, one rank sends nothing"
    if group.fit is None:
        return f"none; make one with: {start_words(group.size)} nnmpi comm fit"
    return (
        f"fitted to {group.fit.facts['host']} with {group.size} ranks on {group.fit.facts['date']}"
    )
