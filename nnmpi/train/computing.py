"""Which BLAS multiplies a run's matrices, and with how many threads: found out by timing both.

    first run      NumPy's BLAS and MKL, where that is installed, multiply matrices of the model's sizes in turns, by
                   one thread each; the times are kept in ~/.cache/nnmpi/blas-...json, and the fastest one is taken;
                   where AVX-512 is no wider than AVX2, OpenBLAS's code for that takes part, too, if the model has no
                   convolutions: of their many small products AVX-512's does the faster ones
    later runs     of such a model on such a processor read them there
    every run      that no launcher has started, and whose environment sets no threads: whether several threads are
                   faster than one now, which they are not on busy cores

What is timed hangs on model and batch alone, not on ranks and layout: the choice of a parallel run is the serial run's.

Whether numba's kernels compute what is around the products is not timed: it hangs on how much the whole run multiplies.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from nnmpi.backend.backend import Backend
from nnmpi.backend.blas import blas_pool, loaded_pools, may_gain_by_avx2, name_blas, read_cpu
from nnmpi.backend.gemm import AVX2, MKL, NUMPY, BlasName, gemm, use_blas
from nnmpi.backend.kernels.lookup import jit, load
from nnmpi.backend.mkl import LEAST, find_mkl, installed_mkl
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.fitting.fit import cache_folder
from nnmpi.comm.group import Group
from nnmpi.command import Switch
from nnmpi.data.dataset import Samples
from nnmpi.errors import NnmpiError, UsageError
from nnmpi.launcher import read_launch
from nnmpi.nn.module import Module
from nnmpi.reading import read_json
from nnmpi.threads import VARIABLES, usable_cores
from nnmpi.train.config import Config, OptimizationConfig, RunConfig
from nnmpi.train.folder import replace_durably

ROWS, FEATURES, KINDS = 1024, 2048, 4  # the largest sizes that are timed, and how many kinds of matrices
ROUNDS, LEAST_S = 5, 0.04  # of each product
FASTER = 1.03  # what is less is noise
# Multiplications of a whole run's ways forward from which on numba's kernels compute: training then takes some seconds,
# beside which the 0.2 s that loading numba takes are little. A CNN on digits gains as much at 4e10, on MNIST
# a third of its time at 9e11 (docs/speed.md: AMD EPYC, Zen 4).
PAYS = 3e11

Sizes = tuple[int, int, int, int]  # rows, inputs, outputs, and how many such matrices there are
Times = dict[str, float]


@dataclass(frozen=True)
class BlasChoice:
    """What multiplies a run's matrices.

    Attributes:
        name: for `use_blas`.
        threads: how many the BLAS may use; 0 for those that it has.
        line: for the header; empty where there was nothing to choose from.
    """

    name: BlasName = NUMPY
    threads: int = 0
    line: str = ""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Multiply so inside the block."""
        with use_blas(self.name):
            if not self.threads:
                yield
            else:
                with loaded_pools().limit(limits=self.threads, user_api="blas"):
                    yield


@dataclass(frozen=True)
class Computing:
    """What computes on the host.

    Attributes:
        blas: what multiplies matrices.
        jit: whether numba's kernels do the rest.
        lines: for the header: why.
    """

    blas: BlasChoice
    jit: bool
    lines: tuple[str, ...]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute so inside the block."""
        with self.blas.in_use(), jit() if self.jit else nullcontext():
            yield


def choose_computing(
    config: Config, model: Module, train: Samples, backend: Backend, group: Group
) -> tuple[Config, Computing]:
    """Return what computes, and the configuration in which it is settled. Collective.

    Args:
        config: every option.
        model: the whole one; values are not needed.
        train: the training set.
        backend: where this rank computes.
        group: all ranks of the run.

    Raises:
        UsageError: on all ranks, where one is asked for that a rank does not have.
    """
    config, kernels = choose_kernels(config, model, train, backend, group)
    blas, wanted = BlasChoice(), config.optimization.batch_size
    if not backend.is_device:
        batch = len(train) if wanted == "full" else min(wanted, len(train))
        blas = choose_blas(config.run, model, batch * (train.sample_shape[0] if train.is_tokens else 1), group)
        config = replace(config, run=replace(config.run, blas=blas.name, blas_threads=blas.threads))
    found = {"products": blas.line, "kernels": kernels}
    lines = tuple(f"{name}: {line}" for name, line in found.items() if line)
    return config, Computing(blas, config.run.jit == "on", lines)


def choose_kernels(config: Config, model: Module, train: Samples, backend: Backend, group: Group) -> tuple[Config, str]:
    """Return the configuration with --jit on or off, the same on all ranks, and why, for the header. Collective.

    It hangs on what the words of the command say, and on which numba is installed; so a command that is repeated, or
    given to other ranks, has the same bits. A run that goes on finds "on" or "off" in its config.json.

    Args:
        config, model, train, backend, group: see `choose_computing`.
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
            line = f"NumPy's; loading numba's, which are faster, {why}"
        elif all(group.gather(_loads())):
            chosen, line = "on", f"numba's, which are faster than NumPy's; loading them {why}"
    return replace(config, run=replace(run, jit=chosen)), line


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


