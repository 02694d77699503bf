"""Exercises in a notebook: `nnmpi.exercise.check`."""

from nnmpi.command import suggest
from nnmpi.errors import UsageError
from nnmpi.exercise.exercise import Exercise, Function
from nnmpi.exercise.exercises import EXERCISES


def find(name: str) -> Exercise:
    """Return the exercise of this name.

    Raises:
        UsageError: for an unknown name.

    Example:
        >>> from nnmpi.exercise.notebook import find
        >>> find("ring-all-reduce").title
        'Every rank gets the sum of all buffers, around a ring.'
    """
    if name not in EXERCISES:
        near = suggest(name, EXERCISES) or "; python -m nnmpi.exercise lists them"
        raise UsageError(f"there is no exercise {name!r}{near}")
    return EXERCISES[name]


def check(name: str, function: Function) -> str:
    """Check a solution of an exercise; return a sentence on a right one.

    Raises:
        UsageError: for an unknown exercise.
        WrongAnswer: naming the mistake.

    Example:
        >>> def ring_cost(N, M, alpha, beta):
        ...     return 2 * (N - 1) * (alpha + M / N * beta)
        >>> nnmpi.exercise.check("ring-cost", ring_cost)
        'right in 32 cases'
    """
    return find(name).check(function)
