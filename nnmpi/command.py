"""What the package's commands have in common: how words are refused, how help is asked for, and who of a job speaks."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import NoReturn

from nnmpi.errors import NnmpiError, UsageError
from nnmpi.launcher import read_launch


class HelpAsked(Exception):
    """The user asked for help; the text is the message."""


class Parser(argparse.ArgumentParser):
    """Raises the package's error where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        """Raise with the message as a sentence.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message} (see {self.prog} --help)")


def say(main: Callable[[Sequence[str]], str]) -> int:
    """Print what a command has to say of the words behind its name, or one sentence that says what is wrong.

    Of the ranks of a job the first one speaks, of help too.

    Returns:
        The exit status.
    """
    launch = read_launch(os.environ)
    speaks = launch is None or launch.rank == 0
    try:
        with nullcontext() if speaks else redirect_stdout(StringIO()):  # argparse prints its help by itself
            text = main(sys.argv[1:])
        if speaks:
            print(text, flush=True)
    except BrokenPipeError:  # the reader has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except NnmpiError as error:
        if speaks:
            print(f"nnmpi: {error}", file=sys.stderr)
        return error.exit_status
    return 0
