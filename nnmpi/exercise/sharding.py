"""What ranks share out, to write against a group; run on simulated ranks and compared with the serial result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.errors import CommError, counted
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call, compare
from nnmpi.shard import split

Trial: TypeAlias = Callable[[Group, Function], tuple[Any, Any]]
"""What one rank does: what the function gave it, and what it should have given."""

SIZES = (1, 2, 3, 4)
BATCH, IN, MIDDLE, OUT = 3, 7, 6, 5


def check(trial: Trial, function: Function) -> str:
    """Return that every rank gets the serial result.

    Raises:
        WrongAnswer: naming rank and element, or who waits for whom.
    """
    for size in SIZES:

        def main(group: Group) -> tuple[Any, Any]:
            return trial(group, function)

        try:
            results = simulate(main, ranks=size)
        except CommError as error:
            raise WrongAnswer(f"on {counted(size, 'rank')}: {error}") from None
        for rank, (found, wanted) in enumerate(results):
            compare(f"on {counted(size, 'rank')}, the result of rank {rank}", found, wanted)
    return f"equal to the serial result on {', '.join(map(str, SIZES))} ranks"


def _arrays(*shapes: tuple[int, ...]) -> list[Array]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape) for shape in shapes]


def _mine(n: int, group: Group) -> slice:
    part = split(n, group.size)[group.rank]
    return slice(part.start, part.stop)


def _row_linear(group: Group, function: Function) -> tuple[Any, Any]:
    x, w = _arrays((BATCH, IN), (IN, OUT))
    mine = _mine(IN, group)
    return call(function, group, x[:, mine].copy(), w[mine].copy()), x @ w


def _column_gradient(group: Group, function: Function) -> tuple[Any, Any]:
    grad, w = _arrays((BATCH, OUT), (IN, OUT))
    mine = _mine(OUT, group)
    return call(function, group, grad[:, mine].copy(), w[:, mine].copy()), grad @ w.T


def _sharded_pair(group: Group, function: Function) -> tuple[Any, Any]:
    x, first, second = _arrays((BATCH, IN), (IN, MIDDLE), (MIDDLE, OUT))
    mine = _mine(MIDDLE, group)
    found = call(function, group, x.copy(), first[:, mine].copy(), second[mine].copy())
    return found, np.maximum(x @ first, 0) @ second


def _global_mean(group: Group, function: Function) -> tuple[Any, Any]:
    (losses,) = _arrays((7,))
    mine = losses[_mine(7, group)]
    return call(function, group, float(mine.sum()), len(mine)), losses.mean()


def _zero_update(group: Group, function: Function) -> tuple[Any, Any]:
    weights, *gradients = _arrays((11,), *[(11,)] * group.size)
    found = weights.copy()
    mine = _mine(11, group)
    call(function, group, found, gradients[group.rank].copy(), mine, 0.1)
    return found, weights - 0.1 * sum(gradients)


_TABLE: tuple[tuple[str, str, str, Trial], ...] = (
    (
        "row-linear",
        "x @ w, where each rank has some columns of x and the same rows of w.\n\nReturn the whole product on every "
        "rank.",
        "group, x, w",
        _row_linear,
    ),
    (
        "column-gradient",
        "The gradient of x in y = x @ w, where each rank has some columns of w and the same columns of y's "
        "gradient.\n\nReturn the whole gradient on every rank.",
        "group, grad, w",
        _column_gradient,
    ),
    (
        "sharded-pair",
        "max(x @ a, 0) @ b, where each rank has some columns of a and the same rows of b.\n\nReturn the whole result "
        "on every rank; one sum is enough.",
        "group, x, a, b",
        _sharded_pair,
    ),
    (
        "global-mean",
        "The mean loss over all ranks' samples; some ranks have more samples than others, some none.\n\nReturn it on "
        "every rank, from the sum of this rank's losses and how many they are.",
        "group, loss_sum, samples",
        _global_mean,
    ),
    (
        "zero-update",
        "A step of ZeRO: each rank updates its own part of the weights.\n\nweights and gradient are flat, and mine is "
        "this rank's part, a slice. Change weights in place, so that they are\nthe old ones less rate times the sum of "
        "all ranks' gradients, everywhere: reduce_scatter, update, all_gather.",
        "group, weights, gradient, mine, rate",
        _zero_update,
    ),
)

EXERCISES = tuple(
    Exercise(
        name,
        f"{statement}\n\ngroup has rank, size, all_reduce(array), reduce_scatter(array), all_gather(array): on flat "
        "arrays, in place.",
        arguments,
        partial(check, trial),
        "import numpy as np",
    )
    for name, statement, arguments, trial in _TABLE
)
