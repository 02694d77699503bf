"""Exercises in a notebook: `nnmpi.exercise.check`."""

from nnmpi.command import suggest
from nnmpi.errors import UsageError
from nnmpi.exercise.exercise import Function
from nnmpi.exercise.exercises import EXERCISES


def check(name: str, function: Function) -> str:
    """Return what a right solution was found to do.

    Raises:
        UsageError: for an exercise that there is not.
        WrongAnswer: what is wrong with it.

    >>> check("ring-cost", lambda N, M, alpha, beta: 2 * (N - 1) * (alpha + M / N * beta))
    "right for 1 to 16 ranks: latencies and bytes are those of the steps' critical path"
    """
    if name not in EXERCISES:
        raise UsageError(f"there is no exercise {name!r}{suggest(name, EXERCISES)}")
    return EXERCISES[name].check(function)
