"""What an exercise is: a few lines that say what is wanted, a file to begin with, and a check of what was written."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, TypeAlias

import numpy as np

from nnmpi.custom import fault
from nnmpi.errors import NnmpiError

Function: TypeAlias = Callable[..., Any]
LIMIT_S = 60.0  # for a whole check, which takes a few seconds at most


class WrongAnswer(NnmpiError):
    """What is wrong with a solution, in a sentence for the one who wrote it."""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: as it is written on the command line.
        statement: what is wanted, in a few lines.
        arguments: of the function, such as "rank, size".
        check: takes the function; returns what it was found to do, or raises `WrongAnswer`.
        imports: what the file begins with.
    """

    name: str
    statement: str
    arguments: str
    check: Callable[[Function], str]
    imports: str = ""

    @property
    def function(self) -> str:
        """The name of the function that is to be written."""
        return self.name.replace("-", "_")

    @property
    def title(self) -> str:
        """The first line of the statement."""
        return self.statement.partition("\n")[0]

    def starter(self) -> str:
        """Return the file to begin with: the statement, and a function that is not written yet."""
        file = f"{self.function}.py"
        text = f"{self.statement}\n\nCheck it with: python -m nnmpi.exercise {self.name} {file}"
        imports = f"{self.imports}\n\n\n" if self.imports else "\n"
        body = indent('raise NotImplementedError("write it here")', "    ")
        return f'"""{text}\n"""\n\n{imports}def {self.function}({self.arguments}):\n{body}\n'


def call(function: Function, *values: Any) -> Any:
    """Return what a solution makes of these values.

    Raises:
        WrongAnswer: for any exception in it that is not the package's own: what it was, where, and for which values.
    """
    try:
        return function(*values)
    except NnmpiError:
        raise
    except (Exception, SystemExit) as error:  # a solution that ends the program must not seem right
        raise WrongAnswer(fault(function, map(_show, values), error)) from error


@contextmanager
def guarded(file: Path) -> Iterator[None]:
    """Import and check a solution within this: what its file raises becomes a sentence; a loop without an end ends.

    Raises:
        WrongAnswer: with the line of the file. What takes too long ends the process, which prints where it was.
    """
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # no exception stops a solution that catches all
    try:
        yield
    except NnmpiError:
        raise
    except SyntaxError as error:
        raise WrongAnswer(f"{file}{f', line {error.lineno}' if error.lineno else ''}: {error.msg}") from None
    except Exception as error:
        places = [
            each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file.absolute())
        ]
        if not places:
            raise  # it is not the solution's
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise WrongAnswer(f"{file}, line {places[-1]}: {text}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def compare(what: str, found: Any, wanted: Any) -> None:
    """Refuse an array that is not the one that is wanted.

    Args:
        what: what it is, and where, such as "the result of rank 1 of 3".

    Raises:
        WrongAnswer: for what is no numbers, and another shape; else naming the first element that differs.
    """
    wanted = np.asarray(wanted)
    try:
        given = np.asarray(found)
    except ValueError:  # rows of several lengths
        given = np.asarray(None)
    if given.dtype.kind not in "fiu":
        raise WrongAnswer(f"{what} is {found!r}, and must be numbers of shape {wanted.shape}")
    if given.shape != wanted.shape:
        raise WrongAnswer(f"{what} has shape {given.shape}, and must have {wanted.shape}")
    differs = np.argwhere(~np.isclose(given, wanted, rtol=1e-9, atol=1e-12))
    if len(differs):
        place = tuple(map(int, differs[0]))
        at = f"{what}: element {place if len(place) > 1 else place[0]} " if place else f"{what} "
        raise WrongAnswer(f"{at}is {given[place]:.6g}, and must be {wanted[place]:.6g}")


def _show(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return repr(value)
