"""A run's backend, shared by a device's ranks, its errors as sentences; BLAS and numba.

On the host each rank has one BLAS thread unless the environment says otherwise, and numba computes
in long runs. Nothing is timed, so a repeated command has the same bits.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.blas import one_blas_thread
from nnmpi.backend.device import REMEDY, expects_device, select
from nnmpi.backend.kernels import jit, load
from nnmpi.comm.agreement import agreed
from nnmpi.comm.buffers import cuda_aware
from nnmpi.comm.group import Group
from nnmpi.command import Switch
from nnmpi.data.dataset import Samples
from nnmpi.errors import DeviceError, NnmpiError, UsageError, counted
from nnmpi.nn.module import Module
from nnmpi.train.config import Config, OptimizationConfig, RunConfig
from nnmpi.units import format_bytes

# Multiplications of a whole run's ways forward from which on numba's kernels compute: training then
# takes some seconds, beside which the 0.2 s that loading numba takes are little. A CNN on digits
# gains as much at 4e10, on MNIST a third of its time at 9e11 (benchmarks/training: AMD EPYC, Zen 4).
PAYS = 3e11


@contextmanager
def computing(config: Config) -> Iterator[None]:
    """Compute on the host as chosen, with one BLAS thread per rank by default."""
    with one_blas_thread(), jit() if config.run.jit == "on" else nullcontext():
        yield


def choose_computing(
    config: Config, model: Module, train: Samples, backend: Backend, group: Group
) -> tuple[Config, str]:
    """Return the configuration with --jit on or off, and the reason; equal on all ranks.

    The choice depends on the options and on the installed numba, so the same command on other ranks
    has the same bits. A run that resumes finds "on" or "off" in its config.json.
    """
    run = config.run
    if run.jit != "auto":
        return config, ""
    plain = not backend.is_device and run.dtype == run.precision == "float32"
    versions = set(group.gather(installed_numba() if plain else ""))
    chosen: Switch = "off"
    line = ""
    if len(versions) == 1 and versions != {""}:
        work = multiplications(config.optimization, model, train)
        why = f"pays in runs of {PAYS:.0e} multiplications or more; this one has {work:.0e}"
        if work < PAYS:
            line = f"kernels: NumPy's; loading numba's, which are faster, {why}"
        elif all(group.gather(_loads())):
            chosen, line = (
                "on",
                f"kernels: numba's, which are faster than NumPy's; loading them {why}",
            )
    return config.having(jit=chosen), line


def installed_numba() -> str:
    """Return the version of numba, without loading it; empty where it is not installed."""
    # it brings email and more, so not to every start
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("numba")
    except PackageNotFoundError:
        return ""


def _loads() -> bool:
    """Return whether the compiled kernels can be had: a numba that is too old for this NumPy is
    none.
    """
    try:
        load()
    except UsageError:
        return False
    return True


def multiplications(options: OptimizationConfig, model: Module, train: Samples) -> float:
    """Estimate a run's multiplications in forward passes: samples times weights they meet.

    A convolution's weights count for each pixel of a sample, as if nothing were pooled; of a
    language model all weights count for each token.
    """
    shape = train.sample_shape
    places = shape[0] if train.is_tokens else 1
    pixels = prod(shape[:-1])
    weights = [
        parameter.declared for parameter in model.parameters() if len(parameter.declared) > 1
    ]
    of_one = sum(prod(weight) * (pixels if len(weight) > 2 else places) for weight in weights)
    samples = options.epochs * len(train)
    if options.max_steps is not None:
        samples = min(samples, options.max_steps * options.rows(len(train)))
    return float(of_one * samples)


# ---- the backend ----

# The options that do what REMEDY says.
REMEDY_OPTIONS = (
    "lower --batch-size, raise --microbatches, use --activation-memory least or --precision bf16,"
    " or spread the model over more ranks with --tp or --pp"
)


def take_backend(name: str, group: Group, limit_bytes: int | None = None) -> Backend:
    """Return the backend of this name, with a fair part of its device's memory. Collective.

    Where "auto" finds a device on some nodes alone, all ranks take NumPy.

    Args:
        name: auto, numpy or cupy.
        group: all ranks of the run.
        limit_bytes: what a rank's arrays may take of a device's memory, if less than that.

    Raises:
        DeviceError: on all ranks, when one cannot use the device that it should.
    """
    local_rank = group.local_rank()
    with agreed(group):
        backend = select(name, local_rank)
    names = group.gather(backend.name)
    if len(set(names)) > 1:
        without = [rank for rank, item in enumerate(names) if item == "numpy"]
        reason = (
            f"auto chose numpy on all ranks: rank {without[0]} ({len(without)} of {group.size}) has"
            " no device"
        )
        backend = replace(numpy_backend(), reason=reason)
    ranks = group.gather([platform.node(), backend.card]).count([platform.node(), backend.card])
    with agreed(group):
        backend.share(ranks)
        if limit_bytes is not None:
            backend.limit_memory(limit_bytes)
    return backend


def check_backend(options: RunConfig, backend: Backend) -> None:
    """Refuse CPU kernels on a device, and a device's precisions on the CPU.

    Raises:
        UsageError: saying so; also where there is no numba, and --jit on.
    """
    if options.jit == "on":
        load()
        if backend.is_device:
            raise UsageError(
                f"--jit compiles for the CPU, and this run is on {backend.device}, which has"
                " kernels of its own; leave it out, or give --backend numpy"
            )
    if options.precision != "float32" and not backend.is_device:
        raise UsageError(
            f"--precision {options.precision} needs a CUDA device, and this run is on the CPU"
            f" ({backend.reason}); leave it out"
        )


def describe_device(backend: Backend, group: Group, verbose: bool = False) -> list[str]:
    """Return lines on how ranks share devices and memory, and why this backend. Collective.

    That no rank has a device is said where one could be meant to be used.

    Args:
        backend: where this rank computes.
        group: all ranks of the run.
        verbose: say why this backend anyway.
    """
    result = group.gather(
        [platform.node(), backend.card, verbose or bool(backend.reason) and expects_device()]
    )
    places = [item[:2] for item in result]
    lines = (
        [f"chosen: {backend.reason}"] if backend.reason and any(item[2] for item in result) else []
    )
    if not backend.is_device:
        return lines
    cards = {tuple(place) for place in places}
    most = max(places.count(list(card)) for card in cards)
    use = backend.memory()
    limit = "no limit of memory"
    if use.limit_bytes is not None:
        limit = f"{format_bytes(use.limit_bytes)} of memory for each rank"
    shared = f", up to {most} ranks on one" if most > 1 else ""
    way = "given to MPI" if cuda_aware() else "staged through the host's memory"
    return [
        f"devices: {len(cards)} for {counted(group.size, 'rank')}{shared}; {limit} ({use.note})",
        *([f"device arrays: {way}"] if group.size > 1 else []),
        *lines,
    ]


@contextmanager
def explain_errors(
    backend: Backend,
    words: str = "out of memory ({}); give a smaller --batch-size, or --microbatches 2 or more",
) -> Iterator[None]:
    """Turn an error of the device, or of memory, into a sentence.

    Args:
        backend: knows its library's errors.
        words: the sentence where the host's memory was too little.

    Raises:
        DeviceError: in the error's place.
    """
    try:
        yield
    except NnmpiError:
        raise
    except Exception as error:
        explanation = backend.explain(error)
        if explanation is None and isinstance(error, MemoryError):
            explanation = DeviceError(words.format(error))
        if explanation is None:
            raise
        raise DeviceError(str(explanation).replace(REMEDY, REMEDY_OPTIONS)) from error
