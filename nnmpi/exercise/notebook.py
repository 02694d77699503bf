"""Exercises in a notebook: `nnmpi.exercise.check`."""

from nnmpi.command import suggest
from nnmpi.errors import UsageError
from nnmpi.exercise.exercise import Exercise, Function
from nnmpi.exercise.exercises import EXERCISES


def find(name: str) -> Exercise:
    """Return the exercise of this name.

    Raises:
        UsageError: where there is none.
    """
    if name not in EXERCISES:
        near = suggest(name, EXERCISES)
        raise UsageError(
            f"there is no exercise {name!r}{near}; python -m nnmpi.exercise lists them"
        )
    return EXERCISES[name]


def check(name: str, function: Function) -> str:
    """Return what a right solution was found to do.

    Raises:
        UsageError: for an exercise that there is not.
        WrongAnswer: what is wrong with it.

    >>> check("ring-cost", lambda N, M, alpha, beta: 2 * (N - 1) * (alpha + M / N * beta))
    'right in 32 cases'
    """
    return find(name).check(function)
