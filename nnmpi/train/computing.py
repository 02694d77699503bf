"""What computes on the host: one BLAS thread for each rank unless the environment says otherwise; numba in long runs.

Nothing is timed, so a repeated command has the same bits. Whether numba's kernels compute what is around the products
depends on how much the whole run multiplies.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod

from nnmpi.backend.backend import Backend
from nnmpi.backend.blas import one_blas_thread
from nnmpi.backend.kernels import jit, load
from nnmpi.comm.group import Group
from nnmpi.command import Switch
from nnmpi.data.dataset import Samples
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.train.config import Config, OptimizationConfig

# Multiplications of a whole run's ways forward from which on numba's kernels compute: training then takes some seconds,
# beside which the 0.2 s that loading numba takes are little. A CNN on digits gains as much at 4e10, on MNIST
# a third of its time at 9e11 (docs/speed.md: AMD EPYC, Zen 4).
PAYS = 3e11


@dataclass(frozen=True)
class Computing:
    """What computes on the host.

    Attributes:
        jit: whether numba's kernels compute what is around the products.
        line: for the header: why; empty where there was nothing to choose.
    """

    jit: bool = False
    line: str = ""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute so inside the block, each rank with one BLAS thread unless the environment sets another number."""
        with one_blas_thread(), jit() if self.jit else nullcontext():
            yield


def choose_computing(
    config: Config, model: Module, train: Samples, backend: Backend, group: Group
) -> tuple[Config, Computing]:
    """Return the configuration with --jit on or off, and what computes: the same on all ranks. Collective.

    The choice depends on the options and on the installed numba, so the same command on other ranks has the same bits.
    A run that resumes finds "on" or "off" in its config.json.
    """
    run = config.run
    if run.jit != "auto":
        return config, Computing(run.jit == "on")
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
            chosen, line = "on", f"kernels: numba's, which are faster than NumPy's; loading them {why}"
    return replace(config, run=replace(run, jit=chosen)), Computing(chosen == "on", line)


def installed_numba() -> str:
    """Return the version of numba, without loading it; empty where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # it brings email and more, so not to every start

    try:
        return version("numba")
    except PackageNotFoundError:
        return ""


def _loads() -> bool:
    """Return whether the compiled kernels can be had: a numba that is too old for this NumPy is none."""
    try:
        load()
    except UsageError:
        return False
    return True


def multiplications(options: OptimizationConfig, model: Module, train: Samples) -> float:
    """Return about how many multiplications all ways forward of a run have: its samples by the weights that each meets.

    A convolution's weights count for each pixel of a sample, as if nothing were pooled; of a language model all weights
    count for each token.
    """
    shape = train.sample_shape
    places = shape[0] if train.is_tokens else 1
    pixels = prod(shape[:-1])
    weights = [each.declared for each in model.parameters() if len(each.declared) > 1]
    of_one = sum(prod(each) * (pixels if len(each) > 2 else places) for each in weights)
    samples = options.epochs * len(train)
    if options.max_steps is not None:
        batch = len(train) if options.batch_size == "full" else options.batch_size
        samples = min(samples, options.max_steps * batch)
    return float(of_one * samples)
