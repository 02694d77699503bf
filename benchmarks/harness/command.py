"""Readers of options, and how a command ends: shared by the command lines of all suites.

A reader is the `type=` of an option. It reads one word, and raises a UsageError that says what is
wrong with it; the `Parser` puts the option's name before that.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nnmpi.base.errors import NnmpiError, UsageError

T = TypeVar("T")
INTERRUPTED = 130  # the exit status after Ctrl-C


def run(program: str, work: Callable[[], int | None]) -> int:
    """Do the work of a command and return its exit status; print an error as one sentence.

    Args:
        program: how the command was started; printed before the sentence.
        work: parses, measures and prints; returns the exit status, None for 0.
    """
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head`; Python would fail again as it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except NnmpiError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED


def say(text: str) -> None:
    """Print a paragraph at once."""
    print(f"{text}\n", flush=True)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError, with the sentence of a reader."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, str(error.__context__)) from None

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the message and a hint at --help."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def positive_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_seconds(text: str) -> float:
    """Return a finite number of seconds above 0."""
    try:
        result = float(text)
    except ValueError:
        result = 0.0
    if not 0 < result < float("inf"):
        raise UsageError(f"{text!r} is not a number of seconds above 0")
    return result


def file(text: str) -> Path:
    """Return the path of a file."""
    if not text:
        raise UsageError("the path is empty; give one, or leave the option out")
    return Path(text)


def list_of(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the reader of a list with commas, without repetitions.

    Args:
        read: (word) -> value.
    """

    def read_all(text: str) -> tuple[T, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise UsageError(f"{text!r} names nothing")
        return tuple(dict.fromkeys(map(read, words)))

    return read_all


def one_of(*known: str) -> Callable[[str], str]:
    """Return the reader of a name."""

    def read(text: str) -> str:
        if text not in known:
            raise UsageError(f"{text!r} is unknown; the names are {', '.join(known)}")
        return text

    return read


def add_options(
    parser: argparse.ArgumentParser, *options: tuple[str, Callable[[str], Any], str | None, str]
) -> None:
    """Add options that have a value.

    Args:
        options: name, reader, default as it would be typed, help; the help ends with the default.
    """
    for name, read, default, text in options:
        text += " (default: %(default)s)" if default else ""
        metavar = name.lstrip("-").upper()
        parser.add_argument(name, type=read, default=default, metavar=metavar, help=text)


def add_blocks(parser: argparse.ArgumentParser, block_s: str) -> None:
    """Add the options of suites whose contestants do blocks of steps in turns.

    Args:
        block_s: the default of --block-s.
    """
    add_options(
        parser,
        ("--rounds", positive_count, "15", "blocks of each contestant"),
        ("--block-s", positive_seconds, block_s, "seconds of a block, about"),
        ("--json", file, None, "file for everything, written after each case"),
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
