"""The lines above a run: what runs, on what, and what was chosen."""

import platform

import threadpoolctl

from nnmpi.backend.blas import blas_pool, installed_mkl
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement, describe_stages
from nnmpi.compose.trainer import Trainer
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.data.text import Text
from nnmpi.errors import counted
from nnmpi.nn.norm import BatchNorm
from nnmpi.schedule.schedules import name_of
from nnmpi.train.build import warmup_steps
from nnmpi.train.checkpoint import Extent
from nnmpi.train.computing import describe_device, installed_numba
from nnmpi.train.config import Config, OptimizationConfig
from nnmpi.train.inputs import Inputs
from nnmpi.train.run import TrainingRun


def header(run: TrainingRun) -> list[tuple[str, str]]:
    """Return facts of the run, each a name and words, as starts.jsonl keeps them. Collective."""
    config, group, backend, trainer = run.config, run.group, run.backend, run.trainer
    inputs, extent = run.inputs, run.extent
    options = config.optimization
    nodes = sorted(set(group.gather(platform.node())))
    train, test = inputs.train, inputs.test
    precision = "" if config.run.precision == "float32" else f", precision {config.run.precision}"
    partition = "" if config.data.partition == "none" else f", partition {config.data.partition}"
    named = [
        f"layout: {_layout(trainer)}, {counted(group.size, 'rank')} on {counted(len(nodes), 'node')} "
        f"({', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''})",
        *_pipeline(inputs, trainer.arrangement),
        *_synchrony(config, group),
        f"MPI: {group.comm.world.library}",
        f"backend: {backend.name} on {backend.device}, {config.run.dtype}{precision}{_kernels(config)}; "
        f"{'kernels of its own' if backend.is_device else blas()}",
        *filter(None, [run.kernels]),
        *describe_device(backend, group, config.run.verbose),
        f"data: {train.name}, {len(train)} training and {len(test)} test {_samples(train)}{partition}",
        f"batches: {extent.train_batches} of {inputs.batch_size} in each of "
        f"{counted(options.epochs, 'epoch')}, {counted(extent.steps, 'step')} in all",
        f"model: {config.model.model}, {_parameters(trainer)}; {_optimizer(options, extent)}",
        *_statistics(group, inputs, trainer),
        *_communication(group, trainer),
        f"run folder: {config.run.out}",
    ]
    return [(name, text) for name, _, text in (line.partition(": ") for line in named)]


def _samples(samples: Samples) -> str:
    """Return what the samples of a data set are."""
    if isinstance(samples, Text):
        kind = "sentences of at most" if samples.sentences else "blocks of"
        return f"{kind} {samples.context} tokens, of a vocabulary of {samples.classes} ({samples.tokenizer.name})"
    targets = samples.describe_targets() if isinstance(samples, Dataset) else f"{samples.classes} classes"
    return f"samples of {' x '.join(map(str, samples.sample_shape))}, {targets}"


def _kernels(config: Config) -> str:
    """Return whose kernels compute besides BLAS, if not the array library's alone."""
    return f", kernels compiled by numba {installed_numba()}" if config.run.jit == "on" else ""


def blas() -> str:
    """Return the BLAS that NumPy uses: its name, version, the processor it is for, and its threads."""
    pool = blas_pool(threadpoolctl.threadpool_info())
    kind = f" for {pool['architecture']}" if pool.get("architecture") else ""
    if not pool:
        return "BLAS unknown"
    threads = counted(pool["num_threads"], "thread")
    mkl = installed_mkl()
    large = "" if mkl is None else f", mkl {mkl.version} for large products"
    return f"{pool['internal_api']} {pool.get('version') or ''}{kind}{large}, {threads} per rank"


def _layout(trainer: Trainer) -> str:
    """Return how the model is spread over the ranks."""
    where = trainer.arrangement
    mesh = where.mesh.mesh
    shape = f"dp {mesh.dp}" if mesh.size == mesh.dp else str(mesh)
    attention = f" ({where.layout.sp_attention})" if where.sequence is not None else ""
    zero = f", ZeRO {where.layout.zero}" if where.layout.zero else ""
    return f"{shape}{attention}{zero}{', sums in a fixed order' if where.layout.fixed else ''}"


def _synchrony(config: Config, group: Group) -> list[str]:
    """Return how far ranks may drift apart, and how slow they are on purpose; nothing for an ordinary run."""
    sync = config.sync
    slow = sync.slowness(config.run.seed)
    simulated = []
    if sync.simulate:
        links = f"links of {sync.network}" if sync.network else "messages no time"
        computing = "just the time of --slow" if slow.minimum_s else "its processor time"
        simulated = [
            f"simulated: {counted(group.size, 'rank')} in this process, seed {config.run.seed}; computing takes "
            f"{computing}, {links}"
        ]
    return [
        *simulated,
        *([f"sync: {sync.rule.describe()}"] if sync.rule.asynchronous else []),
        *([f"slow: {slow.describe()}"] if slow else []),
    ]


def _communication(group: Group, trainer: Trainer) -> list[str]:
    """Return what sums gradients, and what predicts its time; nothing where none are summed by an all-reduce."""
    exchange = trainer.describe_exchange()
    return [f"all-reduce: {exchange}", f"cost model: {_fit(group)}"] if exchange else []


def _statistics(group: Group, inputs: Inputs, trainer: Trainer) -> list[str]:
    """Return over what batch normalization averages, where that is not the batch. Collective."""
    parts = inputs.train_loader.microbatches
    norms = any(isinstance(module, BatchNorm) for _, module in trainer.model.named_modules())
    if parts == 1 or not any(group.gather(norms)):
        return []
    samples = counted(-(-inputs.batch_size // parts), "sample")
    return [
        f"statistics: batch normalization takes those of each of {parts} microbatches ({samples}); a run of whole "
        "batches has other numbers"
    ]


def _pipeline(inputs: Inputs, where: Arrangement) -> list[str]:
    """Return the schedule and what each stage has; nothing without a pipeline."""
    if not where.stages:
        return []
    microbatches = inputs.train_loader.microbatches
    recompute = ", computing activations again" if where.layout.recomputes else ""
    samples = -(-inputs.batch_size // microbatches)
    return [
        f"pipeline: {name_of(where.layout.schedule)}, {counted(len(where.cuts), 'stage')}, "
        f"{counted(microbatches, 'microbatch', 'microbatches')} of {samples} samples{recompute}",
        *describe_stages(where),
    ]


def _parameters(trainer: Trainer) -> str:
    """Return how many parameters the model has, and how many of them this rank."""
    own, where = trainer.model.storage.size, trainer.arrangement
    if where.elements == own:
        return f"{own:,} parameters"
    return f"{where.elements:,} parameters, {own:,} of them on rank 0"


def _optimizer(options: OptimizationConfig, extent: Extent) -> str:
    """Return the optimizer and what changes its learning rate, in words."""
    words = [f"{options.optimizer}, learning rate {options.lr:g}"]
    if options.schedule != "constant":
        words.append(options.schedule)
    if warmup := warmup_steps(options, extent):
        words.append(f"warm-up of {counted(warmup, 'step')}")
    return ", ".join(words)


def _fit(group: Group) -> str:
    """Return what predictions are made by."""
    if group.size == 1:
        return "none, one rank sends nothing"
    if group.fit is None:
        return f"none; make one with: mpirun -n {group.size} python -m nnmpi.comm fit"
    return f"fitted to {group.fit.facts['host']} with {group.size} ranks on {group.fit.facts['date']}"
