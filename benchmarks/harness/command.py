"""Options as values, and how a command ends: what the command lines of all suites have in common.

The functions here are made for argparse's `type=`: they read one word, and say in a sentence what
is wrong with it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.harness.plots import SUFFIXES
from nnmpi.command import Parser
from nnmpi.errors import HelpAsked, NnmpiError, UsageError
from nnmpi.units import parse_bytes, parse_seconds

T = TypeVar("T")
INTERRUPTED = 130  # the exit status after Ctrl-C


class CommandParser(Parser):
    """A parser whose options have no abbreviations, and which leaves it to its caller to print the
    help.

    Args:
        program: how the command is started, as the help shows it.
        description: for the help; its lines stay as they are.
    """

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            program,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the values of the words of a command line.

        Raises:
            HelpAsked: for -h or --help anywhere among the words, whatever else is wrong with them.
            UsageError: for an unknown option, or a value that cannot be used.
        """
        if {"-h", "--help"} & set(words):
            raise HelpAsked(self.format_help().rstrip())
        return self.parse_args(list(words))


def run(program: str, work: Callable[[], int | None]) -> int:
    """Do the work of a command and return its exit status. Help and errors are printed, each as it
    should be.

    Args:
        program: how the command was started: stands before the sentence of an error.
        work: parses, measures and prints; returns the exit status, None for 0.
    """
    try:
        return work() or 0
    except HelpAsked as asked:
        print(asked)
        return 0
    except NnmpiError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED


def say(text: str) -> None:
    """Print a paragraph at once."""
    print(f"{text}\n", flush=True)


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        _refuse(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_seconds(text: str) -> float:
    """Return a finite number of seconds above 0."""
    try:
        result = float(text)
    except ValueError:
        result = 0.0
    if not 0 < result < float("inf"):
        _refuse(f"{text!r} is not a number of seconds above 0")
    return result


def nbytes(text: str) -> int:
    """Return a number of bytes: "4", "64k", "1.5GiB"."""
    return one(parse_bytes)(text)


def duration(text: str) -> float:
    """Return seconds from a number with or without a unit: "2e-6", "2us"."""
    return one(parse_seconds)(text)


def file(text: str) -> Path:
    """Return the path of a file."""
    if not text:
        _refuse("the path is empty; give one, or leave the option out")
    return Path(text)


def picture(text: str) -> Path:
    """Return the path of a picture; its name says the format."""
    path = file(text)
    if path.suffix not in SUFFIXES:
        _refuse(f"{text}: the name must end in {', '.join(SUFFIXES)}")
    return path


def one(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a reader whose UsageError becomes the error that argparse puts behind the option's
    name.
    """

    def read_one(text: str) -> T:
        try:
            return read(text)
        except UsageError as error:
            _refuse(str(error))

    return read_one


def each(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the reader of a list with commas, whose words are read one by one; each value comes
    once.

    Args:
        read: (word) -> value.
    """

    def read_all(text: str) -> tuple[T, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            _refuse(f"{text!r} names nothing")
        return tuple(dict.fromkeys(one(read)(word) for word in words))

    return read_all


def one_of(*known: str) -> Callable[[str], str]:
    """Return the reader of a name."""

    def read(text: str) -> str:
        if text not in known:
            _refuse(f"{text!r} is unknown; the names are {', '.join(known)}")
        return text

    return read


def _refuse(sentence: str) -> NoReturn:
    raise argparse.ArgumentTypeError(sentence)


def add_data_dir(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add --data-dir.

    Args:
        otherwise: what happens without it, for the help.
    """
    text = f"the folder of MNIST's files; {otherwise}"
    parser.add_argument("--data-dir", type=file, metavar="DIR", help=text)


def add_blocks(parser: argparse.ArgumentParser, block_s: float) -> None:
    """Add --rounds, --block-s, --markdown and --json, of suites whose contestants do blocks of
    steps in turns.

    Args:
        block_s: the default of --block-s.
    """
    add: Any = parser.add_argument
    add(
        "--rounds",
        type=positive,
        default=15,
        metavar="N",
        help="blocks of each contestant (default: 15)",
    )
    text = f"how long one takes, about (default: {block_s:g})"
    add("--block-s", type=positive_seconds, default=block_s, metavar="SECONDS", help=text)
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--json", type=file, metavar="FILE", help="write everything there, after each case")
