"""What can be timed, by the names of the command line; and the command line as values."""

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import command
from nnmpi.comm.algorithms.registry import AUTO, COLLECTIVES, NATIVE, NCCL, SHARED
from nnmpi.comm.buffers import DTYPES
from nnmpi.errors import UsageError
from nnmpi.units import format_bytes

PROGRAM = "mpirun -n P python benchmarks/collectives"
DESCRIPTION = """Time collectives, interleaved in one process, beside what the cost model predicts.
The README beside the program says what the columns mean and how they are measured."""

ALL_REDUCE = "all-reduce"
OPERATIONS = (ALL_REDUCE, "broadcast", "all-gather", "reduce-scatter")
BACKENDS = ("numpy", "cupy")

FUSED = "fused"  # the all-reduce and the optimizer's update in one, over shared memory
UPDATE = "native+update"  # what it is compared with: MPI's all-reduce, then the update on every rank
GLOO = "gloo"  # PyTorch's, for comparison
NO_MPI = "without MPI"  # in the place of an MPI's name, where gloo was measured alone
ALL = "all"

# What an algorithm's speed is compared with, where it is not MPI's own call: only what does the same work.
BASELINES = {FUSED: UPDATE, UPDATE: UPDATE}


def algorithms(operation: str, on_device: bool = False) -> tuple[str, ...]:
    """Return the names of all that "all" means for an operation, on host or device arrays: the baseline first."""
    made_of_steps = tuple(how for what, how in COLLECTIVES if what == operation)
    if operation != ALL_REDUCE:
        return (NATIVE, *made_of_steps, *([NCCL] if on_device else []))
    return (NATIVE, SHARED, *made_of_steps, AUTO, *([NCCL] if on_device else [UPDATE, FUSED]))


def known(operation: str, on_device: bool = False) -> tuple[str, ...]:
    """Return the names that may be asked for."""
    names = algorithms(operation, on_device)
    return (*names, GLOO) if operation == ALL_REDUCE else names


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; besides those of the help they have:

    - sizes: lengths of the buffer in bytes, rising; each rank has one so long
    - algorithms: each name once, in the order of the rounds
    - everything: whether "all" was asked for, so that what cannot run here is left out with a notice

    Raises:
        HelpAsked: for --help.
        UsageError: for an unknown name, or a value that cannot be used.
    """
    options = _parser().parse(words)
    names = known(options.operation, options.backend == "cupy")
    options.everything = ALL in options.algorithms
    for name in options.algorithms:
        if name not in (ALL, *names):
            raise UsageError(f"--algorithms {name!r} is unknown; the names are {', '.join((ALL, *names))}")
    every = algorithms(options.operation, options.backend == "cupy")
    chosen = [each for name in options.algorithms for each in (every if name == ALL else (name,))]
    options.algorithms = tuple(dict.fromkeys(chosen))
    options.sizes = _sizes(options.min, options.max, options.factor, np.dtype(options.dtype).itemsize)
    return options


def _parser() -> command.CommandParser:
    parser = command.CommandParser(PROGRAM, DESCRIPTION)
    add, one_of, dtypes = parser.add_argument, command.one_of, sorted(each.name for each in DTYPES)
    text = f"{', '.join(OPERATIONS)} (default: {ALL_REDUCE})"
    add("--operation", type=one_of(*OPERATIONS), default=ALL_REDUCE, metavar="NAME", help=text)
    text = f"of {', '.join(known(ALL_REDUCE))}, with cupy ipc, nccl; all (default): all but gloo"
    add("--algorithms", type=command.each(str), default=(ALL,), metavar="A,B,...", help=text)
    add("--min", type=command.nbytes, default=4, metavar="BYTES", help="the shortest buffer (default: 4)")
    text = "the longest buffer, like 64k or 1.5GiB (default: 64m)"
    add("--max", type=command.nbytes, default=64 * 2**20, metavar="BYTES", help=text)
    add("--factor", type=_factor, default=4, metavar="N", help="from one size to the next (default: 4)")
    text = "of the elements (default: float32)"
    add("--dtype", type=one_of(*dtypes), default="float32", metavar="NAME", help=text)
    text = "numpy, or cupy: device arrays (default: numpy)"
    add("--backend", type=one_of(*BACKENDS), default="numpy", metavar="NAME", help=text)
    add("--check", action="store_true", help="verify every result of every call")
    text = "calls of each algorithm at each size (default: what the budget allows)"
    add("--iterations", type=command.positive, metavar="N", help=text)
    text = "time for each size, warm-up and refilling included (default: 2)"
    add("--budget-s", type=command.positive_seconds, default=2.0, metavar="SECONDS", help=text)
    add("--json", type=command.file, metavar="FILE", help="write the rows there, after each size")
    add("--plot", type=command.picture, metavar="FILE", help="draw time against size: .png, .svg or .pdf")
    text = "the fitted model to predict with (default: the one of this machine, if any)"
    add("--fit", type=command.file, metavar="FILE", help=text)
    add("--refit", action="store_true", help="fit the model first, under a minute, and save it")
    return parser


def _factor(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 1")
    return int(text)


def _sizes(least: int, most: int, factor: int, itemsize: int) -> tuple[int, ...]:
    """Return whole elements from the least to the most bytes."""
    if least > most:
        raise UsageError(
            f"--min {format_bytes(least)} is more than --max {format_bytes(most)}; give the shorter one as --min"
        )
    if most < itemsize:
        raise UsageError(f"--max {format_bytes(most)} has no room for one element; give at least {itemsize}")
    sizes, size = [], max(least, itemsize)
    while size <= most:
        sizes.append(size // itemsize * itemsize)
        size *= factor
    return tuple(dict.fromkeys(sizes))