def choose_blas(run: RunConfig, model: Module, rows: int, group: Group) -> BlasChoice:
    """Return what multiplies this model's matrices, the same on all ranks. Collective.

    Args:
        run: says what is asked for, and the dtype of weights.
        model: the whole one; values are not needed.
        rows: of its inputs: samples of the global batch, or their tokens.
        group: all ranks of the run.

    Raises:
        UsageError: on all ranks, where one is asked for that a rank does not have.
    """
    wanted, threads, dtype = run.blas, run.blas_threads, run.dtype
    sizes, line = sizes_of(model, rows), ""
    name: BlasName = NUMPY
    if wanted == "auto":
        own = _candidates(model) if sizes else []
        names = [each for each in own if all(each in rank for rank in group.gather(own))]
        if len(names) > 1:
            name, line = on_root(group, lambda: _fastest(names, sizes, dtype))
    elif wanted != NUMPY:
        with agreed(group), use_blas(wanted):
            name, line = wanted, f"{_said(wanted)}, as asked for"
    reason = ""
    if not threads and group.size == 1:
        threads, reason = _threads(name, sizes, dtype)
    return BlasChoice(name, threads, "; ".join(filter(None, (line, reason))))


def _candidates(model: Module) -> list[BlasName]:
    """Return what may be the fastest on this rank; all ranks say it of the same model."""
    has_convolutions = any(len(each.declared) > 2 for each in model.parameters())
    found: list[BlasName] = [NUMPY]
    if not has_convolutions and may_gain_by_avx2():
        found.append(AVX2)
    if find_mkl() is not None:
        found.append(MKL)
    return found


def sizes_of(model: Module, rows: int) -> list[Sizes]:
    """Return the sizes of the matrices that a model multiplies with, those with most work first; none if all are small.

    A convolution's kernels are taken as the matrix (kh kw c, o) that columns of pixels are multiplied with.

    Args:
        rows: of the model's inputs.
    """
    found = Counter[tuple[int, int, int]]()
    for parameter in model.parameters():
        shape = parameter.declared
        if len(shape) > 1:
            high = ROWS if len(shape) > 2 else min(rows, ROWS)
            found[high, min(prod(shape[:-1]), FEATURES), min(shape[-1], FEATURES)] += 1
    large = [(*size, count) for size, count in found.items() if prod(size) > LEAST]
    return sorted(large, key=lambda size: (-prod(size), size))[:KINDS]


def _fastest(names: Sequence[BlasName], sizes: Sequence[Sizes], dtype: str) -> tuple[BlasName, str]:
    """Return the name of the fastest BLAS, and a line on it: by the times that are kept, or by new ones."""
    from nnmpi.planner.profile import default_file  # it brings the simulated world, which is not for every start

    cache, facts = cache_folder(), _facts(names, sizes, dtype)
    file = None if cache is None else default_file(facts, cache, "blas")
    times, when = (None if file is None else load_times(file, facts)), "kept"
    if times is None:
        with loaded_pools().limit(limits=1, user_api="blas"):
            times, when = _time(dict(zip(names, names, strict=True)), sizes, dtype, thread_time, LEAST_S), "timed now"
        if file is not None:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_durably(file, json.dumps({"facts": facts, "seconds": times}, indent=1).encode())
    best = min(names, key=times.__getitem__)
    if times[NUMPY] < FASTER * times[best]:
        others = (f"{_said(each)} takes {times[each] / times[NUMPY]:.2f} of its time" for each in names[1:])
        return NUMPY, f"{_said(NUMPY)}; {', '.join(others)} ({when})"
    ratio = times[NUMPY] / times[best]
    return best, f"{_said(best)}, {ratio:.2f} times as fast as {_said(NUMPY)} with these matrices ({when})"


