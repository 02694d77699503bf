"""The command line, as values that have been checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.options import count, seconds
from benchmarks.training.cases import CASES, SHALLOWSPEED, find
from benchmarks.words import listed
from nnmpi.command import Parser
from nnmpi.errors import UsageError

PROGRAM = "python benchmarks/training"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch on the same cores, one thread per rank, in turns.
The README beside the program says how it is measured."""
EVERY, NONE = ",".join(CASES), "none"
CHECKED = "cnn,gpt-block,iris"  # with ShallowSpeed's network beside them, all operations
GROWTH_STEPS, CHECK_STEPS = 1000, 20
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """What is to be measured, and where the result goes.

    Attributes:
        ranks: numbers of processes.
        cases: names.
        rounds: blocks of each contestant.
        block_s: how long one takes, about.
        torch: whether PyTorch takes part.
        check: reduced, for correctness.
        growth_steps: steps over which memory is watched; 0 for not at all.
        start_repeats: how often programs are started; 0 for not at all.
        markdown: whether tables are Markdown.
        readme: whether they replace those of the README.
        json, plot: files.
    """

    ranks: tuple[int, ...]
    cases: tuple[str, ...]
    rounds: int
    block_s: float
    torch: bool
    check: bool
    growth_steps: int
    start_repeats: int
    markdown: bool
    readme: bool
    json: Path | None
    plot: Path | None


def parse(words: Sequence[str]) -> Options:
    """Return the options that these words of a command line stand for.

    Raises:
        UsageError: for an unknown name, or a value that cannot be used.
    """
    found = _parser().parse_args(list(words))
    cases = tuple(dict.fromkeys(listed(found.cases or (CHECKED if found.check else EVERY))))
    cases = () if cases == (NONE,) else cases
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise UsageError(f"--cases {unknown[0]!r} is unknown; the cases are {EVERY}, and {NONE}")
    cases += (SHALLOWSPEED.name,) if found.shallowspeed or found.check else ()
    ranks = tuple(dict.fromkeys(count("--ranks", word) for word in listed(found.ranks)))
    for name in cases:
        for size in ranks:
            if find(name).batch % size:
                raise UsageError(f"--ranks {size} does not divide the batch of {name}, {find(name).batch}")
    if found.plot is not None and found.plot.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {found.plot}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    return Options(
        ranks=ranks,
        cases=cases,
        rounds=2 if found.check else count("--rounds", found.rounds),
        block_s=0.0 if found.check else seconds("--block-s", found.block_s),
        torch=not found.without_torch,
        check=found.check,
        growth_steps=CHECK_STEPS if found.check else GROWTH_STEPS * found.growth,
        start_repeats=1 if found.check else count("--start-repeats", found.start_repeats) * found.start,
        markdown=found.markdown,
        readme=found.readme,
        json=found.json,
        plot=found.plot,
    )


def _parser() -> Parser:
    parser = Parser(PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", default="1,2", metavar="P,...", help="numbers of processes (default: 1,2)")
    add("--cases", metavar="A,B,...", help=f"models ({EVERY}), or {NONE}")
    add("--shallowspeed", action="store_true", help="also: ShallowSpeed's design beside nnmpi, on its own set-up")
    add("--start", action="store_true", help="also: the time from mpirun, and from torchrun, to the first step")
    add("--growth", action="store_true", help=f"also: memory before and after {GROWTH_STEPS} steps")
    add("--without-torch", action="store_true", help="nnmpi alone")
    add("--rounds", default="15", metavar="N", help="blocks of each contestant (default: 15)")
    add("--block-s", default="0.2", metavar="SECONDS", help="how long one takes, about (default: 0.2)")
    add("--start-repeats", default="7", metavar="N", help="how often --start starts each (default: 7)")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--readme", action="store_true", help="replace the tables of the README beside the program")
    add("--json", type=Path, metavar="FILE", help="write everything there, after each case")
    add("--plot", type=Path, metavar="FILE", help="draw the speeds: .png, .svg or .pdf")
    text = f"reduced: each part once, verified, no times worth keeping, and fewer cases unless told ({CHECKED})"
    add("--check", action="store_true", help=text)
    return parser
