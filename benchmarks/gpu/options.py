"""The command line, as values that have been checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.options import count, seconds
from benchmarks.gpu.cases import CASES, MNIST, MODES, TINY
from benchmarks.words import listed
from nnmpi.command import Parser
from nnmpi.errors import UsageError

PROGRAM = "python benchmarks/gpu"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch eager on the same device, in turns, beside what
the device can do at best. The README beside the program says how it is measured."""
EVERY = (*CASES, MNIST)


@dataclass(frozen=True)
class Options:
    """What is to be measured, and where the result goes.

    Attributes:
        cases, modes: names.
        rounds: blocks of each contestant.
        block_s: how long one takes, about.
        torch: whether PyTorch takes part.
        check: sizes that take no time, each part once, for tests.
        data_dir: where MNIST is.
        markdown: whether tables are Markdown.
        json: the file for everything.
    """

    cases: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    block_s: float
    torch: bool
    check: bool
    data_dir: Path | None
    markdown: bool
    json: Path | None


def parse(words: Sequence[str]) -> Options:
    """Return the options that these words of a command line stand for.

    Raises:
        UsageError: for an unknown name, or a value that cannot be used.
    """
    found = _parser().parse_args(list(words))
    known = (*TINY, MNIST) if found.check else EVERY
    return Options(
        cases=_names("--cases", found.cases, known),
        modes=_names("--modes", found.modes, MODES),
        rounds=2 if found.check else count("--rounds", found.rounds),
        block_s=0.0 if found.check else seconds("--block-s", found.block_s),
        torch=not found.without_torch,
        check=found.check,
        data_dir=found.data_dir,
        markdown=found.markdown,
        json=found.json,
    )


def _parser() -> Parser:
    parser = Parser(PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", metavar="A,B,...", help=f"what is measured ({','.join(EVERY)}); all by default")
    add("--modes", metavar="A,B,...", help=f"precisions ({','.join(MODES)}); all by default. mnist is float32 alone")
    add("--without-torch", action="store_true", help="nnmpi alone")
    add("--rounds", default="15", metavar="N", help="blocks of each contestant (default: 15)")
    add("--block-s", default="0.1", metavar="SECONDS", help="how long one takes, about (default: 0.1)")
    add("--data-dir", type=Path, metavar="DIR", help="folder with MNIST's files; made-up images without them")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--json", type=Path, metavar="FILE", help="write everything there, after each case")
    add("--check", action="store_true", help="tiny sizes, each part once, verified, no times worth keeping")
    return parser


def _names(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    words = tuple(dict.fromkeys(listed(text)))
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise UsageError(f"{option} {text!r} names nothing known: choose from {','.join(known)}")
    return words