def _threads(name: BlasName, sizes: Sequence[Sizes], dtype: str) -> tuple[int, str]:
    """Return how many threads are fastest now, and words on it; 0 where others have chosen."""
    several = int(blas_pool(threadpool_info()).get("num_threads", 1))
    if (
        several == 1
        or not sizes
        or read_launch(os.environ) is not None
        or any(each in os.environ for each in VARIABLES)
    ):
        return 0, ""
    several = min(several, usable_cores()[0])
    times = _time({"1": name, str(several): name}, sizes[:1], dtype, perf_counter, LEAST_S / 10)
    ratio = times["1"] / times[str(several)]
    if ratio >= FASTER:
        return several, f"{several} threads, {ratio:.2f} times as fast as one"
    return 1, f"1 thread, as {several} take {1 / ratio:.2f} times as long now"


def _time(
    ways: Mapping[str, BlasName], sizes: Sequence[Sizes], dtype: str, now: Callable[[], float], least_s: float
) -> Times:
    """Return the least seconds of all products of a step's way forward and back, by each way, taken in turns.

    Args:
        ways: the BLAS by the name of the way; a name that is a number is that of the threads.
        sizes: of the matrices.
        dtype: of the matrices.
        now: the clock; the thread's own leaves out what other programs took.
        least_s: how long each product is tried.
    """
    times = dict.fromkeys(ways, 0.0)
    for rows, inputs, outputs, count in sizes:
        x, weight, grad = (np.ones(size, dtype) for size in ((rows, inputs), (inputs, outputs), (rows, outputs)))
        for a, b, place in ((x, weight, grad), (x.T, grad, weight), (grad, weight.T, x)):
            out, best, spent_s, turns = np.empty_like(place), dict.fromkeys(ways, np.inf), 0.0, 0
            while turns < ROUNDS or spent_s < least_s:
                for way, name in ways.items():
                    limit = int(way) if way.isdigit() else None
                    with use_blas(name), loaded_pools().limit(limits=limit, user_api="blas"):
                        begin = now()
                        gemm(np, a, b, out=out)
                        took_s = now() - begin
                    if turns:  # the first one warms up
                        best[way] = min(best[way], took_s)
                        spent_s += took_s
                turns += 1
            for way, seconds in best.items():
                times[way] += count * seconds
    return times


def _facts(names: Sequence[BlasName], sizes: Sequence[Sizes], dtype: str) -> dict[str, Any]:
    """Return what times hold for."""
    file = find_mkl()
    return {
        "cpu": read_cpu("model name") + read_cpu("flags"),
        "numpy": [np.__version__, name_blas(blas_pool(threadpool_info()))],
        "mkl": None if file is None else [file.name, file.stat().st_size],
        "names": list(names),
        "sizes": [list(each) for each in sizes],
        "dtype": dtype,
    }


def load_times(file: Path, facts: Mapping[str, Any]) -> Times | None:
    """Return the times that are kept in a file; None where there are none of these facts, or it is damaged."""
    try:
        kept = read_json(file)
        times = {name: float(kept["seconds"][name]) for name in facts["names"]}
    except (OSError, KeyError, TypeError, ValueError, NnmpiError):
        return None
    plausible = all(isfinite(seconds) and seconds > 0 for seconds in times.values())
    return times if plausible and kept.get("facts") == facts else None


def _said(name: str) -> str:
    """Return a BLAS in words."""
    if name == MKL:
        return f"mkl {installed_mkl().version}"
    return "OpenBLAS's code for AVX2" if name == AVX2 else name_blas(blas_pool(threadpool_info()))
