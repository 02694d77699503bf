"""A run's backend: devices shared by ranks, out-of-memory sentences, BLAS threads and numba.

On the host each rank has one BLAS thread unless the environment sets another number. numba's
kernels are used in long runs. The choice depends on counted multiplications, not on timings: a
timing would vary from run to run, and so would the bits of a repeated command.
"""

import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.blas import one_blas_thread
from nnmpi.backend.device import REMEDY, expects_device, select
from nnmpi.backend.kernels import jit, load
from nnmpi.backend.precision import ON_HOST
from nnmpi.base.command import Switch
from nnmpi.base.errors import DeviceError, NnmpiError, UsageError, counted
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import agreed
from nnmpi.comm.buffers import cuda_aware
from nnmpi.comm.group import Group
from nnmpi.data.dataset import Samples
from nnmpi.nn.module import Module
from nnmpi.train.config import Config, OptimizationConfig

# numba's kernels are used from this number of multiplications on, counted over all forward passes
# of a run. Training then takes some seconds, and loading numba 0.2 s. A CNN on digits regains the
# loading time at 4e10; on MNIST, at 9e11, a CNN saves a third of its time (benchmarks/training: AMD
# EPYC, Zen 4).
PAYS = 3e11


@contextmanager
def computing(config: Config) -> Iterator[None]:
    """Run the body with one BLAS thread per rank by default, and with numba's kernels if --jit."""
    with one_blas_thread(), jit() if config.run.jit == "on" else nullcontext():
        yield


def choose_computing(
    config: Config, model: Module, train: Samples, backend: Backend, group: Group
) -> tuple[Config, str]:
    """Return the configuration with --jit on or off, and the reason. Collective.

    The choice depends on the options and the installed numba alone, so that another number of
    ranks gives the same bits. config.json holds the choice, so that a resumed run keeps it.
    """
    run = config.run
    if run.jit != "auto":
        return config, ""
    single = run.dtype == "float32" and config.numerics.precision in ON_HOST
    plain = single and not backend.is_device
    versions = set(group.gather(installed_numba() if plain else ""))
    chosen: Switch = "off"
    line = ""
    work = multiplications(config.optimization, model, train)
    if plain and "" in versions and work >= PAYS:
        line = (
            "kernels: NumPy's; numba's are faster in a run as long as this one, a CNN's by a third:"
            " pip install numba"
        )
    elif len(versions) == 1 and versions != {""}:
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
    """Return the version of numba, without loading it; empty if it is not installed."""
    # imported here: importlib.metadata imports email and more, which most starts do not need
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("numba")
    except PackageNotFoundError:
        return ""


def _loads() -> bool:
    """Return whether numba loads; one too old for this NumPy does not."""
    try:
        load()
    except UsageError:
        return False
    return True


def multiplications(options: OptimizationConfig, model: Module, train: Samples) -> float:
    """Estimate the multiplications of a run's forward passes: samples times uses of weights.

    A convolution's weights count once per pixel of a sample, ignoring pooling. A language model's
    weights count once per token.
    """
    shape = train.sample_shape
    positions = shape[0] if train.is_tokens else 1
    pixels = prod(shape[:-1])
    weights = [
        parameter.declared for _, parameter in model.named_weights() if len(parameter.declared) > 1
    ]
    per_sample = sum(
        prod(weight) * (pixels if len(weight) > 2 else positions) for weight in weights
    )
    samples = options.epochs * len(train)
    if options.max_steps is not None:
        samples = min(samples, options.max_steps * options.rows(len(train)))
    return float(per_sample * samples)


# ---- the backend ----

# REMEDY in terms of the train command's options.
REMEDY_OPTIONS = (
    "lower --batch-size, raise --microbatches, use --activation-memory least or --precision bf16,"
    " or spread the model over more ranks with --tp or --pp"
)


def make_backend(name: str, group: Group, limit_bytes: int | None = None) -> Backend:
    """Return this rank's backend, with an equal share of its device's memory. Collective.

    With "auto", all ranks take NumPy unless every rank has a device.

    Args:
        name: auto, numpy or cupy.
        group: all ranks of the run.
        limit_bytes: of a rank's arrays on the device, if less than the share.

    Raises:
        DeviceError: on all ranks, when one rank cannot use its device.
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
        backend.divide_memory(ranks)
        if limit_bytes is not None:
            backend.limit_memory(limit_bytes)
    return backend


def check_backend(config: Config, backend: Backend) -> None:
    """Refuse --jit on a device or without numba, and a device's precisions on the CPU."""
    if config.run.jit == "on":
        load()
        if backend.is_device:
            raise UsageError(
                f"--jit compiles for the CPU, and this run is on {backend.device}, which has"
                " kernels of its own; leave it out, or give --backend numpy"
            )
    precision = config.numerics.precision
    if precision not in ON_HOST and not backend.is_device:
        raise UsageError(
            f"--precision {precision} needs a CUDA device, and this run is on the CPU"
            f" ({backend.reason}); leave it out"
        )


def describe_device(backend: Backend, group: Group, verbose: bool = False) -> list[str]:
    """Return the header's lines on devices: their sharing, memory, and choice. Collective.

    The reason for NumPy is given only on a machine with CuPy or NVIDIA's driver, where the user
    may have expected a device.

    Args:
        backend: of this rank.
        group: all ranks of the run.
        verbose: give the reason on any machine.
    """
    result = group.gather(
        [platform.node(), backend.card, verbose or bool(backend.reason) and expects_device()]
    )
    lines = (
        [f"chosen: {backend.reason}"] if backend.reason and any(item[2] for item in result) else []
    )
    if not backend.is_device:
        return lines
    cards = Counter(tuple(item[:2]) for item in result)
    most, use = max(cards.values()), backend.memory()
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
    """Turn a device's error, or one of memory, into a DeviceError with a sentence.

    Args:
        backend: explains its library's errors.
        words: the sentence when the host's memory is too small.
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
