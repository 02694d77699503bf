"""Costs to write down: N ranks, M bytes, seconds alpha for a message and beta for a byte. Held against `price`."""

from collections.abc import Callable
from functools import partial
from math import isclose
from typing import TypeAlias

from nnmpi.comm.algorithms.registry import find_collective
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulate import price
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call

Seconds: TypeAlias = Callable[..., float]
"""(N, M, alpha, beta, ...) -> seconds, which are exact."""

ALPHA_S, BETA_S = 1e-5, 1e-9
_ITEM_BYTES = 4


def _exact(operation: str, algorithm: str, N: int, M: int, alpha: float, beta: float) -> float:
    return price(find_collective(operation, algorithm), N, M, Machine.uniform(alpha, beta))


def _buckets(N: int, M: int, alpha: float, beta: float, buckets: int) -> float:
    return buckets * _exact("all-reduce", "ring", N, M // buckets, alpha, beta)


def check(exact: Seconds, further: tuple[int, ...], function: Function) -> str:
    """Return that a formula is right.

    Args:
        exact: the right seconds.
        further: the values of what the formula depends on beside N, M, alpha and beta.

    Raises:
        WrongAnswer: saying for how many ranks, and whether latencies or bytes are wrong.
    """
    for N in (1, 2, 3, 4, 5, 8, 16):
        M = 1000 * N * _ITEM_BYTES
        for more in further or (None,):
            rest = () if more is None else (more,)
            given = f"with N = {N}, M = {M}" + (f" and {more} buckets" if rest else "")
            parts = (("alpha", 1.0, 1.0, 0.0), ("M beta", float(M), 0.0, 1.0))
            for letters, unit, alpha, beta in parts:
                found, wanted = _number(function, N, M, alpha, beta, *rest), exact(N, M, alpha, beta, *rest)
                if not isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9):
                    raise WrongAnswer(
                        f"{given} the formula has {found / unit:g} {letters}, but the steps take {wanted / unit:g} "
                        f"{letters} along their critical path"
                    )
            found, wanted = _number(function, N, 1, 0.0, 1.0, *rest), wanted / M  # of one byte, by what // makes 0
            if not isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9):
                raise WrongAnswer(
                    f"with N = {N}, M = 1 the formula has {found:g} beta, and must have {wanted:g} beta: a message's "
                    "bytes are divided by /, not by //"
                )
            found, wanted = (f(N, M, ALPHA_S, BETA_S, *rest) for f in (partial(_number, function), exact))
            if not isclose(found, wanted, rel_tol=1e-9):
                raise WrongAnswer(
                    f"{given} the two parts are right, but together they give {found:g} s, not {wanted:g} s"
                )
    return "right for 1 to 16 ranks: latencies and bytes are those of the steps' critical path"


def check_crossover(function: Function) -> str:
    """Return where a crossover was confirmed; errors are those of `check`."""
    for N in (4, 8, 16, 64):
        alpha, beta = 1e-3, 1e-8  # so that a few bytes more or less do not matter
        M = _number(function, N, alpha, beta)
        if not 0 < M < 1e15:
            raise WrongAnswer(f"with N = {N} it gives {M:g} bytes, which is no length of a buffer")
        for part, better, worse in ((0.98, "tree", "ring"), (1.02, "ring", "tree")):
            times = {name: _exact("all-reduce", name, N, int(part * M), alpha, beta) for name in ("tree", "ring")}
            if times[better] > times[worse]:
                told = f"ring {times['ring']:.4g} s, tree {times['tree']:.4g} s"
                raise WrongAnswer(f"with N = {N} the two do not cross at {M:g} bytes: at {int(part * M)} it is {told}")
    return "right for 4, 8, 16 and 64 ranks: below it the tree is faster, above it the ring"


def _number(function: Function, *values: float) -> float:
    found = call(function, *values)
    if not isinstance(found, int | float):
        raise WrongAnswer(f"it gives {found!r}, and must give a number of seconds or bytes")
    return float(found)


_TABLE = (
    (
        "server-cost",
        "The parameter server's all-reduce: rank 0 takes from one after another, then sends to each.",
        "ps",
    ),
    ("ring-cost", "The ring's all-reduce: 2 (N - 1) steps with an N-th of the buffer each.", "ring"),
    ("tree-cost", "The tree's all-reduce: up and down, the whole buffer on every level.", "tree"),
)

EXERCISES = (
    *(
        Exercise(
            name,
            f"{statement}\n\nReturn its seconds for M bytes on N ranks; adding takes no time.",
            "N, M, alpha, beta",
            partial(check, partial(_exact, "all-reduce", algorithm), ()),
        )
        for name, statement, algorithm in _TABLE
    ),
    Exercise(
        "all-gather-cost",
        "The ring's all-gather: N - 1 steps.\n\nReturn its seconds on N ranks; M are the bytes of all chunks together.",
        "N, M, alpha, beta",
        partial(check, partial(_exact, "all-gather", "ring"), ()),
    ),
    Exercise(
        "bucket-cost",
        "Gradients in equal buckets, each summed around the ring, one after another.\n\nReturn the seconds for M bytes "
        "in all on N ranks.",
        "N, M, alpha, beta, buckets",
        partial(check, _buckets, (1, 2, 5)),
    ),
    Exercise(
        "ring-tree-crossover",
        "From how many bytes on is the ring faster than the tree?\n\nReturn the M at which both all-reduces take as "
        "long; N is a power of two, at least 4.",
        "N, alpha, beta",
        check_crossover,
    ),
)
