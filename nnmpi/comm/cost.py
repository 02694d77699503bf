"""What collectives cost on paper: the table that courses teach, and what the steps here really cost, side by side.

    N      ranks
    M      bytes: of the whole buffer; in an all-gather, of the part that each rank brings
    alpha  seconds that a message takes however short it is (latency)
    beta   seconds per byte
    gamma  seconds to add a byte to another
    log N  the levels of a binary tree over N ranks: log2 N, rounded up when N is no power of two

    operation             the course's table                         what runs here
    parameter server      2 alpha         + 2 (N-1) M beta           2 (N-1) alpha + 2 (N-1) M beta   + (N-1) M gamma
    ring all-reduce       2 (N-1) alpha   + 2 (N-1)/N M beta         the same                         + (N-1)/N M gamma
    tree all-reduce       2 alpha log N   + 2 log N M beta           the same                         + log N M gamma
    broadcast             alpha log N     + log N M beta             the same
    all-gather            alpha log N     + (N-1) M beta             the same

The forms on the right hold for one link everywhere and for buffers that N divides. `price` and `simulate_collective`
give the exact time for everything else: several nodes, curves, unequal chunks, slow ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from types import MappingProxyType

from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.machine import Curve, Link, Machine
from nnmpi.comm.simulate import simulate_collective

# The functions below take N, M, alpha and beta as above, by the letters of the table: ranks, bytes, seconds.


def levels(N: int) -> int:
    """Return log N of the formulas: the smallest number of doublings that reach N."""
    return (N - 1).bit_length()


def parameter_server(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the course's seconds: one latency to the server and one back, and every byte over the server's link.

    That latency supposes a server which receives from all workers at once, while their bytes still queue. In `star` the
    server receives from one worker after another: 2 (N-2) alpha more, which decides for short messages. In return the
    sum does not depend on which worker comes first.
    """
    return 2 * alpha + 2 * (N - 1) * M * beta


def ring_all_reduce(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the course's seconds: 2 (N-1) steps, each with an N-th of the buffer."""
    return 2 * (N - 1) * alpha + 2 * (N - 1) / N * M * beta


def tree_all_reduce(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the course's seconds: up the tree and down again, the whole buffer on every level."""
    return 2 * alpha * levels(N) + 2 * levels(N) * M * beta


def broadcast(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the course's seconds, which are those of `tree_broadcast`: the whole buffer on every level of a tree."""
    return alpha * levels(N) + levels(N) * M * beta


def ring_broadcast(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the seconds of the other broadcast, `tree_scatter` and a ring: for long buffers."""
    return (levels(N) + N - 1) * alpha + 2 * (N - 1) / N * M * beta


def all_gather(N: int, M: float, alpha: float, beta: float) -> float:
    """Return the course's seconds, which are those of `bruck_all_gather`, too. M is what each rank brings.

    (So N M bytes come together. Other texts, and the docstrings of the algorithms here, call those M.)
    """
    return alpha * levels(N) + (N - 1) * M * beta


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of `table`.

    Attributes:
        name: the course's name; for what the course does not have, (operation, algorithm) in words.
        formula: the course's formula; empty where it has none.
        course_s: what that formula gives; None where there is none.
        exact_s: what the steps here take on the machine.
        differs: why the two differ, in words; empty where they do not.
    """

    name: str
    formula: str
    course_s: float | None
    exact_s: float
    differs: str


@dataclass(frozen=True, slots=True)
class _Taught:
    name: str
    formula: str
    seconds: Callable[[int, float, float, float], float]


_NOTHING = Curve.line(0.0, 0.0)
_SERVER, _RING = ("all-reduce", "ps"), ("all-reduce", "ring")
ITEM_BYTES = 4  # of the elements that chunks are made of
_TAUGHT: Mapping[tuple[str, str], _Taught] = MappingProxyType(
    {
        _SERVER: _Taught("parameter server", "2 alpha + 2 (N-1) M beta", parameter_server),
        ("all-reduce", "ring"): _Taught("ring all-reduce", "2 (N-1) alpha + 2 (N-1)/N M beta", ring_all_reduce),
        ("all-reduce", "tree"): _Taught("tree all-reduce", "2 alpha log N + 2 log N M beta", tree_all_reduce),
        ("broadcast", "tree"): _Taught("broadcast", "alpha log N + log N M beta", broadcast),
        ("all-gather", "tree"): _Taught("all-gather", "alpha log N + (N-1) M beta", all_gather),
    }
)


def table(ranks: int, nbytes: int, machine: Machine) -> list[Row]:
    """Return the course's table for so many ranks and bytes, beside what the collectives here take on a machine.

    Args:
        ranks: N.
        nbytes: M; in the all-gathers the bytes that each rank brings.
        machine: alpha and beta of the course's formulas are those of its link between nodes (of that inside, when all
            ranks are on one), one way, for a message of M bytes.

    Raises:
        UsageError: for no ranks, or a machine with another number of them.
    """
    link = machine.link(len(set(machine.places(ranks))) > 1).one_way
    alpha, beta = link.alpha_s, link.beta(max(nbytes, 1))
    rows = []
    for key in dict.fromkeys((*_TAUGHT, *COLLECTIVES)):
        operation, algorithm = key
        collective = find_collective(operation, algorithm, machine.nodes)
        buffer = ranks * nbytes if operation == "all-gather" else nbytes
        exact_s = simulate_collective(collective, ranks, buffer, machine).seconds
        taught = _TAUGHT.get(key)
        if taught is None:
            rows.append(Row(f"{operation} by {algorithm}", "", None, exact_s, "the table does not have it"))
            continue
        course_s = taught.seconds(ranks, nbytes, alpha, beta)
        differs = "" if isclose(course_s, exact_s, rel_tol=1e-9) else _why(key, ranks, nbytes, machine)
        rows.append(Row(taught.name, taught.formula, course_s, exact_s, differs))
    return rows


def _why(key: tuple[str, str], ranks: int, nbytes: int, machine: Machine) -> str:
    """Return what the course's formula does not know of."""
    reasons = []
    inside = machine.inside
    if key == _SERVER and ranks > 2:
        reasons.append("one server receives one message after another: 2 (N-1) alpha")
    if key[0] == "all-reduce" and machine.add(nbytes) > 0:
        reasons.append("the time to add (gamma)")
    if key == _RING and inside.one_way != inside.both_ways:
        reasons.append("sending and receiving at once takes longer than one of the two")
    if replace(machine, add=_NOTHING, inside=Link(inside.one_way, inside.one_way)) != Machine(
        Link(inside.one_way, inside.one_way), add=_NOTHING
    ):
        reasons.append("links and ranks that are not all alike")
    if len(inside.one_way.points) > 2:
        reasons.append("a time per byte that depends on the length")
    if key == _RING and nbytes // ITEM_BYTES % ranks:
        reasons.append("chunks of unequal length")
    return "; ".join(reasons)
