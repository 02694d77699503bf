"""The command line, as values that have been checked."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.names import ALL, ALL_REDUCE, OPERATIONS, algorithms, known
from benchmarks.words import listed
from nnmpi.comm.buffers import DTYPES
from nnmpi.comm.sizes import name_bytes, parse_bytes
from nnmpi.command import HelpAsked, Parser
from nnmpi.errors import UsageError

PROGRAM = "mpirun -n P python benchmarks/collectives"
DESCRIPTION = """Time collectives, interleaved in one process, beside what the cost model predicts.
The README beside the program says what the columns mean and how they are measured."""
BACKENDS = ("numpy", "cupy")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """What is to be measured, and where the result goes.

    Attributes:
        operation: one of `names.OPERATIONS`.
        algorithms: names, each once, in the order of the rounds.
        everything: whether "all" was asked for, so that what cannot run here is left out with a notice.
        sizes: lengths of the buffer in bytes, rising; each rank has one so long.
        dtype: of the elements.
        backend: where the buffers lie.
        check: whether every result is verified.
        iterations: timed calls of each algorithm at each size; None for as many as `budget_s` has room for.
        budget_s: seconds for each size, warm-up and refilling included.
        json: the file for the rows.
        plot: the file for the picture.
        fit: the file of the fitted model; None for this machine's usual place.
        refit: whether the model is fitted anew first.
    """

    operation: str
    algorithms: tuple[str, ...]
    everything: bool
    sizes: tuple[int, ...]
    dtype: str
    backend: str
    check: bool
    iterations: int | None
    budget_s: float
    json: Path | None
    plot: Path | None
    fit: Path | None
    refit: bool


def parse(words: Sequence[str]) -> Options:
    """Return the options that these words of a command line stand for.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for an unknown name, or a value that cannot be used.
    """
    parser = _parser()
    found = parser.parse_args(list(words))
    if found.help:
        raise HelpAsked(parser.format_help().rstrip())
    dtype = _one_of("--dtype", found.dtype, sorted(each.name for each in DTYPES))
    operation = _one_of("--operation", found.operation, OPERATIONS)
    backend = _one_of("--backend", found.backend, BACKENDS)
    names, everything = _algorithms(found.algorithms, operation, backend == "cupy")
    itemsize = next(each.itemsize for each in DTYPES if each.name == dtype)
    return Options(
        operation=operation,
        algorithms=names,
        everything=everything,
        sizes=_sizes(_bytes("--min", found.min), _bytes("--max", found.max), _factor(found.factor), itemsize),
        dtype=dtype,
        backend=backend,
        check=found.check,
        iterations=None if found.iterations is None else count("--iterations", found.iterations),
        budget_s=seconds("--budget-s", found.budget_s),
        json=_path("--json", found.json),
        plot=_plot(found.plot),
        fit=_path("--fit", found.fit),
        refit=found.refit,
    )


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="print this")
    add("--operation", default=ALL_REDUCE, metavar="NAME", help=f"{', '.join(OPERATIONS)} (default: {ALL_REDUCE})")
    names = ", ".join(known(ALL_REDUCE))
    add(
        "--algorithms",
        default=ALL,
        metavar="A,B,...",
        help=f"of {names}, with cupy ipc, nccl; all (default): all but gloo",
    )
    add("--min", default="4", metavar="BYTES", help="the shortest buffer (default: 4)")
    add("--max", default="64m", metavar="BYTES", help="the longest buffer, like 64k or 1.5GiB (default: 64m)")
    add("--factor", default="4", metavar="N", help="from one size to the next (default: 4)")
    add("--dtype", default="float32", metavar="NAME", help="of the elements (default: float32)")
    add("--backend", default="numpy", metavar="NAME", help="numpy, or cupy: device arrays (default: numpy)")
    add("--check", action="store_true", help="verify every result of every call")
    add("--iterations", metavar="N", help="calls of each algorithm at each size (default: what the budget allows)")
    add("--budget-s", default="2", metavar="SECONDS", help="time for each size (default: 2)")
    add("--json", metavar="FILE", help="write the rows there, after each size")
    add("--plot", metavar="FILE", help="draw time against size: .png, .svg or .pdf")
    add("--fit", metavar="FILE", help="the fitted model to predict with (default: the one of this machine, if any)")
    add("--refit", action="store_true", help="fit the model first, under a minute, and save it")
    return parser


def _algorithms(text: str, operation: str, on_device: bool) -> tuple[tuple[str, ...], bool]:
    """Return the names, each once, and whether "all" is among them."""
    words = listed(text)
    if not words:
        raise UsageError("--algorithms is empty; give names like native,ring, or all")
    names: list[str] = []
    for word in words:
        everything = algorithms(operation, on_device)
        names += everything if word == ALL else [_one_of("--algorithms", word, (ALL, *known(operation, on_device)))]
    return tuple(dict.fromkeys(names)), ALL in words


def _sizes(least: int, most: int, factor: int, itemsize: int) -> tuple[int, ...]:
    """Return whole elements from the least to the most bytes."""
    if least > most:
        raise UsageError(
            f"--min {name_bytes(least)} is more than --max {name_bytes(most)}; give the shorter one as --min"
        )
    if most < itemsize:
        raise UsageError(f"--max {name_bytes(most)} has no room for one element; give at least {itemsize}")
    sizes, size = [], max(least, itemsize)
    while size <= most:
        sizes.append(size // itemsize * itemsize)
        size *= factor
    return tuple(dict.fromkeys(sizes))


def _one_of(option: str, word: str, names: Sequence[str]) -> str:
    if word not in names:
        raise UsageError(f"{option} {word!r} is unknown; the names are {', '.join(names)}")
    return word


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _factor(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise UsageError(f"--factor {text!r} is not a whole number above 1")
    return int(text)


def count(option: str, text: str) -> int:
    """Return what an option's word counts.

    Raises:
        UsageError: when it is not a whole number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} {text!r} is not a whole number above 0")
    return int(text)


def seconds(option: str, text: str) -> float:
    """Return the seconds that an option's word stands for.

    Raises:
        UsageError: when they are not above 0 and finite.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"{option} {text!r} is not a number of seconds above 0")
    return found


def _path(option: str, text: str | None) -> Path | None:
    if text == "":
        raise UsageError(f"{option} is empty; give a path, or leave {option} out")
    return None if text is None else Path(text)


def _plot(text: str | None) -> Path | None:
    path = _path("--plot", text)
    if path is not None and path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    return path
